"""Layout of a run: parallel sizes, and what each training rank and each server holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from anygauge.config.modalities import TOWERS, modalities
from anygauge.config.roles import run_components
from anygauge.planning.shape import ModelShape
from anygauge.serving.server_plan import plan_servers
from anygauge.serving.sglang.kinds import plan_copies, plan_devices, plan_ranks

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

    @property
    def total(self) -> float:
        """All parameters without adapters."""
        return self.dense + self.experts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """One server of the policy, or the embedded engine of a worker."""

    count: int
    """Servers of the run."""
    devices: int
    """Devices of each server."""
    copies: int
    """Copies of the weights in it."""
    ranks: int
    """Data-parallel ranks in it."""
    is_embedded: bool
    is_external: bool = False

    @property
    def shards(self) -> int:
        """Devices that one copy of the weights is divided among."""
        return max(1, self.devices // self.copies)

    @property
    def cache_shards(self) -> int:
        """Devices that one data-parallel rank divides its cache among."""
        return max(1, self.devices // self.ranks)


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
    server: ServerLayout | None
    """``None`` where nothing is generated."""

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
        return self.workers + server.count * server.devices


def make_layout(config: Config, shape: ModelShape) -> Layout:
    """Return the layout of a config, whose sizes fit each other."""
    sizes, workers = config.train.parallel, config.placement.train_workers
    is_fsdp = config.train.engine == "fsdp"
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
        server=_server(config),
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


def _server(config: Config) -> ServerLayout | None:
    if not run_components(config).generates:
        return None
    if not config.has_engines_apart or config.rollout.engine == "transformers":
        workers = config.placement.rollout_workers or config.placement.train_workers
        is_embedded = config.placement.rollout_workers == 0
        return ServerLayout(count=workers, devices=1, copies=1, ranks=1, is_embedded=is_embedded)
    plans = [plan for plan in plan_servers(config) if plan.is_synced]
    first = plans[0]
    return ServerLayout(
        count=len(plans),
        devices=plan_devices(config, first),
        copies=plan_copies(config, first),
        ranks=plan_ranks(config, first),
        is_embedded=False,
        is_external=bool(config.rollout.external),
    )
