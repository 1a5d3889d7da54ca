"""Expected seconds of a step, from operations, bytes and measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from anygauge.planning.batches import Batches
from anygauge.planning.layout import Layout
from anygauge.planning.memory import ServerMemory, TrainMemory
from anygauge.planning.rates import Rates
from anygauge.planning.shape import ModelShape
from anygauge.planning.traffic import gathered_bytes, token_bytes, update_bytes

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["Passes", "step_seconds", "total_seconds"]

FORWARD, BOTH = 1.0, 3.0
"""Products of a forward pass, and of forward and backward: gradients of inputs and of weights."""
FROZEN = 2.0
"""Products of a linear layer whose weight gets no gradient."""
ATTENTION = 3.5
"""Products of attention forward and backward over forward: it computes its scores again."""
OPTIMIZER_BYTES = 32.0
"""Bytes per parameter that the norm of the gradients and AdamW move."""
AGAIN = 1.17
"""Bytes of the other kernels where norms and activations are computed again, over those without."""
CAUSAL = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Log-prob passes before the first optimizer step, in passes over all samples."""

    policy: float
    reference: float = 0.0
    trains: bool = True
    """Whether anything is trained; without, a step is a rollout."""
    are_plain_batches: bool = False
    """See :attr:`anygauge.planning.plan.Assumptions.is_plain_batch`."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.policy + self.reference


def step_seconds(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    batches: Batches,
    memory: tuple[TrainMemory, ServerMemory | None],
    rates: Rates,
    passes: Passes,
    *,
    sleeps: bool,
) -> Mapping[str, float]:
    """Return the seconds of the parts of a step whose samples are all as long as they may be.

    :param sleeps: Whether trainers and servers sleep in turns.
    """
    train, server = memory
    layer_s = rates.layer_s if passes.are_plain_batches else rates.packed_layer_s
    if config.train.engine == "fsdp" and layout.workers > config.train.parallel.replicate:
        layer_s = max(layer_s, rates.gathered_layer_s)
    common = (config, shape, layout, batches, rates, layer_s)
    parts = {
        "generate": _generation(config, shape, layout, batches, server, rates),
        "log_probs": passes.total * batches.mini_batches * _mini_batch(*common, trains=False),
        "train": batches.mini_batches * _mini_batch(*common, trains=True),
        "sync": 0.0 if server is None else 2.0 * shape.parameters / rates.sync,
        "sleep": 2 * train.asleep / rates.offload if sleeps else 0.0,
    }
    steps = parts if passes.trains else {"generate": parts["generate"]}
    return {name: seconds for name, seconds in steps.items() if seconds > 0}


def total_seconds(config: Config, parts: Mapping[str, float]) -> float:
    """Return the seconds of a step: generation runs beside training in schedules that are not ``sync``."""
    if config.rollout.schedule == "sync" or "generate" not in parts:
        return sum(parts.values())
    own = sum(seconds for name, seconds in parts.items() if name != "generate")
    return max(own, parts["generate"])


# -------------------------------------------------------------------------
# Training
# -------------------------------------------------------------------------


def _mini_batch(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    batches: Batches,
    rates: Rates,
    layer_s: float,
    *,
    trains: bool,
) -> float:
    """Return the seconds of an optimizer step, or of a log-prob pass over its samples.

    :param layer_s: Seconds of the host per layer and micro-batch.
    :param trains: Whether there is a backward pass and an update.
    """
    lengths = [batches.sample_tokens] * batches.mini_batch_samples
    split = layout.tensor * layout.context * layout.pipeline
    device = _products(config, shape, rates, sum(lengths), trains=trains)
    device += _output(config, shape, rates, sum(lengths), trains=trains)
    device += _attention(config, shape, rates, lengths, trains=trains)
    device += _other_passes(config, shape, rates, sum(lengths), trains=trains)
    device *= _engine_factor(config, rates) / split
    device = _with_exchanges(config, shape, layout, batches, rates, device, trains=trains)
    sparse = shape.experts.layers if shape.experts is not None else 0
    layers_s = (shape.layers * layer_s + sparse * rates.experts_s) / layout.pipeline
    host = layers_s * batches.micro_batches * _host_passes(config, trains=trains)
    bubble = (batches.micro_batches + layout.pipeline - 1) / batches.micro_batches
    return max(device, host) * bubble + (_update(layout, config, rates) if trains else 0.0)


def _host_passes(config: Config, *, trains: bool) -> float:
    """Return the host's work over that of a forward and a backward pass."""
    return (_again(config) + BOTH if trains else FORWARD) / BOTH


def _products(config: Config, shape: ModelShape, rates: Rates, tokens: int, *, trains: bool) -> float:
    """Return the seconds of the linear layers' products."""
    times = _times(config) if trains else FORWARD
    experts = shape.active_parameters - shape.layer_parameters
    plain = 2 * shape.layer_parameters * tokens / _product_rate(shape, rates)
    return times * (plain + 2 * experts * tokens / rates.experts)


def _again(config: Config) -> float:
    """Return the forward passes that a backward pass repeats."""
    return FORWARD if config.train.recompute == "full" else 0.0


def _times(config: Config) -> float:
    return _again(config) + (FROZEN if config.train.lora.is_on else BOTH)


def _product_rate(shape: ModelShape, rates: Rates) -> float:
    return rates.product * shape.hidden / (shape.hidden + rates.small_width)


def _output(config: Config, shape: ModelShape, rates: Rates, tokens: int, *, trains: bool) -> float:
    """Return the seconds of the output layer, whose logits may be computed again in backward."""
    times = FORWARD
    if trains:
        times = FROZEN if config.train.lora.is_on else BOTH
        times += FORWARD if config.train.loss_memory_gib == 0 else 0.0
    return times * 2 * shape.embedding * tokens / _product_rate(shape, rates)


def _attention(config: Config, shape: ModelShape, rates: Rates, lengths: list[int], *, trains: bool) -> float:
    own = shape.attention
    scores = 2 * (own.query + own.output) * sum(length**2 for length in lengths) * CAUSAL
    times = ATTENTION if trains else FORWARD
    if trains and config.train.recompute in ("full", "selective"):
        times += FORWARD
    return times * shape.attention_layers * scores / rates.attention


def _other_passes(config: Config, shape: ModelShape, rates: Rates, tokens: int, *, trains: bool) -> float:
    """Return the seconds of norms, activations, rotary embedding and adapters, which only move memory."""
    kept = shape.kept()
    moved = 2 * (kept.tokens + kept.split) * tokens
    share = rates.passes if trains else rates.passes / 3
    if trains and config.train.recompute == "full":
        share *= 4 / 3
    elif trains and config.train.recompute != "none":
        share *= AGAIN
    seconds = share * moved / rates.copy
    if config.train.lora.is_on:
        seconds += _adapters(shape, rates, tokens) * (1.0 if trains else 1 / 3)
    return seconds


def _adapters(shape: ModelShape, rates: Rates, tokens: int) -> float:
    own, hidden = shape.attention, shape.hidden
    widths = 4 * hidden + own.query + own.key + own.value + own.output + 3 * (hidden + shape.intermediate)
    return rates.adapters * 2 * shape.layers * widths * tokens / rates.copy


def _with_exchanges(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    batches: Batches,
    rates: Rates,
    device: float,
    *,
    trains: bool,
) -> float:
    """Return the seconds of a mini-batch with what its layers exchange with other ranks.

    The FSDP engine gathers a layer while another one computes.
    """
    if config.train.engine == "fsdp":
        return max(device, gathered_bytes(config, layout, batches, trains=trains) / rates.link)
    tokens = batches.sample_tokens * batches.mini_batch_samples
    return device + tokens * token_bytes(config, shape, layout, trains=trains) / rates.link


def _engine_factor(config: Config, rates: Rates) -> float:
    if config.train.engine != "fsdp":
        return 1.0
    return rates.fsdp_lora if config.train.lora.is_on else rates.fsdp


def _update(layout: Layout, config: Config, rates: Rates) -> float:
    trained, experts = layout.rank.trained(config)
    owned = trained / layout.optimizer_shards + experts / layout.expert_shards
    exchanged = 0.0 if config.train.engine == "fsdp" else update_bytes(config, layout)
    return OPTIMIZER_BYTES * owned / rates.copy + exchanged / rates.link + rates.step_s


# -------------------------------------------------------------------------
# Generation
# -------------------------------------------------------------------------


def _generation(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    batches: Batches,
    server: ServerMemory | None,
    rates: Rates,
) -> float:
    """Return the seconds in which a server makes its samples, in waves where its cache does not hold all."""
    engines = layout.server
    if engines is None or server is None or not batches.response_tokens:
        return 0.0
    samples = ceil(batches.samples / layout.server_ranks(engines.kind))
    fits = max(1, server.cache_tokens // batches.sample_tokens)
    waves = ceil(samples / fits)
    at_once = ceil(samples / waves)
    step = _decode_step(config, shape, engines.shards, batches, at_once, rates)
    fixed = rates.sample_s * samples
    if engines.is_embedded:
        step += rates.embedded_decode_s * shape.layers
        fixed = 0.0
    prompts = 2 * shape.active_parameters * batches.prompts * batches.prompt_tokens
    reads = next((group for group in layout.servers if group.kind == "prefill"), engines)
    prefill = prompts / layout.server_ranks(reads.kind) / _product_rate(shape, rates) / reads.shards
    return waves * batches.response_tokens * step + prefill + fixed


def _decode_step(
    config: Config, shape: ModelShape, shards: int, batches: Batches, at_once: int, rates: Rates
) -> float:
    """Return the seconds of one token of all samples: weights and half of the cache are read."""
    size = 4 if (config.rollout.dtype or config.train.dtype or "float32") == "float32" else 2
    mean = batches.prompt_tokens + batches.response_tokens / 2
    weights = _read_parameters(shape, at_once) * size
    cache = at_once * mean * shape.cache_numbers * size
    operations = 2 * (shape.active_parameters + shape.embedding) * at_once
    return (
        (weights + cache) / rates.copy + operations / _product_rate(shape, rates)
    ) / shards + rates.decode_s


def _read_parameters(shape: ModelShape, tokens: int) -> float:
    """Return the parameters that a decode step reads: experts that no token visits stay where they are."""
    dense = shape.layer_parameters + shape.embedding
    if shape.experts is None:
        return float(dense)
    missed = (1 - shape.experts.chosen / shape.experts.count) ** tokens
    return dense + shape.expert_parameters * (1 - missed)
