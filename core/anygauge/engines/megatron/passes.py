"""Forward steps for Megatron's schedule: a log-prob pass and a training pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from anygauge.device import on_device
from anygauge.engines.megatron.inputs import MicroBatch, whole_responses
from anygauge.engines.megatron.layers.output import OutputLogprob, response_output
from anygauge.engines.responses import compared, loss_inputs
from anygauge_hooks.batch import TopKLogProbs, TrainBatch
from anygauge_hooks.engines import LossFunction, LossInputs

__all__ = ["LogProbPass", "TopKPass", "TrainPass"]


class _Pass:
    """Runs the model on a micro-batch, and what makes log-probabilities of its output."""

    def __init__(self, logprob: OutputLogprob, temperature: float) -> None:
        self.logprob = logprob
        self.temperature = temperature

    def outputs(self, wrapped: Any, batch: MicroBatch) -> Tensor:
        """Return hidden states ``[r, H]`` of this rank's response tokens, or a stage's output."""
        return response_output(wrapped, batch.rows, batch.inputs, self.logprob.path)

    def log_probs(
        self, wrapped: Any, hidden: Tensor, batch: MicroBatch, *, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of all response tokens, ``[R]``."""
        outputs = self.logprob(wrapped, hidden, batch.targets, self.temperature, entropy_grad=entropy_grad)
        return whole_responses(outputs[0], batch), whole_responses(outputs[1], batch)

    def compared(
        self, wrapped: Any, hidden: Tensor, batch: MicroBatch, ids: Tensor, *, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities ``[R, K + 2]`` and entropies ``[R]`` of all response tokens.

        The first are those of the response itself, then come others, and at last all but the others together.

        :param ids: Ids of the others, ``[r, K]`` on this rank.
        """
        sampled = batch.targets[:, None]
        targets = torch.cat((sampled, ids), 1)
        log_probs, entropy = self.logprob(
            wrapped, hidden, targets, self.temperature, entropy_grad=entropy_grad, rest=True
        )
        # the op leaves the response's token out of the rest, whether it is among the others or not
        log_probs = compared(log_probs, sampled, ids)
        return whole_responses(log_probs, batch), whole_responses(entropy, batch)


class LogProbPass(_Pass):
    """Forward only; collects log-probabilities ``[R]``."""

    def __call__(self, batches: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Callable[..., Tensor]]:
        """Return hidden states, and the function that computes log-probabilities."""
        batch = next(batches)
        hidden = self.outputs(wrapped, batch)

        def collect(hidden: Tensor, *, non_loss_data: bool) -> Tensor:
            assert non_loss_data
            log_probs, _ = self.logprob(wrapped, hidden, batch.targets, self.temperature, entropy_grad=False)
            return whole_responses(log_probs, batch)

        return hidden, collect


class TopKPass(_Pass):
    """Forward only; collects the top-k tokens and what is compared of them, ``[R, 2 K + 2]`` float32.

    Ids below 2 ** 24 are whole numbers in float32 too.
    """

    def __init__(self, logprob: OutputLogprob, temperature: float, count: int) -> None:
        super().__init__(logprob, temperature)
        self.count = count

    def __call__(self, batches: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Callable[..., Tensor]]:
        """Return hidden states, and the function that finds the top-k tokens."""
        batch = next(batches)
        hidden = self.outputs(wrapped, batch)

        def collect(hidden: Tensor, *, non_loss_data: bool) -> Tensor:
            assert non_loss_data
            ids = self.logprob.top_k_ids(wrapped, hidden, self.count)
            log_probs = self.compared(wrapped, hidden, batch, ids, entropy_grad=False)[0]
            return torch.cat((whole_responses(ids.to(log_probs), batch), log_probs), 1)

        return hidden, collect


class TrainPass(_Pass):
    """Forward and loss; Megatron's schedule runs the backward pass."""

    def __init__(
        self,
        logprob: OutputLogprob,
        temperature: float,
        loss: LossFunction,
        data: TrainBatch,
        device: torch.device,
        *,
        entropy_grad: bool,
    ) -> None:
        super().__init__(logprob, temperature)
        self.loss = loss
        self.data = data
        self.device = device
        self.entropy_grad = entropy_grad

    def __call__(self, batches: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Return hidden states, and the function that computes the loss."""
        batch = next(batches)
        hidden = self.outputs(wrapped, batch)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            value, reported = self.loss(self._loss_inputs(wrapped, batch, hidden))
            metrics = {**reported, "loss": value.detach()}
            # Token weights already make the mean, so Megatron is told of no tokens to divide by.
            return value, torch.zeros([], dtype=torch.int, device=self.device), metrics

        return hidden, loss

    def _loss_inputs(self, wrapped: Any, batch: MicroBatch, hidden: Tensor) -> LossInputs:
        teacher, top_k_log_probs = self.data.teacher_top_k, None
        if teacher is None:
            log_probs, entropy = self.log_probs(wrapped, hidden, batch, entropy_grad=self.entropy_grad)
        else:
            ids = self._teacher_ids(batch, teacher)
            all_log_probs, entropy = self.compared(
                wrapped, hidden, batch, ids, entropy_grad=self.entropy_grad
            )
            log_probs, top_k_log_probs = all_log_probs[:, 0], all_log_probs[:, 1:]
        return loss_inputs(self.data, batch, log_probs, entropy, top_k_log_probs, self.device)

    def _teacher_ids(self, batch: MicroBatch, teacher: TopKLogProbs) -> Tensor:
        """Return the teacher's top-k tokens ``[r, K]`` in the places of this rank."""
        ids = on_device(teacher.ids.index_select(0, batch.responses), self.device)
        return ids if batch.local_responses is None else ids[batch.local_responses]
