"""Corrections, applied once to any policy loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from anygauge.algorithms.sample_sums import sample_mean_weights
from anygauge_hooks.algorithms import Correction
from anygauge_hooks.engines import LossFunction, LossInputs
from anygauge_hooks.errors import PluginError

__all__ = ["CorrectedLoss", "with_sample_sizes"]

Metrics = Mapping[str, Tensor]
PREFIX = "correction/"
SQUARE, TOTAL, SIZE = "/weight_square", "/total", "/effective_samples"
BY_SAMPLE, COUNT = ":samples", f"{PREFIX}samples"
"""Ends the name of a sum over samples; and how many there are, which no micro-batch knows."""


@dataclass(frozen=True, slots=True)
class CorrectedLoss:
    """A policy loss whose tokens are weighed by corrections: an instance, so that it can be sent to a worker.

    A policy loss is a sum over tokens times ``inputs.loss_weights``, so the weights of all corrections are
    multiplied into those. Each correction sees the same inputs, and their order does not matter. Metrics of
    the loss are of the tokens as they were sampled, with ``inputs.metric_weights``. Terms that
    :func:`~anygauge.algorithms.losses.policy_objective` adds are not corrected, as in the papers.
    """

    policy_loss: LossFunction
    corrections: Mapping[str, Callable[[LossInputs], Correction]]
    """Corrections by name: functions of the inputs alone."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Return the scalar loss, and metrics that add up over micro-batches.

        :param inputs: Inputs in which the masked tokens hold finite values only.
        :raises PluginError: A correction returned something else than a number for each token.
        """
        with torch.no_grad():
            corrections = {name: _found(name, fn(inputs), inputs) for name, fn in self.corrections.items()}
            metrics = dict(
                chain.from_iterable(_report(name, each, inputs) for name, each in corrections.items())
            )
            metrics[COUNT] = sample_mean_weights(inputs).sum()
        factors = [
            each.importance_weights for each in corrections.values() if each.importance_weights is not None
        ]
        if factors:
            weights = torch.stack([inputs.loss_weights, *factors]).prod(0)
            inputs = replace(inputs, loss_weights=weights, metric_weights=inputs.loss_weights)
        loss, reported = self.policy_loss(inputs)
        return loss, {**reported, **metrics}


def _found(name: str, result: Any, inputs: LossInputs) -> Correction:
    """Call a correction and check its result."""
    size = inputs.loss_weights.shape
    problem = None if isinstance(result, Correction) else f"it returned a {type(result).__name__}"
    if problem is None:
        weights = (
            {} if result.importance_weights is None else {"importance_weights": result.importance_weights}
        )
        for key, value in {**result.metrics, **result.sample_metrics, **weights}.items():
            if not isinstance(value, Tensor):
                problem = f"its {key} is a {type(value).__name__}"
            elif value.shape != size:
                problem = f"its {key} is {list(value.shape)}"
    if problem is not None:
        raise PluginError(
            f"Correction {name!r} must return a Correction with tensors {list(size)}; {problem}.",
            hint="One number per token; importance_weights = None for a correction without weights.",
        )
    checked: Correction = result
    return checked


def _report(name: str, correction: Correction, x: LossInputs) -> list[tuple[str, Tensor]]:
    """Return the metrics of a correction, summed."""
    by_token, by_sample = dict(correction.metrics), dict(correction.sample_metrics)
    if (weights := correction.importance_weights) is not None:
        own = by_sample if correction.by_sample else by_token
        own |= {"weight": weights, "masked": (weights == 0).to(weights.dtype)}
        own |= {SQUARE[1:]: weights.square(), TOTAL[1:]: torch.ones_like(weights)}
    shares = sample_mean_weights(x)
    return [
        *((f"{PREFIX}{name}/{key}", (value * x.loss_weights).sum()) for key, value in by_token.items()),
        *((f"{PREFIX}{name}/{key}{BY_SAMPLE}", (value * shares).sum()) for key, value in by_sample.items()),
    ]


def with_sample_sizes(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add the means and sizes of samples to the metrics of a step: they are not sums over micro-batches.

    Means over samples take the place of sums, and effective sample sizes that of second moments: as a share
    of what there are, ``(sum a w)^2 / (sum a * sum a w^2)`` with ``a`` the weights before correction, of
    tokens or of samples: L. Kish, "Survey Sampling" (1965), section 11.7.
    """
    done = {key: value for key, value in metrics.items() if key != COUNT and not key.endswith(BY_SAMPLE)}
    count = max(metrics.get(COUNT, 0.0), 1.0)
    sums = {key: value for key, value in metrics.items() if key.endswith(BY_SAMPLE)}
    done |= {key.removesuffix(BY_SAMPLE): value / count for key, value in sums.items()}
    for key in [key for key in done if key.startswith(PREFIX) and key.endswith(SQUARE)]:
        name = key.removesuffix(SQUARE)
        squares = done.pop(key) * done.pop(name + TOTAL)
        done[name + SIZE] = done[f"{name}/weight"] ** 2 / squares if squares > 0 else 0.0
    return done
