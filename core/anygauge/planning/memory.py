"""Memory of a run by arithmetic: what engines, optimizer and servers allocate, in bytes.

Numbers of bytes per parameter follow from the engines. Megatron's has weights in the dtype of training and
main gradients in float32, and a distributed optimizer divides Adam's moments and what the weights lack of
float32. The FSDP engine has float32 weights; a single worker computes with copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from anygauge.kernels.loss_budget import FREE_SHARE
from anygauge.planning.batches import Batches
from anygauge.planning.layout import Layout, ServerLayout
from anygauge.planning.shape import Kept, ModelShape
from anygauge.serving.memory_fit import HEADROOM

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = [
    "FLOAT",
    "GIB",
    "PROCESS",
    "ServerMemory",
    "TrainMemory",
    "is_cache_bounded",
    "itemsize",
    "phases",
    "server_memory",
    "spare_when_both_awake",
    "state_bytes",
    "train_memory",
]

GIB = 1 << 30
FLOAT = 4
MOMENTS = 8
"""Bytes of Adam's two moments of a parameter, in float32."""
TILE_NUMBERS = 8192 * 16_896
"""Numbers of the largest tile of the loss, in float32."""
SMALLEST_TILE = 1 << 24
TILE_SHARE = 8
"""A tile is at most this part of all logits."""
NF4_BYTES = 0.516
"""Bytes of a weight in 4 bits, its scale included."""
SERVER_STATIC = 0.85
"""Part of a device that SGLang takes for weights and KV cache where nobody limits it."""
ONE_BYTE = ("fp8", "w8a8_fp8", "w8a8_int8")
"""SGLang's quantizations that leave a byte for each number of a linear layer; embedding and output layer stay
as they are."""
SERVER_FIXED = 1.5 * GIB
"""Assumed memory of a server beside weights, cache and logits: libraries, work space, device graphs."""
PROCESS = 0.75 * GIB
"""Assumed memory of a training process that torch does not count: the context, libraries, communicators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMemory:
    """Memory of the fullest training rank, in bytes on its device."""

    weights: float = 0.0
    """As the model computes with them."""
    masters: float = 0.0
    """Float32 weights, or the halves that the model's weights lack."""
    gradients: float = 0.0
    """Gradients that stay between micro-batches."""
    moments: float = 0.0
    activations: float = 0.0
    """Activations of the micro-batches that wait for their backward pass."""
    logits: float = 0.0
    """Kept by the loss for its backward pass."""
    work: float = 0.0
    """Temporary memory at the peak: a tile of the loss, gathered weights, gradients of one layer."""
    others: float = 0.0
    """Weights of an embedded rollout engine; the state of a critic."""

    @property
    def state(self) -> float:
        """Memory that stays for a whole step: weights, gradients and optimizer."""
        return self.weights + self.masters + self.gradients + self.moments + self.others

    @property
    def peak(self) -> float:
        """Most memory that torch allocates in a step."""
        return self.state + self.activations + self.logits + self.work

    @property
    def asleep(self) -> float:
        """Host memory of the rank while it sleeps; gradients are dropped."""
        return self.weights + self.masters + self.moments + self.others


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """Memory of a rollout engine on each of its devices, in bytes."""

    weights: float
    cache: float
    cache_tokens: int
    """Tokens that the cache of a data-parallel rank holds."""
    others: float
    """Logits of a batch, work space and device graphs."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.cache + self.others


def train_memory(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    batches: Batches,
    *,
    device_bytes: float | None,
    master_bytes: int,
    others: float = 0.0,
) -> TrainMemory:
    """Return the memory of the fullest training rank at its peak.

    :param device_bytes: Memory of a device, which the default of ``train.loss_memory_gib`` depends on.
    :param master_bytes: See :attr:`anygauge_hooks.types.BackendSpec.master_weight_bytes`.
    :param others: Bytes of an embedded engine's weights, and of a critic's state.
    """
    if not layout.trains:
        return TrainMemory(others=others)
    state = state_bytes(config, layout, batches, master_bytes=master_bytes)
    activations = _activations(config, shape, layout, batches)
    loss = _loss(config, shape, layout, batches)
    known = sum(state.values()) + others + activations.waiting
    kept = min(loss.logits, _budget(config, device_bytes, known))
    # The loss works while all activations wait. Gradients grow as a backward pass frees them.
    at_loss = kept + loss.tile + loss.gradient + _gathered(config, shape, layout)
    later = activations.again + _late_gradients(config, layout, batches)
    work = max(at_loss, later - activations.waiting) - kept
    return TrainMemory(**state, activations=activations.waiting, logits=kept, work=work, others=others)


# -------------------------------------------------------------------------
# Weights, gradients, optimizer
# -------------------------------------------------------------------------


def itemsize(config: Config) -> int:
    """Return the bytes of a number in the dtype of training."""
    return 4 if (config.train.dtype or "float32") == "float32" else 2


def state_bytes(config: Config, layout: Layout, batches: Batches, *, master_bytes: int) -> dict[str, float]:
    """Return the memory that a trained model takes between steps, by field of :class:`TrainMemory`."""
    if config.train.engine == "fsdp":
        return _fsdp_state(config, layout, batches)
    return _megatron_state(config, layout, master_bytes)


def _megatron_state(config: Config, layout: Layout, master_bytes: int) -> dict[str, float]:
    size, rank = itemsize(config), layout.rank
    trained, experts = rank.trained(config)
    # each rank of the distributed optimizer has its part of this; all gradients are on every rank
    owned = trained / layout.optimizer_shards + experts / layout.expert_shards
    master = 0 if size == FLOAT else master_bytes
    return {
        "weights": size * (rank.total + rank.adapters),
        "masters": master * owned,
        "gradients": FLOAT * (trained + experts),
        "moments": MOMENTS * owned,
    }


def _fsdp_state(config: Config, layout: Layout, batches: Batches) -> dict[str, float]:
    size, rank = itemsize(config), layout.rank
    shards = layout.workers // config.train.parallel.replicate
    is_lora = config.train.lora.is_on
    trained, frozen = (rank.adapters, rank.total) if is_lora else (rank.total, 0.0)
    copies = size * trained if shards == 1 and size == 2 else 0.0
    return {
        "weights": size * (frozen - rank.packed) / shards + NF4_BYTES * rank.packed + copies,
        "masters": FLOAT * trained / shards,
        # those of the first micro-batch come when its activations go
        "gradients": FLOAT * trained / shards if batches.micro_batches > 1 else 0.0,
        "moments": MOMENTS * trained / shards,
    }


def _late_gradients(config: Config, layout: Layout, batches: Batches) -> float:
    """Return the gradients that the FSDP engine has at the end of a backward pass, beyond those that stay."""
    if config.train.engine != "fsdp":
        return 0.0
    rank, shards = layout.rank, layout.workers // config.train.parallel.replicate
    trained = rank.adapters if config.train.lora.is_on else rank.total
    whole = FLOAT * trained / shards if batches.micro_batches == 1 else 0.0
    # One worker gets them in the model's dtype and copies them to float32; shards are reduced in float32.
    return whole + (itemsize(config) * trained if shards == 1 else 0.0)


def _gathered(config: Config, shape: ModelShape, layout: Layout) -> float:
    """Return the weights that the FSDP engine has gathered for the loss: the root's, and two layers."""
    shards = layout.workers // config.train.parallel.replicate
    if config.train.engine != "fsdp" or shards == 1:
        return 0.0
    layer = (shape.layer_parameters + shape.expert_parameters) / shape.layers
    ends = shape.embedding * (1 if shape.is_tied else 2)
    return itemsize(config) * (ends + 2 * layer)


# -------------------------------------------------------------------------
# Activations
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Activations:
    waiting: float
    """Kept by all micro-batches in flight."""
    again: float
    """Those of one layer, while its backward pass runs."""


def _activations(config: Config, shape: ModelShape, layout: Layout, batches: Batches) -> _Activations:
    kept, mode = shape.kept(), config.train.recompute
    tokens, size = batches.micro_batch_tokens / layout.context, itemsize(config)
    if mode in ("elementwise", "selective"):
        kept = Kept(
            tokens=kept.tokens - kept.recomputed,
            split=kept.split - kept.recomputed_split,
            recomputed=0,
            recomputed_split=0,
        )
    between = layout.tensor if layout.is_sequence_parallel else 1
    # selective recompute gathers keys again
    keys = 0.0 if mode == "selective" else _gathered_keys(shape, layout.context)
    whole = kept.tokens / between + (kept.split + keys) / layout.tensor
    per_layer = whole / shape.layers
    inputs = shape.hidden / between
    own = shape.layers / layout.pipeline * (inputs if mode == "full" else per_layer)
    adapters = _adapter_numbers(config, shape) / layout.pipeline if mode != "full" else 0.0
    # the final norm's sum and output, and the hidden states of the response, which no rank divides
    ends = 2 * inputs + shape.hidden
    in_flight = min(layout.pipeline, batches.micro_batches)
    again = per_layer * tokens * size
    return _Activations(size * tokens * ((own + adapters) * in_flight + ends), again)


def _gathered_keys(shape: ModelShape, context: int) -> float:
    """Return the numbers of gathered keys and values that attention keeps per token, beyond its own keys.

    A rank has two of ``2 C`` chunks of a sequence, which see ``2 C + 1`` chunks together.
    """
    own = shape.attention
    seen = (context + 0.5) * (own.key + own.value) - own.key
    return shape.attention_layers * seen if context > 1 else 0.0


def _adapter_numbers(config: Config, shape: ModelShape) -> float:
    """Return what adapters keep per token: the narrow product of each."""
    lora = config.train.lora
    return shape.layers * 7.0 * (lora.rank or 16) if lora.is_on else 0.0


# -------------------------------------------------------------------------
# Loss
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loss:
    logits: float
    """All logits of a micro-batch, as they are kept."""
    tile: float
    gradient: float
    """Gradient of the output layer's weight, where no main gradient takes it."""


def _loss(config: Config, shape: ModelShape, layout: Layout, batches: Batches) -> _Loss:
    columns = shape.vocabulary / layout.tensor
    numbers = batches.loss_tokens / layout.context * columns
    trains_all = not config.train.lora.is_on
    gradient = FLOAT * layout.rank.output if config.train.engine == "fsdp" and trains_all else 0.0
    if not config.train.fused_loss:
        return _Loss(0.0, 2 * itemsize(config) * numbers, gradient)
    tile = min(TILE_NUMBERS, max(SMALLEST_TILE, numbers / TILE_SHARE), numbers)
    return _Loss(itemsize(config) * numbers, FLOAT * tile, gradient)


def _budget(config: Config, device_bytes: float | None, known: float) -> float:
    """Return what the loss may keep: a tenth of what is free, if the config does not say."""
    if config.train.loss_memory_gib is not None:
        return config.train.loss_memory_gib * GIB
    if device_bytes is None:
        return float("inf")
    return max(0.0, device_bytes - PROCESS - known) / FREE_SHARE


# -------------------------------------------------------------------------
# Servers
# -------------------------------------------------------------------------


def server_memory(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    server: ServerLayout,
    batches: Batches,
    *,
    device_bytes: float | None,
) -> ServerMemory:
    """Return the memory of the rollout engines of a group."""
    size = _server_itemsize(config)
    matrices = 1 if server.quantization in ONE_BYTE else size
    inner = shape.layer_parameters + shape.expert_parameters
    ends = shape.parameters - shape.others - inner
    weights = (matrices * inner + size * ends) / server.shards
    cache_size = 1 if str(server.cache_dtype).startswith("fp8") else size
    bytes_of_token = cache_size * shape.cache_numbers / server.stages
    bytes_of_token /= min(server.cache_shards, shape.attention.cache_heads)
    in_flight = ceil(batches.samples / layout.server_ranks(server.kind))
    tokens = _cache_tokens(config, batches, in_flight, is_embedded=server.is_embedded)
    others = 2 * FLOAT * min(in_flight, 1024) * shape.vocabulary / server.shards
    if not server.is_embedded:
        others += SERVER_FIXED
        if device_bytes is not None:
            room = max(0.0, (server.static_part or SERVER_STATIC) * device_bytes - weights)
            tokens = min(tokens or room, room / bytes_of_token)
    return ServerMemory(
        weights=weights, cache=tokens * bytes_of_token, cache_tokens=int(tokens), others=others
    )


def _server_itemsize(config: Config) -> int:
    return 4 if (config.rollout.dtype or config.train.dtype or "float32") == "float32" else 2


def _cache_tokens(config: Config, batches: Batches, in_flight: int, *, is_embedded: bool) -> float:
    """Return the tokens of a cache; 0 leaves them to the memory that there is."""
    longest = in_flight * batches.sample_tokens
    if is_embedded:
        return float(min(config.rollout.max_batch_tokens, longest))
    return float(config.rollout.max_batch_tokens) if is_cache_bounded(config) else 0.0


def is_cache_bounded(config: Config) -> bool:
    """Return whether the config bounds the tokens of a server's cache."""
    return "max_batch_tokens" in config.rollout.model_fields_set


def spare_when_both_awake(
    config: Config, train: TrainMemory, server: ServerMemory, device_bytes: float
) -> float:
    """Return what a shared device has left if nobody sleeps, as :mod:`anygauge.serving.memory_fit` counts."""
    buffers = 2 * config.weight_sync.bucket_bytes
    taken = train.peak + PROCESS + server.total + buffers
    return device_bytes * (1 - HEADROOM) - taken


def phases(
    config: Config, train: TrainMemory, server: ServerMemory | None, layout: Layout, *, sleeps: bool
) -> Mapping[str, tuple[float, float]]:
    """Return the memory of trainers and of engines on a training device, by phase.

    Phases that a run does not have, as without training or generation, are left out.

    :param sleeps: Whether trainers and servers on one device sleep in turns.
    """
    every = _all_phases(config, train, server, layout, sleeps=sleeps)
    left_out = set() if layout.trains else {"train", "sync"}
    left_out |= set() if layout.server is not None else {"generate"}
    return {name: both for name, both in every.items() if name not in left_out}


def _all_phases(
    config: Config, train: TrainMemory, server: ServerMemory | None, layout: Layout, *, sleeps: bool
) -> Mapping[str, tuple[float, float]]:
    own = 0.0 if server is None else server.total
    is_shared = server is not None and (
        layout.is_colocated or bool(layout.server and layout.server.is_embedded)
    )
    is_embedded = bool(layout.server and layout.server.is_embedded)
    if not is_shared:
        return {"generate": (train.state, 0.0), "train": (train.peak, 0.0)}
    if is_embedded:
        assert server is not None
        # the trainer's memory has the engine's weights among others
        weights = server.weights
        return {"generate": (train.state - weights, own), "train": (train.peak - weights, weights)}
    assert server is not None
    if not sleeps:
        return {"generate": (train.state, own), "train": (train.peak, own)}
    buffers = 2.0 * config.weight_sync.bucket_bytes
    return {
        "generate": (0.0, own),
        "train": (train.peak, 0.0),
        "sync": (train.weights + buffers, server.weights),
    }
