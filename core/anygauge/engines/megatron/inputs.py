"""Micro-batches: what the model gets, as one dictionary of keyword arguments built in one place.

The log-prob pass and the training pass call :func:`model_inputs` alike, so neither can lose an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, cast

import torch
from torch import Tensor

from anygauge.data.packing import pack_by_tokens
from anygauge.engines.megatron.modules import PackedSequences
from anygauge_hooks.errors import DataError
from anygauge_hooks.rl import TrainSample

__all__ = ["MicroBatch", "micro_batches", "model_inputs", "per_sample", "response_values"]

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples packed back to back."""

    indices: tuple[int, ...]
    """Which samples, in packing order."""
    response_lengths: tuple[int, ...]
    inputs: Mapping[str, Any]
    """Keyword arguments of the model."""
    rows: Tensor
    """``[R]``, int64: the positions whose next token is a response token."""
    targets: Tensor
    """``[R]``, int64: those next tokens."""


def micro_batches(
    samples: Sequence[TrainSample], max_tokens: int, rotary: Rotary, device: torch.device
) -> list[MicroBatch]:
    """Pack samples into micro-batches of at most ``max_tokens`` tokens.

    :param rotary: From positions ``[T]`` to cosines and sines ``[T, R]``.
    """
    bins = pack_by_tokens([len(sample.tokens) for sample in samples], max_tokens)
    return [_micro_batch(samples, tuple(indices), rotary, device) for indices in bins]


def _micro_batch(
    samples: Sequence[TrainSample], indices: tuple[int, ...], rotary: Rotary, device: torch.device
) -> MicroBatch:
    chosen = [samples[i] for i in indices]
    for index, sample in zip(indices, chosen, strict=True):
        _check(sample, index)
    lengths = tuple(len(sample.tokens) for sample in chosen)
    responses = tuple(sample.response_length for sample in chosen)
    tokens = torch.tensor([token for sample in chosen for token in sample.tokens], dtype=torch.int64)
    rows = _ranges([end - 1 - r for end, r in zip(accumulate(lengths), responses, strict=True)], responses)
    return MicroBatch(
        indices=indices,
        response_lengths=responses,
        inputs=model_inputs(tokens.to(device), lengths, rotary),
        rows=rows.to(device),
        targets=tokens[rows + 1].to(device),
    )


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


def _ranges(starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return ``start, start + 1, ...`` of each range, end to end, int64."""
    counts = torch.tensor(lengths)
    shifts = torch.tensor(starts) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + torch.repeat_interleave(shifts, counts)


def model_inputs(tokens: Tensor, lengths: tuple[int, ...], rotary: Rotary) -> dict[str, Any]:
    """Return the keyword arguments of the model for packed sequences.

    :param tokens: ``[T]``, int64, on the device.
    :param lengths: Length of each sequence; they sum to ``T``.
    """
    positions = _ranges([0] * len(lengths), lengths).to(tokens.device)
    cos, sin = rotary(positions)
    boundaries = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=tokens.device)
    packing = PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
        cos=cos,
        sin=sin,
    )
    return {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "packed_seq_params": packing,
    }


def response_values(
    batch: MicroBatch, values: Sequence[Sequence[float]] | Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return the values of each response token of a micro-batch, ``[R]``, float32.

    :param values: By sample of the whole step, one value per response token.
    """
    chosen = [values[i] for i in batch.indices]
    if isinstance(chosen[0], Tensor):
        return torch.cat(cast(list[Tensor], chosen)).float().to(device)
    return torch.tensor(list(chain.from_iterable(chosen)), dtype=torch.float32, device=device)


def per_sample(batches: Sequence[MicroBatch], outputs: Sequence[Tensor], count: int) -> list[Tensor]:
    """Undo the packing: from ``[R]`` per micro-batch to one host tensor per sample, in sample order."""
    result: list[Tensor] = [torch.empty(0)] * count
    for batch, output in zip(batches, outputs, strict=True):
        for index, part in zip(batch.indices, output.cpu().split(batch.response_lengths), strict=True):
            result[index] = part
    return result
