"""Micro-batches: the keyword arguments of a transformers model, packed or padded, built in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anygauge.data.balance import media_costs, sequence_costs
from anygauge.data.batch import ranges, response_rows, starts
from anygauge.data.packing import pack_by_cost
from anygauge.device import on_device
from anygauge.engines.fsdp.attention import packing_arguments
from anygauge.engines.media import MediaReader, media_positions, tower_batches
from anygauge.engines.responses import Responses, before_responses, check_responses
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.media import Media

__all__ = ["MicroBatch", "micro_batches", "model_inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch(Responses):
    """Samples of a batch that go through the model together."""

    inputs: Mapping[str, Any]
    """Keyword arguments of the model, of :func:`model_inputs`."""
    rows: Tensor
    """``[R]``, int64: the positions, over all rows of the input, whose next token is a response token."""
    targets: Tensor
    """``[R]``, int64: those next tokens."""
    media: Sequence[tuple[Media, ...]]
    """Media of each sample."""
    first: Tensor
    """``[N]``, int64: the position of each sample's first token, over all rows of the input."""

    def to(self, device: torch.device, reader: MediaReader | None = None) -> MicroBatch:
        """Return the micro-batch with its tensors on a device.

        :param reader: Where the media of a model with towers come from.
        """
        inputs: dict[str, Any] = {
            name: on_device(value, device) if isinstance(value, Tensor) else value
            for name, value in self.inputs.items()
        }
        if "lengths" in inputs:
            inputs |= packing_arguments(inputs.pop("boundaries"), inputs.pop("lengths"))
        if reader is not None:
            inputs["media"] = tower_batches(self.media, self.first.tolist(), reader, device)
        return replace(
            self,
            inputs=inputs,
            rows=on_device(self.rows, device),
            targets=on_device(self.targets, device),
        )


def micro_batches(
    batch: TrainBatch,
    max_tokens: int,
    flops_per_token: Callable[[int], float],
    common: Callable[[int], int],
    *,
    is_packed: bool,
    reader: MediaReader | None = None,
) -> list[MicroBatch]:
    """Divide samples into micro-batches of at most ``max_tokens`` tokens, on the host.

    :param flops_per_token: From the length of a sequence to the forward operations of one of its tokens.
    :param common: From the number of micro-batches that this rank needs to the number that all need.
    :param is_packed: Whether the samples of a micro-batch lie end to end; otherwise each has a row.
    :param reader: Where the media of a model with towers come from.
    :raises DataError: A sample has no response, or nothing before it.
    :raises MediaMismatchError: Placeholders and media differ.
    """
    check_responses(batch)
    lengths = list(batch.lengths)
    if is_packed:
        costs = sequence_costs(lengths, flops_per_token)
        if reader is not None:
            costs = costs + media_costs(batch.media, partial(reader.spec.flops, reader.hf))
        plans = pack_by_cost(lengths, costs, max_tokens, common)
    else:
        plans = _rows_of_like_length(lengths, max_tokens, common)
    sequences = batch.tokens.long().split(lengths)
    shortest = min(range(len(lengths)), key=lengths.__getitem__)
    return [
        _micro_batch(batch, sequences, plan or [shortest], reader, is_packed=is_packed, is_idle=not plan)
        for plan in plans
    ]


def _rows_of_like_length(
    lengths: Sequence[int], max_tokens: int, common: Callable[[int], int]
) -> list[list[int]]:
    """Divide samples into micro-batches that have few tokens of padding; the longest come first."""
    plans: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if plans and lengths[plans[-1][0]] * (len(plans[-1]) + 1) <= max_tokens:
            plans[-1].append(index)
        else:
            plans.append([index])
    return plans + [[]] * (common(len(plans)) - len(plans))


def _micro_batch(
    batch: TrainBatch,
    sequences: Sequence[Tensor],
    indices: Sequence[int],
    reader: MediaReader | None,
    *,
    is_packed: bool,
    is_idle: bool,
) -> MicroBatch:
    chosen, media = [sequences[index] for index in indices], [batch.media[index] for index in indices]
    lengths, responses = [len(each) for each in chosen], [batch.response_lengths[i] for i in indices]
    targets = torch.cat(chosen).index_select(0, before_responses(lengths, responses) + 1)
    first = starts(lengths)[: len(lengths)] if is_packed else torch.arange(len(chosen)) * max(lengths)
    positions = None if reader is None else media_positions(chosen, media, reader)
    return MicroBatch(
        indices=indices,
        response_lengths=responses,
        responses=response_rows(batch.response_lengths, indices),
        is_idle=is_idle,
        inputs=model_inputs(chosen, positions, is_packed=is_packed),
        rows=before_responses(lengths, responses, first),
        targets=targets,
        media=media,
        first=first,
    )


def model_inputs(
    sequences: Sequence[Tensor], positions: Tensor | None = None, *, is_packed: bool
) -> dict[str, Any]:
    """Return the keyword arguments of the model, on the host.

    :param sequences: Token ids of each sequence, int64.
    :param positions: ``[3, S]``, int64, of all of their tokens, where media have positions of their own.
    :param is_packed: Whether they lie end to end in one row; otherwise each has a row, padded at its end.
    """
    lengths = [len(each) for each in sequences]
    if is_packed:
        if positions is None:
            positions = ranges(torch.zeros(len(lengths), dtype=torch.int64), lengths)
        return {
            "input_ids": torch.cat(list(sequences))[None],
            "position_ids": positions.unsqueeze(-2),
            "boundaries": torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
            "lengths": lengths,
        }
    padded = pad_sequence(list(sequences), batch_first=True)
    places = torch.arange(padded.shape[1])
    axes = () if positions is None else positions.unbind()
    return {
        "input_ids": padded,
        "position_ids": torch.stack([pad_sequence(axis.split(lengths), batch_first=True) for axis in axes])
        if axes
        else places.expand(len(lengths), -1),
        "attention_mask": (places < torch.tensor(lengths)[:, None]).long(),
    }
