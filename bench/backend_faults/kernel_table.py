"""How a fault gets into one op of a backend's kernel table."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from anygauge_hooks import kernels as contract
from anygauge_hooks.kernels import KernelImpl
from backend_faults.fault import Fault, reached

Body = Callable[[Callable[..., Any], SimpleNamespace], Any]
"""``body(call, a)``: the faulty kernel, where ``call(**changed)`` runs the vendor's own with the given
arguments but for those, and ``a`` has what was given."""


def op_fault(op: str, name: str, statement: str, body: Body, **declared: Any) -> Fault:
    """Return a fault of an op.

    :param declared: Fields of ``KernelImpl`` that the vendor declares wrongly.
    """
    return Fault(f"{op}.{name}", statement, "register_kernels", partial(_change, op, body, declared))


add_rms_norm = partial(op_fault, "add_rms_norm")
causal_conv1d = partial(op_fault, "causal_conv1d")
gated_delta_rule = partial(op_fault, "gated_delta_rule")
grouped_matmul = partial(op_fault, "grouped_matmul")
layer_norm = partial(op_fault, "layer_norm")
linear_logprob = partial(op_fault, "linear_logprob")
qk_norm_rotary = partial(op_fault, "qk_norm_rotary")
rms_norm = partial(op_fault, "rms_norm")
rotary_embedding = partial(op_fault, "rotary_embedding")
swiglu = partial(op_fault, "swiglu")
token_permute = partial(op_fault, "token_permute")
token_unpermute = partial(op_fault, "token_unpermute")
topk_router = partial(op_fault, "topk_router")
varlen_attention = partial(op_fault, "varlen_attention")
vocab_parallel_logprob = partial(op_fault, "vocab_parallel_logprob")
"""Faults of each op."""


def _change(op: str, body: Body, declared: Any, answers: Sequence[Any], _: Any) -> list[list[KernelImpl]]:
    kernels = [list(answer) for answer in answers]
    if not any(kernel.op == op for answer in kernels for kernel in answer):
        kernels.append([_usual(op)])
    return [[_broken(k, body, declared) if k.op == op else k for k in answer] for answer in kernels]


def _usual(op: str) -> KernelImpl:
    """Return what serves an op without a kernel of the backend, as a kernel of the backend."""
    from anygauge.kernels import linear_logprob, reference

    own = linear_logprob if op == "linear_logprob" else reference
    return KernelImpl(op=op, fn=getattr(own, op), source="backend_faults", priority=1)


def _broken(kernel: KernelImpl, body: Body, declared: Any) -> KernelImpl:
    if kernel.tiles:
        from anygauge.kernels.linear_logprob import linear_logprob

        kernel = replace(kernel, fn=partial(linear_logprob, math=kernel.fn()), tiles=False)
    return replace(kernel, fn=faulty(kernel.op, kernel.fn, body), **declared)


def faulty(op: str, function: Callable[..., Any], body: Body) -> Callable[..., Any]:
    """Return an op's function with a fault."""
    protocol = getattr(contract, "".join(word.capitalize() for word in op.split("_")))
    signature = inspect.signature(partial(protocol.__call__, None))

    @wraps(protocol.__call__)
    def broken(*given: Any, **named: Any) -> Any:
        reached()
        bound = signature.bind(*given, **named)
        bound.apply_defaults()

        def call(**changed: Any) -> Any:
            again = inspect.BoundArguments(signature, {**bound.arguments, **changed})  # type: ignore[arg-type]
            return function(*again.args, **again.kwargs)

        return body(call, SimpleNamespace(**bound.arguments))

    broken.__signature__ = signature  # type: ignore[attr-defined]
    return broken
