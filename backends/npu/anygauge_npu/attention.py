"""Attention over packed sequences, by one call of Ascend's fused operator for up to 1024 of them.

The operator's layout is TND: the tokens of all sequences back to back, and cumulative lengths as host
integers, without a 0 in front. Its softmax statistics lie so where it is told, and head by head where not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anygauge_npu.guards import check_dtypes, check_lengths, check_shape, check_size, refuse

__all__ = ["HEAD_SIZES", "varlen_attention"]

OP = "varlen_attention"
HEAD_SIZES = range(1, 769)
HEADS = 256
TOKENS = 1 << 20
"""In one call, of queries and of keys."""

SEQUENCES = 1024
"""In one call; the documentation gives 1024 in one place and 2048 in another."""

MASK = 2048
"""Rows and columns of the compressed mask, for sequences of any length."""

RIGHT_DOWN_CAUSAL = 3
"""Sparse mode: the last query of a sequence sees its last key. The other causal mode aligns the first two."""

BAND = 4
"""Sparse mode: as before, and a query sees no more than some keys before it. Both take the same mask."""


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

    :raises KernelInputError: The operator does not take these tensors or lengths.
    """
    sizes, key_sizes = _checked(q, k, v, lengths, key_lengths, causal)
    _check_extras(q, causal, window, sinks)
    if not len(q):
        output = _nothing(q, k, v, *(() if sinks is None else (sinks,)))
        return (output, q.new_zeros(q.shape[:2], dtype=torch.float32)) if return_lse else output
    calls = _calls(*_even(q, k, v), sizes, key_sizes)
    options = _options(causal, window, sinks, return_lse, q.device)
    results = [_attend(*call, scale, options) for call in calls]
    outputs, sums = zip(*results, strict=True)
    output = _joined(outputs)
    return (output, _joined(sums)) if return_lse else output


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None,
    causal: bool,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the lengths of queries and keys, after refusing what the operator does not take."""
    check_dtypes(OP, q=q, k=k, v=v)
    check_shape(OP, "q", q, (None, None, None), "[T, H, D]")
    check_shape(OP, "k", k, (None, None, q.shape[2]), "[S, K, D]")
    check_shape(OP, "v", v, (*k.shape[:2], None), "[S, K, E]")
    for what, size in (("a head size of", q.shape[2]), ("a value size of", v.shape[2])):
        check_size(OP, what, size, HEAD_SIZES[0], HEAD_SIZES[-1])
    check_size(OP, "a number of heads of", q.shape[1], 1, HEADS)
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        refuse(OP, f"{q.shape[1]} query heads and {k.shape[1]} key heads", "Key heads divide query heads.")
    sizes = check_lengths(OP, "lengths", lengths, len(q), "q")
    given = ("lengths", lengths) if key_lengths is None else ("key_lengths", key_lengths)
    key_sizes = check_lengths(OP, *given, len(k), "k")
    if len(key_sizes) != len(sizes):
        refuse(OP, f"{len(sizes)} lengths and {len(key_sizes)} key_lengths", "Each sequence has one of both.")
    for num_queries, num_keys in zip(sizes, key_sizes, strict=True):
        if num_keys < (num_queries if causal else min(num_queries, 1)):
            rule = "the queries are its last tokens" if causal else "queries have a key"
            refuse(OP, f"a sequence of {num_queries} queries and {num_keys} keys", f"In a sequence {rule}.")
    check_size(OP, "a sequence of", max((*sizes, *key_sizes), default=0), 0, TOKENS)
    return sizes, key_sizes


def _check_extras(q: Tensor, causal: bool, window: int | None, sinks: Tensor | None) -> None:
    if window is not None and (window < 1 or not causal):
        asked = f"a window of {window} tokens" if causal else "a window without a causal mask"
        refuse(OP, asked, "A window is of causal attention, and has the token itself in it.")
    if sinks is not None:
        check_dtypes(OP, q=q, sinks=sinks)
        check_shape(OP, "sinks", sinks, (q.shape[1],), "[H]")


def _even(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys at least as wide as the values, as the operator wants. Zeros add no score."""
    missing = max(0, v.shape[-1] - q.shape[-1])
    return (F.pad(q, (0, missing)), F.pad(k, (0, missing)), v) if missing else (q, k, v)


def _calls(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], key_lengths: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor, Tensor, list[int], list[int]]]:
    """Yield the tensors and the cumulative lengths of each call, without the sequences that ask nothing."""
    k, v = (_keys_with_queries(x, lengths, key_lengths) for x in (k, v))
    pairs = [pair for pair in zip(lengths, key_lengths, strict=True) if pair[0]]
    first, first_key = 0, 0
    for group in _groups(pairs):
        ends, key_ends = (list(accumulate(column)) for column in zip(*group, strict=True))
        after, after_key = first + ends[-1], first_key + key_ends[-1]
        keys, values = (_part(x, first_key, after_key) for x in (k, v))
        yield _part(q, first, after), keys, values, ends, key_ends
        first, first_key = after, after_key


def _part(x: Tensor, start: int, end: int) -> Tensor:
    """Return some rows; all of them as they are, for the gradient of a slice is a copy."""
    return x if (start, end) == (0, len(x)) else x[start:end]


def _keys_with_queries(x: Tensor, lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> Tensor:
    """Return the keys without those of sequences that have no queries."""
    if all(n or not seen for n, seen in zip(lengths, key_lengths, strict=True)):
        return x
    parts = torch.split(x, list(key_lengths))
    return torch.cat([x[:0], *(part for part, n in zip(parts, lengths, strict=True) if n)])


def _groups(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield as many sequences at a time as one call takes."""
    group: list[tuple[int, int]] = []
    tokens = 0
    for pair in pairs:
        if group and (len(group) == SEQUENCES or tokens + max(pair) > TOKENS):
            yield group
            group, tokens = [], 0
        group.append(pair)
        tokens += max(pair)
    if group:
        yield group


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: list[int],
    key_ends: list[int],
    scale: float,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Return the output of one call, and the log-sum-exp ``[T, H]`` where it is wanted."""
    output, peak, total, *_ = torch.ops.npu.npu_fusion_attention(
        q,
        k,
        v,
        q.shape[1],
        "TND",
        scale=scale,
        actual_seq_qlen=ends,
        actual_seq_kvlen=key_ends,
        **options,
    )
    # [T, H, 8], where a number is repeated
    return output, (peak + total.log())[..., 0].detach() if options["softmax_layout"] else None


def _options(
    causal: bool, window: int | None, sinks: Tensor | None, return_lse: bool, device: torch.device
) -> dict[str, Any]:
    """Return what all calls of an attention are given."""
    options: dict[str, Any] = {
        "atten_mask": _future(device) if causal else None,
        "sparse_mode": RIGHT_DOWN_CAUSAL if causal else 0,
        "softmax_layout": "TND" if return_lse else "",
    }
    if window is not None:  # the operator counts the tokens before a token, without itself
        options |= {"sparse_mode": BAND, "pre_tockens": window - 1, "next_tockens": 0}
    if sinks is not None:
        options["sink"] = sinks.float()
    return options


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


@lru_cache(maxsize=8)
def _future(device: torch.device) -> Tensor:
    """Return the compressed mask, where True is what a query must not see."""
    with torch.inference_mode(mode=False):  # a later pass may keep it for its gradient
        return torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu_(1)


def _nothing(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor:
    """Return the attention of no queries, with gradients of zero."""
    parts = torch.cat([x.flatten()[:0] for x in (q, k, v, *others)])
    return parts.view(0, q.shape[1], v.shape[-1])
