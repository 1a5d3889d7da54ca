"""Rules of algorithms: the models that each needs beside the policy, and keys that depend on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from anygauge.config.named_functions import taken_options
from anygauge.config.schema import Algorithm, Config, Section
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge_hooks.types import LoadedPlugins, NamedFunction

__all__ = [
    "algorithm_rule",
    "algorithm_rules",
    "algorithm_warnings",
    "compares",
    "estimator",
    "has_critic",
    "has_teacher",
    "rates_samples",
    "reads_old_log_probs",
    "sampling_rule",
    "value_problems",
]

ESTIMATORS = "register_advantage_estimators"
VALUES, TEACHER, OLD = "values", "teacher_log_probs", "old_log_probs"
LOSS_OPTIONS = ("clip_low", "clip_high", "dual_clip")
"""Keys that go to the policy loss, if its signature has them."""
ON_POLICY = "policy_gradient"
SEQUENCE_RATIO = "gspo"
WIDEST_SEQUENCE_CLIP = 0.01
"""A mean of log-ratios over a response hardly ever leaves a wider range: nothing would be clipped."""

Problems = Iterator[ConfigProblem]


def estimator(config: Config, plugins: LoadedPlugins) -> NamedFunction | None:
    """Return the advantage estimator, or ``None`` if its name is unknown or the task is SFT."""
    if config.run.task == "sft":
        return None
    named: NamedFunction | None = plugins.find(ESTIMATORS, config.algorithm.advantage)
    return named


def has_critic(config: Config, plugins: LoadedPlugins) -> bool:
    """Return whether a critic is trained beside the policy."""
    named = estimator(config, plugins)
    return named is not None and VALUES in named.needs


def has_teacher(config: Config, plugins: LoadedPlugins) -> bool:
    """Return whether there is a teacher."""
    likens = config.run.task != "sft" and config.algorithm.distill_kl_coef > 0
    return likens or rates_samples(config, plugins)


def rates_samples(config: Config, plugins: LoadedPlugins) -> bool:
    """Return whether the teacher computes log-probs of the policy's samples."""
    named = estimator(config, plugins)
    return named is not None and (TEACHER in named.needs or config.algorithm.distill_coef > 0)


def compares(config: Config) -> bool:
    """Return whether the policy is compared with a reference, in the loss or in the rewards."""
    coefficients = (config.algorithm.kl_coef, config.algorithm.kl_reward_coef)
    return any(each > 0 for each in coefficients) and config.run.task != "sft"


def reads_old_log_probs(config: Config, plugins: LoadedPlugins) -> bool:
    """Return whether anything reads the policy's log-probs before the first optimizer step of a rollout.

    Corrections do not: they are a part of the loss, which has the log-probs of that step itself.
    """
    named, algorithm = estimator(config, plugins), config.algorithm
    rewards = algorithm.kl_reward_coef > 0 or rates_samples(config, plugins)
    return rewards or config.train.router_replay or (named is not None and OLD in named.needs)


def algorithm_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield conflicts that do not depend on plugins."""
    if config.run.task == "sft" and config.algorithm.loss_aggregation == "constant_length":
        hint = "a row of SFT has no rollout.max_new_tokens to be divided by; take another"
        yield ConfigProblem(path="algorithm.loss_aggregation", found="constant_length", hint=hint)
    if config.critic.warmup_steps >= config.run.steps:
        hint = f"leaves no step for the policy: run.steps is {config.run.steps}"
        yield ConfigProblem(path="critic.warmup_steps", found=config.critic.warmup_steps, hint=hint)


def algorithm_rules(config: Config, plugins: LoadedPlugins) -> Problems:
    """Yield keys that the advantage estimator cannot use, and keys that it needs."""
    named, algorithm = estimator(config, plugins), config.algorithm
    if named is None and config.run.task != "sft":
        return  # an unknown name is a problem of its own
    if named is not None:
        yield from _registered(named)
        yield from _alone(config, named)
        yield from value_problems("algorithm.advantage_options", named, algorithm.advantage_options)
        yield from _loss(config, plugins)
    by_token = [name for name, each in sorted(plugins.named(ESTIMATORS).items()) if each.kind == "token"]
    if algorithm.kl_reward_coef > 0 and named is not None and named.kind == "group":
        hint = f"{named.name!r} has one reward for each sample; use kl_coef, or one of {_listed(by_token)}"
        yield ConfigProblem(path="algorithm.kl_reward_coef", found=algorithm.kl_reward_coef, hint=hint)
    if algorithm.distill_coef > 0 and named is not None and TEACHER in named.needs:
        hint = f"{named.name!r} is distillation already; leave it out"
        yield ConfigProblem(path="algorithm.distill_coef", found=algorithm.distill_coef, hint=hint)
    if algorithm.distill_kl_coef == 0 and algorithm.distill_top_k != Algorithm().distill_top_k:
        hint = "has no effect without algorithm.distill_kl_coef above 0"
        yield ConfigProblem(path="algorithm.distill_top_k", found=algorithm.distill_top_k, hint=hint)
    if not has_critic(config, plugins):
        yield from _unused(config.critic, "critic", _takers(plugins, VALUES))
    if not has_teacher(config, plugins):
        takers = f"{_takers(plugins, TEACHER)}, or algorithm.distill_coef or distill_kl_coef above 0"
        yield from _unused(config.teacher, "teacher", takers)
    elif config.teacher.path is None:
        yield ConfigProblem(path="teacher.path", found=None, hint="name the model that is to be distilled")


def _registered(named: NamedFunction) -> Problems:
    """Yield how a plugin registers an estimator that the trainer would not know how to call."""
    for name, given, known in (
        ("kind", (named.kind,), ("group", "token")),
        ("needs", tuple(named.needs), (VALUES, TEACHER, OLD)),
    ):
        if wrong := [each for each in given if each not in known]:
            hint = f"its plugin registers it with {name} = {_listed(wrong)}; known: {_listed(known)}"
            yield ConfigProblem(path="algorithm.advantage", found=named.name, hint=hint)


def _alone(config: Config, named: NamedFunction) -> Problems:
    """Yield an estimator that compares the samples of a prompt, where each is alone."""
    algorithm, samples = config.algorithm, config.rollout.samples_per_prompt
    options = algorithm.advantage_options
    compares_none = options.get("center") is False and options.get("scale") is False
    distils = algorithm.distill_coef > 0 or algorithm.distill_kl_coef > 0
    if samples < named.min_samples and not compares_none and not distils:
        hint = f"{named.name!r} compares the samples of a prompt, and learns nothing from a single one; "
        hint += f"write {named.min_samples} or more, or take another algorithm.advantage"
        yield ConfigProblem(path="rollout.samples_per_prompt", found=samples, hint=hint)


def algorithm_warnings(config: Config) -> Problems:
    """Yield settings that are allowed but probably unintended."""
    algorithm, warmup = config.algorithm, config.train.warmup_steps
    if warmup > (total := config.run.steps * config.optimizer_steps):
        hint = (
            f"the run takes {total} optimizer steps and ends before train.lr = {config.train.lr:g} is reached"
        )
        yield ConfigProblem(path="train.warmup_steps", found=warmup, hint=hint)
    if config.run.task == "sft" or algorithm.policy_loss != SEQUENCE_RATIO:
        return
    paper = "GSPO's paper (arXiv 2507.18071)"
    if algorithm.loss_aggregation == "token_mean":
        hint = f'{paper} takes "sample_mean"; a ratio of the whole sample weighs long responses more here'
        yield ConfigProblem(path="algorithm.loss_aggregation", found=algorithm.loss_aggregation, hint=hint)
    for key, value in (("clip_low", 3e-4), ("clip_high", 4e-4)):
        if (width := getattr(algorithm, key)) > WIDEST_SEQUENCE_CLIP:
            hint = f"{paper} takes {value}; the ratio of a sample is a geometric mean, which hardly ever "
            hint += "leaves a range for single tokens, so nothing would be clipped"
            yield ConfigProblem(path=f"algorithm.{key}", found=width, hint=hint)


def sampling_rule(config: Config) -> Problems:
    """Yield truncated sampling: the ratios of the loss would be against another distribution."""
    if config.run.task == "sft":
        return
    for key, off in (("top_p", 1), ("top_k", 0)):
        if (value := getattr(config.rollout, key)) != off:
            hint = (
                "log-probs are over the whole vocabulary, while tokens would be drawn from a part of it, so "
            )
            hint += (
                f"every ratio of the loss would be wrong; write {off}. Evaluation has eval.{key} of its own"
            )
            yield ConfigProblem(path=f"rollout.{key}", found=value, hint=hint)


def value_problems(path: str, function: NamedFunction, options: Mapping[str, Any]) -> Problems:
    """Yield options whose value does not have the annotated type.

    :param path: Path of the table that holds the options.
    """
    for option, value in options.items():
        try:
            TypeAdapter(_hint(function.fn, option)).validate_python(value, strict=True)
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            hint = f"{function.name!r} cannot take it: {message[0].lower()}{message[1:]}"
            yield ConfigProblem(path=f"{path}.{option}", found=value, hint=hint)
        except PydanticUserError:
            continue  # a type of which pydantic knows nothing


def _hint(function: Callable[..., Any], option: str) -> Any:
    """Return the annotated type of an option.

    The other annotations are not evaluated: they may name types that are imported for a type checker alone.
    """
    function = inspect.unwrap(function)
    annotation = getattr(function, "__annotations__", {}).get(option, Any)
    alone = SimpleNamespace(__annotations__={option: annotation})
    try:
        return get_type_hints(alone, getattr(function, "__globals__", {}), include_extras=True)[option]
    except Exception:  # noqa: BLE001 - foreign code: a stranger's annotation
        return Any


def _loss(config: Config, plugins: LoadedPlugins) -> Problems:
    """Yield the keys that the policy loss does not read."""
    algorithm = config.algorithm
    loss: NamedFunction | None = plugins.find("register_policy_losses", algorithm.policy_loss)
    if loss is None:
        return  # a problem of its own
    taken = taken_options(loss.fn, LOSS_OPTIONS)
    takes = ", ".join(taken) or f"none of {', '.join(LOSS_OPTIONS)}"
    for key in LOSS_OPTIONS:
        value = getattr(algorithm, key)
        if key not in taken and value != Algorithm.model_fields[key].default:
            hint = f"has no effect: {algorithm.policy_loss!r} takes {takes}"
            yield ConfigProblem(path=f"algorithm.{key}", found=value, hint=hint)
    if algorithm.policy_loss == ON_POLICY and config.optimizer_steps > 1:
        hint = f"{ON_POLICY!r} has no ratio to the policy that sampled, which differs after one step;  "
        hint += "write 1, or take a loss that clips"
        yield ConfigProblem(path="train.optimizer_steps", found=config.optimizer_steps, hint=hint)


def _takers(plugins: LoadedPlugins, need: str) -> str:
    names = [name for name, each in sorted(plugins.named(ESTIMATORS).items()) if need in each.needs]
    return f"algorithm.advantage = {_listed(names)}"


def _listed(names: Collection[object]) -> str:
    return ", ".join(map(repr, names)) or "one that a plugin would provide"


def _unused(section: Section, name: str, takers: str) -> Problems:
    """Yield the keys of a section that are set. A resolved config holds every key."""
    for key, field in type(section).model_fields.items():
        if (value := getattr(section, key)) != field.default:
            hint = f"has no effect here: the {name} is there for {takers}"
            yield ConfigProblem(path=f"{name}.{key}", found=str(value), hint=hint)
