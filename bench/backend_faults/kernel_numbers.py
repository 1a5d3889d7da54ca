"""Faults of ops in dtypes, rounding and gradients: what is nearly right, or right in one direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from backend_faults import kernel_table as op
from backend_faults.fault import Fault
from backend_faults.kernel_parts import alternating, low, noisy, overwrite, through, with_grad
from backend_faults.kernel_table import Body, op_fault

# -------------------------------------------------------------------------
# Rounding
# -------------------------------------------------------------------------


def _bfloat16_squares(call: Callable[..., Any], a: SimpleNamespace) -> Tensor:
    exact, rough = (x.square().float().mean(-1, keepdim=True) for x in (a.x.float(), a.x.bfloat16()))
    return (call().float() * ((exact + a.eps) / (rough + a.eps)).sqrt()).to(a.x.dtype)


def _sum_not_rounded(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    if a.residual is None or a.x.dtype == torch.float32:
        return call()
    wide = call(x=a.x.float(), weight=a.weight.float(), residual=a.residual.float())
    return call()[0], wide[1].to(a.x.dtype)


_NOISE = noisy(2**-12)
_GRADIENT_NOISE = noisy(3e-6)
_ULP = alternating(lambda g: g * (1 + 2**-7) if g.dtype == torch.bfloat16 else g)

ROUNDING = [
    op.rms_norm("float64_result", "rms_norm returns float64", lambda call, a: call().double()),
    op.rms_norm("bfloat16_squares", "rms_norm squares in bfloat16", _bfloat16_squares),
    op.rms_norm(
        "large_tensor",
        "rms_norm leaves what is past 2^20 elements at 0",
        lambda call, a: (y := call()) * (torch.arange(y.numel(), device=y.device) < 1 << 20).view(y.shape),
    ),
    op.add_rms_norm("sum_not_rounded", "add_rms_norm norms the sum before it is rounded", _sum_not_rounded),
    op.varlen_attention(
        "noisy", "attention differs by 1e-4 from call to call", lambda call, a: through(call(), _NOISE)
    ),
    op.varlen_attention(
        "noisy_gradient",
        "the gradient of attention differs by 3e-6 from call to call",
        lambda call, a: call(q=with_grad(a.q, _GRADIENT_NOISE)),
    ),
    op.varlen_attention(
        "gradient_varies_in_bfloat16",
        "every second gradient of attention in bfloat16 differs by its last bit",
        lambda call, a: call(k=with_grad(a.k, _ULP)),
    ),
    op.grouped_matmul(
        "bfloat16_products",
        "grouped_matmul multiplies float32 in bfloat16",
        lambda call, a: call(x=low(a.x), weight=low(a.weight)),
    ),
    op.gated_delta_rule(
        "decay_and_beta_rounded",
        "gated_delta_rule rounds decay and beta to bfloat16",
        lambda call, a: call(g=low(a.g), beta=low(a.beta)),
    ),
    op.linear_logprob(
        "bfloat16_logits",
        "linear_logprob rounds float32 hidden states to bfloat16",
        lambda call, a: call(
            hidden=low(a.hidden),
        ),
    ),
]


# -------------------------------------------------------------------------
# Gradients
# -------------------------------------------------------------------------


def _zero(gradient: Tensor) -> Tensor:
    return torch.zeros_like(gradient)


def _frozen(op: str, given: str) -> Fault:
    """Return a fault of a backward that returns early where the weight is frozen."""

    def body(call: Callable[..., Any], a: SimpleNamespace) -> Any:
        x = getattr(a, given)
        return call() if a.weight.requires_grad else call(**{given: with_grad(x, _zero)})

    return op_fault(
        op, "frozen_weight", f"{op} gives {given} a zero gradient where its weight is frozen", body
    )


def _first_gradient(output: Tensor) -> Tensor:
    """Take the first element of the gradient for all: a loss that is a mean has one."""
    return with_grad(output, lambda g: g.flatten()[:1].expand(g.numel()).reshape(g.shape) if g.numel() else g)


def _written_in_backward(name: str) -> Body:
    """Write the gradient of a tensor over it."""

    def body(call: Callable[..., Any], a: SimpleNamespace) -> Any:
        x = getattr(a, name)

        def written(gradient: Tensor) -> Tensor:
            overwrite(x, gradient)
            return gradient

        return call(**{name: with_grad(x, written)})

    return body


def _detached(name: str) -> Body:
    return lambda call, a: call(**{name: with_grad(getattr(a, name), _zero)})


GRADIENTS = [
    op.rms_norm("weight_gradient_missing", "rms_norm gives its weight a zero gradient", _detached("weight")),
    op.grouped_matmul(
        "weight_gradient_missing", "grouped_matmul gives its weight a zero gradient", _detached("weight")
    ),
    op.varlen_attention(
        "value_gradient_missing", "attention gives the values a zero gradient", _detached("v")
    ),
    op.linear_logprob(
        "hidden_gradient_missing",
        "linear_logprob gives the hidden states a zero gradient",
        _detached("hidden"),
    ),
    _frozen("rms_norm", "x"),
    _frozen("layer_norm", "x"),
    _frozen("linear_logprob", "hidden"),
    _frozen("grouped_matmul", "x"),
    op.grouped_matmul(
        "weight_gradient_with_input",
        "grouped_matmul gives its weight a zero gradient where its input needs none",
        lambda call, a: call() if a.x.requires_grad else call(weight=with_grad(a.weight, _zero)),
    ),
    op.vocab_parallel_logprob(
        "one_gradient",
        "the backward of vocab_parallel_logprob takes the first token's gradient for all tokens",
        lambda call, a: through(call(), _first_gradient),
    ),
    op.linear_logprob(
        "one_gradient",
        "the backward of linear_logprob takes the first token's gradient for all tokens",
        lambda call, a: through(call(), _first_gradient),
    ),
    op.swiglu(
        "written_in_backward",
        "the backward of swiglu writes its gradient over gate_up",
        _written_in_backward("gate_up"),
    ),
    op.rotary_embedding(
        "written_in_backward",
        "the backward of rotary_embedding writes its gradient over q",
        _written_in_backward("q"),
    ),
    op.token_unpermute(
        "first_copy_gradient",
        "token_unpermute gives a gradient to the first copy of each token alone",
        lambda call, a: call(permuted=with_grad(a.permuted, lambda g: _first_copies(g, a.rows))),
    ),
]


def _first_copies(gradient: Tensor, rows: Tensor) -> Tensor:
    first = torch.zeros(len(gradient), 1, dtype=gradient.dtype, device=gradient.device)
    first[rows[:, 0].long()] = 1
    return gradient * first


FAULTS: Sequence[Fault] = (*ROUNDING, *GRADIENTS)
