"""Norms of the models of transformers, with the kernels of the backend's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.kernels.table import KernelTable

__all__ = ["TableLayerNorm", "TableRmsNorm", "bind_norm", "is_norm"]


class TableLayerNorm(nn.LayerNorm):
    """Torch's layer norm with the kernel of the table, which :func:`bind_norm` sets."""

    kernel: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return self.kernel(input, self.weight, self.bias, self.eps)


class TableRmsNorm(nn.Module):
    """The norm of transformers' models with the kernel of the table, which :func:`bind_norm` sets."""

    kernel: Callable[..., Tensor]
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return self.kernel(hidden_states, self.weight, self.variance_epsilon)


def is_norm(module: Any) -> bool:
    """Return whether a module is a norm that the table has, by its name and attributes."""
    if type(module) is nn.LayerNorm:
        return module.bias is not None
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def bind_norm(module: Any, kernels: KernelTable, dtype: torch.dtype) -> None:
    """Let a module take its kernel from the table, if it is a norm that the table has.

    Its class is replaced, and its parameters stay.
    """
    if not is_norm(module):
        return
    if type(module) is nn.LayerNorm:
        module.kernel = kernels.resolve("layer_norm", dtype=dtype)  # type: ignore[assignment]
        module.__class__ = TableLayerNorm
    else:
        module.__class__ = TableRmsNorm
        module.kernel = kernels.resolve("rms_norm", dtype=dtype)
