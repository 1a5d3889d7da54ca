"""Value head: a critic is any family's model with one number per token in place of the output layer.

Megatron imports happen here at module level: import this file only after ``prepare_megatron``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor, nn

from anygauge.engines.megatron.layers.output import ResponseOutput
from anygauge.engines.megatron.weights.mapping import OUTPUT, TensorSource
from anygauge_hooks.megatron import WeightRule, megatron_model, with_megatron
from anygauge_hooks.models import ModelSpec

__all__ = ["SCORE", "ValueHead", "ZeroFilled", "value_model"]

SCORE = "score.weight"
"""Name of a classification model's weight in transformers; with one label it is a value head."""


class ValueHead(ResponseOutput):
    """Gives the value of each wanted token, in float32. Every tensor-parallel rank has all of it.

    Its weight starts at 0: a critic expects nothing before it has seen a reward.

    :param layer: Layer that Megatron built.
    """

    def __init__(self, layer: ColumnParallelLinear) -> None:
        super().__init__(layer)
        self.weight = nn.Parameter(layer.weight.new_zeros(1, layer.weight.shape[1]))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Return values ``[R, 1, 1]``, and no bias.

        :param hidden: ``[T, 1, H]``, or this rank's part of it under sequence parallelism.
        :param weight: Weight of an embedding, which a critic does not share.
        """
        return F.linear(self.wanted(hidden).float(), self.weight.float()), None


def value_model(spec: ModelSpec, hf: Mapping[str, Any]) -> tuple[ModelSpec, dict[str, Any]]:
    """Return a family with a score for an output layer, and the Hugging Face config of such a model.

    Nothing is tied. A checkpoint of the language model fits: what it has for the output layer is not used.
    """
    untied = {**hf, "tie_word_embeddings": False}
    model = megatron_model(spec)
    output = f"{model.output_owner}.{OUTPUT}".lstrip(".")
    rules = model.weight_rules(untied)
    replaced = tuple(name for rule in rules if rule.canonical == output for name in rule.hf)
    score = WeightRule(canonical=output, hf=(SCORE,))

    def weight_rules(hf: Mapping[str, Any]) -> Sequence[WeightRule]:
        return [*(rule for rule in model.weight_rules(hf) if rule.canonical != output), score]

    return (
        replace(
            with_megatron(spec, replace(model, weight_rules=weight_rules)),
            model_options=lambda hf: {**spec.model_options(hf), "tie_embeddings": False},
            unused_weights=lambda hf: (*spec.unused_weights(hf), *replaced),
        ),
        untied,
    )


@dataclass(frozen=True, slots=True)
class ZeroFilled:
    """A checkpoint that reads zeros for missing parts of some tensors."""

    source: TensorSource
    shapes: Mapping[str, Sequence[int]]
    """Shapes of the tensors that the checkpoint may lack, by name."""

    @property
    def names(self) -> set[str]:
        """Return every tensor's name."""
        return self.source.names | set(self.shapes)

    def shape(self, name: str) -> Sequence[int]:
        """Return a tensor's shape."""
        return self.shapes[name] if self._is_lacking(name) else self.source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return a tensor's type."""
        return torch.float32 if self._is_lacking(name) else self.source.dtype(name)

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        """Return a part of a tensor."""
        return (
            torch.zeros(self.shapes[name])[index] if self._is_lacking(name) else self.source.read(name, index)
        )

    def _is_lacking(self, name: str) -> bool:
        return name in self.shapes and name not in self.source.names
