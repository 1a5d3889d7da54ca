"""Call of a reward function: its arguments, and the results that are valid."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from anygauge.failures import raised_at
from anygauge.rollout.rewards import limited
from anygauge.rollout.rewards.extraction import boxed
from anygauge_hooks.errors import AnygaugeError, RewardError

__all__ = [
    "ARGUMENTS",
    "DEFAULT_KEY",
    "LARGEST",
    "TRL_ARGUMENTS",
    "Call",
    "Item",
    "Outcome",
    "TrlForm",
    "accepted",
    "failure",
    "number",
    "plain",
    "refusal",
]

ARGUMENTS = ("response", "label", "metadata", "prompt")
"""Arguments that a reward function may take, each by name; the first is required."""
TRL_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments of a function in TRL's form, beside the columns of the data; each is a list over the samples."""
DEFAULT_KEY = "score"
"""Which number of a result that is a dict, where ``reward.key`` names none."""
LARGEST = 1e30
"""Well inside float32, so that the differences within a group are too."""
Outcome = tuple[Any, str | None]
"""Result of a function for a sample, a float or a dict of plain values, or else the reason why there is
none."""
_EXCERPT = 200
"""Characters of a value or an error that a reason shows."""
_DEPTH = 4
"""Levels of a result that are kept."""


class Item(NamedTuple):
    """Arguments of one call: a sample, or lists with one entry per sample of a group."""

    response: Any
    label: Any
    metadata: Any
    prompt: Any
    completion_ids: Any = None
    """Tokens of each response, for a function in TRL's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlForm:
    """A reward function in TRL's form: ``def reward(completions, **columns) -> list[float]``."""

    needs: tuple[str, ...] = ()
    """Columns without a default."""
    takes: tuple[str, ...] | None = None
    """Parameters by name; ``None`` if it takes any."""
    label_key: str | None = None
    """Column that holds the label."""
    is_chat: bool = False
    """Whether a completion is a list of one message, as in TRL's conversational data."""

    def arguments(self, item: Item, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments for the samples of a prompt.

        :raises RewardError: The data lacks a column that the function needs.
        """
        texts = item.response
        completions = [[{"role": "assistant", "content": each}] for each in texts] if self.is_chat else texts
        known = {"prompts": item.prompt, "completions": completions, "completion_ids": item.completion_ids}
        given = self._columns(item) | known | dict(options)
        if missing := [name for name in self.needs if name not in given]:
            columns = ", ".join(self._columns(item)) or "none"
            raise RewardError(
                f"the data has no column {', '.join(missing)}; it has {columns}.",
                hint="Rename a column of the data or a parameter of the function.",
            )
        return given if self.takes is None else {name: given[name] for name in self.takes if name in given}

    def _columns(self, item: Item) -> dict[str, Sequence[Any]]:
        rows: Sequence[Mapping[str, Any]] = item.metadata
        columns: dict[str, Sequence[Any]] = {key: [row.get(key) for row in rows] for key in rows[0]}
        return columns if self.label_key is None else {**columns, self.label_key: item.label}


@dataclass(frozen=True, kw_only=True)
class Call:
    """A reward function, and how a config wants it called."""

    name: str
    """As the config names it."""
    fn: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    extract: bool = False
    """Whether the function gets only the boxed answer."""
    per_group: bool = False
    accepted: tuple[str, ...] = ARGUMENTS
    trl: TrlForm | None = None
    """Set for a function in TRL's form, which is called once per group."""

    def arguments(self, item: Item) -> dict[str, Any]:
        """Return the keyword arguments for one call."""
        if self.trl is not None:
            return self.trl.arguments(item._replace(response=self.given(item.response)), self.options)
        arguments = self.shared(item)
        arguments["response"] = self.given(item.response)
        return arguments

    def shared(self, item: Item) -> dict[str, Any]:
        """Return the arguments that are the same for every sample of a prompt."""
        return {name: getattr(item, name) for name in self.accepted if name != "response"} | dict(
            self.options
        )

    def given(self, response: Any) -> Any:
        """Return the part of a response that the function gets."""
        if not self.extract:
            return response
        return [boxed(each) or "" for each in response] if self.per_group else boxed(response) or ""

    def size(self, item: Item) -> int:
        """Return how many samples an item holds."""
        return len(item.response) if self.per_group else 1

    def outcomes(self, value: Any, item: Item) -> list[Outcome]:
        """Return the outcome of each sample of an item."""
        if not self.per_group:
            return [self.outcome(value)]
        count = self.size(item)
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, (list, tuple)) or len(values) != count:
            kind = f"{len(values)} values" if isinstance(values, (list, tuple)) else _shown(values)
            return [self.failed(f"returned {kind} for {count} samples, not a list of {count}")] * count
        if self.trl is not None:  # TRL adds up its functions' rewards without those that are None
            values = [0.0 if each is None else each for each in values]
        return [self.outcome(each) for each in values]

    def outcome(self, value: Any) -> Outcome:
        """Return the outcome of one sample."""
        if type(value) is float and -LARGEST <= value <= LARGEST:
            return value, None
        if isinstance(value, Mapping):
            key = self.key or DEFAULT_KEY
            if key not in value:
                has = ", ".join(map(_shown, value)) or "none"
                return self.failed(f"returned a dict without {key!r}, which has {has}; set reward.key")
            problem = refusal(value[key])
            return self.failed(f"returned for {key!r} {problem}") if problem else (plain(value), None)
        problem = refusal(value)
        return self.failed(f"returned {problem}") if problem else (float(value), None)

    def received(self, outcomes: Sequence[Outcome], item: Item) -> list[Outcome]:
        """Return the outcomes of an item that a process has sent, each value checked again.

        :raises ValueError: They are not one for each of its samples.
        """
        if len(outcomes) != self.size(item):
            raise ValueError(f"{len(outcomes)} outcomes for {self.size(item)} samples")
        return [self.outcome(value) if error is None else (None, error) for value, error in outcomes]

    def failed(self, why: str) -> Outcome:
        """Return the outcome of a sample that could not be scored.

        :param why: As a clause, of which the function is the subject.
        """
        return None, f"{self.name} {why}"


def accepted(parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which of :data:`ARGUMENTS` a function with these ``inspect`` parameters takes by name."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ARGUMENTS
    by_name = {
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    return tuple(name for name in ARGUMENTS if name in by_name)


def number(value: Any, key: str | None) -> float:
    """Return the number of an accepted result."""
    return float(value[key or DEFAULT_KEY] if isinstance(value, Mapping) else value)


def failure(error: BaseException) -> str:
    """Return why a call failed, as a clause: an own error's words, or what was raised where by the user."""
    if isinstance(error, AnygaugeError):
        return f"failed: {error.args[0]}" + (f" {error.hint}" if error.hint else "")
    return f"raised {_shown(error)}{raised_at(error, limited.__file__)}"


def refusal(value: Any) -> str | None:
    """Return what a reward is, and what it should be, or ``None`` if it can be trained on."""
    problem = _problem(value)
    if problem is not None and not isinstance(value, Real):
        return f"{problem}, which is not a number"
    with suppress(OverflowError):  # of a number that no float holds
        if problem is not None and not math.isfinite(value):
            return f"{problem}, which is not a finite number"
    return problem


def _problem(value: Any) -> str | None:
    """Return what a reward is that is no number to train on, or ``None``."""
    if not isinstance(value, Real):
        return _shown(value)
    try:
        shown, as_float = repr(value), float(value)
    except (OverflowError, ValueError):  # Python writes no integer of more than 4300 digits
        shown, as_float = f"{type(value).__name__} beyond any float", LARGEST * 2
    if not math.isfinite(as_float):
        return shown
    return f"{shown}, too large for float32 (the limit is {LARGEST:g})" if abs(as_float) > LARGEST else None


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """Return a copy that any process can read and JSON can write."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return _problem(value) or value
    if isinstance(value, Real):
        return _problem(value) or float(value)
    if depth and isinstance(value, Mapping):
        return {str(key): plain(each, depth - 1) for key, each in value.items()}
    if depth and isinstance(value, (list, tuple)):
        return [plain(each, depth - 1) for each in value]
    return _shown(value)


_shortener = reprlib.Repr()
_shortener.maxother = _shortener.maxstring = _EXCERPT


def _shown(value: Any) -> str:
    """Return a short ``repr`` of anything, also of an object whose own one raises."""
    return _shortener.repr(value)
