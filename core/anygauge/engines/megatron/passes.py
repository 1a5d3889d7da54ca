"""What Megatron's schedule calls for each micro-batch: a log-prob pass and a training pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from anygauge.engines.megatron.inputs import MicroBatch, response_values
from anygauge_hooks.engines import LossFunction, LossInputs
from anygauge_hooks.kernels import VocabParallelLogprob
from anygauge_hooks.rl import TrainSample

__all__ = ["LogProbPass", "StepData", "TrainPass"]


@dataclass(frozen=True, slots=True)
class StepData:
    """What the loss needs for each sample of this rank, beside the model's output."""

    samples: Sequence[TrainSample]
    weights: Sequence[Sequence[float]]
    old_log_probs: Sequence[Tensor] | Sequence[Sequence[float]]
    reference_log_probs: Sequence[Tensor] | None


class _Pass:
    """Runs the model on a micro-batch, with logits at the response positions only."""

    def __init__(self, model: GPTModel, logprob: VocabParallelLogprob, temperature: float) -> None:
        self.model = model
        self.logprob = logprob
        self.temperature = temperature

    def logits(self, wrapped: Any, batch: MicroBatch) -> Tensor:
        """Return the logits ``[R, V]`` of a micro-batch's response positions."""

        def select(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0].index_select(0, batch.rows), *inputs[1:])

        # The output layer is the largest matrix of a small model; prompt positions need none of it.
        handle = self.model.output_layer.register_forward_pre_hook(select)
        try:
            output: Tensor = wrapped(**batch.inputs)
        finally:
            handle.remove()
        return output[0]


class LogProbPass(_Pass):
    """Forward only; collects log-probabilities ``[R]``."""

    def __call__(self, batches: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Callable[..., Tensor]]:
        """Return the logits, and what turns them into log-probabilities."""
        batch = next(batches)
        logits = self.logits(wrapped, batch)

        def collect(logits: Tensor, *, non_loss_data: bool) -> Tensor:
            assert non_loss_data
            return self.logprob(logits, batch.targets, self.temperature, None, entropy_grad=False)[0]

        return logits, collect


class TrainPass(_Pass):
    """Forward and loss; Megatron's schedule runs the backward pass."""

    def __init__(
        self,
        model: GPTModel,
        logprob: VocabParallelLogprob,
        temperature: float,
        loss: LossFunction,
        data: StepData,
        device: torch.device,
        *,
        entropy_grad: bool,
    ) -> None:
        super().__init__(model, logprob, temperature)
        self.loss = loss
        self.data = data
        self.device = device
        self.entropy_grad = entropy_grad

    def __call__(self, batches: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Return the logits, and what turns them into a loss."""
        batch = next(batches)
        logits = self.logits(wrapped, batch)

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            value, reported = self.loss(self._loss_inputs(batch, logits))
            metrics = {**reported, "loss": value.detach()}
            # Token weights already make the mean, so Megatron is told of no tokens to divide by.
            return value, torch.zeros([], dtype=torch.int, device=self.device), metrics

        return logits, loss

    def _loss_inputs(self, batch: MicroBatch, logits: Tensor) -> LossInputs:
        log_probs, entropy = self.logprob(
            logits, batch.targets, self.temperature, None, entropy_grad=self.entropy_grad
        )
        data, samples = self.data, self.data.samples

        def values(of: Any) -> Tensor:
            return response_values(batch, of, self.device)

        reference = data.reference_log_probs
        return LossInputs(
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=values(data.old_log_probs),
            rollout_log_probs=values([sample.rollout_log_probs for sample in samples]),
            reference_log_probs=None if reference is None else values(reference),
            advantages=values([sample.advantages for sample in samples]),
            loss_mask=values([sample.loss_mask for sample in samples]),
            weights=values(data.weights),
            samples=batch.indices,
            lengths=batch.response_lengths,
        )
