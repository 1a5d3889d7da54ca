"""The rules of the ``[reward]`` table, and of those that evaluation data sets have of their own."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from anygauge.config.named_functions import name_problems, option_problems
from anygauge.config.schema import Config, EvalDataset, Reward, RewardFunction
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import NamedFunction

__all__ = ["is_scored", "reward_functions", "reward_labels", "reward_rule"]

HOOK = "register_reward_functions"
OF_ONE_FUNCTION = tuple(key for key in RewardFunction.model_fields if key != "function")
"""Keys that each part has for itself."""

Problems = Iterator[ConfigProblem]


def _tables(config: Config) -> Iterator[tuple[str, Reward]]:
    yield "reward", config.reward
    for name, dataset in config.eval.datasets.items():
        if dataset.reward is not None:
            yield f"eval.datasets.{name}.reward", dataset.reward


def _functions(path: str, reward: Reward) -> Iterator[tuple[str, str, RewardFunction]]:
    """Yield path, name and table of every function of a reward."""
    tables: dict[str, RewardFunction] = {path: reward}
    tables |= {f"{path}.parts.{name}": part for name, part in reward.parts.items()}
    for where, table in tables.items():
        if table.function is not None:
            yield where, table.function, table


def reward_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield settings of a reward that do not go together."""
    for path, reward in _tables(config):
        if reward.parts:
            yield from _parts(path, reward)
        elif reward.function is None and (path != "reward" or is_scored(config)):
            hint = "name a reward: exact_match, math, package.module:function, ...; or give parts"
            yield ConfigProblem(path=f"{path}.function", found=None, hint=hint)
        longest = config.rollout.max_new_tokens
        if path == "reward" and reward.overlong_buffer > longest:
            hint = f"must be at most rollout.max_new_tokens = {longest}"
            yield ConfigProblem(path=f"{path}.overlong_buffer", found=reward.overlong_buffer, hint=hint)


def is_scored(config: Config) -> bool:
    """Return whether training needs a reward."""
    return config.run.task == "rl" and config.debug.mode != "train_only"


def _parts(path: str, reward: Reward) -> Problems:
    if reward.function is not None:
        hint = "a reward has one function or parts; make the function one of the parts"
        yield ConfigProblem(path=f"{path}.function", found=reward.function, hint=hint)
    for key in OF_ONE_FUNCTION:
        if getattr(reward, key) != Reward.model_fields[key].default:
            hint = "has no effect with parts; give it to each part that needs it"
            yield ConfigProblem(path=f"{path}.{key}", found=getattr(reward, key), hint=hint)


def reward_labels(config: Config, plugins: Plugins) -> Problems:
    """Yield rewards that need a label where ``data.label_key`` is not set."""
    for section, label_key, reward in _labels(config):
        for _, name, _ in _functions(section, reward):
            if label_key is None and _needs_label(plugins.find(HOOK, name)):
                hint = f"reward {name!r} takes a label, without a default; name the field that holds it"
                yield ConfigProblem(path=f"{section}.label_key", found=None, hint=hint)


def _needs_label(function: NamedFunction | None) -> bool:
    """Return whether a function has a parameter for the label, without a default; TRL's form has columns."""
    try:
        parameters = {} if function is None else inspect.signature(function.fn).parameters
    except (TypeError, ValueError):
        return False  # a problem of its own
    label = parameters.get("label")
    return label is not None and label.default is label.empty and "completions" not in parameters


def _labels(config: Config) -> Iterator[tuple[str, str | None, Reward]]:
    """Yield where a label is named, its name, and the reward that it goes to."""
    if config.debug.mode == "train_only":
        return
    shared = [each for each in config.eval.datasets.values() if _shares_reward_and_label(each)]
    if is_scored(config) or config.eval.data or shared:
        yield "data", config.data.label_key, config.reward
    for name, dataset in config.eval.datasets.items():
        path = f"eval.datasets.{name}"
        if "label_key" in dataset.model_fields_set:
            yield path, dataset.label_key, dataset.reward or config.reward
        elif dataset.reward is not None:
            yield path, config.data.label_key, dataset.reward


def _shares_reward_and_label(dataset: EvalDataset) -> bool:
    return "label_key" not in dataset.model_fields_set and dataset.reward is None


def reward_functions(config: Config, plugins: Plugins) -> Problems:
    """Yield unknown functions, and options that a function does not take."""
    for table, reward in _tables(config):
        for path, name, function in _functions(table, reward):
            yield from name_problems(f"{path}.function", name, HOOK, plugins)
            if (registered := plugins.find(HOOK, name)) is not None:
                yield from option_problems(f"{path}.options", name, registered.fn, function.options)
