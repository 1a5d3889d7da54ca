"""The plan of a run: everything that follows from its config, its model's sizes and a device's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anygauge.config.roles import critic_config, run_components
from anygauge.config.rules.algorithm import compares
from anygauge.planning.batches import Batches, make_batches
from anygauge.planning.layout import Layout, ServerLayout, make_layout
from anygauge.planning.memory import (
    PROCESS,
    ServerMemory,
    TrainMemory,
    phases,
    server_memory,
    spare_when_both_awake,
    state_bytes,
    train_memory,
)
from anygauge.planning.rates import Rates
from anygauge.planning.seconds import Passes, step_seconds, total_seconds
from anygauge.planning.shape import ModelShape

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["Assumptions", "Plan", "make_plan"]

HOST_DEVICES = 8
"""Devices of one host, whose trainers sleep in the same host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Facts that a config does not have."""

    backend: str
    master_bytes: int = 4
    """See :attr:`anygauge_hooks.types.BackendSpec.master_weight_bytes`."""
    device_bytes: float | None = None
    """Memory of a device; ``None`` if it is not known, and then nothing is said about what fits."""
    host_bytes: float | None = None
    """Memory of a host; ``None`` if it is not known."""
    gpu: str | None = None
    rates: Rates | None = None
    """``None`` where no rates of this device were measured."""
    reads_old_log_probs: bool = False
    """Whether something reads the policy's log-probs before its first optimizer step."""
    critic: ModelShape | None = None
    """Sizes of the critic as a language model; ``None`` without one."""
    is_plain_batch: bool = False
    """Whether all samples have one length that attention takes as a plain batch, as in a benchmark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Memory and time of a run, in bytes and seconds."""

    shape: ModelShape
    layout: Layout
    batches: Batches
    train: TrainMemory
    server: ServerMemory | None
    """Memory of :attr:`Layout.server`; ``None`` without one, or if others own it."""
    servers: tuple[ServerMemory, ...]
    """Memory of each of :attr:`Layout.servers`; empty if others own them."""
    assumptions: Assumptions
    phases: Mapping[str, tuple[float, float]]
    """Bytes of trainers and of engines on a training device, by phase."""
    sleeps: bool
    """Whether trainers and servers on the same devices sleep in turns."""
    spare: float | None
    """Bytes left if both stay awake; ``None`` where no device is shared or its memory is not known."""
    host_asleep: float
    """Host memory of the trainers of one host while they sleep, and of a reference."""
    checkpoint: float
    """Bytes of one checkpoint on disk."""
    export: float
    """Bytes of an export as a Hugging Face directory."""
    seconds: Mapping[str, float]
    """Seconds of a step by part; empty without rates."""
    total_seconds: float | None

    @property
    def fullest(self) -> float:
        """Most bytes of a training device in any phase, without what torch does not count."""
        return max(sum(both) for both in self.phases.values())

    @property
    def needed(self) -> float:
        """The same with what a training process takes beside torch."""
        return self.fullest + PROCESS


def make_plan(config: Config, shape: ModelShape, given: Assumptions) -> Plan:
    """Return the plan of a config.

    :param config: Checked: its sizes fit each other.
    """
    layout, critic = make_layout(config, shape), _critic(config, given)
    batches = make_batches(config, layout, shape.context)
    memory = given.device_bytes
    servers = _servers(config, shape, layout, batches, given)
    server = next((own for group, own in servers if group is layout.server), None)
    fullest = max((own for _, own in servers), key=lambda own: own.total, default=None)
    train = train_memory(
        config,
        shape,
        layout,
        batches,
        device_bytes=memory,
        master_bytes=given.master_bytes,
        others=_engine_weights(layout, server) + (critic.state(batches, given) if critic else 0.0),
    )
    spare = None
    if layout.is_colocated and fullest is not None and memory is not None:
        spare = spare_when_both_awake(config, train, fullest, memory)
    sleeps = layout.trains and config.placement.sleeps and server is not None and _sleeps(config, spare)
    parts: Mapping[str, float] = {}
    passes = _passes(config, layout, given)
    if given.rates is not None:
        memory_of = (train, server)
        parts = step_seconds(config, shape, layout, batches, memory_of, given.rates, passes, sleeps=sleeps)
    return Plan(
        shape=shape,
        layout=layout,
        batches=batches,
        train=train,
        server=server,
        servers=tuple(own for _, own in servers),
        assumptions=given,
        phases=phases(config, train, fullest, layout, sleeps=sleeps),
        sleeps=sleeps,
        spare=spare,
        host_asleep=_host_bytes(config, layout, train, sleeps=sleeps),
        checkpoint=_checkpoint_bytes(config, shape, layout) + (critic.checkpoint if critic else 0.0),
        export=_export_bytes(shape, layout) + (_export_bytes(critic.shape, layout) if critic else 0.0),
        seconds=parts,
        total_seconds=total_seconds(config, parts) if parts else None,
    )


def _servers(
    config: Config, shape: ModelShape, layout: Layout, batches: Batches, given: Assumptions
) -> list[tuple[ServerLayout, ServerMemory]]:
    """Return groups of servers that the run starts, with the memory of each of their servers."""
    return [
        (group, server_memory(config, shape, layout, group, batches, device_bytes=given.device_bytes))
        for group in layout.servers
        if not group.is_external
    ]


@dataclass(frozen=True, slots=True)
class _Critic:
    """Critic: a model of its own, trained in full beside the policy."""

    config: Config
    """See :func:`anygauge.config.roles.critic_config`."""
    shape: ModelShape
    layout: Layout

    def state(self, batches: Batches, given: Assumptions) -> float:
        """Return its bytes on the fullest training rank."""
        parts = state_bytes(self.config, self.layout, batches, master_bytes=given.master_bytes)
        return sum(parts.values())

    @property
    def checkpoint(self) -> float:
        """Bytes of its part of a checkpoint."""
        return _checkpoint_bytes(self.config, self.shape, self.layout)


def _critic(config: Config, given: Assumptions) -> _Critic | None:
    if given.critic is None or not run_components(config).learns:
        return None
    # A value head of one row replaces the output layer: the embedding remains, as of a tied model.
    own, shape = critic_config(config), replace(given.critic, is_tied=True)
    return _Critic(own, shape, make_layout(own, shape))


def _engine_weights(layout: Layout, server: ServerMemory | None) -> float:
    is_embedded = layout.server is not None and layout.server.is_embedded
    return server.weights if is_embedded and server is not None else 0.0


def _sleeps(config: Config, spare: float | None) -> bool:
    return config.placement.offload == "always" or spare is None or spare < 0


def _passes(config: Config, layout: Layout, given: Assumptions) -> Passes:
    """Return the log-prob passes of a step: the first optimizer step computes its own log-probs."""
    steps = config.optimizer_steps
    policy = 1 - 1 / steps
    if config.run.task == "sft" or config.algorithm.old_log_probs == "rollout":
        policy = 0.0
    elif given.reads_old_log_probs:
        policy = 1.0
    return Passes(
        policy=policy,
        reference=1.0 if compares(config) else 0.0,
        are_plain_batches=given.is_plain_batch,
        trains=layout.trains,
    )


def _export_bytes(shape: ModelShape, layout: Layout) -> float:
    return 2.0 * shape.parameters if layout.trains else 0.0


def _host_bytes(config: Config, layout: Layout, train: TrainMemory, *, sleeps: bool) -> float:
    ranks = min(layout.workers, HOST_DEVICES)
    reference = train.weights if compares(config) and not config.train.lora.is_on else 0.0
    return ranks * ((train.asleep if sleeps else 0.0) + reference)


def _checkpoint_bytes(config: Config, shape: ModelShape, layout: Layout) -> float:
    """Return the bytes of a checkpoint: weights in their dtype, float32 weights and both moments."""
    if not layout.trains:
        return 0.0
    is_lora = config.train.lora.is_on
    parameters = layout.rank.adapters * layout.tensor * layout.pipeline if is_lora else shape.parameters
    is_copy = config.train.dtype not in (None, "float32") and config.train.engine != "fsdp"
    return parameters * (12.0 + (2.0 if is_copy else 0.0))
