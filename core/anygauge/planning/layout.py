"""Layout of a run: parallel sizes, and what each training rank and each server holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from anygauge.config.modalities import TOWERS, modalities
from anygauge.config.roles import run_components
from anygauge.planning.shape import ModelShape
from anygauge.serving.server_plan import ServerPlan, plan_servers
from anygauge.serving.sglang.kinds import (
    plan_argument,
    plan_copies,
    plan_devices,
    plan_ranks,
    plan_stages,
)
from anygauge_hooks.serving import ServerKind

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["Layout", "RankWeights", "ServerLayout", "make_layout"]

ADAPTER_RANK = 16
"""Rank that is assumed where ``train.lora.path`` decides it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWeights:
    """Parameters of the fullest training rank, which has the embedding or the output layer."""

    dense: float
    """Those that all data-parallel ranks have."""
    experts: float
    """Those of its experts."""
    output: float
    """Its rows of the output layer; part of ``dense``."""
    adapters: float
    """Parameters of LoRA adapters."""
    packed: float = 0.0
    """Those of ``dense`` that are frozen in 4 bits, whole on each rank."""

    @property
    def total(self) -> float:
        """All parameters without adapters."""
        return self.dense + self.experts

    def trained(self, config: Config) -> tuple[float, float]:
        """Return the trained parameters without those of experts, and the latter."""
        return (self.adapters, 0.0) if config.train.lora.is_on else (self.dense, self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """A group of servers of the policy, or the embedded engines of the workers."""

    kind: ServerKind = "regular"
    count: int
    """Servers of the group."""
    devices: int
    """Devices of each server."""
    copies: int
    """Copies of the weights in it."""
    ranks: int
    """Data-parallel ranks in it."""
    stages: int = 1
    """Pipeline stages of a server."""
    is_embedded: bool
    is_external: bool = False
    quantization: str | None = None
    """SGLang's name of how the servers quantize weights as they load them."""
    cache_dtype: str | None = None
    """SGLang's name of the dtype of the KV cache; ``None`` takes that of the weights."""
    static_part: float | None = None
    """Part of a device for weights and KV cache; ``None`` if the config does not say."""

    @property
    def shards(self) -> int:
        """Devices that one copy of the weights is divided among."""
        return max(1, self.devices // self.copies)

    @property
    def cache_shards(self) -> int:
        """Devices of a stage that one data-parallel rank divides its cache among."""
        return max(1, self.devices // (self.ranks * self.stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a run."""

    trains: bool
    """Whether the workers have train engines."""
    workers: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    is_sequence_parallel: bool
    is_colocated: bool
    rank: RankWeights
    servers: tuple[ServerLayout, ...]
    """Groups that get the trained weights; empty where nothing is generated."""
    server_devices: int
    """Devices of all servers, also of those that get no weights."""
    other_servers: int
    """Servers of encoders and of other models, which get no weights."""

    @property
    def server(self) -> ServerLayout | None:
        """Group that generates with the fewest devices for its weights; ``None`` without any."""
        groups = [group for group in self.servers if group.kind != "prefill"]
        return min(groups, key=lambda group: group.shards, default=None)

    def server_ranks(self, kind: ServerKind) -> int:
        """Return the data-parallel ranks of all servers of a kind, which share the samples."""
        return sum(group.count * group.ranks for group in self.servers if group.kind == kind)

    @property
    def optimizer_shards(self) -> int:
        """Ranks that an optimizer of dense weights is divided among."""
        return self.data * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks that the optimizer of a rank's experts is divided among."""
        return max(1, self.tensor * self.context * self.data // self.expert)

    @property
    def devices(self) -> int:
        """Devices of the whole run."""
        server = self.server
        if server is None or server.is_embedded or server.is_external or self.is_colocated:
            return self.workers
        return self.workers + self.server_devices


def make_layout(config: Config, shape: ModelShape) -> Layout:
    """Return the layout of a config, whose sizes fit each other."""
    sizes, workers = config.train.parallel, config.placement.train_workers
    is_fsdp = config.train.engine == "fsdp"
    plans = _plans(config)
    model = 1 if is_fsdp else sizes.tensor * sizes.pipeline * sizes.context
    return Layout(
        trains=run_components(config).trains,
        workers=workers,
        tensor=1 if is_fsdp else sizes.tensor,
        pipeline=1 if is_fsdp else sizes.pipeline,
        context=1 if is_fsdp else sizes.context,
        expert=1 if is_fsdp else sizes.expert * sizes.expert_tensor,
        data=max(1, workers // model),
        is_sequence_parallel=sizes.tensor > 1 if sizes.sequence is None else sizes.sequence,
        is_colocated=config.placement.colocated,
        rank=_rank_weights(config, shape),
        servers=_servers(config),
        server_devices=sum(plan_devices(config, plan) for plan in plans),
        other_servers=sum(not plan.is_synced for plan in plans),
    )


def _rank_weights(config: Config, shape: ModelShape) -> RankWeights:
    """Return the parameters of the first or last pipeline stage, whichever has more."""
    sizes, is_fsdp = config.train.parallel, config.train.engine == "fsdp"
    tensor, pipeline = (1, 1) if is_fsdp else (sizes.tensor, sizes.pipeline)
    expert = 1 if is_fsdp else sizes.expert * sizes.expert_tensor
    # With one stage a tied weight is there once; with several, the first and the last have it each.
    ends = 1 if pipeline > 1 or shape.is_tied else 2
    others = shape.others if _reads_media(config) else 0
    dense = shape.layer_parameters / (tensor * pipeline) + ends * shape.embedding / tensor + others
    return RankWeights(
        dense=dense,
        experts=shape.expert_parameters / (expert * pipeline),
        output=shape.embedding / tensor,
        adapters=adapter_parameters(config, shape) / (tensor * pipeline),
        packed=0.0 if config.train.lora.base is None else shape.layer_parameters,
    )


def _reads_media(config: Config) -> bool:
    return any(modalities(config) & kinds for kinds in TOWERS.values())


def adapter_parameters(config: Config, shape: ModelShape) -> float:
    """Return the parameters of all adapters; 0 if all weights are trained.

    An adapter of rank ``r`` has ``r`` times the width of its input and of its output.
    """
    lora = config.train.lora
    if not lora.is_on:
        return 0.0
    chosen = lora.targets if isinstance(lora.targets, tuple) else None
    widths = _adapter_widths(shape)
    total = sum(width for name, width in widths.items() if chosen is None or name in chosen)
    return float(total * (lora.rank or ADAPTER_RANK))


def _adapter_widths(shape: ModelShape) -> dict[str, int]:
    """Return the input and output widths of each kind of linear layer, summed over the model."""
    own, hidden, layers, experts = shape.attention, shape.hidden, shape.layers, shape.experts
    sparse = 0 if experts is None else experts.layers
    mlp = (layers - sparse) * (hidden + shape.intermediate)
    if experts is not None:
        shared = hidden + experts.shared_width if experts.shared_width else 0
        mlp += sparse * (experts.count * (hidden + experts.width) + shared)
    return {
        "q_proj": layers * (hidden + own.query),
        "k_proj": layers * (hidden + own.key),
        "v_proj": layers * (hidden + own.value),
        "o_proj": layers * (own.output + hidden),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), mlp),
    }


def _plans(config: Config) -> tuple[ServerPlan, ...]:
    """Return all servers of a run; none where engines are in the training workers."""
    is_apart = run_components(config).generates and config.has_engines_apart
    return plan_servers(config) if is_apart else ()


def _servers(config: Config) -> tuple[ServerLayout, ...]:
    if not run_components(config).generates:
        return ()
    if not config.has_engines_apart or config.rollout.engine == "transformers":
        workers = config.placement.rollout_workers or config.placement.train_workers
        is_embedded = config.placement.rollout_workers == 0
        return (ServerLayout(count=workers, devices=1, copies=1, ranks=1, is_embedded=is_embedded),)
    synced = [plan for plan in _plans(config) if plan.is_synced]
    groups = (list(plans) for _, plans in groupby(synced, key=lambda plan: id(plan.group)))
    return tuple(_group(config, plans) for plans in groups)


def _group(config: Config, plans: Sequence[ServerPlan]) -> ServerLayout:
    first = plans[0]
    static = plan_argument(config, first, "mem_fraction_static")
    return ServerLayout(
        kind=first.kind,
        count=len(plans),
        devices=plan_devices(config, first),
        copies=plan_copies(config, first),
        ranks=plan_ranks(config, first),
        stages=plan_stages(config, first),
        is_embedded=False,
        is_external=bool(config.rollout.external),
        quantization=plan_argument(config, first, "quantization"),
        cache_dtype=plan_argument(config, first, "kv_cache_dtype"),
        static_part=float(static) if isinstance(static, int | float) else None,
    )
