"""The rules of rollout control in ``[rollout]``: functions, filters, over-sampling, partial samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anygauge.config.named_functions import import_problems, name_problems, option_problems
from anygauge.config.schema import Config, Rollout
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import NamedFunction

__all__ = ["control_functions", "control_rule"]

Problems = Iterator[ConfigProblem]


def control_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield keys that have no effect or leave nothing to train on."""
    rollout = config.rollout
    yield from _left_over(rollout)
    if "zero_variance" in rollout.filters and rollout.samples_per_prompt < 2:
        hint = "'zero_variance' rejects every group of one sample; take at least 2"
        yield ConfigProblem(path="rollout.samples_per_prompt", found=rollout.samples_per_prompt, hint=hint)
    for name, count in Counter(rollout.filters).items():
        if count > 1:
            yield ConfigProblem(path="rollout.filters", found=name, hint="is listed twice; list it once")
    is_made = config.debug.mode != "train_only"
    if rollout.schedule != "sync" and is_made and not config.has_engines_apart:
        hint = "trainer and engine cannot work at the same time in one process; set placement.rollout_workers"
        yield ConfigProblem(path="rollout.schedule", found=rollout.schedule, hint=hint)
    # A resolved config holds every key.
    if rollout.schedule != "async" and rollout.max_staleness != Rollout().max_staleness:
        hint = 'has an effect only with rollout.schedule = "async"; leave it out'
        yield ConfigProblem(path="rollout.max_staleness", found=rollout.max_staleness, hint=hint)
    yield from _evaluation(config)
    for name, options in rollout.filter_options.items():
        if name not in rollout.filters:
            hint = f"rollout.filters has no {name!r}; list it there, or leave its options out"
            yield ConfigProblem(path=f"rollout.filter_options.{name}", found=options, hint=hint)


def _evaluation(config: Config) -> Problems:
    waits = config.rollout.schedule == "sync"
    if waits and config.eval.wait:
        hint = 'training waits with rollout.schedule = "sync" anyway; leave it out'
        yield ConfigProblem(path="eval.wait", found=True, hint=hint)
    if (waits or config.eval.wait) and config.eval.concurrency is not None:
        hint = "affects only evaluations that training does not wait for; leave it out"
        yield ConfigProblem(path="eval.concurrency", found=config.eval.concurrency, hint=hint)


def _left_over(rollout: Rollout) -> Problems:
    """Yield keys about what a step leaves over, where it leaves nothing, or nothing is discarded."""
    if rollout.schedule != "sync":
        hint = (
            f'has no effect with rollout.schedule = "{rollout.schedule}": unfinished groups always continue'
        )
        for key in ("over_sampling", "partial_rollout", "requeue_discarded"):
            if (value := getattr(rollout, key)) != Rollout.model_fields[key].default:
                yield ConfigProblem(path=f"rollout.{key}", found=value, hint=f"{hint}; leave it out")
        return
    if not rollout.over_sampling:
        hint = "has no effect without rollout.over_sampling: a step ends when all of its samples are done"
        for key in ("partial_rollout", "requeue_discarded"):
            if (value := getattr(rollout, key)) != Rollout.model_fields[key].default:
                yield ConfigProblem(path=f"rollout.{key}", found=value, hint=hint)
    elif not rollout.requeue_discarded and rollout.partial_rollout:
        hint = "has no effect with rollout.partial_rollout, which discards nothing; leave it out"
        yield ConfigProblem(path="rollout.requeue_discarded", found=False, hint=hint)


def control_functions(config: Config, plugins: Plugins) -> Problems:
    """Yield unknown functions, and options that a function does not take."""
    rollout = config.rollout
    functions, filters = "register_rollout_functions", "register_sample_filters"
    yield from name_problems("rollout.function", rollout.function, functions, plugins)
    options = rollout.function_options
    yield from _options("rollout.function_options", rollout.function, functions, options, plugins)
    for name in rollout.filters:
        yield from name_problems("rollout.filters", name, filters, plugins)
        path, options = f"rollout.filter_options.{name}", rollout.filter_options.get(name, {})
        yield from _options(path, name, filters, options, plugins)
    for name in rollout.after_sample:
        yield from import_problems("rollout.after_sample", name)
    engines = plugins.named("register_rollout_engines")
    engine = engines.get(rollout.engine)
    if rollout.schedule != "sync" and engine is not None and engine.serve is None:
        servers = ", ".join(sorted(name for name, each in engines.items() if each.serve)) or "none"
        hint = f"rollout.engine = {rollout.engine!r} is not a server, which this needs; servers: {servers}"
        yield ConfigProblem(path="rollout.schedule", found=rollout.schedule, hint=hint)


def _options(path: str, name: str, hook: str, options: Mapping[str, Any], plugins: Plugins) -> Problems:
    function: NamedFunction | None = plugins.find(hook, name)
    if function is not None:
        yield from option_problems(path, name, function.fn, options)
