"""Calls of kernels: recorded while one side computes, and repeated with the kernels of either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from anygauge.kernels import reference
from anygauge.kernels.observer import ResolvedKernel
from anygauge.testing.conformance.kernel_checks import cotangents
from anygauge.testing.conformance.tolerances import tolerance_of
from anygauge.testing.model_numbers import FLOOR, largest
from anygauge_hooks.kernels import KernelImpl, KernelOp

__all__ = ["CallRecorder", "KernelCall", "Outcome", "errors_of", "limit_of", "repeat_call"]

_FLOAT32 = frozenset({"cos", "sin", "g", "beta", "expert_bias", "probs", "logits"})
"""Arguments that are float32, or may be, whatever the dtype of a run is."""

Facts = tuple[tuple[str, Any], ...]
Key = tuple[KernelOp, str, Facts]


class Argument(NamedTuple):
    """A tensor that an op was called with."""

    values: Tensor
    """On the host."""
    wants_gradient: bool
    is_on_host: bool
    """Whether the op got it there, beside others on a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """One call of an op."""

    op: KernelOp
    dtype: str
    run_dtype: str
    """Dtype of the side that made it: some ops compute in float32 in every run."""
    facts: Facts
    layer: int
    arguments: Mapping[str, Any]
    """Values by name; tensors as :class:`Argument`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a repeated call, on the host."""

    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor]
    """Those of the arguments that want one, for the same random gradients of the outputs on every side."""


@dataclass
class CallRecorder:
    """An observer of kernels that writes calls to files while it is on."""

    directory: Path
    run_dtype: str
    resolved: dict[Key, ResolvedKernel] = field(default_factory=dict)
    is_on: bool = False
    layer: int = -1
    """Number of the decoder layer that runs."""
    skipped: set[str] = field(default_factory=set)
    """Ops that were called together with other ranks, which cannot be repeated alone."""
    _count: int = 0

    def __call__(self, resolved: ResolvedKernel) -> Callable[..., Any]:
        """Return the kernel of a module with the recording around it."""
        key = (resolved.op, resolved.dtype, tuple(sorted(resolved.facts.items())))
        self.resolved[key] = resolved
        names = signature(getattr(reference, resolved.op))

        def recorded_call(*args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                self._write(key, names.bind(*args, **kwargs).arguments)
            return resolved.fn(*args, **kwargs)

        return recorded_call

    def files(self) -> Sequence[Path]:
        """Return the recorded calls, in order."""
        return sorted(self.directory.glob("call-*.pt"))

    def find(self, op: KernelOp, dtype: str, facts: Facts) -> ResolvedKernel | None:
        """Return the kernel that the modules of this process have; ``None`` if none of them has one."""
        return self.resolved.get((op, dtype, facts))

    def _write(self, key: Key, arguments: Mapping[str, Any]) -> None:
        if any(isinstance(each, ProcessGroup) and each.size() > 1 for each in arguments.values()):
            self.skipped.add(key[0])
            return
        op, dtype, facts = key
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        is_mixed = len({tensor.device for tensor in tensors}) > 1
        kept = {name: _kept(value, is_mixed) for name, value in arguments.items()}
        call = KernelCall(
            op=op, dtype=dtype, run_dtype=self.run_dtype, facts=facts, layer=self.layer, arguments=kept
        )
        torch.save(call, self.directory / f"call-{self._count:06}.pt")
        self._count += 1


def _kept(value: Any, is_mixed: bool) -> Any:
    if isinstance(value, ProcessGroup):
        return None  # of this rank alone
    if not isinstance(value, Tensor):
        return value
    is_on_host = is_mixed and value.device.type == "cpu"
    return Argument(value.detach().to("cpu", copy=True), value.requires_grad, is_on_host)


def repeat_call(fn: Callable[..., Any], call: KernelCall, dtype: str, device: torch.device) -> Outcome:
    """Call a kernel with recorded arguments, forward and backward.

    :param dtype: Dtype of the activations, which may differ from that of the record.
    """
    tensors: dict[str, Tensor] = {}
    given: dict[str, Any] = {}
    for name, value in call.arguments.items():
        given[name] = value
        if isinstance(value, Argument):
            given[name] = tensors[name] = _placed(name, value, call.dtype, dtype, device)
    bound = signature(getattr(reference, call.op)).bind_partial()
    bound.arguments.update(given)
    outputs = _settled(call.op, fn(*bound.args, **bound.kwargs), tensors)
    leaves = [tensor for tensor in tensors.values() if tensor.requires_grad]
    reached = [output for output in outputs if output.requires_grad]
    gradients: Sequence[Tensor] = ()
    if reached and leaves:
        gradients = torch.autograd.grad(reached, leaves, cotangents(reached), materialize_grads=True)
    return Outcome([each.detach().cpu() for each in outputs], [each.cpu() for each in gradients])


def _placed(name: str, argument: Argument, recorded: str, dtype: str, device: torch.device) -> Tensor:
    values = argument.values
    is_activation = values.dtype == getattr(torch, recorded) and name not in _FLOAT32
    kind = getattr(torch, dtype) if is_activation else values.dtype
    # A copy on the host too: an op may overwrite what it is given.
    placed = values.to("cpu" if argument.is_on_host else device, kind, copy=True)
    return placed.requires_grad_(argument.wants_gradient)


def _settled(op: KernelOp, result: Any, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs in an order that the op defines."""
    if op == "topk_router":  # in which order the chosen experts come is not said
        weights, experts = result
        return (torch.zeros_like(tensors["logits"], dtype=weights.dtype).scatter(1, experts, weights),)
    return result if isinstance(result, tuple) else (result,)


def limit_of(kernel: KernelImpl, dtype: str) -> float:
    """Return how far a kernel may be from the exact result; two may be apart by the sum of theirs."""
    return sum(tolerance_of(kernel, dtype))


def errors_of(actual: Outcome, expected: Outcome) -> Iterator[float | None]:
    """Yield the largest error of the outputs, and that of the gradients; ``None`` without any."""
    for ours, theirs in ((actual.outputs, expected.outputs), (actual.gradients, expected.gradients)):
        beside = max((_size(each) for each in theirs), default=0.0)
        pairs = zip(ours, theirs, strict=True)
        yield max((_error(one, other, beside) for one, other in pairs), default=None)


def _error(actual: Tensor, expected: Tensor, beside: float) -> float:
    """Return the largest difference relative to the largest value.

    :param beside: The largest value of the tensors that come with it: one that vanishes beside them, such as
        the gradient of a query that sees one key, is as exact as they are.
    """
    if actual.shape != expected.shape:
        return torch.inf
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual.long(), expected.long()) else torch.inf
    if not expected.numel():
        return 0.0
    apart = torch.where(actual == expected, 0.0, actual.double() - expected.double()).abs()
    return largest(apart) / (max(_size(expected), FLOOR * beside) or 1.0)


def _size(tensor: Tensor) -> float:
    if not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return float(tensor.double().abs().max().nan_to_num(0.0))
