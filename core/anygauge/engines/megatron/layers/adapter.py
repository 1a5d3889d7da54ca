"""LoRA adapters of Megatron's linears, which may be several linears of a checkpoint in one.

Each of those has its own adapter. What they compute from is the same, so their ``A`` are one matrix; each
``B`` gives some of the columns of the output, those of its linear, and is divided as they are.

Megatron imports happen here at module level: import this file only after ``prepare_megatron``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from anygauge.engines.lora.base import AdapterState
from anygauge.engines.megatron.gradients import replace_first
from anygauge.engines.megatron.layers.linear import linear
from anygauge.engines.megatron.weights.mapping import TensorRule, to_canonical

__all__ = ["LinearAdapter", "add_adapter"]

NAME = "adapter"
"""Attribute of a linear that has one."""


class LinearAdapter(nn.Module):
    """Low-rank matrices beside the weight of a linear.

    :param rule: Rule of the weight.
    :param parts: Which of the rule's Hugging Face tensors have an adapter.
    :param ways: Ranks that divide the weight.
    :param sequence_parallel: Whether this rank has some of the tokens before a column-parallel linear, and
        after a row-parallel one.
    """

    def __init__(
        self,
        weight: Tensor,
        rule: TensorRule,
        parts: Sequence[int],
        *,
        rank: int,
        scale: float,
        ways: int,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.rule, self.parts = rule, parts
        self.rank, self.scale, self.ways = rank, scale, ways
        self.sequence_parallel = sequence_parallel
        self.is_row = rule.declared.split_dim == 1
        assert len(rule.hf) == 1 or not self.is_row, "linears whose input is divided are not fused"
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.A = nn.Parameter(torch.empty(len(parts) * rank, weight.shape[1], **options))
        self.sizes = [self._rows(part, len(weight)) for part in range(len(rule.hf))]
        """Columns of the output, on this rank, of each linear of a checkpoint."""
        for part in parts:
            self.register_parameter(
                self.name(part), nn.Parameter(torch.empty(self.sizes[part], rank, **options))
            )
        for parameter in self.parameters():
            replace_first(parameter)
        self._mark_partial_gradients()

    def _rows(self, part: int, rows: int) -> int:
        sections = self.rule.declared.sections
        return rows if self.is_row or not sections else sum(sections[part]) // self.ways

    def _mark_partial_gradients(self) -> None:
        """Let Megatron sum the gradients of matrices that each rank applies to tokens of its own."""
        if self.sequence_parallel:
            is_replicated = self.rule.declared.split_dim is None
            for parameter in self.parameters():
                if is_replicated or (parameter is self.A) != self.is_row:
                    parameter.sequence_parallel = True  # type: ignore[attr-defined]  # Megatron's mark

    def name(self, part: int) -> str:
        """Return the name of a ``B``: it ends as the name of its linear does."""
        return f"B_{self.rule.hf[part].removesuffix('.weight').rpartition('.')[2]}"

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the output of the linear.

        :param x: Its input.
        """
        low = self._exchange(linear(x, self.A)) * self.scale
        lows = dict(zip(self.parts, low.split(self.rank, -1), strict=True))
        outputs = [
            linear(lows[part], self.get_parameter(self.name(part)))
            if part in lows
            else low.new_zeros(*low.shape[:-1], size)
            for part, size in enumerate(self.sizes)
        ]
        return to_canonical(self.rule.declared, outputs, self.ways, low.dim() - 1)

    def _exchange(self, low: Tensor) -> Tensor:
        """Return what the rank's ``B`` are applied to, from what its ``A`` gives."""
        if self.ways == 1:
            return low
        group = parallel_state.get_tensor_model_parallel_group()
        if self.is_row:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            reduced: Tensor = reduce(low, group=group)
            return reduced
        if self.sequence_parallel:
            gathered: Tensor = gather_from_sequence_parallel_region(low, group=group)
            return gathered
        # each rank has some columns of the output, so the gradients of all ranks are summed
        copied: Tensor = copy_to_tensor_model_parallel_region(low, group=group)
        return copied

    def product(self) -> Tensor:
        """Return what the adapter adds to this rank's part of the weight, float32."""
        downs = dict(zip(self.parts, self.A.detach().float().split(self.rank), strict=True))
        products = [
            self.get_parameter(self.name(part)).detach().float() @ downs[part]
            if part in downs
            else self.A.new_zeros(size, self.A.shape[1], dtype=torch.float32)
            for part, size in enumerate(self.sizes)
        ]
        return to_canonical(self.rule.declared, products, self.ways) * self.scale


def add_adapter(layer: Any, adapter: LinearAdapter, state: AdapterState) -> None:
    """Add an adapter to a linear, which computes with it while the state is on."""
    setattr(layer, NAME, adapter)

    def add(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        if not state.is_on:
            return output
        added = module.adapter(inputs[0])
        return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added

    layer.register_forward_hook(add)
