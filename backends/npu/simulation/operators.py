"""Host versions of torch-npu's fused operators, for the **simulated** device.

Written from the operators' documentation (``torch_npu/_op_plugin_docs.py`` in the wheel, and CANN's of
aclnn), not from the kernels that call them. What it demands of a call is asserted: a wrong call fails here.
They show that a call means what its caller thinks. They never show an Ascend's numerics.

Each has the arguments of its operator's schema, takes host tensors and returns host tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from simulation.aten import gradients

__all__ = ["OPERATORS"]

OPERATORS: dict[str, Callable[..., Any]] = {}
"""Operators by name in the ``npu::`` namespace."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
UNLIMITED = 2147483647


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add a function to the table under its name."""
    OPERATORS[function.__name__] = function
    return function


def _floats(*tensors: Tensor) -> None:
    """Demand one floating dtype that the hardware has."""
    kinds = {x.dtype for x in tensors}
    assert len(kinds) == 1, f"dtypes differ: {kinds}"
    assert kinds <= set(FLOATS), f"not a dtype of the hardware: {kinds}"


def _dense(*tensors: Tensor) -> None:
    """Demand contiguous memory where the documentation does not say that strides are taken."""
    assert all(x.is_contiguous() for x in tensors), [x.stride() for x in tensors]


# -------------------------------------------------------------------------
# Norm and activation
# -------------------------------------------------------------------------


@_operator
def npu_rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return the normalized input, and one over the root of the mean square, in float32."""
    _floats(input, gamma)
    _dense(input, gamma)
    assert 2 <= input.dim() <= 8, input.shape
    assert gamma.shape == input.shape[-1:], (gamma.shape, input.shape)
    assert input.numel(), "no empty tensor"
    scale = (input.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (input.float() * scale * gamma.float()).to(input.dtype), scale


@_operator
def npu_rms_norm_backward(dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and gamma, the second in float32."""
    _floats(dy, input, gamma)
    assert rstd.dtype == torch.float32
    assert rstd.shape == (*input.shape[:-1], 1), rstd.shape
    normed = input.float() * rstd
    weighted = dy.float() * gamma.float()
    projection = (weighted * normed).mean(-1, keepdim=True)
    dgamma = (dy.float() * normed).flatten(0, -2).sum(0)
    return ((weighted - normed * projection) * rstd).to(input.dtype), dgamma


def _swiglu(x: Tensor, dim: int) -> Tensor:
    first, second = x.float().chunk(2, dim)
    return first * torch.sigmoid(first) * second


@_operator
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """Return ``swish`` of the first half times the second."""
    _floats(input)
    _dense(input)
    assert 1 <= input.dim() <= 8, input.shape
    assert input.shape[dim] % 2 == 0, input.shape
    assert input.numel(), "no empty tensor"
    return _swiglu(input, dim).to(input.dtype)


@_operator
def npu_swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    """Return the gradient of the input."""
    _floats(grad_output, input)
    (grad,) = gradients(lambda x: _swiglu(x, dim), [input.float()], grad_output.float())
    return grad.to(input.dtype)


# -------------------------------------------------------------------------
# Rotary embedding
# -------------------------------------------------------------------------


@_operator
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return ``r1 * input + r2 * turned(input)`` for a 4-dimensional input."""
    _floats(input, r1, r2)
    _dense(input, r1, r2)
    assert input.dim() == r1.dim() == r2.dim() == 4
    assert rotate is None
    assert r1.shape == r2.shape
    width = input.shape[-1]
    assert width < 896, width
    assert width % 2 == 0, width
    assert r1.shape[-1] == width, (r1.shape, input.shape)
    assert r1.abs().max() <= 1, "outside of [-1, 1]"
    assert r2.abs().max() <= 1, "outside of [-1, 1]"
    _check_rotary_layout(input, r1)
    return (r1.float() * input.float() + r2.float() * _turned(input.float(), rotary_mode)).to(input.dtype)


def _check_rotary_layout(x: Tensor, angles: Tensor) -> None:
    """Demand one of BNSD, BSND and SBND: each with its own axes that the angles may leave out."""
    (a, b, c, _), wanted = x.shape, tuple(angles.shape[:3])
    bnsd = {(1, 1, c), (a, 1, c), (a, b, c)}
    bsnd = {(1, b, 1), (a, b, 1), (a, b, c)}
    sbnd = {(a, 1, 1), (a, b, 1), (a, b, c)}
    limits = []
    if wanted in bnsd:
        limits.append(a < 1000 and b < 1000)
    if wanted in bsnd:
        limits.append(a < 1000 and c < 1000)
    if wanted in sbnd:
        limits.append(b < 1000 and c < 1000)
    assert any(limits), f"no layout fits {tuple(x.shape)} and {tuple(angles.shape)}"


def _turned(x: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    assert mode == "interleave", mode
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


# -------------------------------------------------------------------------
# Attention
# -------------------------------------------------------------------------

COMPRESSED = (2048, 2048)


def _bounds(ends: Sequence[int] | None, tokens: int) -> list[tuple[int, int]]:
    """Return start and end of each sequence, from cumulative lengths that have no 0 in front."""
    assert not isinstance(ends, Tensor), "lengths are host integers"
    assert ends, "varlen attention wants cumulative lengths"
    assert all(type(end) is int for end in ends), ends
    assert 1 <= len(ends) <= 1024, len(ends)
    assert ends[0] > 0, "the lengths start with the first sequence's, not with 0"
    assert all(a <= b for a, b in pairwise(ends)), ends
    assert ends[-1] == tokens, (ends[-1], tokens)
    return list(zip((0, *ends[:-1]), ends, strict=True))


def _check_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, mask: Tensor | None, sparse_mode: int
) -> None:
    """Demand what the documentation says of tensors in the layout TND."""
    _floats(query, key, value)
    assert query.dim() == key.dim() == value.dim() == 3
    assert head_num == query.shape[1], (head_num, query.shape)
    assert 1 <= head_num <= 256, head_num
    assert key.shape[:2] == value.shape[:2], (key.shape, value.shape)
    assert key.shape[1] > 0
    assert head_num % key.shape[1] == 0, (head_num, key.shape)
    assert query.shape[2] == key.shape[2] >= value.shape[2], (query.shape, key.shape, value.shape)
    assert 1 <= query.shape[2] <= 768, query.shape
    assert 1 <= query.shape[0] <= 1 << 20, query.shape
    assert 1 <= key.shape[0] <= 1 << 20, key.shape
    assert sparse_mode in (0, 2, 3, 4), f"sparse mode {sparse_mode} is not simulated"
    if sparse_mode == 0:
        assert mask is None, "a mask of one's own is not simulated"
        return
    assert mask is not None, "without a mask, the sparse mode has no effect"
    assert mask.dtype in (torch.bool, torch.uint8), mask.dtype
    assert mask.shape == COMPRESSED, mask.shape
    # 1 hides; kept is the lower triangle with the diagonal
    assert torch.equal(mask.bool(), torch.ones(COMPRESSED, dtype=torch.bool).triu(1)), (
        "not the compressed mask"
    )


@dataclass(frozen=True)
class _Sparse:
    """Which keys a query of a sequence sees: the mode, and what only mode 4 reads."""

    mode: int
    before: int
    after: int

    def __post_init__(self) -> None:
        assert self.mode != 4 or (self.before >= 0 == self.after), "a band that is no causal window"


def _scores(query: Tensor, key: Tensor, scale: float, sparse: _Sparse) -> Tensor:
    """Return the masked scores ``[N, Sq, Skv]`` of one sequence."""
    shared = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(shared, 1)
    scores = scale * torch.einsum("qnd,knd->nqk", query, keys)
    if not sparse.mode:
        return scores
    num_queries, num_keys = scores.shape[1:]
    assert sparse.mode == 2 or num_queries <= num_keys, "right-down causal wants no more queries than keys"
    corner = 0 if sparse.mode == 2 else num_keys - num_queries
    every = torch.ones(num_queries, num_keys, dtype=torch.bool)
    hidden = every.triu(1 + corner)
    if sparse.mode == 4:
        hidden |= every.tril(corner - sparse.before - 1)
    return scores.masked_fill(hidden, -torch.inf)


def _sinks(sink: Tensor | None, heads: int) -> Tensor:
    """Return the sinks ``[N]`` in float32, minus infinity where there are none."""
    if sink is None:
        return torch.full((heads,), -torch.inf)
    assert sink.dtype == torch.float32, sink.dtype
    assert sink.shape == (heads,), (sink.shape, heads)
    return sink


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    queries: Sequence[tuple[int, int]],
    keys: Sequence[tuple[int, int]],
    sparse: _Sparse,
    sinks: Tensor,
    softmax_layout: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output ``[T, N, D]`` and, of all sequences back to back, the statistics ``[N, S]`` of each.

    In the layout TND the statistics of each are ``[S, N]``.
    """
    outputs: list[Tensor] = []
    statistics: tuple[list[Tensor], list[Tensor]] = ([], [])
    for (a, b), (c, d) in zip(queries, keys, strict=True):
        scores = _scores(query[a:b], key[c:d], scale, sparse)
        values = value[c:d].repeat_interleave(query.shape[1] // value.shape[1], 1)
        peak = torch.maximum(scores.amax(-1), sinks[:, None])
        weights = (scores - peak[..., None]).exp()
        total = weights.sum(-1) + (sinks[:, None] - peak).exp()
        outputs.append(torch.einsum("nqk,knd->qnd", weights / total[..., None], values))
        for target, rows in zip(statistics, (peak, total), strict=True):
            target.append((rows.t() if softmax_layout == "TND" else rows).flatten())
    peaks, totals = map(torch.cat, statistics)
    return torch.cat(outputs), peaks, totals


@_operator
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Return output, largest scores, sums of exponentials, a reserved tensor and three numbers of dropout.

    Statistics have the shape ``[T, N, 8]``, where a number is repeated eight times. They lie so in memory if
    their layout is TND, and else are the ``[N, S, 8]`` of one sequence after the other.
    """
    assert input_layout == "TND", f"layout {input_layout} is not simulated"
    assert (pse, padding_mask, prefix, dropout_mask) == (None,) * 4
    assert keep_prob == 1
    assert softmax_layout in ("", "TND"), softmax_layout
    _check_attention(query, key, value, head_num, atten_mask, sparse_mode)
    queries, keys = _bounds(actual_seq_qlen, len(query)), _bounds(actual_seq_kvlen, len(key))
    wide = query.float(), key.float(), value.float()
    sparse, sinks = _Sparse(sparse_mode, pre_tockens, next_tockens), _sinks(sink, head_num)
    output, peak, total = _attention(*wide, scale, queries, keys, sparse, sinks, softmax_layout)
    peaks, totals = (
        x[:, None].expand(-1, 8).reshape(len(query), head_num, 8).contiguous() for x in (peak, total)
    )
    return output.to(query.dtype), peaks, totals, query.new_empty(0), 0, 0, 0


@_operator
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    """Return the gradients of query, key and value; the bias, which was not given, has none.

    Probabilities come from the statistics that forward kept, as on the device.
    """
    assert input_layout == "TND", f"layout {input_layout} is not simulated"
    assert softmax_max is not None
    assert softmax_sum is not None
    assert attention_in is not None
    assert softmax_layout in ("", "TND"), softmax_layout
    _check_attention(query, key, value, head_num, atten_mask, sparse_mode)
    assert dy.dtype == query.dtype, (dy.dtype, query.dtype)
    assert dy.shape == (*query.shape[:2], value.shape[2]), dy.shape
    queries, keys = _bounds(actual_seq_qlen, len(query)), _bounds(actual_seq_kvlen, len(key))
    q, k, v, output, grad = (x.float() for x in (query, key, value, attention_in, dy))
    shared = head_num // key.shape[1]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    sparse, sinks = _Sparse(sparse_mode, pre_tockens, next_tockens), _sinks(sink, head_num)
    dsink = torch.zeros(head_num)
    delta = (grad * output).sum(-1)
    for (a, b), (c, d) in zip(queries, keys, strict=True):
        flat = (x.reshape(-1, 8)[a * head_num : b * head_num, 0] for x in (softmax_max, softmax_sum))
        peak, total = (
            (x.view(b - a, head_num).t() if softmax_layout == "TND" else x.view(head_num, b - a))[..., None]
            for x in flat
        )
        weights = (_scores(q[a:b], k[c:d], scale_value, sparse) - peak).exp() / total
        dsink -= ((sinks[:, None, None] - peak).exp() / total * delta[a:b].T[..., None]).sum((1, 2))
        values = v[c:d].repeat_interleave(shared, 1)
        inner = torch.einsum("qnd,knd->nqk", grad[a:b], values) - delta[a:b].T[..., None]
        slope = scale_value * weights * inner
        dq[a:b] = torch.einsum("nqk,knd->qnd", slope, k[c:d].repeat_interleave(shared, 1))
        for target, gradient in (
            (dk, torch.einsum("nqk,qnd->knd", slope, q[a:b])),
            (dv, torch.einsum("nqk,qnd->knd", weights, grad[a:b])),
        ):
            target[c:d] = gradient.unflatten(1, (-1, shared)).sum(2)
    grads = dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)
    return *grads, None, dsink if sink is not None else torch.empty(0)


# -------------------------------------------------------------------------
# Experts
# -------------------------------------------------------------------------


@_operator
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    **others: Any,
) -> list[Tensor]:
    """Return the products of one tensor with the weights of its groups, in one tensor."""
    assert len(x) == len(weight) == 1, "several tensors are not simulated"
    assert bias is None
    assert not any(value is not None for value in others.values()), others
    assert act_type == 0
    assert split_item in (2, 3), "one tensor out is 2 or 3"
    assert group_list is not None
    assert group_list.dtype == torch.int64
    assert group_list.dim() == 1
    assert len(group_list) <= 1024
    assert group_list_type in (0, 1), group_list_type
    assert group_list_type == 0 or len(group_list) > 1, "a list of one count is refused"
    (left,), (right,) = x, weight
    _floats(left, right)
    assert left.dim() == 2
    assert left.numel(), "no empty tensor"
    ends = group_list.tolist() if group_list_type == 0 else group_list.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    assert all(0 <= a <= b for a, b in zip(starts, ends, strict=True)), ends
    groups = [slice(a, b) for a, b in zip(starts, ends, strict=True)]
    assert group_type in (0, 2), f"group type {group_type} is not simulated"
    product = (_along_inner if group_type else _along_rows)(left, right, groups)
    return [product.to(left.dtype)]


def _along_rows(x: Tensor, weight: Tensor, groups: list[slice]) -> Tensor:
    """Return ``[M, N]`` from ``[M, K]`` and ``[G, K, N]``, whose memory may be transposed."""
    _dense(x)
    assert weight.dim() == 3
    assert weight.is_contiguous() or weight.mT.is_contiguous(), weight.stride()
    assert len(groups) == len(weight)
    assert groups[-1].stop == len(x), (groups[-1], x.shape)
    assert x.shape[1] == weight.shape[1]
    # the last dimension in memory
    assert x.shape[1] < 65536
    assert weight.shape[2 if weight.is_contiguous() else 1] < 65536
    return torch.cat([x[rows].float() @ w.float() for rows, w in zip(groups, weight, strict=True)])


def _along_inner(x: Tensor, weight: Tensor, groups: list[slice]) -> Tensor:
    """Return ``[G, M, N]`` from ``[M, K]``, which is transposed in memory, and ``[K, N]``."""
    assert x.t().is_contiguous(), "grouped along the inner dimension, x is a transposed tensor"
    _dense(weight)
    assert weight.dim() == 2
    assert x.shape[1] == len(weight) == groups[-1].stop, (x.shape, weight.shape, groups[-1])
    assert max(x.shape[0], weight.shape[1]) < 65536
    return torch.stack([x[:, part].float() @ weight[part].float() for part in groups])


# -------------------------------------------------------------------------
# Routing and permutation of tokens
# -------------------------------------------------------------------------


@_operator
def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest ``k`` of the softmax, their indices, and where each comes in another order."""
    _floats(x)
    _dense(x)
    assert finished is None, "finished rows are not simulated"
    assert x.dim() == 2, x.shape
    assert x.numel(), "no empty tensor"
    assert 0 < k <= min(x.shape[-1], 1024), k
    values, indices = x.float().softmax(-1).topk(k)
    rows = torch.arange(len(x) * k, dtype=torch.int32).view(k, len(x)).t().contiguous()
    return values.to(x.dtype), indices.int(), rows


@_operator
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights and indices of the ``k`` largest of sigmoid and bias, and the sigmoids."""
    _floats(x)
    assert norm_type == 1, "softmax is not simulated here"
    assert (input_ids, tid2eid, k_group, group_count, renorm) == (None, None, 1, 1, 0)
    assert x.dim() == 2, x.shape
    assert x.numel(), "no empty tensor"
    assert 2 < x.shape[1] <= 2048, x.shape
    assert 1 <= k <= x.shape[1], k
    scores = x.float().sigmoid()
    ranked = scores
    if bias is not None:
        _floats(x, bias)
        assert bias.shape == x.shape[1:], bias.shape
        ranked = scores + bias.float()
    indices = ranked.topk(k).indices
    chosen = scores.gather(1, indices)
    weights = routed_scaling_factor * chosen / (chosen.sum(-1, keepdim=True) + eps)
    return weights.to(x.dtype), indices.int(), scores if out_flag else torch.empty_like(scores)


@_operator
def npu_moe_token_permute_with_routing_map(
    tokens: Tensor,
    routing_map: Tensor,
    *,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens by expert, their probabilities, and where each token's copies went, in int32."""
    _floats(tokens)
    assert tokens.dim() == routing_map.dim() == 2
    assert not drop_and_pad, "capacity is not simulated"
    assert probs is not None
    assert routing_map.dtype in (torch.bool, torch.int8), routing_map.dtype
    assert probs.shape == routing_map.shape, (probs.shape, routing_map.shape)
    assert probs.dtype == tokens.dtype or (tokens.dtype, probs.dtype) == (torch.bfloat16, torch.float32)
    assert num_out_tokens is not None
    count = len(tokens)
    assert count, "no empty tensor"
    chosen = routing_map.bool()
    topk = num_out_tokens // count
    assert 0 < topk < 512, topk
    assert (chosen.sum(1) == topk).all(), "each token has as many experts"
    expert, token = chosen.t().nonzero().unbind(1)
    place = torch.zeros(routing_map.shape, dtype=torch.int64)
    place[token, expert] = torch.arange(len(token))
    return tokens[token], probs[token, expert], place[chosen].int()


@_operator
def npu_moe_token_permute_with_routing_map_grad(
    permuted_token_out_grad: Tensor,
    probs_grad: Tensor | None,
    sorted_indices: Tensor,
    routing_map: Tensor,
    experts_num: int,
    tokens_num: int,
    drop_and_pad: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of tokens and probabilities, of which those not chosen have none."""
    _floats(permuted_token_out_grad)
    assert not drop_and_pad
    assert routing_map.shape == (tokens_num, experts_num)
    assert sorted_indices.dtype == torch.int32
    assert probs_grad is not None
    places = sorted_indices.long()
    tokens = permuted_token_out_grad[places].float().view(tokens_num, -1, permuted_token_out_grad.shape[1])
    probs = torch.zeros(routing_map.shape, dtype=probs_grad.dtype)
    probs[routing_map.bool()] = probs_grad[places]
    return tokens.sum(1).to(permuted_token_out_grad.dtype), probs


@_operator
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    """Return the weighted sum of each token's rows; without weights, each row is a token's only one."""
    _floats(permuted_tokens)
    assert not padded_mode
    assert restore_shape is None
    assert permuted_tokens.dim() == 2
    assert sorted_indices.dim() == 1
    assert sorted_indices.dtype == torch.int32, sorted_indices.dtype
    assert len(sorted_indices) == len(permuted_tokens)
    assert torch.equal(sorted_indices.sort().values.long(), torch.arange(len(permuted_tokens)))
    weights = torch.ones(len(permuted_tokens), 1) if probs is None else probs
    assert weights.dim() == 2
    assert 0 < weights.shape[1] <= 512, weights.shape
    assert weights.numel() == len(permuted_tokens), weights.shape
    rows = permuted_tokens[sorted_indices.long()].float().view(*weights.shape, -1)
    return (rows * weights.float().unsqueeze(-1)).sum(1).to(permuted_tokens.dtype)


@_operator
def _npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the sum, and what the gradient of weights would need."""
    total = npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape)
    return total, permuted_tokens.clone()
