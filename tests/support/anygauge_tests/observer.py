"""A run of a recipe, and what its hooks were shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.rl import Group
from anygauge_hooks.types import NamedFunction, RunInfo, TrackerSpec

__all__ = [
    "Digits",
    "Observer",
    "Rewarding",
    "Tracking",
    "digits",
    "run_with_observer",
    "versions_by_step",
]


class Observer:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        """Groups of each step, in the order of steps."""
        self.metrics: list[Mapping[str, float]] = []
        """Metrics of each step."""

    @hookimpl
    def after_rollout(self, groups: Sequence[Group]) -> None:
        """Keep the groups of a step."""
        self.groups.extend(groups)

    @hookimpl
    def after_train_step(self, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""
        self.metrics.append(metrics)


class Digits:
    """Brings a reward that differs among samples, so that each step changes the weights."""

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        """Register :func:`digits`."""
        return [NamedFunction(name="digits", fn=digits, inline=True)]


class Tracking:
    """Brings the reward ``even``, and is the tracker ``memory``: a subclass has its ``log``."""

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        """Register the share of even digits in a response of three tokens."""
        return [NamedFunction(name="even", fn=_even, inline=True)]

    @hookimpl
    def register_trackers(self) -> list[TrackerSpec]:
        """Register this object."""
        return [TrackerSpec(name="memory", make=lambda run: self)]

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Take the metrics of a step."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing: what was kept is read later."""


class Rewarding(Digits, Observer):
    """An observer with that reward."""


def digits(response: str) -> float:
    """Return the share of digits in a response of four tokens."""
    return sum(character.isdigit() for character in response) / 4


def _even(response: str) -> float:
    return sum(character in "02468" for character in response) / 3


def versions_by_step(groups: Sequence[Group], per_step: int) -> list[set[int]]:
    """Return the versions of weights that made the tokens of each step."""
    steps = [groups[start : start + per_step] for start in range(0, len(groups), per_step)]
    return [
        {version for group in step for sample in group.samples for version in sample.weight_versions}
        for step in steps
    ]


def run_with_observer(recipe: Path, observer: Observer, keys: Mapping[str, object] = {}) -> RunInfo:
    """Train as a config says, on the CPU, with an observer registered as a plugin.

    :param keys: Of the command line.
    """
    plugins = load_plugins()
    plugins.register(observer, "observer")
    return train(load_config(recipe, list(keys.items()), backend="cpu", plugins=plugins), plugins)
