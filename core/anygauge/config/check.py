"""What the schema cannot say: names that plugins provide, keys that need each other, files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config.data_files import dataset_name, split_slice
from anygauge.config.debug_rules import debug_rule, replay_rule
from anygauge.config.model_files import read_model
from anygauge.config.named_functions import failed_plugins, option_problems
from anygauge.config.placement_rules import cluster_rule, engines_rule
from anygauge.config.reward_rules import label_rule, reward_functions, reward_rule
from anygauge.config.schema import Config, Data, DataFile, Eval, EvalDataset, Rollout
from anygauge.config.tree import covers
from anygauge.hub.names import DATASETS, data_name, model_name
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import BackendSpec, NamedFunction

__all__ = ["check"]

NAMES = (
    ("train.engine", "register_train_engines"),
    ("rollout.engine", "register_rollout_engines"),
    ("algorithm.advantage", "register_advantage_estimators"),
    ("algorithm.policy_loss", "register_policy_losses"),
    ("data.source", "register_data_sources"),
    ("run.trackers", "register_trackers"),
)
"""Keys that name something, and the hook that provides it."""
RL_ONLY = (
    "algorithm.kl_coef",
    "algorithm.entropy_coef",
    "algorithm.policy_loss",
    "algorithm.old_log_probs",
    "rollout.samples_per_prompt",
)
"""Keys that mean nothing to SFT."""

Problems = Iterator[ConfigProblem]


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and the keys that it reads: it is skipped if one of them is wrong already."""

    rule: Callable[[Config, Collection[str]], Problems]
    reads: tuple[str, ...]


def check(
    config: Config,
    backend: BackendSpec,
    plugins: Plugins,
    *,
    user_keys: Collection[str] = (),
    broken: Collection[str] = (),
    check_files: bool = True,
) -> list[ConfigProblem]:
    """Return every problem that the schema did not find.

    :param user_keys: Dotted paths that the user wrote.
    :param broken: Paths that the schema refused; nothing more is said about them.
    :param check_files: Whether to look at the files and directories that the config names.
    """
    found = chain(
        *(
            each.rule(config, user_keys)
            for each in (*RULES, *(FILE_RULES if check_files else ()))
            if not any(covers(path, key) for path in broken for key in each.reads)
        ),
        _names(config, plugins),
        _advantage_options(config, plugins),
        reward_functions(config, plugins),
        _models(config, plugins) if check_files else (),
        plugins.collect("check_config", config=config, backend=backend),
    )
    problems = [problem for problem in found if not any(covers(path, problem.path) for path in broken)]
    return list({(problem.path, problem.hint): problem for problem in problems}.values())


# -------------------------------------------------------------------------
# Keys that need each other
# -------------------------------------------------------------------------


def _optimizer_steps(config: Config, user_keys: Collection[str]) -> Problems:
    rollout, steps = config.rollout, config.train.optimizer_steps
    each = 1 if config.run.task == "sft" else rollout.samples_per_prompt
    samples = rollout.prompts_per_step * each
    sizes = f"{samples} samples a step ({rollout.prompts_per_step} prompts x {each})"
    if samples % steps:
        divisors = ", ".join(str(n) for n in range(1, min(samples, 64) + 1) if samples % n == 0)
        hint = f"must divide the {sizes}: one of {divisors}"
        yield ConfigProblem(path="train.optimizer_steps", found=steps, hint=hint)
    elif samples // steps < config.placement.num_workers:
        hint = f"leaves workers without a sample: {sizes} over {steps} optimizer steps; use fewer workers"
        yield ConfigProblem(path="placement.num_workers", found=config.placement.num_workers, hint=hint)
    elif rollout.prompts_per_step < config.placement.num_workers and not config.placement.rollout_workers:
        hint = (
            f"leaves workers without a prompt: at most rollout.prompts_per_step = {rollout.prompts_per_step}"
        )
        yield ConfigProblem(path="placement.num_workers", found=config.placement.num_workers, hint=hint)


def _evaluation(config: Config, user_keys: Collection[str]) -> Problems:
    evaluation = config.eval
    tables: dict[str, Eval | EvalDataset] = {"eval": evaluation}
    tables |= {f"eval.datasets.{name}": dataset for name, dataset in evaluation.datasets.items()}
    for path, each in tables.items():
        temperature = evaluation.temperature if each.temperature is None else each.temperature
        samples = each.samples_per_prompt or evaluation.samples_per_prompt
        if temperature == 0 and samples > 1:
            hint = "greedy decoding repeats one answer; take 1 sample, or a temperature above 0"
            yield ConfigProblem(path=f"{path}.samples_per_prompt", found=samples, hint=hint)
    for name in sorted({dataset_name(file) for file in evaluation.data} & evaluation.datasets.keys()):
        hint = "a file of eval.data has this name too; give one of them another"
        yield ConfigProblem(path=f"eval.datasets.{name}", found=name, hint=hint)
    ignored = sorted(key for key in user_keys if key.startswith("eval."))
    if ignored and not (evaluation.data or evaluation.datasets) and "eval.data" not in ignored:
        hint = f"without data {', '.join(ignored)} has no effect; name the files, or write []"
        yield ConfigProblem(path="eval.data", found=None, hint=hint)


def _task(config: Config, user_keys: Collection[str]) -> Problems:
    if config.run.task != "sft":
        return
    for path in RL_ONLY:
        section, key = path.split(".")
        default = type(getattr(config, section)).model_fields[key].default
        # A resolved config holds every key.
        if _at(config, path) != default:
            hint = 'has no effect with run.task = "sft"; leave it out'
            yield ConfigProblem(path=path, found=_at(config, path), hint=hint)


def _resume(config: Config, user_keys: Collection[str]) -> Problems:
    if config.run.resume and config.run.overwrite:
        hint = "run.overwrite deletes the run that run.resume goes on with; give one of them"
        yield ConfigProblem(path="run.resume", found=True, hint=hint)


def _schedule(config: Config, user_keys: Collection[str]) -> Problems:
    train = config.train
    if train.min_lr > train.lr:
        hint = f"must be at most train.lr = {train.lr}"
        yield ConfigProblem(path="train.min_lr", found=train.min_lr, hint=hint)
    if not all(0 <= beta < 1 for beta in train.adam_betas):
        hint = "both must be at least 0 and less than 1"
        yield ConfigProblem(path="train.adam_betas", found=list(train.adam_betas), hint=hint)


def _lengths(config: Config, user_keys: Collection[str]) -> Problems:
    rollout = config.rollout
    longest = (config.data.max_prompt_tokens or 1) + rollout.max_new_tokens
    if longest > rollout.max_batch_tokens:
        hint = f"must hold one prompt and its response: at least {longest} tokens"
        yield ConfigProblem(path="rollout.max_batch_tokens", found=rollout.max_batch_tokens, hint=hint)


RULES = (
    Check(
        _optimizer_steps,
        (
            "rollout.prompts_per_step",
            "rollout.samples_per_prompt",
            "train.optimizer_steps",
            "placement.num_workers",
            "placement.rollout_workers",
        ),
    ),
    Check(engines_rule, ("placement.rollout_workers", "rollout.prompts_per_step", "debug")),
    Check(cluster_rule, ("cluster.address", "placement.launcher")),
    Check(label_rule, ("data.label_key", "reward", "eval.datasets")),
    Check(reward_rule, ("reward", "eval.datasets", "rollout.max_new_tokens")),
    Check(_evaluation, ("eval",)),
    Check(_task, ("run.task",)),
    Check(_resume, ("run.resume", "run.overwrite")),
    Check(debug_rule, ("debug", "run.task")),
    Check(_schedule, ("train.lr", "train.min_lr", "train.adam_betas")),
    Check(_lengths, ("data.max_prompt_tokens", "rollout.max_new_tokens", "rollout.max_batch_tokens")),
)


# -------------------------------------------------------------------------
# Names
# -------------------------------------------------------------------------


def _at(config: Config, path: str) -> Any:
    section, key = path.split(".")
    return getattr(getattr(config, section), key)


def _names(config: Config, plugins: Plugins) -> Problems:
    for path, hook in NAMES:
        value = _at(config, path)
        for name in value if isinstance(value, tuple) else (value,) if value else ():
            if name not in (known := plugins.named(hook)):
                hint = f"no plugin provides it; available: {', '.join(sorted(known)) or 'none'}"
                yield ConfigProblem(path=path, found=name, hint=hint + failed_plugins(plugins))


def _advantage_options(config: Config, plugins: Plugins) -> Problems:
    name, options = config.algorithm.advantage, config.algorithm.advantage_options
    function: NamedFunction | None = plugins.named("register_advantage_estimators").get(name)
    if function is not None:
        yield from option_problems("algorithm.advantage_options", name, function.fn, options)


# -------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------


def _data_files(config: Config, user_keys: Collection[str]) -> Problems:
    if not config.data.train:
        yield ConfigProblem(path="data.train", found=[], hint="name at least one file")
    for path, files in _file_lists(config):
        for index, file in enumerate(files):
            yield from _data_file(f"{path}[{index}]", file)


def _file_lists(config: Config) -> Iterator[tuple[str, Sequence[DataFile]]]:
    yield "data.train", config.data.train
    yield "eval.data", config.eval.data
    for name, dataset in config.eval.datasets.items():
        yield f"eval.datasets.{name}.files", dataset.files


def _data_file(path: str, file: DataFile) -> Problems:
    try:
        local = Path(split_slice(file.path)[0])
    except ValueError as error:
        yield ConfigProblem(path=path, found=file.path, hint=str(error))
        return
    if data_name(path, file.path) is not None:
        return  # looked up once nothing else is wrong
    if file.path.startswith("hf:"):
        yield ConfigProblem(
            path=path, found=file.path, hint=f"a data file's name is {DATASETS}OWNER/NAME/FILE"
        )
    elif not local.is_file():
        yield ConfigProblem(path=path, found=file.path, hint=f"no such file{_from_here(local)}")


def _run_directory(config: Config, user_keys: Collection[str]) -> Problems:
    directory = config.run.directory.absolute()
    existing = next(path for path in (directory, *directory.parents) if os.access(path, os.F_OK))
    if not existing.is_dir():
        hint = (
            f"{'is' if existing == directory else f'cannot be made: {existing} is'} a file; name a directory"
        )
    elif not os.access(existing, os.W_OK | os.X_OK):
        hint = f"cannot be made: {existing} is not writable; name another directory"
    else:
        return
    yield ConfigProblem(path="run.directory", found=str(config.run.directory), hint=hint)


def _overwrite(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield what the run is to read and would delete before it does."""
    if not config.run.overwrite:
        return
    own = (config.run.directory / config.run.name).resolve()
    for key, path in _read_paths(config):
        # A link is deleted with the directory, wherever it leads to.
        if any(each.is_relative_to(own) for each in (path.resolve(), path.parent.resolve() / path.name)):
            hint = f"run.overwrite would delete it with {own}; copy it elsewhere, or choose another run.name"
            yield ConfigProblem(path=key, found=str(path), hint=hint)


def _read_paths(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the key and the path of what a run reads; a replay has a rule of its own."""
    read = [("model.path", config.model.path), ("reference.path", config.reference.path)]
    for path, files in _file_lists(config):
        for index, file in enumerate(files):
            with suppress(ValueError):  # which is a problem of its own
                read.append((f"{path}[{index}]", Path(split_slice(file.path)[0])))
    yield from ((key, path) for key, path in read if path is not None and os.path.lexists(path))
    caches = (("data.cache", config.data.cache), ("hub.cache", config.hub.cache))
    yield from ((key, cache) for key, cache in caches if cache is not None)


OVERWRITE_READS = (
    *("run.directory", "run.name", "run.overwrite", "model.path", "reference.path"),
    *("data.train", "data.cache", "eval.data", "eval.datasets", "hub.cache"),
)
FILE_RULES = (
    Check(_data_files, ("data.train", "eval.data", "eval.datasets")),
    Check(_run_directory, ("run.directory",)),
    Check(_overwrite, OVERWRITE_READS),
    Check(replay_rule, ("debug", "run.directory", "run.name", "run.overwrite")),
)


def _from_here(path: Path) -> str:
    return "" if path.is_absolute() else f" in {Path.cwd()}; relative paths start at the current directory"


def _models(config: Config, plugins: Plugins) -> Problems:
    trusted = config.model.trust_remote_code
    policy, problems = _read_model("model.path", config.model.path, plugins, trusted)
    yield from problems
    if policy is not None:
        yield from _context(config, policy)
        yield from _stop_tokens(config, policy)
        yield from _chat_template(config)
    if config.algorithm.kl_coef > 0 and config.reference.path is not None:
        reference, problems = _read_model("reference.path", config.reference.path, plugins, trusted)
        yield from problems
        if policy and reference and policy.get("architectures") != reference.get("architectures"):
            hint = f"holds {reference.get('architectures')}; model.path holds {policy.get('architectures')}"
            yield ConfigProblem(path="reference.path", found=str(config.reference.path), hint=hint)


def _read_model(
    path: str, directory: Path, plugins: Plugins, trust_remote_code: bool
) -> tuple[dict[str, Any] | None, list[ConfigProblem]]:
    """Return a Hugging Face config if it can be read, and what is wrong with its directory."""

    def problem(hint: str) -> ConfigProblem:
        return ConfigProblem(path=path, found=str(directory), hint=hint)

    if model_name(path, directory) is not None:
        return None, []  # looked up once nothing else is wrong
    if not directory.is_dir():
        hint = f"no such directory{_from_here(directory)}, and no name on a hub, which is OWNER/NAME"
        return None, [problem(hint)]
    hf, hints = read_model(directory, plugins, trust_remote_code=trust_remote_code)
    return hf, [problem(hint) for hint in hints]


def _stop_tokens(config: Config, hf: Mapping[str, Any]) -> Problems:
    size = hf.get("vocab_size")
    tables: dict[str, Rollout | EvalDataset] = {"rollout": config.rollout}
    tables |= {f"eval.datasets.{name}": dataset for name, dataset in config.eval.datasets.items()}
    for path, table in tables.items():
        for index, token in enumerate(table.stop_token_ids or ()):
            if isinstance(size, int) and token >= size:
                hint = f"the model's vocab_size is {size}"
                yield ConfigProblem(path=f"{path}.stop_token_ids[{index}]", found=token, hint=hint)


def _context(config: Config, hf: Mapping[str, Any]) -> Problems:
    limit = hf.get("max_position_embeddings")
    longest = (config.data.max_prompt_tokens or 1) + config.rollout.max_new_tokens
    if isinstance(limit, int) and longest > limit:
        hint = (
            f"a prompt and its response may have {longest} tokens; the model takes {limit} "
            "(data.max_prompt_tokens + rollout.max_new_tokens must fit)"
        )
        yield ConfigProblem(path="rollout.max_new_tokens", found=config.rollout.max_new_tokens, hint=hint)


def _chat_template(config: Config) -> Problems:
    directory = config.model.path
    tables: dict[str, Data | EvalDataset] = {"data": config.data}
    tables |= {f"eval.datasets.{name}": dataset for name, dataset in config.eval.datasets.items()}
    paths = [f"{path}.apply_chat_template" for path, table in tables.items() if table.apply_chat_template]
    if not paths or (directory / "chat_template.jinja").is_file():
        return
    try:
        tokenizer = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tokenizer = {}
    if not tokenizer.get("chat_template"):
        hint = f"the tokenizer of {directory} has no chat template; write false, or add chat_template.jinja"
        yield from (ConfigProblem(path=path, found=True, hint=hint) for path in paths)
