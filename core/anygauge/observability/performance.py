"""Speed of a step: seconds by phase, tokens per second and floating-point operations per second."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Required, TypedDict

from anygauge.config.modalities import TOWERS
from anygauge.observability.memory import memory_metrics
from anygauge.observability.phases import PhaseTime, Row
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Group

__all__ = ["LANGUAGE", "StepWork", "WorkerReport", "performance_metrics"]


class WorkerReport(TypedDict, total=False):
    """Report of one worker for one step."""

    seconds: Required[Mapping[str, float]]
    """Seconds of each phase."""
    memory: Required[Mapping[str, float]]
    """Bytes, from :func:`~anygauge.observability.memory.worker_memory`."""
    passes: Mapping[str, float]
    """Forward passes over all samples that a training worker's engine of the policy made in ``log_probs``."""
    servers: Mapping[str, float]
    """Number of servers that were ``idle``, where servers generate."""
    phases: Mapping[Row, Sequence[PhaseTime]]
    """Phases for the timeline: its own, and from the driver those of the servers."""


NAMES = {"generate": "rollout", "weight_sync": "update_weights"}
"""Phases of workers that have another name among the metrics."""
TRAIN_PHASES = ("forward_backward", "optimizer")
ROLE_PHASES = ("teacher", "values", "train_values")
"""Phases of engines other than the policy's."""
ENGINE_PHASES = ("generate", "log_probs", *TRAIN_PHASES, *ROLE_PHASES)
NO_TOWERS: Mapping[str, float] = MappingProxyType({})
LANGUAGE = "language"
"""Name of all parts of a model but its towers, in ``train.freeze``."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """Tokens and FLOPs of a step. Computed while the workers train: it costs a pass over the samples."""

    tokens: int
    """Tokens of prompts and responses."""
    response_tokens: int
    longest_response: int
    forward_flops: float | None
    """FLOPs of one forward pass over all samples, and over each medium once; ``None`` if the model does not
    say."""
    spared_flops: float = 0.0
    """FLOPs that a backward pass, which has twice as many, saves where parts are frozen."""

    @classmethod
    def of_groups(
        cls,
        groups: Sequence[Group],
        flops_per_token: Callable[[int], float] | None = None,
        media_flops: Callable[[Media], float] | None = None,
        frozen: Collection[str] = (),
    ) -> StepWork:
        """Return the work of a step that trains on rollouts.

        :param flops_per_token: From the length of a sequence to the forward operations of one of its tokens.
        :param media_flops: The forward operations of a tower over a medium.
        :param frozen: Parts that learn nothing, as ``train.freeze`` names them.
        """
        samples = [sample for group in groups for sample in group.samples]
        responses = [len(sample.response_tokens) for sample in samples]
        totals = [len(each.prompt_tokens) + own for each, own in zip(samples, responses, strict=True)]
        towers = _media_flops((sample.media for sample in samples), media_flops)
        return cls.of_lengths(totals, responses, flops_per_token, towers, frozen)

    @classmethod
    def of_batches(
        cls,
        batches: Sequence[TrainBatch],
        flops_per_token: Callable[[int], float] | None = None,
        media_flops: Callable[[Media], float] | None = None,
        frozen: Collection[str] = (),
    ) -> StepWork:
        """Return the work of a step that trains on given responses."""
        totals = [length for batch in batches for length in batch.lengths]
        responses = [length for batch in batches for length in batch.response_lengths]
        towers = _media_flops((media for batch in batches for media in batch.media), media_flops)
        return cls.of_lengths(totals, responses, flops_per_token, towers, frozen)

    @classmethod
    def of_lengths(
        cls,
        totals: Sequence[int],
        responses: Sequence[int],
        flops_per_token: Callable[[int], float] | None,
        tower_flops: Mapping[str, float] = NO_TOWERS,
        frozen: Collection[str] = (),
    ) -> StepWork:
        """Return the work of sequences of these lengths, of which the responses are a part.

        :param tower_flops: The forward operations of towers, by what ``train.freeze`` calls them.
        """
        work = cls(sum(totals), sum(responses), max(responses), None)
        if flops_per_token is None:
            return work
        parts = {LANGUAGE: _forward_flops(totals, flops_per_token), **tower_flops}
        # Gradients pass through a frozen decoder to the towers before it; nothing is before a tower.
        spared = sum(
            flops * (1 if part == LANGUAGE else 2) for part, flops in parts.items() if part in frozen
        )
        return replace(work, forward_flops=sum(parts.values()), spared_flops=spared)


def _forward_flops(totals: Sequence[int], flops_per_token: Callable[[int], float]) -> float:
    return sum(flops_per_token(length) * length * count for length, count in Counter(totals).items())


def _media_flops(
    shown: Iterable[Sequence[Media]], flops: Callable[[Media], float] | None
) -> Mapping[str, float]:
    if flops is None:
        return NO_TOWERS
    distinct = {each.key: each for media in shown for each in media}.values()
    return {
        part: sum(flops(each) for each in distinct if each.kind in kinds) for part, kinds in TOWERS.items()
    }


def performance_metrics(
    work: StepWork,
    reports: Sequence[WorkerReport],
    *,
    wall_s: float,
    driver_seconds: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the ``perf/*`` metrics of a step.

    The times divide the step: they are those of the worker that spent most in its engines (of one that trains
    and one that does not, where they are not the same), those of the driver, and ``overhead_time`` for what
    is in none of them.

    :param reports: One for each worker.
    :param wall_s: Seconds of the step, from its first call to its last.
    :param driver_seconds: Time of the driver's own work, by phase: ``{"reward": 0.2}``.
    """
    seconds = {**_critical_seconds(reports), **(driver_seconds or {})}
    return {
        "perf/step_time": wall_s,
        **{f"perf/{phase}_time": value for phase, value in seconds.items()},
        "perf/overhead_time": wall_s - sum(seconds.values()),
        **_deprecated(seconds),
        **_speeds(work, seconds, wall_s, devices=len(reports)),
        **_operations(work, reports, seconds),
        **_waiting(seconds, wall_s),
        **memory_metrics([report.get("memory", {}) for report in reports]),
        **_idle_servers(reports),
    }


def _idle_servers(reports: Sequence[WorkerReport]) -> dict[str, float]:
    counts = [report["servers"]["idle"] for report in reports if "servers" in report]
    return {"perf/idle_servers": sum(counts)} if counts else {}


def _deprecated(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that have a new name, under the old one, for one release."""
    return {"perf/turns_time": seconds["sleep"] + seconds["wake_up"]} if "sleep" in seconds else {}


def _critical_seconds(reports: Sequence[WorkerReport]) -> dict[str, float]:
    """Return the seconds by phase of the workers that a step waited for longest."""
    seconds: dict[str, float] = {}
    for trains in (True, False):
        alike = [report["seconds"] for report in reports if _trains(report) is trains]
        for phase, value in _named(max(alike, key=_engine_seconds, default={})).items():
            # What both have, such as a weight sync, they do side by side.
            seconds[phase] = max(value, seconds.get(phase, 0.0))
    return seconds


def _named(seconds: Mapping[str, float]) -> dict[str, float]:
    named: dict[str, float] = {}
    for phase, value in seconds.items():
        name = "train" if phase in TRAIN_PHASES else NAMES.get(phase, phase)
        named[name] = named.get(name, 0.0) + value
    return named


def _trains(report: WorkerReport) -> bool:
    return any(phase in report["seconds"] for phase in TRAIN_PHASES)


def _engine_seconds(seconds: Mapping[str, float]) -> float:
    return sum(seconds.get(phase, 0.0) for phase in ENGINE_PHASES)


def _speeds(work: StepWork, seconds: Mapping[str, float], wall_s: float, devices: int) -> dict[str, float]:
    speeds = {
        "perf/tokens_per_s": work.tokens / wall_s,
        "perf/tokens_per_device_per_s": work.tokens / wall_s / devices,
    }
    if rollout_s := seconds.get("rollout"):
        speeds["perf/rollout_tokens_per_s"] = work.response_tokens / rollout_s
        speeds["perf/longest_sample_tokens_per_s"] = work.longest_response / rollout_s
    return speeds


def _operations(
    work: StepWork, reports: Sequence[WorkerReport], seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return model TFLOP/s per training device; a whole backward pass counts twice the forward pass."""
    devices = sum(map(_trains, reports))
    if work.forward_flops is None or not devices:
        return {}
    tera, spared = (flops / devices / 1e12 for flops in (work.forward_flops, work.spared_flops))
    passes = max(report.get("passes", {}).get("log_probs", 0) for report in reports)
    done = {
        "perf/tflops": (3 * tera - spared, "train"),
        "perf/log_probs_tflops": (passes * tera, "log_probs"),
    }
    timed = {name: (count, seconds.get(phase)) for name, (count, phase) in done.items() if count}
    return {name: count / spent for name, (count, spent) in timed.items() if spent}


def _waiting(seconds: Mapping[str, float], wall_s: float) -> dict[str, float]:
    """Return the share of a step in which the train engine had nothing to do."""
    if "train" not in seconds:
        return {}
    worked = sum(seconds.get(phase, 0.0) for phase in ("train", "log_probs", *ROLE_PHASES))
    return {"perf/wait_time_ratio": 1.0 - worked / wall_s}
