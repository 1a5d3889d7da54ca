"""Parts of faults of ops: changes of tensors, of gradients and of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from backend_faults.kernel_table import Body


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0]), None


def with_grad(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``x``, whose gradient is changed on its way back."""
    return _Backward.apply(x, change) if x.requires_grad else x


def through(x: Any, change: Callable[[Any], Any]) -> Any:
    """Change a result, or the first of several."""
    return (change(x[0]), *x[1:]) if isinstance(x, tuple) else change(x)


def overwrite(x: Tensor, y: Tensor) -> None:
    """Write to the memory of ``x`` behind autograd's back."""
    if 0 not in x.stride():
        x.data.copy_(y.detach())


def misread(grad: Tensor) -> Tensor:
    """Return a gradient as a kernel reads it that takes every tensor to be contiguous."""
    return grad if grad.is_contiguous() else grad.contiguous().flatten().roll(1).view(grad.shape)


def low(x: Tensor) -> Tensor:
    """Round to bfloat16, in the dtype of ``x``."""
    return x.bfloat16().to(x.dtype)


def zero_from(x: Tensor, row: int) -> Tensor:
    """Return ``x`` with zeros in the rows from one on."""
    mask = torch.arange(x.shape[0], device=x.device) < row
    return x * mask.view(-1, *(1,) * (x.dim() - 1)).to(x.dtype)


def same_buffer() -> Body:
    """Return every result of a shape in the same memory."""
    buffers: dict[Any, Tensor] = {}

    def keep(y: Tensor) -> Tensor:
        buffer = buffers.setdefault((y.shape, y.dtype), torch.empty_like(y.detach()))
        buffer.copy_(y.detach())
        y.data = buffer
        return y

    return lambda call, a: through(call(), keep)


def first_of_shape(name: str) -> Body:
    """Use at every later call what an argument was at the first call of a shape."""
    seen: dict[Any, Any] = {}

    def body(call: Callable[..., Any], a: SimpleNamespace) -> Any:
        given = next(x for x in vars(a).values() if isinstance(x, Tensor))
        first = seen.setdefault((given.shape, given.dtype), value := getattr(a, name))
        return call(**{name: first}) if _size(first) == _size(value) else call()

    return body


def _size(x: Any) -> Any:
    return x.shape if isinstance(x, Tensor) else (len(x), sum(x))


def noisy(size: float) -> Callable[[Tensor], Tensor]:
    """Multiply by numbers around 1 that differ each time, from a generator of its own."""
    generators: dict[Any, torch.Generator] = {}

    def change(x: Tensor) -> Tensor:
        generator = generators.setdefault(x.device, torch.Generator(x.device))
        noise = torch.rand(x.shape, generator=generator, device=x.device)
        return (x * (1 + size * (noise - 0.5))).to(x.dtype)

    return change


def alternating(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Change every second tensor."""
    count = iter(range(1 << 60))
    return lambda x: change(x) if next(count) % 2 else x


def draws(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Draw a random number, as a dropout with probability 0 does."""
    torch.rand(1, device=next(x for x in vars(a).values() if isinstance(x, Tensor)).device)
    return call()


def with_lse(a: SimpleNamespace, result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change the log-sum-exp, where it was asked for."""
    return (result[0], change(result[1])) if a.return_lse else result


def sequence_blocks(lengths: Sequence[int], size: int) -> list[int]:
    """Return the lengths of the blocks that sequences are cut into."""
    return [min(size, n - start) for n in lengths for start in range(0, max(n, 1), size)]
