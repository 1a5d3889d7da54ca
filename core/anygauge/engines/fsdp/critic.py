"""Critic engine: the policy's model with a value head, and values in place of log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from anygauge.config.roles import as_classifier
from anygauge.engines.fsdp.batch import MicroBatch
from anygauge.engines.fsdp.engine import FsdpEngine
from anygauge.engines.fsdp.model import Outputs
from anygauge.engines.responses import value_inputs
from anygauge_hooks.algorithms import ValueLoss
from anygauge_hooks.batch import TrainBatch

__all__ = ["FsdpCritic"]


class FsdpCritic(FsdpEngine):
    """Implements ``anygauge_hooks.engines.CriticEngine``. Its config is the critic's."""

    is_critic = True

    def values(self, batch: TrainBatch) -> Tensor:
        """Return the critic's value before each response token."""
        with self._asking("values"):
            return self._collect(batch, _values)

    def train_values(self, batch: TrainBatch, loss: ValueLoss) -> Mapping[str, float]:
        """Take one optimizer step on this rank's mini-batch and return the metrics of the whole step."""

        def value_loss(plan: MicroBatch, values: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
            return loss(value_inputs(batch, plan, values, self.device))

        return self._train(batch, _values, value_loss, "train_values")

    def _config_changes(self) -> Mapping[str, Any]:
        return as_classifier(self.hf)


def _values(outputs: Outputs, plan: MicroBatch) -> Tensor:
    return outputs.values()
