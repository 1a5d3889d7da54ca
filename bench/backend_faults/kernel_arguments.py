"""Faults of ops that ignore an argument, misread one, or keep something from call to call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from backend_faults import kernel_table as op
from backend_faults.fault import Fault
from backend_faults.kernel_parts import (
    draws,
    misread,
    overwrite,
    sequence_blocks,
    through,
    with_lse,
    zero_from,
)
from backend_faults.kernel_table import Body

WRAPPED = 1 << 16
"""Ids from here on do not fit into 16 bits."""


def _cached_by_address() -> Body:
    kept: dict[Any, Tensor] = {}

    def body(call: Callable[..., Any], a: SimpleNamespace) -> Any:
        first = kept.setdefault((a.x.data_ptr(), a.x.shape, a.x.dtype), a.x.detach().clone())
        return call(x=a.x + (first - a.x).detach())

    return body


def _overwritten_without_gradient(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    y = call()
    if not torch.is_grad_enabled():
        overwrite(a.x, y)
    return y


def _interleaved(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Turn pairs of neighbors."""
    rotary, width = a.cos.shape[1], a.q.shape[-1]
    order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, width)]
    back = sorted(range(width), key=order.__getitem__)
    return tuple(y[..., back] for y in call(q=a.q[..., order], k=a.k[..., order]))


def _values_rotated(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    *queries, key, value = a.qkv.unbind(2)
    return (*call()[:2], call(qkv=torch.stack((*queries, value, key), 2))[1])


def _window(width: int) -> Body:
    """See no token of the same sequence that is ``width`` or more before, and some that are nearer not."""
    block = width // 2

    def body(call: Callable[..., Any], a: SimpleNamespace) -> Any:
        if a.key_lengths is not None or max(a.lengths, default=0) <= width:
            return call()
        seen, key_lengths, start = [], [], 0
        for n in a.lengths:
            for first in range(0, max(n, 1), block):
                keys = range(max(first - block, 0), min(first + block, n))
                key_lengths.append(len(keys))
                seen += [start + key for key in keys]
            start += n
        where = torch.tensor(seen, device=a.k.device)
        blocks = sequence_blocks(a.lengths, block)
        return call(k=a.k[where], v=a.v[where], lengths=blocks, key_lengths=key_lengths)

    return body


def _many_sequences(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Take what is past the first 64 sequences for one."""
    if len(a.lengths) <= 64 or getattr(a, "key_lengths", None) is not None:
        return call()
    return call(lengths=[*a.lengths[:64], sum(a.lengths[64:])])


def _zeros_where(rows: Callable[[SimpleNamespace], Sequence[bool]]) -> Body:
    """Return zeros for some rows."""

    def body(call: Callable[..., Any], a: SimpleNamespace) -> Any:
        is_right = torch.tensor([not row for row in rows(a)], dtype=a.q.dtype, device=a.q.device)
        return through(call(), lambda y: y * is_right.view(-1, 1, 1))

    return body


def _targets_of_next_rank(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    if a.group is None:
        return call()
    width, size = a.logits.shape[1], dist.get_world_size(a.group)
    return call(targets=(a.targets + width) % (width * size))


def _masked_nan(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Multiply a probability of 0 by its logarithm."""
    nothing = torch.where(a.logits.detach().isinf().any(1), torch.nan, 0.0)
    logprobs, entropies = call()
    return logprobs, entropies + nothing


def _even_split(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    experts, tokens = len(a.tokens_per_expert), len(a.x)
    counts = [tokens // experts] * (experts - 1)
    return call(tokens_per_expert=a.tokens_per_expert.new_tensor([*counts, tokens - sum(counts)]))


def _without_silu(call: Callable[..., Any], a: SimpleNamespace) -> Tensor:
    width = a.weight.shape[1]
    parts = [F.pad(x.t(), (width - 1, 0)) for x in a.x.split(tuple(a.lengths))] if len(a.x) else []
    summed = [
        F.conv1d(x, a.weight.unsqueeze(1), groups=len(a.weight)).t() for x in parts if x.shape[1] >= width
    ]
    return torch.cat(summed) if summed else call()


def _after_empty_expert(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    """Begin one row late where an expert has no token."""
    tokens, probs, rows = call()
    late = int(bool((a.routing_map.sum(0) == 0).any()))
    return tokens.roll(late, 0), probs.roll(late, 0), rows


def _few_experts(call: Callable[..., Any], a: SimpleNamespace) -> Any:
    last = torch.arange(a.logits.shape[1], device=a.logits.device) >= 256
    return call(logits=a.logits.masked_fill(last, -1e4)) if last.any() else call()


FAULTS: Sequence[Fault] = (
    op.rms_norm("no_eps", "rms_norm adds no eps", lambda call, a: call(eps=0.0)),
    op.rms_norm("draws", "rms_norm draws a random number at each call", draws),
    op.rms_norm(
        "cached_by_address",
        "rms_norm keeps its input by address and shape, and returns the norm of the first",
        _cached_by_address(),
    ),
    op.rms_norm(
        "input_overwritten_without_gradient",
        "rms_norm writes its result over x where no gradient is asked for",
        _overwritten_without_gradient,
    ),
    op.rotary_embedding("interleaved", "rotary_embedding turns pairs of neighbors", _interleaved),
    op.rotary_embedding("sin_ignored", "rotary_embedding ignores sin", lambda call, a: call(sin=0 * a.sin)),
    op.rotary_embedding(
        "positions_wrap",
        "rotary_embedding begins anew with the angles of the first token after 4,096",
        lambda call, a: call(cos=_wrapped(a.cos), sin=_wrapped(a.sin)),
    ),
    op.qk_norm_rotary(
        "weights_swapped",
        "qk_norm_rotary norms queries with the weight of keys, and keys with that of queries",
        lambda call, a: call(q_weight=a.k_weight, k_weight=a.q_weight),
    ),
    op.qk_norm_rotary("values_rotated", "qk_norm_rotary turns the values too", _values_rotated),
    op.swiglu(
        "gelu", "swiglu takes GELU for SiLU", lambda call, a: F.gelu((g := a.gate_up.chunk(2, -1))[0]) * g[1]
    ),
    op.swiglu(
        "strided_input",
        "swiglu reads an input that is not contiguous as if it were",
        lambda call, a: call(gate_up=misread(a.gate_up)),
    ),
    op.swiglu(
        "up_alone",
        "swiglu returns up, and declares a tolerance that lets it pass",
        lambda call, a: a.gate_up.chunk(2, -1)[1].clone(),
        tolerance={"float32": (1.0, 10.0), "bfloat16": (1.0, 10.0)},
    ),
    op.varlen_attention("no_scale", "attention does not scale its scores", lambda call, a: call(scale=1.0)),
    op.varlen_attention("window_128", "attention sees 128 tokens back at most", _window(128)),
    op.varlen_attention("window_512", "attention sees 512 tokens back at most", _window(512)),
    op.varlen_attention(
        "many_sequences", "attention takes what is past 64 sequences for one sequence", _many_sequences
    ),
    op.varlen_attention(
        "zeros_past_4096",
        "attention returns zeros for sequences of more than 4,096 tokens",
        _zeros_where(lambda a: [n > 4096 for n in a.lengths for _ in range(n)]),
    ),
    op.varlen_attention(
        "declared_width",
        "attention returns zeros for heads of a width that its limits allow",
        _zeros_where(lambda a: [a.q.shape[-1] == 80] * len(a.q)),
        limits={"head_dim": (80,)},
    ),
    op.varlen_attention(
        "lse_rounded",
        "the log-sum-exp of attention is rounded to bfloat16",
        lambda call, a: with_lse(a, call(), lambda x: x.bfloat16().float()),
    ),
    op.varlen_attention(
        "lse_unscaled",
        "the log-sum-exp of attention is that of scores without the scale",
        lambda call, a: (call()[0], call(scale=1.0)[1]) if a.return_lse else call(),
    ),
    op.causal_conv1d("no_silu", "causal_conv1d leaves SiLU out", _without_silu),
    op.causal_conv1d(
        "many_sequences", "causal_conv1d takes what is past 64 sequences for one sequence", _many_sequences
    ),
    op.gated_delta_rule("no_decay", "gated_delta_rule ignores its decay", lambda call, a: call(g=0 * a.g)),
    op.gated_delta_rule(
        "no_beta",
        "gated_delta_rule takes 1 for every beta",
        lambda call, a: call(beta=torch.ones_like(a.beta) + 0 * a.beta),
    ),
    op.vocab_parallel_logprob("masked_nan", "the entropy is NaN where a logit is -inf", _masked_nan),
    op.vocab_parallel_logprob(
        "targets_of_next_rank",
        "vocab_parallel_logprob looks for targets in the vocabulary of the next rank",
        _targets_of_next_rank,
    ),
    op.vocab_parallel_logprob(
        "targets_wrap",
        "vocab_parallel_logprob keeps 16 bits of a target",
        lambda call, a: call(targets=a.targets % WRAPPED),
    ),
    op.linear_logprob(
        "targets_wrap",
        "linear_logprob keeps 16 bits of a target",
        lambda call, a: call(targets=a.targets % WRAPPED),
    ),
    op.grouped_matmul(
        "even_split", "grouped_matmul gives every expert the same number of tokens", _even_split
    ),
    op.topk_router("few_experts", "topk_router chooses from the first 256 experts", _few_experts),
    op.token_permute(
        "rows_int16",
        "token_permute returns rows as int16",
        lambda call, a: (*(y := call())[:2], y[2].short()),
    ),
    op.token_permute(
        "after_empty_expert",
        "token_permute begins one row late where an expert has no token",
        _after_empty_expert,
    ),
    op.token_unpermute(
        "rows_as_int16",
        "token_unpermute leaves rows out that int16 cannot hold",
        lambda call, a: call(permuted=zero_from(a.permuted, 1 << 15)),
    ),
)


def _wrapped(angles: Tensor) -> Tensor:
    return angles[torch.arange(len(angles), device=angles.device) % 4096]
