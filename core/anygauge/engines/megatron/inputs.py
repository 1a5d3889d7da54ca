"""Micro-batches: the model's keyword arguments, built in one place.

The log-prob pass and the training pass call :func:`model_inputs` alike, so neither can lose an argument.

Rows are selected by ``index_select`` and its like, and not by brackets, for which torch wakes all of its
threads, however few rows there are: the device waits for a micro-batch meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any, cast

import torch
from megatron.core import parallel_state
from torch import Tensor

from anygauge.data.balance import alike, media_costs, sequence_costs
from anygauge.data.packing import pack_by_cost
from anygauge.device import on_device
from anygauge.engines.megatron.layers.context_parallel import (
    Cut,
    SequenceParts,
    cut_sequences,
    ranges,
    sum_over_context,
)
from anygauge.engines.megatron.layers.modules import PackedSequences
from anygauge.engines.megatron.layers.routing import Routes, RoutingStore
from anygauge.engines.megatron.media.batch import MediaInputs, MediaReader, media_inputs
from anygauge_hooks.errors import DataError
from anygauge_hooks.rl import TrainSample

__all__ = [
    "MicroBatch",
    "MicroBatches",
    "PlannedBatch",
    "attach_routes",
    "keep_routes",
    "micro_batches",
    "model_inputs",
    "per_sample",
    "response_values",
    "response_weights",
    "whole_responses",
]

WHOLE = Cut()
"""Tokens are not divided."""

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(slots=True)
class PlannedBatch:
    """Which samples a micro-batch has, on the host."""

    indices: tuple[int, ...]
    """In packing order."""
    response_lengths: tuple[int, ...]
    parts: SequenceParts
    """How their tokens are divided among ranks."""
    is_idle: bool
    """Whether nothing is learnt from it: it keeps this rank in step with others that have more."""
    routes: Routes | None = None
    """Which experts the tokens go to, where a pass captures or replays it."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples packed back to back. ``R`` counts their response tokens, ``r`` those that are of this rank."""

    indices: tuple[int, ...]
    """Which samples, in packing order."""
    response_lengths: tuple[int, ...]
    inputs: Mapping[str, Any]
    """Keyword arguments of the model."""
    rows: Tensor
    """``[r]``, int64: the positions of this rank whose next token is a response token."""
    targets: Tensor
    """``[r]``, int64: those next tokens."""
    own: Tensor | None
    """``[r]``, int64: which response tokens these are; ``None`` if they are all."""
    is_idle: bool


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Micro-batches of a mini-batch. Each is on the device from when it is reached until it is done with."""

    plans: Sequence[PlannedBatch]
    make: Callable[[PlannedBatch], MicroBatch]

    def readers(self, count: int) -> list[Iterator[MicroBatch]]:
        """Return iterators over the same micro-batches, which the first to reach one makes for all."""
        made: dict[int, tuple[MicroBatch, int]] = {}

        def take(number: int) -> MicroBatch:
            batch, readers = made.pop(number) if number in made else (self.make(self.plans[number]), count)
            if readers > 1:
                made[number] = batch, readers - 1
            return batch

        return [map(take, range(len(self.plans))) for _ in range(count)]


def micro_batches(
    samples: Sequence[TrainSample],
    max_tokens: int,
    rotary: Rotary,
    device: torch.device,
    cut: Cut = WHOLE,
    count: Callable[[int], int] = int,
    flops_per_token: Callable[[int], float] = alike,
    media: MediaReader | None = None,
) -> MicroBatches:
    """Pack samples into micro-batches of at most ``max_tokens`` tokens that take about the same time.

    :param rotary: From positions ``[T]`` to cosines and sines ``[T, R]``.
    :param cut: How their tokens are divided among ranks.
    :param count: From the number of micro-batches that this rank needs to the number that it must have.
    :param flops_per_token: From the length of a sequence to the forward operations of one of its tokens.
    :param media: Where the model's media come from; ``None`` for a model of text.
    """
    for index, sample in enumerate(samples):
        _check(sample, index)
    lengths = [cut.padded(len(sample.tokens)) for sample in samples]
    shortest = min(range(len(samples)), key=lengths.__getitem__)
    costs = sequence_costs(lengths, flops_per_token)
    if media is not None:
        costs = costs + media_costs(samples, partial(media.spec.flops, media.hf))
    bins = pack_by_cost(lengths, costs, max_tokens, count)
    plans = [_plan(samples, tuple(indices) or (shortest,), cut, is_idle=not indices) for indices in bins]
    return MicroBatches(plans, partial(_micro_batch, samples, rotary, device, media))


def _plan(
    samples: Sequence[TrainSample], indices: tuple[int, ...], cut: Cut, *, is_idle: bool
) -> PlannedBatch:
    return PlannedBatch(
        indices=indices,
        response_lengths=tuple(samples[i].response_length for i in indices),
        parts=cut_sequences(tuple(len(samples[i].tokens) for i in indices), cut),
        is_idle=is_idle,
    )


def _micro_batch(
    samples: Sequence[TrainSample],
    rotary: Rotary,
    device: torch.device,
    media: MediaReader | None,
    plan: PlannedBatch,
) -> MicroBatch:
    chosen = [samples[i] for i in plan.indices]
    lengths = tuple(len(sample.tokens) for sample in chosen)
    tokens = torch.tensor([token for sample in chosen for token in sample.tokens], dtype=torch.int64)
    learnt = [not plan.is_idle and any(sample.loss_mask) for sample in chosen]
    seen = None if media is None else media_inputs(chosen, plan.parts, media, device)
    inputs = model_inputs(tokens, lengths, rotary, device, plan.parts, learnt, seen)
    inputs["packed_seq_params"].routes = plan.routes
    rows, targets, own = _responses(tokens, lengths, plan)
    return MicroBatch(
        indices=plan.indices,
        response_lengths=plan.response_lengths,
        inputs=inputs,
        rows=on_device(rows, device),
        targets=on_device(targets, device),
        own=None if own is None else on_device(own, device),
        is_idle=plan.is_idle,
    )


def _responses(
    tokens: Tensor, lengths: Sequence[int], plan: PlannedBatch
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows, targets and own of a micro-batch, on the host."""
    responses, parts = plan.response_lengths, plan.parts
    before = torch.tensor([length - 1 - count for length, count in zip(lengths, responses, strict=True)])
    targets = tokens.index_select(0, ranges(_starts(lengths) + before, responses) + 1)
    rows = ranges(_starts(parts.lengths)[: len(lengths)] + before, responses)
    if parts.is_whole:
        return rows, targets, None
    rows = parts.local(rows)
    own = (rows >= 0).nonzero().squeeze(1)
    return rows.index_select(0, own), targets.index_select(0, own), own


def _check(sample: TrainSample, index: int) -> None:
    """Refuse a sample whose first response token has nothing before it, or whose values do not fit it."""
    length, response = len(sample.tokens), sample.response_length
    values = (sample.loss_mask, sample.rollout_log_probs, sample.advantages)
    if not 0 < response < length or any(len(value) != response for value in values):
        sizes = ", ".join(str(len(value)) for value in values)
        raise DataError(
            f"Sample {index} of {length} tokens has a response of {response}, and mask, log-probs and "
            f"advantages of {sizes} values.",
            hint="A response has at least one token, a prompt before it, and one value of each per token.",
        )


def _starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)][:-1], dtype=torch.int64)


def model_inputs(
    tokens: Tensor,
    lengths: tuple[int, ...],
    rotary: Rotary,
    device: torch.device,
    parts: SequenceParts | None = None,
    learnt: Sequence[bool] = (),
    seen: MediaInputs | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of the model for this rank's part of packed sequences.

    :param tokens: ``[T]``, int64, on the host.
    :param lengths: Length of each sequence; they sum to ``T``.
    :param parts: How they are divided among ranks; not at all, if nothing is said.
    :param learnt: Of each sequence, whether anything is learnt from it; all are, if nothing is said. The
        others count as padding.
    :param seen: What media add; ``None`` for a model of text.
    """
    parts = parts or cut_sequences(lengths, WHOLE)
    positions = ranges(torch.zeros(len(parts.lengths), dtype=torch.int64), parts.lengths)
    real = ranges(_starts(parts.lengths)[: len(lengths)], lengths)
    padded = tokens.new_zeros(sum(parts.lengths)).index_copy_(0, real, tokens)
    if seen is not None and seen.positions is not None:
        positions = positions.repeat(3, 1).index_copy_(1, real, seen.positions)
    positions = on_device(positions.index_select(-1, parts.own_rows), device)
    cos, sin = rotary(positions)
    boundaries = on_device(torch.tensor([0, *accumulate(parts.lengths)], dtype=torch.int32), device)
    packing = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(parts.lengths),
        max_seqlen_kv=max(parts.lengths),
        lengths=parts.own_lengths,
        key_lengths=None if parts.is_whole else parts.key_lengths,
        key_rows=None if parts.is_whole else on_device(parts.key_rows, device),
        parts=parts,
        padding=_padding(lengths, parts, learnt, device),
        cos=cos,
        sin=sin,
    )
    own = {} if seen is None else {"media": seen.batch}
    return {
        **own,
        "input_ids": on_device(padded.index_select(0, parts.own_rows)[None], device),
        "position_ids": positions.unsqueeze(-2),
        "attention_mask": None,
        "packed_seq_params": packing,
    }


def _padding(
    lengths: Sequence[int], parts: SequenceParts, learnt: Sequence[bool], device: torch.device
) -> Tensor | None:
    counted = [length if each else 0 for length, each in zip(lengths, learnt, strict=bool(learnt))]
    counted = counted or list(lengths)
    if sum(counted) == sum(parts.lengths):
        return None
    padding = torch.ones(sum(parts.lengths), dtype=torch.bool)
    padding.index_fill_(0, ranges(_starts(parts.lengths)[: len(lengths)], tuple(counted)), 0)
    return on_device(padding.index_select(0, parts.own_rows), device)


def whole_responses(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the values of all response tokens ``[R, ...]``, of which this rank has ``[r, ...]``.

    A collective. Every rank of a context-parallel group goes on with all of them, since a loss may need whole
    responses.
    """
    if batch.own is None:
        return values
    shape = (sum(batch.response_lengths), *values.shape[1:])
    spread = values.new_zeros(shape).index_copy(0, batch.own, values)
    return sum_over_context(spread, parallel_state.get_context_parallel_group())


def response_weights(
    batch: MicroBatch, values: Sequence[Sequence[float]] | Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return :func:`response_values`, or zeros for an idle micro-batch."""
    weights = response_values(batch, values, device)
    return torch.zeros_like(weights) if batch.is_idle else weights


def response_values(
    batch: MicroBatch, values: Sequence[Sequence[float]] | Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return the values of each response token of a micro-batch, ``[R]``, float32.

    :param values: By sample of the whole step, one value per response token.
    """
    chosen = [values[i] for i in batch.indices]
    if isinstance(chosen[0], Tensor):
        return on_device(torch.cat(cast(list[Tensor], chosen)).float(), device)
    return on_device(torch.tensor(list(chain.from_iterable(chosen)), dtype=torch.float32), device)


def per_sample(batches: Sequence[PlannedBatch], outputs: Sequence[Tensor], count: int) -> list[Tensor]:
    """Undo the packing: from ``[R, ...]`` per micro-batch to one host tensor per sample, in sample order."""
    result: list[Tensor] = [torch.empty(0)] * count
    for batch, output in zip(batches, outputs, strict=True):
        if batch.is_idle:
            continue
        for index, part in zip(batch.indices, output.cpu().split(batch.response_lengths), strict=True):
            result[index] = part
    return result


def attach_routes(
    batches: Sequence[PlannedBatch],
    samples: Sequence[TrainSample],
    make: Callable[[Sequence[TrainSample], SequenceParts], Routes],
) -> None:
    """Give each micro-batch its record."""
    for batch in batches:
        batch.routes = make([samples[index] for index in batch.indices], batch.parts)


def keep_routes(batches: Sequence[PlannedBatch], samples: Sequence[TrainSample], store: RoutingStore) -> None:
    """Keep what the log-prob pass of a step captured, in the place of all before it."""
    store.clear()
    for batch in batches:
        assert batch.routes is not None
        store.keep([samples[index] for index in batch.indices], batch.parts, batch.routes)
