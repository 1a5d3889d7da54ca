"""Gated activation of an MLP: SwiGLU by the kernel table, others in plain torch.

Megatron imports happen here at module level: import this file only after ``prepare_megatron``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.activations import quick_gelu
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from anygauge.engines.megatron.layers.recompute import can_be_made
from anygauge.kernels.table import KernelTable

__all__ = ["GatedActivation", "activation_function"]


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU with its tanh for the error function, https://arxiv.org/abs/1606.08415 section 2."""
    return F.gelu(x, approximate="tanh")


FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    function.__name__: function for function in (F.silu, gelu_tanh, quick_gelu)
}
"""Functions of the gate, by the names that families give them."""


def activation_function(value: Any) -> Any:
    """Return the function of a name; families do not import torch. A function is returned as it is."""
    return FUNCTIONS[value] if isinstance(value, str) else value


class GatedActivation(MegatronModule):
    """Gated activation of a fused gate-and-up projection.

    A module of Megatron's, because its MLP asks every child for a sharded state.
    """

    def __init__(self, config: TransformerConfig, kernels: KernelTable, remade: bool = False) -> None:
        super().__init__(config)
        self.remade = remade
        """Whether a linear makes the output again in its backward pass."""
        is_plain = config.activation_func is F.silu and not config.glu_linear_offset
        if is_plain and config.activation_func_clamp_value is None:
            self.kernel = kernels.resolve("swiglu", dtype=config.params_dtype)
        else:
            options = config.activation_func, config.activation_func_clamp_value, config.glu_linear_offset
            self.kernel = partial(_gated, *options)

    def forward(self, gate_up: Tensor) -> Tensor:
        """Return ``activation(gate) * up``: ``[..., 2 F]`` to ``[..., F]``."""
        output = self.kernel(gate_up)
        return can_be_made(output, self.kernel, gate_up) if self.remade else output


def _gated(
    activation: Callable[[Tensor], Tensor], limit: float | None, offset: float, gate_up: Tensor
) -> Tensor:
    """Return ``activation(gate) * (up + offset)``, as Megatron's MLP has it.

    :param limit: Largest gate, and largest absolute value of up.
    """
    gate, up = torch.chunk(gate_up, 2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activation(gate) * (up + offset)
