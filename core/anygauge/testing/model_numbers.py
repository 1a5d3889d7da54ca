"""Batches, gradients and errors by which a train engine's model is compared with another one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anygauge.data.batch import pack_samples
from anygauge.testing.model_reference import LayerRecord
from anygauge_hooks import hookimpl
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.engines import LossInputs, TrainEngine

__all__ = [
    "FLOOR",
    "GradientOptimizer",
    "batch_of",
    "gradient_error",
    "largest",
    "layer_error",
    "leave_gradients",
    "made_up_tokens",
    "transposed_to",
    "turned_sequences",
]

FLOOR = 1e-3
"""Share below which a norm does not count: of the hidden states for what a layer adds, and of the largest
gradient for a gradient. Below it float32 has few digits left: without rotary, a key's bias has gradient 0."""


def made_up_tokens(vocab_size: int, count: int) -> list[int]:
    """Return tokens that a model has, for one without a tokenizer."""
    return [(7919 * place + 3) % vocab_size for place in range(count)]


def turned_sequences(tokens: Sequence[int], count: int) -> list[list[int]]:
    """Return sequences of different lengths out of the same tokens, which every tokenizer has.

    The first is the tokens as they are; others begin later, go on at the start, and are shorter.
    """
    starts = [number * len(tokens) // count for number in range(count)]
    turned = [[*tokens[start:], *tokens[:start]] for start in starts]
    return [each[: max(2, len(each) - number)] for number, each in enumerate(turned)]


def batch_of(sequences: Sequence[Sequence[int]], prompt: int = 1) -> TrainBatch:
    """Return sequences as a batch whose responses are all tokens after the prompt.

    :param prompt: Its length.
    """
    responses = [sequence[prompt:] for sequence in sequences]
    batch = pack_samples(
        [sequence[:prompt] for sequence in sequences],
        responses,
        loss_masks=[[1] * len(each) for each in responses],
        log_probs=[[0.0] * len(each) for each in responses],
        media=[()] * len(responses),
    )
    batch.loss_weights = torch.full((len(batch.loss_mask),), 1 / len(batch.loss_mask))
    batch.advantages = torch.zeros(len(batch.loss_mask))
    return batch


def layer_error(actual: LayerRecord, expected: LayerRecord, number: int) -> float:
    """Return how far the outputs of a layer are from the reference's, relative to what it adds."""
    before, after = expected.inputs[number], expected.outputs[number]
    scale = (after - before).norm(dim=1).maximum(after.norm(dim=1) * FLOOR)
    return largest((actual.outputs[number] - after).norm(dim=1) / scale)


def gradient_error(actual: Tensor, expected: Tensor, floor: float) -> float:
    """Return how far a gradient is from the reference's by norm, relative to it or to a floor."""
    actual = transposed_to(expected.shape, actual)
    if actual.shape != expected.shape:
        return math.inf
    return largest((actual - expected).norm() / max(float(expected.norm()), floor))


def largest(errors: Tensor) -> float:
    """Return the largest error; one that is no number is the largest of all."""
    return float(errors.nan_to_num(torch.inf).max())


def transposed_to(shape: Sequence[int], tensor: Tensor) -> Tensor:
    """Return a stack of matrices that lie the other way as they are stored, any other tensor as it is.

    Transformers writes the experts of some models in another way than they are published.
    """
    lies_otherwise = tensor.dim() == 3 and list(tensor.shape) != list(shape) == list(tensor.mT.shape)
    return tensor.mT if lies_otherwise else tensor


def leave_gradients(engine: TrainEngine, batch: TrainBatch) -> None:
    """Take a step on the mean negative log-prob; with :class:`GradientOptimizer` weights become gradients."""

    def loss(inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        return -(inputs.log_probs * inputs.loss_weights).sum(), {}

    engine.train_step(batch, loss, temperature=1.0, entropy_grad=False)


class GradientOptimizer:
    """A plugin whose optimizer writes each gradient in the place of its weight."""

    @hookimpl(tryfirst=True)
    def make_optimizer(self, param_groups: Any) -> torch.optim.Optimizer:
        """Return the optimizer of an engine."""
        return _GradientsForWeights(param_groups, {})


class _GradientsForWeights(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Replace the weights."""
        for group in self.param_groups:
            for weight in group["params"]:
                weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
