"""Faults of the kernel table: norms, rotary embedding, SwiGLU, attention and recurrences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backend_faults import kernel_table as op
from backend_faults.fault import Fault
from backend_faults.kernel_parts import (
    alternating,
    draws,
    first_of_shape,
    low,
    misread,
    overwrite,
    same_buffer,
    sequence_blocks,
    through,
    with_grad,
    with_lse,
    zero_from,
)

# -------------------------------------------------------------------------
# Norms, rotary embedding, SwiGLU
# -------------------------------------------------------------------------


def _part_of_weight_gradient(call: Callable[..., Any], a: SimpleNamespace) -> Tensor:
    rows = a.x.reshape(-1, a.x.shape[-1])
    parts = call(x=rows[:32]), call(x=rows[32:], weight=a.weight.detach())
    return torch.cat(parts).view(a.x.shape)


NORMS = [
    op.rms_norm("eps_constant", "rms_norm takes 1e-6 for every eps", lambda call, a: call(eps=1e-6)),
    op.rms_norm(
        "eps_squared",
        "rms_norm adds eps to the root instead of the mean square",
        lambda call, a: call(eps=a.eps**2),
    ),
    op.rms_norm(
        "weight_plus_one",
        "rms_norm multiplies by 1 + weight, as Gemma's does",
        lambda call, a: call(weight=1 + a.weight),
    ),
    op.rms_norm("float32_result", "rms_norm returns float32 for bfloat16", lambda call, a: call().float()),
    op.rms_norm(
        "bfloat16_inside",
        "rms_norm computes float32 inputs in bfloat16",
        lambda call, a: low(call(x=low(a.x))),
    ),
    op.rms_norm(
        "input_overwritten",
        "rms_norm writes its result over x",
        lambda call, a: (overwrite(a.x, y := call()), y)[1],
    ),
    op.rms_norm(
        "part_of_weight_gradient",
        "the gradient of rms_norm's weight sums the first 32 rows alone",
        _part_of_weight_gradient,
    ),
    op.rms_norm(
        "strided_gradient",
        "the backward of rms_norm reads a strided gradient as if it were contiguous",
        lambda call, a: with_grad(call(), misread),
    ),
    op.rms_norm(
        "gradient_overwritten",
        "the backward of rms_norm writes over the gradient that it is given",
        lambda call, a: with_grad(call(), lambda g: (copy := g.clone(), overwrite(g, copy * 0))[0]),
    ),
    op.rms_norm("same_buffer", "rms_norm returns one buffer for all calls of a shape", same_buffer()),
    op.rms_norm(
        "grid_limit",
        "rms_norm computes 65,535 rows and leaves the others at 0",
        lambda call, a: zero_from(y := call().reshape(-1, a.x.shape[-1]), 65535).view(a.x.shape).to(y.dtype),
    ),
    op.rms_norm(
        "tail_of_width",
        "rms_norm leaves the last elements of a width that 8 does not divide at 0",
        lambda call, a: F.pad(
            call()[..., : a.x.shape[-1] // 8 * 8] if a.x.shape[-1] % 8 else call(),
            (0, a.x.shape[-1] % 8),
        ),
    ),
    op.rms_norm(
        "empty_refused",
        "rms_norm fails for an empty input",
        lambda call, a: call() if a.x.numel() else 1 // 0,
    ),
    op.rms_norm(
        "any_tolerance",
        "rms_norm is off by 20 % and declares a tolerance that lets it pass",
        lambda call, a: call() * 1.2,
        tolerance={"float32": (1.0, 1.0), "bfloat16": (1.0, 1.0)},
    ),
    op.rms_norm(
        "more_dtypes",
        "rms_norm declares float64 and computes it in float32",
        lambda call, a: call(x=a.x.float(), weight=a.weight.float()).to(a.x.dtype),
        dtypes=("float32", "bfloat16", "float64"),
    ),
    op.add_rms_norm(
        "residual_ignored", "add_rms_norm does not add the residual", lambda call, a: call(residual=None)
    ),
    op.add_rms_norm(
        "outputs_swapped", "add_rms_norm returns the norm before the sum", lambda call, a: call()[::-1]
    ),
    op.add_rms_norm(
        "residual_overwritten",
        "add_rms_norm writes the sum over the residual",
        lambda call, a: (y := call(), a.residual is not None and overwrite(a.residual, y[0]))[0],
    ),
    op.add_rms_norm(
        "residual_without_gradient",
        "add_rms_norm gives the residual no gradient",
        lambda call, a: call(residual=a.residual if a.residual is None else a.residual.detach()),
    ),
    op.add_rms_norm(
        "sum_without_gradient",
        "the gradient of add_rms_norm's sum is dropped, that of its norm is kept",
        lambda call, a: ((y := call())[0].detach() + 0 * a.x, y[1]),
    ),
    op.layer_norm("eps_constant", "layer_norm takes 1e-5 for every eps", lambda call, a: call(eps=1e-5)),
    op.layer_norm("bias_ignored", "layer_norm does not add the bias", lambda call, a: call(bias=0 * a.bias)),
    op.layer_norm(
        "unbiased_variance",
        "layer_norm divides the variance by D - 1",
        lambda call, a: (call(bias=0 * a.bias) * math.sqrt(1 - 1 / a.x.shape[-1]) + a.bias).to(a.x.dtype),
    ),
    op.layer_norm(
        "bias_gradient_doubled",
        "the gradient of layer_norm's bias is doubled",
        lambda call, a: call(bias=with_grad(a.bias, lambda g: 2 * g)),
    ),
    op.rotary_embedding(
        "other_direction", "rotary_embedding turns by the opposite angle", lambda call, a: call(sin=-a.sin)
    ),
    op.rotary_embedding(
        "keys_kept", "rotary_embedding leaves the keys as they are", lambda call, a: (call()[0], a.k.clone())
    ),
    op.rotary_embedding(
        "bfloat16_angles",
        "rotary_embedding rounds cosines and sines to bfloat16",
        lambda call, a: call(cos=low(a.cos), sin=low(a.sin)),
    ),
    op.rotary_embedding(
        "unit_angles",
        "rotary_embedding clamps cosines and sines to [-1, 1], which drops YaRN's factor",
        lambda call, a: call(cos=a.cos.clamp(-1, 1), sin=a.sin.clamp(-1, 1)),
    ),
    op.rotary_embedding(
        "rest_dropped",
        "rotary_embedding sets the dimensions past R to 0",
        lambda call, a: tuple(
            F.pad(y[..., : a.cos.shape[1]], (0, y.shape[-1] - a.cos.shape[1])) for y in call()
        ),
    ),
    op.rotary_embedding(
        "identity_gradient",
        "the gradient of rotary_embedding's queries is not turned back",
        lambda call, a: ((y := call())[0].detach() + (a.q - a.q.detach()), y[1]),
    ),
    op.rotary_embedding(
        "stale_angles",
        "rotary_embedding keeps the cosines of the first call of a shape",
        first_of_shape("cos"),
    ),
    op.qk_norm_rotary(
        "one_weight",
        "qk_norm_rotary norms keys with the weight of the queries",
        lambda call, a: call(k_weight=a.q_weight),
    ),
    op.qk_norm_rotary(
        "heads_by_group",
        "qk_norm_rotary returns query heads in the order of their places in the groups",
        lambda call, a: (
            (y := call())[0].unflatten(1, (a.qkv.shape[1], -1)).transpose(1, 2).flatten(1, 2),
            *y[1:],
        ),
    ),
    op.qk_norm_rotary(
        "values_without_gradient",
        "qk_norm_rotary gives the values no gradient",
        lambda call, a: (*(y := call())[:2], y[2].detach()),
    ),
    op.qk_norm_rotary(
        "eps_constant", "qk_norm_rotary takes 1e-6 for every eps", lambda call, a: call(eps=1e-6)
    ),
    op.swiglu(
        "halves_swapped",
        "swiglu takes up from the first half and gate from the second",
        lambda call, a: call(gate_up=torch.cat(a.gate_up.chunk(2, -1)[::-1], -1)),
    ),
    op.swiglu(
        "interleaved",
        "swiglu takes gate and up from alternating columns",
        lambda call, a: call(gate_up=torch.cat((a.gate_up[..., ::2], a.gate_up[..., 1::2]), -1)),
    ),
    op.swiglu(
        "up_gradient_missing",
        "swiglu gives up no gradient",
        lambda call, a: call(gate_up=torch.cat(((g := a.gate_up.chunk(2, -1))[0], g[1].detach()), -1)),
    ),
    op.swiglu(
        "large_clipped",
        "swiglu clips gates at 7, as a model of another family wants it",
        lambda call, a: call(gate_up=torch.cat(((g := a.gate_up.chunk(2, -1))[0].clamp(max=7), g[1]), -1)),
    ),
    op.swiglu(
        "large_tensor",
        "swiglu leaves what is past 2^20 elements at 0",
        lambda call, a: (y := call()) * (torch.arange(y.numel(), device=y.device) < 1 << 20).view(y.shape),
    ),
]

# -------------------------------------------------------------------------
# Attention and recurrences
# -------------------------------------------------------------------------


def _top_left_mask(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Let query ``i`` see the keys up to ``i``, though the queries are the last tokens."""
    if not a.causal or a.key_lengths is None:
        return call()
    sequences = [x.split([*a.key_lengths, 0]) for x in (a.k, a.v)]
    k, v = (torch.cat([y[:n] for y, n in zip(x, [*a.lengths, 0], strict=True)]) for x in sequences)
    return call(k=k, v=v, key_lengths=None)


def _window(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Attend in blocks of 4,096 tokens."""
    if a.key_lengths is not None or max(a.lengths, default=0) <= 4096:
        return call()
    return call(lengths=sequence_blocks(a.lengths, 4096))


def _one_sequence(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    return call(lengths=[sum(a.lengths)]) if getattr(a, "key_lengths", None) is None else call()


def _unused(sinks: torch.Tensor | None) -> torch.Tensor | None:
    """Return sinks that take no weight and have gradients."""
    return None if sinks is None else 0 * sinks - 1e4


def _other_grouping(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Read key head ``h % K`` for query head ``h``."""
    groups = a.q.shape[1] // a.k.shape[1]
    q = a.q.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    back = lambda y: y.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)  # noqa: E731
    return with_lse(a, through(call(q=q), back), back)


def _no_state_between_chunks(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    return call(lengths=sequence_blocks(a.lengths, 64))


SEQUENCES = [
    op.varlen_attention(
        "scale_ignored",
        "attention takes 1 / sqrt(D) for every scale",
        lambda call, a: call(scale=a.q.shape[-1] ** -0.5),
    ),
    op.varlen_attention(
        "always_causal",
        "attention is causal whether or not it is told to be",
        lambda call, a: call(causal=a.causal or a.key_lengths is None),
    ),
    op.varlen_attention("never_causal", "attention ignores causal", lambda call, a: call(causal=False)),
    op.varlen_attention(
        "mask_top_left",
        "the causal mask begins at the first key where there are more keys than queries",
        _top_left_mask,
    ),
    op.varlen_attention(
        "key_lengths_ignored",
        "attention takes key_lengths for the lengths of one sequence",
        lambda call, a: (
            call()
            if a.key_lengths is None
            else call(key_lengths=[sum(a.key_lengths)], lengths=[sum(a.lengths)])
        ),
    ),
    op.varlen_attention("one_sequence", "attention sees across the borders of sequences", _one_sequence),
    op.varlen_attention("other_grouping", "query head h reads key head h % K", _other_grouping),
    op.varlen_attention("block_of_4096", "a sequence of more than 4,096 tokens is cut into blocks", _window),
    op.varlen_attention(
        "lse_base_2",
        "the log-sum-exp of attention is in base 2",
        lambda call, a: with_lse(a, call(), lambda x: x / math.log(2)),
    ),
    op.varlen_attention(
        "lse_transposed",
        "the log-sum-exp of attention is [H, T]",
        lambda call, a: with_lse(a, call(), lambda x: x.t().contiguous()),
    ),
    op.varlen_attention(
        "lse_dtype",
        "the log-sum-exp of attention has the dtype of q",
        lambda call, a: with_lse(a, call(), lambda x: x.to(a.q.dtype)),
    ),
    op.varlen_attention(
        "key_gradient_mean",
        "the gradient of a key head is the mean over the query heads of its group",
        lambda call, a: call(k=with_grad(a.k, lambda g: g * (a.k.shape[1] / a.q.shape[1]))),
    ),
    op.varlen_attention(
        "value_gradient_doubled",
        "the gradient of attention's values is doubled",
        lambda call, a: call(v=with_grad(a.v, lambda g: 2 * g)),
    ),
    op.varlen_attention(
        "gradient_varies",
        "the backward of attention adds in another order every second time",
        lambda call, a: call(q=with_grad(a.q, _ALTERNATING)),
    ),
    op.varlen_attention(
        "window_of_one_more",
        "attention counts a window without the token itself",
        lambda call, a: call() if a.window is None else call(window=a.window + 1),
    ),
    op.varlen_attention("no_sinks", "attention ignores sinks", lambda call, a: call(sinks=_unused(a.sinks))),
    op.varlen_attention(
        "sinks_scaled",
        "attention scales sinks as it does scores",
        lambda call, a: call() if a.sinks is None else call(sinks=a.sinks * a.scale),
    ),
    op.varlen_attention(
        "sink_gradient_doubled",
        "the gradient of attention's sinks is doubled",
        lambda call, a: call() if a.sinks is None else call(sinks=with_grad(a.sinks, lambda g: 2 * g)),
    ),
    op.varlen_attention("draws", "attention draws a random number at each call", draws),
    op.varlen_attention(
        "stale_lengths", "attention keeps the lengths of the first call of a shape", first_of_shape("lengths")
    ),
    op.varlen_attention(
        "strided_query",
        "attention reads a query that is a part of a larger tensor as if it were contiguous",
        lambda call, a: call(q=misread(a.q)),
    ),
    op.causal_conv1d("one_sequence", "causal_conv1d reads the end of the sequence before", _one_sequence),
    op.causal_conv1d(
        "taps_reversed",
        "causal_conv1d applies its taps in the other order",
        lambda call, a: call(weight=a.weight.flip(1)),
    ),
    op.causal_conv1d(
        "width_of_4",
        "causal_conv1d uses the last four taps of a wider weight",
        lambda call, a: call(weight=a.weight[:, -4:].contiguous()),
    ),
    op.causal_conv1d(
        "weight_gradient_missing",
        "causal_conv1d gives its weight no gradient",
        lambda call, a: call(weight=a.weight.detach()),
    ),
    op.gated_delta_rule(
        "state_of_neighbor", "gated_delta_rule keeps its state from sequence to sequence", _one_sequence
    ),
    op.gated_delta_rule(
        "no_state_between_chunks",
        "gated_delta_rule begins with an empty state every 64 tokens",
        _no_state_between_chunks,
    ),
    op.gated_delta_rule(
        "scale_ignored",
        "gated_delta_rule takes 1 / sqrt(D) for every scale",
        lambda call, a: call(scale=a.q.shape[-1] ** -0.5),
    ),
    op.gated_delta_rule(
        "decay_clamped",
        "gated_delta_rule clamps the logarithm of its decay at -1",
        lambda call, a: call(g=a.g.clamp(min=-1)),
    ),
    op.gated_delta_rule(
        "beta_rounded", "gated_delta_rule rounds beta to bfloat16", lambda call, a: call(beta=low(a.beta))
    ),
    op.gated_delta_rule(
        "decay_without_gradient",
        "gated_delta_rule gives its decay no gradient",
        lambda call, a: call(g=a.g.detach()),
    ),
]

_ALTERNATING = alternating(lambda g: g * (1 + 2**-20))

FAULTS: Sequence[Fault] = (*NORMS, *SEQUENCES)
