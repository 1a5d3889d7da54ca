"""Responses of a micro-batch: what every train engine does alike with the columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from anygauge.data.batch import ranges, starts
from anygauge.device import on_device
from anygauge_hooks.algorithms import ValueInputs
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.engines import LossInputs
from anygauge_hooks.errors import DataError

__all__ = [
    "Responses",
    "before_responses",
    "check_responses",
    "compared",
    "loss_inputs",
    "unpack",
    "value_inputs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """Samples of a batch that are computed together. ``R`` counts their response tokens."""

    indices: Sequence[int]
    """Which samples of the batch, in packing order."""
    response_lengths: Sequence[int]
    responses: Tensor
    """``[R]``, int64, on the host: rows of these responses in the columns of the batch."""
    is_idle: bool
    """Whether nothing is learned from it: it keeps this rank in step with others that have more."""

    def column(self, values: Tensor | None, device: torch.device, *, counts: bool = True) -> Tensor:
        """Return the values of the response tokens, ``[R, ...]``, float32.

        :param values: A column of the batch.
        :param counts: Or zeros instead, for a micro-batch from which nothing is learned.
        """
        assert values is not None, "a pass or the driver fills in the column before"
        chosen = on_device(values.index_select(0, self.responses).float(), device)
        return chosen if counts else torch.zeros_like(chosen)


def check_responses(batch: TrainBatch) -> None:
    """Check that each sample has a prompt and a response.

    :raises DataError: A sample has no response, or nothing before it.
    """
    for index, (length, response) in enumerate(zip(batch.lengths, batch.response_lengths, strict=True)):
        if not 0 < response < length:
            raise DataError(
                f"Sample {index} of {length} tokens has a response of {response}.",
                hint="A response has at least one token, and a prompt before it.",
            )


def before_responses(lengths: Sequence[int], responses: Sequence[int], first: Tensor | None = None) -> Tensor:
    """Return the rows whose next token is a response token, ``[R]``, int64.

    :param lengths: Tokens of each sequence.
    :param responses: Response tokens of each sequence.
    :param first: First row of each sequence, ``[N]``; ``None`` where they lie end to end.
    """
    before = torch.tensor([length - 1 - count for length, count in zip(lengths, responses, strict=True)])
    return ranges((starts(lengths) if first is None else first) + before, responses)


def compared(log_probs: Tensor, sampled: Tensor, ids: Tensor) -> Tensor:
    """Return log-probabilities ``[r, K + 2]`` of a response, of other tokens, and of all but the others.

    :param log_probs: ``[r, K + 2]``: the same, but the last leaves out the response's token in any case.
    :param sampled: ``[r, 1]``, the response's tokens.
    :param ids: ``[r, K]``, the other tokens.
    """
    rest, is_known = log_probs[:, -1:], (sampled == ids).any(1, keepdim=True)
    rest = torch.where(is_known, rest, torch.logaddexp(rest, log_probs[:, :1]))
    return torch.cat((log_probs[:, :-1], rest), 1)


def loss_inputs(
    data: TrainBatch,
    batch: Responses,
    log_probs: Tensor,
    entropy: Tensor,
    top_k_log_probs: Tensor | None,
    device: torch.device,
) -> LossInputs:
    """Return the inputs of a policy loss.

    :param data: The batch, with every column that the loss reads.
    :param batch: A micro-batch of it.
    :param log_probs: ``[R]``.
    :param entropy: ``[R]``.
    :param top_k_log_probs: ``[R, K + 1]``, of the tokens of ``data.teacher_top_k``.
    """
    teacher, counts = data.teacher_top_k, not batch.is_idle
    column = partial(batch.column, device=device)
    return LossInputs(
        log_probs=log_probs,
        entropy=entropy,
        old_log_probs=log_probs.detach() if data.old_log_probs is None else column(data.old_log_probs),
        rollout_log_probs=column(data.rollout_log_probs),
        reference_log_probs=None if data.reference_log_probs is None else column(data.reference_log_probs),
        advantages=column(data.advantages),
        loss_mask=column(data.loss_mask, counts=counts),
        loss_weights=column(data.loss_weights, counts=counts),
        samples=batch.indices,
        lengths=batch.response_lengths,
        teacher_top_k_log_probs=None if teacher is None else column(teacher.log_probs),
        top_k_log_probs=top_k_log_probs,
    )


def value_inputs(data: TrainBatch, batch: Responses, values: Tensor, device: torch.device) -> ValueInputs:
    """Return the inputs of a value loss.

    :param values: ``[R]``.
    """
    column, counts = partial(batch.column, device=device), not batch.is_idle
    return ValueInputs(
        values=values,
        old_values=column(data.values),
        returns=column(data.returns),
        loss_mask=column(data.loss_mask, counts=counts),
        loss_weights=column(data.loss_weights, counts=counts),
    )


def unpack(plans: Sequence[Responses], outputs: Sequence[Tensor]) -> Tensor:
    """Undo the packing: from ``[R, ...]`` per micro-batch to one column of the batch, on the host."""
    done = [(plan.responses, output) for plan, output in zip(plans, outputs, strict=True) if not plan.is_idle]
    values = torch.cat([output for _, output in done]).cpu()
    return torch.empty_like(values).index_copy_(0, torch.cat([rows for rows, _ in done]), values)
