"""Norms of the models of transformers, with the kernels of the backend's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anygauge.kernels.table import KernelTable

__all__ = ["TableLayerNorm", "TableRmsNorm", "bind_norm"]


class TableLayerNorm(nn.LayerNorm):
    """Torch's layer norm with the kernel of the table, which :func:`bind_norm` sets."""

    kernel: Callable[..., Tensor]

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self.kernel(input, self.weight, self.bias, self.eps)


class TableRmsNorm(nn.Module):
    """The norm of transformers' models with the kernel of the table, which :func:`bind_norm` sets."""

    kernel: Callable[..., Tensor]
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return self.kernel(hidden_states, self.weight, self.variance_epsilon)


def bind_norm(module: Any, kernels: KernelTable, dtype: torch.dtype) -> None:
    """Let a module take its kernel from the table, if it is a norm that the table has.

    Its class is replaced, and its parameters stay.
    """
    if type(module) is nn.LayerNorm and module.bias is not None:
        module.kernel = kernels.resolve("layer_norm", dtype=dtype)  # type: ignore[assignment]
        module.__class__ = TableLayerNorm
    elif type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
        module.__class__ = TableRmsNorm
        module.kernel = kernels.resolve("rms_norm", dtype=dtype)
