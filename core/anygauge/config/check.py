"""What the schema cannot say: names that plugins provide, keys that need each other, files."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config.model_files import read_model
from anygauge.config.schema import Config
from anygauge.config.tree import covers
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
    ("reward.function", "register_reward_functions"),
    ("data.source", "register_data_sources"),
    ("run.trackers", "register_trackers"),
)
"""Keys that name something, and the hook that provides it."""
OPTIONS = (
    ("algorithm.advantage", "advantage_options", "register_advantage_estimators"),
    ("reward.function", "options", "register_reward_functions"),
)
"""Keys that name a function, the key beside it that holds its options, and the hook."""
NOT_OPTIONS = ("response", "label", "metadata")
"""What the core passes to a reward function; what it passes to an estimator has no default."""
LABELLED_REWARDS = ("exact_match", "math")

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
        _options(config, plugins),
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
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    sizes = f"{samples} samples a step ({rollout.prompts_per_step} prompts x {rollout.samples_per_prompt})"
    if samples % steps:
        divisors = ", ".join(str(n) for n in range(1, min(samples, 64) + 1) if samples % n == 0)
        hint = f"must divide the {sizes}: one of {divisors}"
        yield ConfigProblem(path="train.optimizer_steps", found=steps, hint=hint)
    elif samples // steps < config.placement.num_workers:
        hint = f"leaves workers without a sample: {sizes} over {steps} optimizer steps; use fewer workers"
        yield ConfigProblem(path="placement.num_workers", found=config.placement.num_workers, hint=hint)
    elif rollout.prompts_per_step < config.placement.num_workers:
        hint = (
            f"leaves workers without a prompt: at most rollout.prompts_per_step = {rollout.prompts_per_step}"
        )
        yield ConfigProblem(path="placement.num_workers", found=config.placement.num_workers, hint=hint)


def _label(config: Config, user_keys: Collection[str]) -> Problems:
    if config.data.label_key is None and config.reward.function in LABELLED_REWARDS:
        hint = f"reward {config.reward.function!r} compares with a label; name the field that holds it"
        yield ConfigProblem(path="data.label_key", found=None, hint=hint)


def _evaluation(config: Config, user_keys: Collection[str]) -> Problems:
    evaluation = config.eval
    if evaluation.temperature == 0 and evaluation.samples_per_prompt > 1:
        hint = "greedy decoding repeats one answer; set eval.samples_per_prompt = 1 or a temperature above 0"
        yield ConfigProblem(path="eval.samples_per_prompt", found=evaluation.samples_per_prompt, hint=hint)
    ignored = sorted(key for key in user_keys if key.startswith("eval."))
    if ignored and not evaluation.data and "eval.data" not in ignored:
        hint = f"without data {', '.join(ignored)} has no effect; name the files, or write []"
        yield ConfigProblem(path="eval.data", found=None, hint=hint)


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
        ),
    ),
    Check(_label, ("data.label_key", "reward.function")),
    Check(_evaluation, ("eval",)),
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
        for name in value if isinstance(value, tuple) else (value,):
            if path == "reward.function" and ":" in name:
                yield from _import_path(path, name)
            elif name not in (known := plugins.named(hook)):
                hint = f"no plugin provides it; available: {', '.join(sorted(known)) or 'none'}"
                if path == "reward.function":
                    hint += "; a function of your own is package.module:function"
                yield ConfigProblem(path=path, found=name, hint=hint + _failed(plugins))


def _failed(plugins: Plugins) -> str:
    failed = ", ".join(f"{name} ({error!r})" for name, error in sorted(plugins.load_errors.items()))
    return f"; these plugins failed to load: {failed}" if failed else ""


def _import_path(path: str, name: str) -> Problems:
    module, _, function = name.partition(":")
    if not function or not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
        yield ConfigProblem(path=path, found=name, hint="write it as package.module:function")
        return
    try:
        missing = module not in sys.modules and importlib.util.find_spec(module) is None
    except Exception as error:  # noqa: BLE001 - finding a submodule imports the user's package
        hint = f"importing the package of module {module!r} failed: {error!r}"
        yield ConfigProblem(path=path, found=name, hint=hint)
        return
    if missing:
        hint = f"no module {module!r}; run from the directory that holds it, or put that on PYTHONPATH"
        yield ConfigProblem(path=path, found=name, hint=hint)
        return
    yield from _attribute(path, name, module, function)


def _attribute(path: str, name: str, module: str, function: str) -> Problems:
    try:
        found: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - importing it runs the user's code
        hint = f"importing module {module!r} failed: {error!r}"
        yield ConfigProblem(path=path, found=name, hint=hint)
        return
    for part in function.split("."):
        if not hasattr(found, part):
            functions = [known for known in dir(found) if callable(getattr(found, known, None))]
            close = difflib.get_close_matches(part, functions)
            hint = f"module {module!r} has no {function!r}"
            hint += f"; did you mean {' or '.join(close)}?" if close else "; define it there"
            yield ConfigProblem(path=path, found=name, hint=hint)
            return
        found = getattr(found, part)


def _options(config: Config, plugins: Plugins) -> Problems:
    for path, key, hook in OPTIONS:
        options_path = f"{path.split('.')[0]}.{key}"
        function: NamedFunction | None = plugins.named(hook).get(_at(config, path))
        known = _keywords(function.fn) if function else None
        for option, value in _at(config, options_path).items():
            if known is not None and option not in known:
                hint = f"{_at(config, path)!r} has no such option; known: {', '.join(known) or 'none'}"
                yield ConfigProblem(path=f"{options_path}.{option}", found=value, hint=hint)


def _keywords(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the options that a function takes, or ``None`` if it takes any or does not say."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(
        parameter.name
        for parameter in parameters
        if parameter.name not in NOT_OPTIONS
        and (parameter.kind is parameter.KEYWORD_ONLY or parameter.default is not parameter.empty)
    )


# -------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------


def _data_files(config: Config, user_keys: Collection[str]) -> Problems:
    if not config.data.train:
        yield ConfigProblem(path="data.train", found=[], hint="name at least one file")
    for path, files in (("data.train", config.data.train), ("eval.data", config.eval.data)):
        for index, file in enumerate(files):
            if not file.is_file():
                hint = f"no such file{_from_here(file)}"
                yield ConfigProblem(path=f"{path}[{index}]", found=str(file), hint=hint)


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


FILE_RULES = (Check(_data_files, ("data.train", "eval.data")), Check(_run_directory, ("run.directory",)))


def _from_here(path: Path) -> str:
    return "" if path.is_absolute() else f" in {Path.cwd()}; relative paths start at the current directory"


def _models(config: Config, plugins: Plugins) -> Problems:
    policy, problems = _read_model("model.path", config.model.path, plugins)
    yield from problems
    if policy is not None:
        yield from _context(config, policy)
        yield from _stop_tokens(config, policy)
        yield from _chat_template(config)
    if config.algorithm.kl_coef > 0 and config.reference.path is not None:
        reference, problems = _read_model("reference.path", config.reference.path, plugins)
        yield from problems
        if policy and reference and policy.get("architectures") != reference.get("architectures"):
            hint = f"holds {reference.get('architectures')}; model.path holds {policy.get('architectures')}"
            yield ConfigProblem(path="reference.path", found=str(config.reference.path), hint=hint)


def _read_model(
    path: str, directory: Path, plugins: Plugins
) -> tuple[dict[str, Any] | None, list[ConfigProblem]]:
    """Return a Hugging Face config if it can be read, and what is wrong with its directory."""

    def problem(hint: str) -> ConfigProblem:
        return ConfigProblem(path=path, found=str(directory), hint=hint)

    if not directory.is_dir():
        hint = f"no such directory{_from_here(directory)}"
        if not directory.is_absolute():
            hint += f"; to fetch one from the hub: hf download OWNER/{directory.name} --local-dir {directory}"
        return None, [problem(hint)]
    hf, hints = read_model(directory, plugins)
    return hf, [problem(hint) for hint in hints]


def _stop_tokens(config: Config, hf: Mapping[str, Any]) -> Problems:
    size = hf.get("vocab_size")
    for index, token in enumerate(config.rollout.stop_token_ids):
        if isinstance(size, int) and token >= size:
            hint = f"the model's vocab_size is {size}"
            yield ConfigProblem(path=f"rollout.stop_token_ids[{index}]", found=token, hint=hint)


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
    if not config.data.apply_chat_template or (directory / "chat_template.jinja").is_file():
        return
    try:
        tokenizer = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        tokenizer = {}
    if not tokenizer.get("chat_template"):
        hint = f"the tokenizer of {directory} has no chat template; write false, or add chat_template.jinja"
        yield ConfigProblem(path="data.apply_chat_template", found=True, hint=hint)
