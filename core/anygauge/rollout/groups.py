"""Groups under way, and what a checkpoint keeps of them: prompts, journals, samples of finished rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from anygauge.rollout.context import ProducerContext
from anygauge.rollout.gate import Gate
from anygauge.rollout.journal import Journal
from anygauge.rollout.live import LiveRollout
from anygauge_hooks.rl import Group, Prompt, Sample

__all__ = [
    "finished_group",
    "generated_tokens",
    "group_state",
    "is_begun",
    "restored_group",
    "restored_rollouts",
    "rollouts_state",
]


def generated_tokens(rollouts: Sequence[LiveRollout]) -> int:
    """Return how many tokens were generated for the rollouts of a group that are not done."""
    journals = [rollout.journal for rollout in rollouts if not rollout.samples]
    return sum([journal.length for journal in journals if journal.records])


def is_begun(rollouts: Sequence[LiveRollout]) -> bool:
    """Return whether there are tokens of a group."""
    return any([rollout.samples for rollout in rollouts]) or generated_tokens(rollouts) > 0


def finished_group(rollouts: Sequence[LiveRollout]) -> Group:
    """Return a group whose rollouts are all done; samples of a rollout that became several are marked."""
    samples: list[Sample] = []
    for rollout in rollouts:
        own = rollout.samples
        samples += own if len(own) == 1 else [sample._replace(rollout=rollout.place) for sample in own]
    return Group(prompt=rollouts[0].prompt, samples=tuple(samples))


def rollouts_state(rollouts: Sequence[LiveRollout], started_at: int) -> dict[str, Any]:
    """Return a group that is not done.

    :param started_at: The version that the engines served then.
    """
    return {
        "number": rollouts[0].number,
        "prompt": _prompt_state(rollouts[0].prompt),
        "started_at": started_at,
        "journals": {str(each.place): each.journal.state() for each in rollouts if not each.samples},
        "samples": {
            str(each.place): [sample._asdict() for sample in each.samples]
            for each in rollouts
            if each.samples
        },
    }


def group_state(number: int, started_at: int, group: Group) -> dict[str, Any]:
    """Return a group that is done."""
    return {
        "number": number,
        "started_at": started_at,
        "prompt": _prompt_state(group.prompt),
        "samples": [sample._asdict() for sample in group.samples],
    }


def restored_rollouts(state: Mapping[str, Any], context: ProducerContext, gate: Gate) -> list[LiveRollout]:
    """Return the rollouts that :func:`rollouts_state` was asked for."""
    number, prompt = state["number"], _prompts().validate_python(state["prompt"])
    journals = {int(place): Journal.restored(entry) for place, entry in state["journals"].items()}
    samples = {int(place): _samples_of(entries) for place, entries in state["samples"].items()}
    return [
        LiveRollout(context, gate, prompt, number, place, seed, journals.get(place), samples.get(place, ()))
        for place, seed in enumerate(context.seeds(number))
    ]


def restored_group(state: Mapping[str, Any]) -> Group:
    """Return the group that :func:`group_state` was asked for."""
    return Group(prompt=_prompts().validate_python(state["prompt"]), samples=_samples_of(state["samples"]))


def _samples_of(entries: Sequence[Mapping[str, Any]]) -> tuple[Sample, ...]:
    return tuple(_samples().validate_python(entries))


def _prompt_state(prompt: Prompt) -> dict[str, Any]:
    return {each.name: getattr(prompt, each.name) for each in fields(prompt)}


@cache
def _prompts() -> TypeAdapter[Prompt]:
    return TypeAdapter(Prompt)


@cache
def _samples() -> TypeAdapter[list[Sample]]:
    return TypeAdapter(list[Sample])
