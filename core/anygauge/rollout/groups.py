"""Open group: a prompt's unfinished rollouts, their journals and the finished samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from anygauge.rollout.journal import Journal
from anygauge_hooks.rl import Group, Prompt, Sample

__all__ = ["DoneGroup", "OpenGroup", "as_json", "whole_group"]


@dataclass(slots=True)
class OpenGroup:
    """A prompt whose samples are being generated, or that waits to start."""

    number: int
    """How many prompts were drawn before it in the run; its seeds depend on nothing else."""
    prompt: Prompt
    seeds: Sequence[int]
    started_at: int = 0
    """The version that the engines served when it was started; no token of it is older."""
    journals: dict[int, Journal] = field(default_factory=dict)
    """Journals of unfinished rollouts, by rollout."""
    samples: dict[int, tuple[Sample, ...]] = field(default_factory=dict)
    """Samples of finished rollouts."""

    def journal(self, rollout: int) -> Journal:
        """Return what was said in a rollout."""
        return self.journals.setdefault(rollout, Journal())

    @property
    def length(self) -> int:
        """Tokens that were generated for rollouts that are not done."""
        return sum(journal.length for journal in self.journals.values())

    @property
    def is_begun(self) -> bool:
        """Whether there are tokens of it."""
        return bool(self.samples) or self.length > 0

    def forget(self) -> None:
        """Forget all that was generated."""
        self.journals.clear()
        self.samples.clear()

    def state(self) -> dict[str, Any]:
        """Return all of it, as JSON can write it."""
        return {
            "number": self.number,
            "prompt": _prompt_state(self.prompt),
            "started_at": self.started_at,
            "journals": {str(rollout): journal.state() for rollout, journal in self.journals.items()},
            "samples": {
                str(rollout): [sample._asdict() for sample in samples]
                for rollout, samples in self.samples.items()
            },
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], seeds: Callable[[int], Sequence[int]]) -> OpenGroup:
        """Return the group that :meth:`state` was asked for.

        :param seeds: Of each rollout of a group, from the group's number.
        """
        return cls(
            number=state["number"],
            prompt=_prompts().validate_python(state["prompt"]),
            seeds=seeds(state["number"]),
            started_at=state["started_at"],
            journals={int(key): Journal.restored(entry) for key, entry in state["journals"].items()},
            samples={
                int(key): tuple(_samples().validate_python(entries))
                for key, entries in state["samples"].items()
            },
        )


class DoneGroup(NamedTuple):
    """A group that is scored and has passed every filter."""

    number: int
    started_at: int
    group: Group
    seeds: Sequence[int] = ()

    def state(self) -> dict[str, Any]:
        """Return all of it, as JSON can write it."""
        return {
            "number": self.number,
            "started_at": self.started_at,
            "prompt": _prompt_state(self.group.prompt),
            "samples": [sample._asdict() for sample in self.group.samples],
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any], seeds: Callable[[int], Sequence[int]]) -> DoneGroup:
        """Return the group that :meth:`state` was asked for."""
        group = Group(
            prompt=_prompts().validate_python(state["prompt"]),
            samples=tuple(_samples().validate_python(state["samples"])),
        )
        return cls(state["number"], state["started_at"], group, seeds(state["number"]))


def whole_group(group: OpenGroup) -> Group:
    """Return a group whose rollouts are all done; samples of a rollout that became several are marked."""
    samples: list[Sample] = []
    for rollout in range(len(group.seeds)):
        own = group.samples[rollout]
        samples += own if len(own) == 1 else [sample._replace(rollout=rollout) for sample in own]
    return Group(prompt=group.prompt, samples=tuple(samples))


def as_json(state: Any) -> Any:
    """Return a state with nothing in it that JSON does not know; what it does not becomes text."""
    return json.loads(json.dumps(state, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    as_list: Callable[[], Any] | None = getattr(value, "tolist", None)
    return str(value) if as_list is None else as_list()


def _prompt_state(prompt: Prompt) -> dict[str, Any]:
    return {each.name: getattr(prompt, each.name) for each in fields(prompt)}


@cache
def _prompts() -> TypeAdapter[Prompt]:
    return TypeAdapter(Prompt)


@cache
def _samples() -> TypeAdapter[list[Sample]]:
    return TypeAdapter(list[Sample])
