"""Reference implementation of every kernel op, in plain torch.

Written to be read, not to be fast. Every function also runs in float64, which is what the conformance suite
measures a backend's kernels against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from anygauge_hooks.kernels import RmsNorm, RotaryEmbedding, VocabParallelLogprob

__all__ = [
    "add_and_norm",
    "add_rms_norm",
    "by_parts",
    "causal_conv1d",
    "expert_weights",
    "gated_delta_rule",
    "grouped_matmul",
    "layer_norm",
    "linear_logprob",
    "logits_logprob",
    "qk_norm_rotary",
    "rms_norm",
    "rotary_embedding",
    "swiglu",
    "through_logits",
    "token_permute",
    "token_unpermute",
    "topk_router",
    "varlen_attention",
    "vocab_parallel_logprob",
]


CHUNK = 64
"""Tokens of the delta rule that are handled by matrix products instead of one by one."""

NOTHING = -1e30
"""A logit of no probability whose differences are finite."""

LEAST_LOGPROB = -1e4
"""Lower bound of log-probs, below that of any token; its exponential is 0."""


def causal_conv1d(x: Tensor, weight: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return ``silu(sum_w weight[c, w] * x[t - W + 1 + w, c])`` within each sequence.

    See :class:`anygauge_hooks.kernels.CausalConv1d`.
    """
    taps = _widen(weight).unbind(1)
    outputs = []
    for part in _sequences(_widen(x), lengths, 0):
        padded = F.pad(part, (0, 0, len(taps) - 1, 0))
        terms = [padded[first : first + len(part)] * tap for first, tap in enumerate(taps)]
        outputs.append(F.silu(torch.stack(terms).sum(0)))
    return torch.cat(outputs).to(x.dtype)


def _sequences(x: Tensor, lengths: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Return the parts of packed sequences, with an empty one at the end, so that there is at least one."""
    return torch.split(x, [*lengths, 0], dim)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """Return ``scale * S_t q_t`` with ``S_t = exp(g_t) S_{t-1} (1 - beta_t k_t k_t^T) + beta_t v_t k_t^T``.

    That is https://arxiv.org/abs/2412.06464 equation 10, computed chunk by chunk as its section 3.3 says.

    See :class:`anygauge_hooks.kernels.GatedDeltaRule`.
    """
    tensors = [_widen(x).unsqueeze(-1) if x.dim() == 2 else _widen(x) for x in (q, k, v, g, beta)]
    parts = zip(*(_sequences(x.transpose(0, 1), lengths, 1) for x in tensors), strict=True)
    outputs = torch.cat([_delta_rule(*part) for part in parts], dim=1)
    return (outputs * scale).transpose(0, 1).to(v.dtype)


def _delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Run one sequence; ``[H, L, ...]`` each."""
    state = v.new_zeros(v.shape[0], k.shape[-1], v.shape[-1])
    outputs = []
    for chunk in zip(*(torch.split(x, CHUNK, dim=1) for x in (q, k, v, g, beta)), strict=True):
        output, state = _delta_chunk(state, *chunk)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _delta_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk and the state after it.

    Token ``t`` adds ``k_t u_t^T`` to the state ``[H, D, E]``, where ``u_t`` is ``beta_t`` times what the
    state before does not give for ``k_t`` of ``v_t`` yet. The ``u`` of a chunk solve a triangular system.
    """
    decay = _decay(g)
    before, within = decay[:, 1:, :1], decay[:, 1:, 1:]
    system = beta * (k @ k.mT) * within
    wanted = beta * (v - before * (k @ state))
    added = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = before * (q @ state) + ((q @ k.mT) * within) @ added
    left = decay[:, -1].unsqueeze(-1)
    return output, left[:, :1] * state + (left[:, 1:] * k).mT @ added


def _decay(g: Tensor) -> Tensor:
    """Return how much of what each token added is left at each token; the state before the chunk comes first.

    Every sum of logarithms is taken by itself: differences of their running sum would cancel.

    :param g: ``[H, L, 1]``.
    :returns: ``[H, 1 + L, 1 + L]``, 0 for what comes later.
    """
    place = torch.arange(1 + g.shape[1], device=g.device)
    rows, columns = place[:, None], place[None]
    steps = F.pad(g, (0, 0, 1, 0)).expand(-1, -1, len(place)).masked_fill(columns >= rows, 0)
    return steps.cumsum(1).masked_fill(columns > rows, -torch.inf).exp()


def grouped_matmul(x: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return ``x[i] @ weight[e].T`` for the tokens ``i`` of each expert ``e``.

    See :class:`anygauge_hooks.kernels.GroupedMatmul`.
    """
    parts = torch.split(x, tokens_per_expert.tolist())
    return torch.cat([part @ expert.T for part, expert in zip(parts, weight, strict=True)])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x / rms(x) * weight``, https://arxiv.org/abs/1910.07467 equation 4.

    See :class:`anygauge_hooks.kernels.RmsNorm`.
    """
    wide = _widen(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight).to(x.dtype)


def add_rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``residual + x`` and the norm of that.

    See :class:`anygauge_hooks.kernels.AddRmsNorm`.
    """
    return add_and_norm(rms_norm, x, weight, eps, residual)


def add_and_norm(
    norm: RmsNorm, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`add_rms_norm` with another op."""
    total = x if residual is None else residual + x
    return total, norm(total, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of ``x``, https://arxiv.org/abs/1607.06450 equation 4.

    See :class:`anygauge_hooks.kernels.LayerNorm`.
    """
    wide = _widen(x)
    centered = wide - wide.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return (normed * weight + bias).to(x.dtype)


def rotary_embedding(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, https://arxiv.org/abs/2104.09864 equation 34 in the half-rotated layout.

    See :class:`anygauge_hooks.kernels.RotaryEmbedding`.
    """
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    turned, kept = _widen(x[..., :rotary]), x[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
    return torch.cat((turned.to(x.dtype), kept), dim=-1)


def qk_norm_rotary(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into queries, keys and values; normalize the first two, and rotate them.

    See :class:`anygauge_hooks.kernels.QkNormRotary`.
    """
    return by_parts(rms_norm, rotary_embedding, qkv, q_weight, k_weight, cos, sin, eps)


def by_parts(
    norm: RmsNorm,
    rotate: RotaryEmbedding,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute :func:`qk_norm_rotary` with two other ops."""
    queries, key, value = torch.split(qkv, [qkv.shape[2] - 2, 1, 1], 2)
    query, key = norm(queries.flatten(1, 2), q_weight, eps), norm(key.squeeze(2), k_weight, eps)
    return *rotate(query, key, cos, sin), value.squeeze(2)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``, https://arxiv.org/abs/2002.05202 equation 5.

    See :class:`anygauge_hooks.kernels.Swiglu`.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(_widen(gate)) * up).to(gate_up.dtype)


def topk_router(
    logits: Tensor,
    topk: int,
    *,
    score_function: Literal["softmax", "sigmoid"],
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights of the experts of each token, and which they are.

    See :class:`anygauge_hooks.kernels.TopkRouter`.
    """
    scores = _widen(logits.detach())
    if score_function == "sigmoid":
        scores = scores.sigmoid() if expert_bias is None else scores.sigmoid() + expert_bias
    elif pre_softmax:
        scores = scores.softmax(1)
    if num_groups and group_topk:
        scores = _of_the_best_groups(scores, topk, num_groups, group_topk)
    chosen = scores.topk(topk, dim=1).indices
    weights = expert_weights(
        logits,
        chosen,
        score_function=score_function,
        pre_softmax=pre_softmax,
        scaling_factor=scaling_factor,
    )
    return weights, chosen


def _of_the_best_groups(scores: Tensor, topk: int, num_groups: int, group_topk: int) -> Tensor:
    """Return the scores ``[T, E]``, minus infinity outside the groups of each token."""
    grouped = scores.view(len(scores), num_groups, scores.shape[1] // num_groups)
    best = grouped.topk(topk // group_topk, dim=2).values.sum(2).topk(group_topk, dim=1).indices
    outside = torch.ones(grouped.shape[:2], dtype=torch.bool, device=scores.device).scatter(
        1, best, value=False
    )
    return grouped.masked_fill(outside.unsqueeze(2), -torch.inf).flatten(1)


def expert_weights(
    logits: Tensor,
    chosen: Tensor,
    *,
    score_function: Literal["softmax", "sigmoid"],
    pre_softmax: bool = False,
    scaling_factor: float | None = None,
) -> Tensor:
    """Return the weight of each chosen expert, as :func:`topk_router` computes it for its own choice.

    :param logits: ``[T, E]``.
    :param chosen: ``[T, K]``, int64, expert numbers.
    :returns: ``[T, K]``, the dtype of ``logits``.
    """
    wide = _widen(logits)
    if score_function == "sigmoid":
        scores = wide.sigmoid().gather(1, chosen)
        weights = scores / (scores.sum(1, keepdim=True) + 1e-20) if chosen.shape[1] > 1 else scores
    elif pre_softmax:
        weights = wide.softmax(1).gather(1, chosen)
    else:
        weights = wide.gather(1, chosen).softmax(1)
    return (weights if scaling_factor is None else weights * scaling_factor).to(logits.dtype)


def token_permute(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, topk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a copy of each token for each of its experts, sorted by expert.

    See :class:`anygauge_hooks.kernels.TokenPermute`.
    """
    count, experts = routing_map.shape
    by_expert = routing_map.t()
    places = by_expert.flatten().cumsum(0).view(experts, count).t() - 1
    rows = places.masked_select(routing_map).view(count, topk)
    permuted: Tensor = _Spread.apply(tokens, rows)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return permuted, probs.t().masked_select(by_expert), rows


def token_unpermute(permuted: Tensor, rows: Tensor) -> Tensor:
    """Return ``sum_k permuted[rows[t, k]]`` for each token ``t``, summed in float32.

    See :class:`anygauge_hooks.kernels.TokenUnpermute`.
    """
    total: Tensor = _Collect.apply(permuted, rows)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return total


class _Spread(torch.autograd.Function):
    """Copy each token to its rows; the gradient is their sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, rows: Tensor) -> Tensor:
        """Return the copies."""
        ctx.save_for_backward(rows)
        return _spread(tokens, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients of the copies."""
        return _collect(grads[0], *ctx.saved_tensors), None


class _Collect(torch.autograd.Function):
    """Sum the rows of each token; the gradient is a copy for each."""

    @staticmethod
    def forward(ctx: Any, permuted: Tensor, rows: Tensor) -> Tensor:
        """Return the sums."""
        ctx.save_for_backward(rows)
        return _collect(permuted, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the copies of the gradient."""
        return _spread(grads[0], *ctx.saved_tensors), None


def _spread(tokens: Tensor, rows: Tensor) -> Tensor:
    """Return ``[T K, H]``."""
    numbers = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
    of_row = torch.empty_like(numbers).scatter(0, rows.flatten().long(), numbers)
    return tokens.index_select(0, of_row)


def _collect(permuted: Tensor, rows: Tensor) -> Tensor:
    """Return ``[T, H]``."""
    copies = permuted.index_select(0, rows.flatten()).view(*rows.shape, permuted.shape[1])
    return copies.sum(1, dtype=torch.promote_types(permuted.dtype, torch.float32)).to(permuted.dtype)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    scale: float,
    *,
    causal: bool,
    key_lengths: Sequence[int] | None = None,
    return_lse: bool = False,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend within each packed sequence.

    See :class:`anygauge_hooks.kernels.VarlenAttention`.
    """
    repeats = q.shape[1] // k.shape[1]
    keys, values = (_widen(x).repeat_interleave(repeats, dim=1) for x in (k, v))
    sizes = lengths if key_lengths is None else key_lengths
    # one empty sequence at the end, so that there is at least one
    parts = (torch.split(x, [*n, 0]) for x, n in ((_widen(q), lengths), (keys, sizes), (values, sizes)))
    last = None if sinks is None else _widen(sinks)
    rule = scale, causal, window, last
    results = [_attend(qs, ks, vs, *rule) for qs, ks, vs in zip(*parts, strict=True)]
    outputs, sums = (torch.cat(x) for x in zip(*results, strict=True))
    return (outputs.to(q.dtype), sums) if return_lse else outputs.to(q.dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of one sequence."""
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        scores = scores.masked_fill(_hidden(len(q), len(k), window, q.device), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v), scores.detach().logsumexp(-1).t()


def _hidden(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys come after a query, or too long before it: ``[queries, keys]``."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    before = keys - queries
    future = every.triu(1 + before)
    return future if window is None else future | every.tril(before - window)


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    group: Any | None,
    *,
    entropy_grad: bool,
    vocab_size: int | None = None,
    rest: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropy of ``softmax(hidden @ weight.T / temperature)``.

    See :class:`anygauge_hooks.kernels.LinearLogprob`.
    """
    given = (_widen(hidden), _widen(weight), targets, temperature, group)
    return through_logits(
        vocab_parallel_logprob, *given, entropy_grad=entropy_grad, vocab_size=vocab_size, rest=rest
    )


def through_logits(
    logprob: VocabParallelLogprob,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    group: Any | None,
    *,
    entropy_grad: bool,
    vocab_size: int | None = None,
    rest: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`linear_logprob` from full logits in the dtype of ``hidden``.

    :param logprob: Function that computes log-probs from logits; may overwrite them.
    """
    logits = F.linear(_shared(hidden, group), weight)
    start = 0 if group is None else weight.shape[0] * dist.get_rank(group)
    if vocab_size is not None and vocab_size < start + weight.shape[0]:
        padding = torch.arange(start, start + weight.shape[0], device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, -torch.inf)
    return logits_logprob(logprob, logits, targets, temperature, group, entropy_grad=entropy_grad, rest=rest)


def logits_logprob(
    logprob: VocabParallelLogprob,
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    group: Any | None,
    *,
    entropy_grad: bool,
    rest: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute what :func:`linear_logprob` does, from logits.

    :param logprob: Function that computes log-probs from logits; may overwrite them.
    :param logits: ``[T, V / tp]``.
    """
    if targets.dim() == 1:
        return logprob(logits, targets, temperature, group, entropy_grad=entropy_grad)
    column, present = _local_column(targets, logits.shape[-1], group)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    chosen = logits[rows, column]  # gather would keep the logits, which may be overwritten
    scaled = _widen(chosen).masked_fill(~present, 0) / temperature
    scaled = sum_over(scaled, group)
    others = _log_sum_of_others(logits, column, present, temperature, group) if rest else None
    first, entropy = logprob(logits, targets[:, 0], temperature, group, entropy_grad=entropy_grad)
    log_total = (scaled[:, 0] - first)[:, None]
    logprobs = [scaled - log_total]
    if others is not None:
        logprobs.append((others[:, None] - log_total).clamp(min=LEAST_LOGPROB))
    return torch.cat(logprobs, 1), entropy


def _log_sum_of_others(
    logits: Tensor, column: Tensor, present: Tensor, temperature: float, group: Any | None
) -> Tensor:
    """Return the logarithm ``[T]`` of the sum of ``exp(logits / temperature)`` but for some columns."""
    tokens, width = logits.shape
    mask = logits.new_zeros(tokens, width + 1, dtype=torch.bool)
    mask.scatter_(1, column.where(present, width), value=True)
    kept = (_widen(logits) / temperature).masked_fill(mask[:, :width], NOTHING)
    peak = _max_over(kept.detach().amax(-1), group)
    return peak + sum_over((kept - peak[:, None]).exp().sum(-1), group).log()


def vocab_parallel_logprob(
    logits: Tensor, targets: Tensor, temperature: float, group: Any | None, *, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of the targets and the entropy, of ``softmax(logits / temperature)``.

    A logit of minus infinity is a token that cannot occur; it adds nothing to the entropy.

    See :class:`anygauge_hooks.kernels.VocabParallelLogprob`.

    :param logits: ``[T, V / tp]``; left as they are.
    """
    scaled = _widen(logits) / temperature
    peak = _max_over(scaled.detach().amax(-1), group)
    shifted = scaled - peak.unsqueeze(-1)
    weights = shifted.exp()
    total = sum_over(weights.sum(-1), group)
    column, present = _local_column(targets, logits.shape[-1], group)
    chosen = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~present, 0)
    logprobs = sum_over(chosen, group) - total.log()
    finite = shifted.masked_fill(shifted == -torch.inf, 0)
    entropy = total.log() - sum_over((weights * finite).sum(-1), group) / total
    return logprobs, entropy if entropy_grad else entropy.detach()


def _local_column(targets: Tensor, width: int, group: Any | None) -> tuple[Tensor, Tensor]:
    """Return the column of each target in this rank's logits, and whether it is there at all."""
    column = targets - width * (0 if group is None else dist.get_rank(group))
    return column.clamp(0, width - 1), (column >= 0) & (column < width)


def _max_over(x: Tensor, group: Any | None) -> Tensor:
    if group is not None:
        dist.all_reduce(x, dist.ReduceOp.MAX, group)
    return x


def sum_over(x: Tensor, group: Any | None) -> Tensor:
    """Return the sum over a group; the gradient passes unchanged."""
    total: Tensor = _SumOver.apply(x, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return total


class _SumOver(torch.autograd.Function):
    """Sum over a group. Every rank computes the same loss from the sum, so the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any | None) -> Tensor:
        """Return the sum of ``x`` over the ranks of ``group``."""
        total = x.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is."""
        return grads[0], None


def _shared(x: Tensor, group: Any | None) -> Tensor:
    shared: Tensor = _Shared.apply(x, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return shared


class _Shared(torch.autograd.Function):
    """Replicated tensor from which each rank computes a part: the gradient is the sum over the group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any | None) -> Tensor:
        """Return ``x``."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients of the ranks."""
        total = grads[0]
        if ctx.group is not None:
            total = total.contiguous().clone()
            dist.all_reduce(total, group=ctx.group)
        return total, None


def _widen(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in float64 if it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
