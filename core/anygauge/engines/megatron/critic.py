"""Critic engine: the policy's model and schedule, with values in place of log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anygauge.config import Config
from anygauge.config.roles import as_classifier
from anygauge.engines.megatron.engine import MegatronEngine
from anygauge.engines.megatron.inputs import MicroBatch, whole_responses
from anygauge.engines.megatron.layers.output import response_output
from anygauge.engines.megatron.model import build_policy
from anygauge.engines.megatron.ranks import sum_metrics
from anygauge.engines.megatron.scope import make_scope
from anygauge.engines.responses import value_inputs
from anygauge_hooks.algorithms import ValueLoss
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.engines import WorkerContext

__all__ = ["MegatronCritic"]


class MegatronCritic(MegatronEngine):
    """Implements ``anygauge_hooks.engines.CriticEngine``.

    :param config: The critic's: its model and its training are those of ``model`` and ``train``.
    """

    def __init__(self, config: Config, context: WorkerContext) -> None:
        super().__init__(config, context, build=partial(build_policy, is_critic=True))

    def values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's value before each response token."""
        step = _ValuePass(self.policy.output_owner)
        with self._timed("values"), make_scope(self.context.device), torch.no_grad():
            return self._collect(step, self._pack(batch))

    def _config_changes(self) -> Mapping[str, Any]:
        return as_classifier(self.policy.hf)

    def train_values(self, batch: TrainBatch, loss: ValueLoss) -> Mapping[str, float]:
        """Take one optimizer step on this rank's mini-batch and return the metrics of the whole step."""
        step = _ValueTrainPass(self.policy.output_owner, loss, batch, self.device)
        with self._timed("train_values"), make_scope(self.context.device):
            outputs, norm = self._forward_backward(step, self._pack(batch))
            metrics = sum_metrics(outputs, self.device)
            return {**metrics, **self._update(metrics["loss"], norm)}


class _ValuePass:
    """Forward only; collects values ``[R]``. No temperature has a part in them.

    :param path: ``MegatronModel.output_owner``.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, batches: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Callable[..., Any]]:
        """Return values, and the function that gathers those of all ranks."""
        batch = next(batches)

        def collect(values: Tensor, *, non_loss_data: bool) -> Tensor:
            assert non_loss_data
            return whole_responses(values[:, 0], batch)

        return self.outputs(wrapped, batch), collect

    def outputs(self, wrapped: Any, batch: MicroBatch) -> Tensor:
        """Return the values ``[r, 1]`` of this rank's response tokens, or a stage's output."""
        return response_output(wrapped, batch.rows, batch.inputs, self.path)


class _ValueTrainPass(_ValuePass):
    """Forward and loss; Megatron's schedule runs the backward pass."""

    def __init__(self, path: str, loss: ValueLoss, data: TrainBatch, device: torch.device) -> None:
        super().__init__(path)
        self.loss = loss
        self.data = data
        self.device = device

    def __call__(self, batches: Iterator[MicroBatch], wrapped: Any) -> tuple[Tensor, Callable[..., Any]]:
        """Return values, and the function that computes the loss."""
        batch = next(batches)

        def loss(values: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            inputs = value_inputs(self.data, batch, whole_responses(values[:, 0], batch), self.device)
            value, reported = self.loss(inputs)
            # Token weights already make the mean, so Megatron is told of no tokens to divide by.
            none = torch.zeros([], dtype=torch.int, device=self.device)
            return value, none, {**reported, "loss": value.detach()}

        return self.outputs(wrapped, batch), loss
