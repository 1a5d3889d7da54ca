"""Micro-batches: the model's keyword arguments, built in one place.

A batch is planned and packed once, on the host, and all passes over it share the result: the log-prob passes
and the training pass cannot have different arguments. A micro-batch is on the device in its turn alone.

Rows are selected by ``index_select`` and its like, and not by brackets, for which torch wakes all of its
threads, however few rows there are: the device waits for a micro-batch meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from anygauge.data.balance import alike, media_costs, sequence_costs
from anygauge.data.batch import ranges, response_rows, starts
from anygauge.data.packing import pack_by_cost
from anygauge.data.prompts import group_by_prompt, pack_groups, pack_prefixes, prompt_lengths
from anygauge.device import on_device
from anygauge.engines.media import media_positions
from anygauge.engines.megatron.layers.context_parallel import Cut, SequenceParts, cut_sequences
from anygauge.engines.megatron.layers.modules import PackedSequences
from anygauge.engines.megatron.layers.routing import Routes
from anygauge.engines.megatron.media.batch import StageReader, media_batch
from anygauge.engines.responses import Responses, before_responses, check_responses
from anygauge.kernels.reference import sum_over
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.media import Media

__all__ = [
    "MicroBatch",
    "MicroBatches",
    "inputs_on_device",
    "micro_batches",
    "model_inputs",
    "whole_responses",
]

WHOLE = Cut()
"""Tokens are not divided."""

Rotary = Callable[[Tensor], Sequence[Tensor]]
"""From positions ``[T]`` to cosines and sines ``[T, R]``, and then those of local layers, if others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(Responses):
    """Samples of a batch, packed. Of their ``R`` response tokens ``r`` are of this rank."""

    sequences: Sequence[Tensor]
    """Tokens of each of them, int64, on the host."""
    media: Sequence[tuple[Media, ...]]
    parts: SequenceParts
    """How the tokens are divided among ranks."""
    inputs: Mapping[str, Any]
    """Keyword arguments of the model, from :func:`model_inputs`."""
    rows: Tensor
    """``[r]``, int64: the positions of this rank whose next token is a response token."""
    targets: Tensor
    """``[r]``, int64: those next tokens."""
    local_responses: Tensor | None
    """``[r]``, int64: which response tokens these are; ``None`` if they are all."""


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """Micro-batches of a batch. Each is on the device from when it is reached until it is done with."""

    batch: TrainBatch
    plans: Sequence[MicroBatch]
    """On the host."""
    load: Callable[[MicroBatch, Routes | None], MicroBatch]
    """Copies one to the device, with the experts that its tokens go to."""

    def readers(self, count: int, routes: Sequence[Routes] | None = None) -> list[Iterator[MicroBatch]]:
        """Return iterators over the same micro-batches, which the first to reach one loads for all.

        :param routes: For each micro-batch, where a pass captures or replays which experts its tokens go to.
        """
        loaded: dict[int, tuple[MicroBatch, int]] = {}

        def take(number: int) -> MicroBatch:
            if number in loaded:
                batch, readers = loaded.pop(number)
            else:
                batch, readers = self.load(self.plans[number], routes[number] if routes else None), count
            if readers > 1:
                loaded[number] = batch, readers - 1
            return batch

        return [map(take, range(len(self.plans))) for _ in range(count)]


def micro_batches(
    batch: TrainBatch,
    max_tokens: int,
    rotary: Rotary,
    device: torch.device,
    cut: Cut = WHOLE,
    count: Callable[[int], int] = int,
    flops_per_token: Callable[[int], float] = alike,
    media: StageReader | None = None,
    *,
    packs_prefixes: bool = False,
) -> MicroBatches:
    """Pack samples into micro-batches of at most ``max_tokens`` tokens that take about the same time.

    :param rotary: Angles of positions, of ``Policy.rotary``.
    :param cut: How their tokens are divided among ranks.
    :param count: From the number of micro-batches that this rank needs to the number that it must have.
    :param flops_per_token: From the length of a sequence to the forward operations of one of its tokens.
    :param media: Where the model's media come from; ``None`` for a model of text.
    :param packs_prefixes: Whether a micro-batch holds the prompt of several samples once. Not with media or
        under context parallelism.
    :raises DataError: A sample has no response, or nothing before it.
    """
    check_responses(batch)
    lengths = [cut.padded(length) for length in batch.lengths]
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    costs = sequence_costs(lengths, flops_per_token)
    if media is not None:
        costs = costs + media_costs(batch.media, partial(media.spec.flops, media.hf))
    sequences = batch.tokens.long().split(list(batch.lengths))
    masks = batch.loss_mask.split(list(batch.response_lengths))
    if packs_prefixes:
        prompts, groups = prompt_lengths(batch), group_by_prompt(batch)
        prompt_costs = sequence_costs(prompts, flops_per_token)
        bins = pack_groups(lengths, prompts, costs, prompt_costs, groups, max_tokens, count)
    else:
        bins = pack_by_cost(lengths, costs, max_tokens, count)
    pack = partial(_pack, batch, sequences, masks, cut=cut, media=media, packs_prefixes=packs_prefixes)
    plans = [pack(indices or [shortest], is_idle=not indices) for indices in bins]
    return MicroBatches(batch, plans, partial(_load, rotary=rotary, device=device, media=media))


def _pack(
    batch: TrainBatch,
    sequences: Sequence[Tensor],
    masks: Sequence[Tensor],
    indices: Sequence[int],
    *,
    cut: Cut,
    media: StageReader | None,
    packs_prefixes: bool,
    is_idle: bool,
) -> MicroBatch:
    chosen = [sequences[i] for i in indices]
    lengths, responses = [len(each) for each in chosen], [batch.response_lengths[i] for i in indices]
    shown, tokens = [batch.media[i] for i in indices], torch.cat(chosen)
    groups = group_by_prompt(batch, indices) if packs_prefixes else ()
    parts, token_rows = _layout(lengths, responses, groups, cut)
    learned = [not is_idle and bool(masks[i].any()) for i in indices]
    positions = None if media is None else media_positions(chosen, shown, media)
    rows, targets, local_responses = _responses(tokens, lengths, responses, parts, token_rows)
    return MicroBatch(
        indices=indices,
        sequences=chosen,
        response_lengths=responses,
        responses=response_rows(batch.response_lengths, indices),
        media=shown,
        parts=parts,
        inputs=model_inputs(tokens, lengths, parts, learned, positions, token_rows),
        rows=rows,
        targets=targets,
        local_responses=local_responses,
        is_idle=is_idle,
    )


def _layout(
    lengths: Sequence[int], responses: Sequence[int], groups: Sequence[Sequence[int]], cut: Cut
) -> tuple[SequenceParts, Tensor]:
    """Return how the tokens of samples are packed and divided, and which packed row each of them is.

    :param groups: Places of samples whose prompt is packed once; where no two share one, all are whole.
    """
    if not 0 < len(groups) < len(lengths):
        parts = cut_sequences(lengths, cut)
        return parts, _token_rows(lengths, parts)
    prompts = [length - own for length, own in zip(lengths, responses, strict=True)]
    packed = pack_prefixes(lengths, prompts, groups)
    return cut_sequences(packed.lengths, cut).attending(packed.key_lengths, packed.key_rows), packed.rows


def _token_rows(lengths: Sequence[int], parts: SequenceParts) -> Tensor:
    """Return which packed row each token is, ``[T]``, without the padding between sequences."""
    return ranges(starts(parts.lengths)[: len(lengths)], lengths)


def _load(
    batch: MicroBatch,
    routes: Routes | None,
    *,
    rotary: Rotary,
    device: torch.device,
    media: StageReader | None,
) -> MicroBatch:
    inputs = inputs_on_device(batch.inputs, rotary, device, routes)
    if media is not None:
        inputs["media"] = media_batch(batch.media, batch.parts, media, device)
    return replace(
        batch,
        inputs=inputs,
        rows=on_device(batch.rows, device),
        targets=on_device(batch.targets, device),
        local_responses=None if batch.local_responses is None else on_device(batch.local_responses, device),
    )


def _responses(
    tokens: Tensor,
    lengths: Sequence[int],
    responses: Sequence[int],
    parts: SequenceParts,
    token_rows: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows, targets and local responses of a micro-batch."""
    before = before_responses(lengths, responses)
    targets, rows = tokens.index_select(0, before + 1), token_rows.index_select(0, before)
    if parts.is_whole:
        return rows, targets, None
    rows = parts.local(rows)
    local = (rows >= 0).nonzero().squeeze(1)
    return rows.index_select(0, local), targets.index_select(0, local), local


def model_inputs(
    tokens: Tensor,
    lengths: Sequence[int],
    parts: SequenceParts | None = None,
    learned: Sequence[bool] = (),
    media_positions: Tensor | None = None,
    token_rows: Tensor | None = None,
) -> dict[str, Any]:
    """Return the keyword arguments of the model for this rank's part of packed sequences, on the host.

    :param tokens: ``[T]``, int64.
    :param lengths: Length of each sequence; they sum to ``T``.
    :param parts: How they are divided among ranks; not at all, if nothing is said.
    :param learned: Whether anything is learned from each sequence; all are, if nothing is said. The others
        count as padding.
    :param media_positions: ``[3, T]``, int64, where media have positions of their own.
    :param token_rows: ``[T]``, int64: which packed row each token is; tokens of a shared prompt are the same.
        ``None`` where the sequences follow each other.
    """
    parts = parts or cut_sequences(lengths, WHOLE)
    token_rows = _token_rows(lengths, parts) if token_rows is None else token_rows
    padded = tokens.new_zeros(sum(parts.lengths)).index_copy_(0, token_rows, tokens)
    positions = _positions(parts.lengths)
    if media_positions is not None:
        positions = positions.repeat(3, 1)
    positions.index_copy_(-1, token_rows, _positions(lengths) if media_positions is None else media_positions)
    boundaries = torch.tensor([0, *accumulate(parts.lengths)], dtype=torch.int32)
    return {
        "input_ids": padded.index_select(0, parts.own_rows)[None],
        "position_ids": positions.index_select(-1, parts.own_rows),
        "attention_mask": None,
        "packed_seq_params": PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=max(parts.lengths),
            max_seqlen_kv=max(parts.lengths),
            lengths=parts.own_lengths,
            key_lengths=None if parts.is_self_contained else parts.key_lengths,
            key_rows=None if parts.is_self_contained else parts.key_rows,
            parts=parts,
            counts=_counts(lengths, parts, learned, token_rows),
        ),
    }


def _positions(lengths: Sequence[int]) -> Tensor:
    """Return the positions of tokens in their sequences."""
    return ranges(torch.zeros(len(lengths), dtype=torch.int64), lengths)


def _counts(
    lengths: Sequence[int], parts: SequenceParts, learned: Sequence[bool], token_rows: Tensor
) -> Tensor | None:
    """Return how many sequences that something is learned from each of this rank's tokens belongs to."""
    counted = [length if each else 0 for length, each in zip(lengths, learned, strict=bool(learned))]
    rows = token_rows.index_select(0, ranges(starts(lengths), counted or list(lengths)))
    counts = torch.zeros(sum(parts.lengths), dtype=torch.int64).index_add_(0, rows, torch.ones_like(rows))
    return None if bool((counts == 1).all()) else counts.index_select(0, parts.own_rows)


def inputs_on_device(
    inputs: Mapping[str, Any], rotary: Rotary, device: torch.device, routes: Routes | None = None
) -> dict[str, Any]:
    """Copy the keyword arguments of :func:`model_inputs` to the device and complete them.

    :param rotary: Angles of positions, of ``Policy.rotary``.
    """
    positions, packing = on_device(inputs["position_ids"], device), inputs["packed_seq_params"]
    cos, sin, *local = rotary(positions)
    boundaries = on_device(packing.cu_seqlens_q, device)
    packing = replace(
        packing,
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        key_rows=None if packing.key_rows is None else on_device(packing.key_rows, device),
        counts=None if packing.counts is None else on_device(packing.counts, device),
        cos=cos,
        sin=sin,
        local_angles=(local[0], local[1]) if local else None,
        routes=routes,
    )
    return {
        **inputs,
        "input_ids": on_device(inputs["input_ids"], device),
        "position_ids": positions.unsqueeze(-2),
        "packed_seq_params": packing,
    }


def whole_responses(values: Tensor, batch: MicroBatch) -> Tensor:
    """Return the values of all response tokens ``[R, ...]``, of which this rank has ``[r, ...]``.

    A collective. Every rank of a context-parallel group goes on with all of them, since a loss may need whole
    responses.
    """
    if batch.local_responses is None:
        return values
    shape = (sum(batch.response_lengths), *values.shape[1:])
    spread = values.new_zeros(shape).index_copy(0, batch.local_responses, values)
    # each rank has its own terms and zeros for the others', and all go on to compute the same from the sum
    return sum_over(spread, parallel_state.get_context_parallel_group())
