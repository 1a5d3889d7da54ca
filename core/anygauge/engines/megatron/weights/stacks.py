"""Expert stacks whose matrices are transposed in some checkpoints of a family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from anygauge.engines.megatron.weights.mapping import StackSource, TensorRule

__all__ = ["straight"]


def straight(source: StackSource, rule: TensorRule) -> StackSource:
    """Return a checkpoint whose expert stacks are transposed to the layout of their rule.

    Published checkpoints of such a family have them transposed and those that transformers writes have not;
    which of both a tensor is, its shape tells.
    """
    return _Straight(source, rule) if rule.is_stacked and rule.declared.transposed else source


@dataclass(frozen=True, slots=True)
class _Straight:
    source: StackSource
    rule: TensorRule

    def shape(self, name: str) -> Sequence[int]:
        shape = self.source.shape(name)
        return (shape[0], shape[2], shape[1]) if self._is_turned(name) else shape

    def read(self, name: str, index: tuple[slice | int, ...]) -> Tensor:
        if not self._is_turned(name):
            return self.source.read(name, index)
        expert, *matrix = index
        rows, columns = [*matrix, slice(None), slice(None)][:2]
        return self.source.read(name, (expert, columns, rows)).t().contiguous()

    def _is_turned(self, name: str) -> bool:
        declared, shape = self.rule.declared, self.source.shape(name)
        width = sum(declared.sections[self.rule.hf.index(name)])
        along = 1 + (declared.split_dim or 0)
        return len(shape) == 3 and shape[3 - along] == width
