"""Config checks beyond the schema: names that plugins provide, keys that need each other, files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from anygauge.config.data_files import dataset_name
from anygauge.config.named_functions import name_problems, option_problems
from anygauge.config.rules.algorithm import algorithm_rule, algorithm_rules, sampling_rule
from anygauge.config.rules.correction import correction_rules, stale_rule
from anygauge.config.rules.debug import debug_rule, replay_rule
from anygauge.config.rules.file import (
    data_files_rule,
    overwrite_rule,
    run_directory_rule,
    train_files_rule,
)
from anygauge.config.rules.group import engine_kinds, external_rule, groups_rule
from anygauge.config.rules.health import health_rule
from anygauge.config.rules.lora import adapter_rule, lora_rules
from anygauge.config.rules.media import media_rule
from anygauge.config.rules.metric import metric_functions
from anygauge.config.rules.model import chat_template_rule, model_rules, other_models_rule, policy_rule
from anygauge.config.rules.parallel import (
    data_parallel_size,
    parallel_rule,
    role_rule,
)
from anygauge.config.rules.placement import cluster_rule, colocation_rules, engines_rule
from anygauge.config.rules.profile import profile_rules
from anygauge.config.rules.resume import resume_rule
from anygauge.config.rules.reward import reward_functions, reward_labels, reward_rule
from anygauge.config.rules.rollout import control_functions, control_rule
from anygauge.config.rules.weight_sync import transport_rule, weight_sync_rules
from anygauge.config.schema import Config, Eval, EvalDataset
from anygauge.config.secret_values import mask_rule
from anygauge.config.tree import covers
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import BackendSpec, NamedFunction

__all__ = ["check"]

_LEAVE_OUT = "leave it out"
"""End of a hint for a key that can only be removed."""
NAMES = (
    ("train.engine", "register_train_engines"),
    ("rollout.engine", "register_rollout_engines"),
    ("algorithm.advantage", "register_advantage_estimators"),
    ("algorithm.policy_loss", "register_policy_losses"),
    ("algorithm.correction", "register_corrections"),
    ("data.source", "register_data_sources"),
    ("run.trackers", "register_trackers"),
    ("run.metrics", "register_metric_functions"),
    ("weight_sync.transport", "register_weight_transports"),
)
"""Keys that name something, and the hook that provides it."""
RL_ONLY = (
    "algorithm.kl_coef",
    "algorithm.kl_reward_coef",
    "algorithm.normalize_advantages",
    "algorithm.distill_coef",
    "algorithm.distill_kl_coef",
    "algorithm.entropy_coef",
    "algorithm.policy_loss",
    "algorithm.old_log_probs",
    "algorithm.correction",
    "algorithm.mask_stale",
    "rollout.samples_per_prompt",
    "rollout.schedule",
    "rollout.function",
    "rollout.after_sample",
    "rollout.filters",
    "rollout.over_sampling",
    "rollout.partial_rollout",
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
    trains: bool = True,
    checks_models: bool = True,
) -> list[ConfigProblem]:
    """Return every problem that the schema did not find.

    :param user_keys: Dotted paths that the user wrote.
    :param broken: Paths that the schema refused; nothing more is said about them.
    :param check_files: Whether to look at the files and directories that the config names.
    :param trains: Whether the data of a training and the models beside the policy are needed.
    :param checks_models: Whether to check the models, if the files are looked at; that imports torch.
    """
    files = (*FILE_RULES, *(TRAINING_FILE_RULES if trains else ())) if check_files else ()
    problems_of_rules = chain(
        *(
            each.rule(config, user_keys)
            for each in (*RULES, *files)
            if not any(covers(path, key) for path in broken for key in each.reads)
        ),
        _names(config, plugins),
        _advantage_options(config, plugins),
        algorithm_rules(config, plugins) if trains else (),
        correction_rules(config, plugins) if trains else (),
        sampling_rule(config) if trains else (),
        reward_functions(config, plugins),
        reward_labels(config, plugins),
        control_functions(config, plugins),
        metric_functions(config, plugins),
        colocation_rules(config, plugins),
        weight_sync_rules(config, backend, plugins, trains=trains),
        profile_rules(config, backend, plugins),
        transport_rule(config, user_keys, plugins),
        _provider(config, backend),
        lora_rules(config, plugins),
        engine_kinds(config, plugins),
        model_rules(config, plugins, trains=trains) if check_files and checks_models else (),
        plugins.collect("check_config", config=config, backend=backend),
    )
    problems = [
        problem for problem in problems_of_rules if not any(covers(path, problem.path) for path in broken)
    ]
    return _distinct(problems)


def _distinct(problems: Iterable[ConfigProblem]) -> list[ConfigProblem]:
    """Return the first of problems that say the same, or that all advise to leave a key out."""
    kept: dict[tuple[str, str], ConfigProblem] = {}
    for problem in problems:
        is_useless = problem.hint.rstrip(".").endswith(_LEAVE_OUT)
        kept.setdefault((problem.path, _LEAVE_OUT if is_useless else problem.hint), problem)
    return list(kept.values())


# -------------------------------------------------------------------------
# Keys that need each other
# -------------------------------------------------------------------------


def _optimizer_steps(config: Config, user_keys: Collection[str]) -> Problems:
    rollout, steps, samples = config.rollout, config.optimizer_steps, config.rollout_samples
    each = samples // rollout.prompts_per_step
    sizes = f"{samples} samples a step ({rollout.prompts_per_step} prompts x {each})"
    if (size := config.train.global_batch_size) is not None and samples % size:
        hint = f"must divide the {sizes}"
        yield ConfigProblem(path="train.global_batch_size", found=size, hint=hint)
    elif config.train.optimizer_steps not in (1, steps):
        hint = f"train.global_batch_size = {size} makes {steps} of the {sizes}; leave one of the two keys out"
        yield ConfigProblem(path="train.optimizer_steps", found=config.train.optimizer_steps, hint=hint)
    elif samples % steps:
        divisors = ", ".join(str(n) for n in range(1, min(samples, 64) + 1) if samples % n == 0)
        hint = f"must divide the {sizes}: one of {divisors}"
        yield ConfigProblem(path="train.optimizer_steps", found=steps, hint=hint)
    elif samples // steps < data_parallel_size(config):
        hint = f"leaves workers without a sample: {sizes} over {steps} optimizer steps; use fewer workers"
        yield ConfigProblem(path="placement.train_workers", found=config.placement.train_workers, hint=hint)
    elif rollout.prompts_per_step < config.placement.train_workers and not config.has_engines_apart:
        hint = (
            f"leaves workers without a prompt: at most rollout.prompts_per_step = {rollout.prompts_per_step}"
        )
        yield ConfigProblem(path="placement.train_workers", found=config.placement.train_workers, hint=hint)


def _best(config: Config, user_keys: Collection[str]) -> Problems:
    save = config.save
    if save.best is None:
        return
    if save.every is None:
        hint = 'has no effect with save.every = "none"; leave it out'
        yield ConfigProblem(path="save.best", found=save.best, hint=hint)
    names = {dataset_name(file) for file in config.eval.data} | config.eval.datasets.keys()
    if save.best.startswith("eval/") and not any(save.best.startswith(f"eval/{name}") for name in names):
        known = ", ".join(f"eval/{name}" for name in sorted(names)) or "none: eval.data names no file"
        yield ConfigProblem(path="save.best", found=save.best, hint=f"no evaluation has it; known: {known}")


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
        if (value := attrgetter(path)(config)) != default:
            hint = 'has no effect with run.task = "sft"; leave it out'
            yield ConfigProblem(path=path, found=value, hint=hint)


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
            "train.global_batch_size",
            "placement.train_workers",
            "placement.rollout_workers",
            "rollout.external",
            "train.parallel",
        ),
    ),
    Check(parallel_rule, ("placement.train_workers", "train.parallel")),
    Check(role_rule, ("placement.train_workers", "train.parallel", "critic", "teacher")),
    Check(groups_rule, ("rollout.groups", "placement.rollout_workers")),
    Check(
        external_rule,
        (
            "rollout.external",
            "rollout.groups",
            "placement.rollout_workers",
            "weight_sync.transport",
            "debug.mode",
        ),
    ),
    Check(engines_rule, ("placement.rollout_workers", "rollout.prompts_per_step", "debug")),
    Check(cluster_rule, ("cluster.address", "placement.launcher")),
    Check(reward_rule, ("reward", "eval.datasets", "rollout.max_new_tokens")),
    Check(_evaluation, ("eval",)),
    Check(_best, ("save", "eval")),
    Check(_task, ("run.task",)),
    Check(resume_rule, ("run.resume", "run.overwrite", "run.accept_changes")),
    Check(debug_rule, ("debug", "run.task")),
    Check(health_rule, ("health", "run.stop_on", "train.dtype", "rollout.dtype")),
    Check(
        media_rule,
        (
            "media",
            "data.multimodal_keys",
            "eval.datasets",
            "model.modalities",
            "train.freeze",
            "placement.launcher",
            "debug",
        ),
    ),
    Check(algorithm_rule, ("run.task", "run.steps", "algorithm.loss_aggregation", "critic.warmup_steps")),
    Check(control_rule, ("rollout", "placement.rollout_workers", "eval")),
    Check(
        stale_rule,
        ("algorithm.mask_stale", "rollout.schedule", "rollout.partial_rollout", "rollout.max_staleness"),
    ),
    Check(mask_rule, ()),
    Check(_schedule, ("train.lr", "train.min_lr", "train.adam_betas")),
    Check(_lengths, ("data.max_prompt_tokens", "rollout.max_new_tokens", "rollout.max_batch_tokens")),
)


# -------------------------------------------------------------------------
# Names
# -------------------------------------------------------------------------


def _names(config: Config, plugins: Plugins) -> Problems:
    for path, hook in NAMES:
        value = attrgetter(path)(config)
        for name in value if isinstance(value, tuple | dict) else (value,) if value else ():
            yield from name_problems(path, name, hook, plugins)


def _provider(config: Config, backend: BackendSpec) -> Problems:
    name, options = config.train.provider, config.train.provider_options
    if name is not None and name not in backend.providers:
        known = f"it knows {', '.join(backend.providers)}" if backend.providers else "it knows none"
        hint = f"no provider of backend {backend.name}: {known}; write the key in the table of its backend"
        yield ConfigProblem(path="train.provider", found=name, hint=hint)
    if options and name is None:
        hint = "has no effect without train.provider; leave it out"
        yield ConfigProblem(path="train.provider_options", found=options, hint=hint)


def _advantage_options(config: Config, plugins: Plugins) -> Problems:
    name, options = config.algorithm.advantage, config.algorithm.advantage_options
    function: NamedFunction | None = plugins.find("register_advantage_estimators", name)
    if function is not None:
        yield from option_problems("algorithm.advantage_options", name, function.fn, options)


# -------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------


OVERWRITE_READS = (
    *("run.directory", "run.name", "run.overwrite", "model.path", "reference.path"),
    *("teacher.path", "critic.path", "train.lora.path"),
    *("data.train", "data.cache", "eval.data", "eval.datasets", "hub.cache"),
)
TRAINING_FILE_RULES = (
    Check(train_files_rule, ("data.train",)),
    Check(other_models_rule, ("reference", "teacher", "critic", "algorithm")),
)
FILE_RULES = (
    Check(policy_rule, ("model.path", "rollout.groups")),
    Check(chat_template_rule, ("model.path", "data", "eval.datasets", "rollout.function")),
    Check(data_files_rule, ("data.train", "eval.data", "eval.datasets")),
    Check(run_directory_rule, ("run.directory", "run.name", "data.cache", "hub.cache")),
    Check(overwrite_rule, OVERWRITE_READS),
    Check(adapter_rule, ("train.lora",)),
    Check(replay_rule, ("debug", "run.directory", "run.name", "run.overwrite")),
)
