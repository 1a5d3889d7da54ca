"""Weight gradients added to the buffer that the engine has for them: Megatron's ``main_grad``.

They are added where they are made: never rounded to the type of the weight, nor kept until they are added.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["FIRST", "add_product", "add_rows", "handed_back", "weight_gradient"]

FIRST = "main_grad_comes_first"
"""Attribute of a weight: its ``main_grad`` is of the step before, and the next product takes its place."""

ROWS = 8192
"""The rows of so many tokens are summed at a time, which bounds the memory that it takes."""


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Add the gradient of the weight of ``x @ weight.T`` to its ``main_grad``, and return autograd's.

    Without one, autograd gets the gradient itself.

    :param weight: ``[N, K]``.
    :param grad: ``[T, N]``, of the product.
    :param x: ``[T, K]``.
    """
    main: Tensor | None = getattr(weight, "main_grad", None)
    if main is None:
        return grad.t() @ x
    add_product(main, grad.t(), x, beta=0 if vars(weight).pop(FIRST, False) else 1)
    return handed_back(weight)


def add_rows(weight: Tensor, ids: Tensor, grad: Tensor) -> None:
    """Add the gradient of ``weight[ids]`` to the ``main_grad`` of a weight, with the same bits each time.

    Nothing is as large as the weight, and the host waits for nothing.

    :param weight: ``[V, H]``.
    :param ids: ``[T]``, int64.
    :param grad: ``[T, H]``.
    """
    main: Tensor = weight.main_grad  # type: ignore[attr-defined]  # Megatron's, which torch does not declare
    if vars(weight).pop(FIRST, False):
        main.zero_()
    for own, rows in zip(torch.split(ids, ROWS), torch.split(grad, ROWS), strict=True):
        main.index_add_(0, own, _sums_by_id(own, rows.to(main.dtype), len(main)))


def _sums_by_id(ids: Tensor, rows: Tensor, count: int) -> Tensor:
    """Return at one of the places of each id the sum of its rows, and zeros at the others, ``[T, H]``.

    Torch's gradient of an embedding adds rows in a fixed order. Here it is that of an embedding of ``T``
    rows, in which a token has the place of its id. Zeros may then be added to a row in any order.
    """
    places = torch.empty(count, dtype=torch.int64, device=ids.device)
    places[ids] = torch.arange(len(ids), device=ids.device)  # any of those of an id will do
    sums: Tensor = torch.ops.aten.embedding_dense_backward(rows, places[ids], len(ids), -1, False)
    return sums


def handed_back(weight: Tensor) -> Tensor:
    """Return autograd's placeholder for a weight whose gradient is in its ``main_grad``.

    Megatron's hook on the weight starts the reduction of a bucket that is complete. It wants a gradient to be
    there, on the thread of the device, and leaves it alone because of the mark. A sparse one has no memory,
    and adds nothing to that of an embedding that shares the weight.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron's, which torch does not declare
    return torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device, layout=torch.sparse_coo)


def add_product(out: Tensor, a: Tensor, b: Tensor, *, beta: int = 1) -> None:
    """Write ``beta * out + a @ b`` to ``out``, which is of the dtype of ``a`` or wider.

    :param beta: 0 or 1.
    """
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif _widens(a.dtype, a.device):
        torch.addmm(out, a, b, beta=beta, out_dtype=out.dtype, out=out)
    elif beta:
        out.add_(a @ b)
    else:
        out.copy_(a @ b)


@functools.cache
def _widens(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the device adds a product of this dtype to float32 without rounding it first."""
    a = torch.ones(16, 16, dtype=dtype, device=device)
    out = torch.ones(16, 16, device=device)
    try:
        torch.addmm(out, a, a, out_dtype=out.dtype, out=out)
    except RuntimeError:
        return False
    return True
