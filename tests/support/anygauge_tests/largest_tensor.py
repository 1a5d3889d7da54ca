"""Size of the largest tensor that a computation makes."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LargestTensor"]


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Records the number of elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take note of what an operator returns."""
        result = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, Tensor) and not x.is_sparse]
        self.elements = max([self.elements, *sizes])
        return result
