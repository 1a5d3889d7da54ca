"""Packed attention for the models of transformers, with the kernels of the backend's table.

It is registered beside transformers' own attention functions, and a model takes it by its config. Torch
computes what no kernel of the table does (a soft cap, a window that is not causal), sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from anygauge.engines.host_lengths import lengths_of, set_lengths
from anygauge.kernels.table import KernelTable

__all__ = ["ATTENTION", "packing_arguments", "register_attention"]

ATTENTION = "anygauge_flash_packed"
"""Name of the function. Transformers makes no mask, and expects packed sequences, where "flash" is in it."""


def register_attention(kernels: KernelTable) -> None:
    """Add the function to those of transformers.

    :param kernels: Those of the process's backend.
    """
    AttentionInterface.register(ATTENTION, _Attention(kernels))


def packing_arguments(boundaries: Tensor, lengths: Sequence[int]) -> dict[str, Any]:
    """Return the keyword arguments by which transformers tells models how sequences are packed.

    :param boundaries: ``[N + 1]``, int32: where each sequence begins, and the last one ends.
    :param lengths: Their lengths, which the host then need not read from the device in every layer.
    """
    set_lengths(boundaries, lengths)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


class _Attention:
    """An attention function of transformers. Kernels are resolved once for each kind of module."""

    def __init__(self, kernels: KernelTable) -> None:
        self._kernel: Callable[..., Callable[..., Tensor]] = cache(
            lambda **facts: kernels.resolve("varlen_attention", return_lse=False, **facts)
        )

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Attend within each packed sequence.

        :param query: ``[1, heads, T, D]``; as are the others, with heads of their own.
        :param cu_seq_lens_q: ``[N + 1]``, of :func:`packing_arguments`.
        :returns: ``[1, T, heads, E]``, and no weights.
        :raises NotImplementedError: The model has a mask, or does not pass on how sequences are packed.
        """
        if attention_mask is not None or cu_seq_lens_q is None or len(query) != 1:
            raise NotImplementedError("the model does not pass on how sequences are packed")
        q, k, v = (each[0].transpose(0, 1).to(value.dtype) for each in (query, key, value))
        lengths = lengths_of(cu_seq_lens_q) or cu_seq_lens_q.diff().tolist()
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        scale = q.shape[-1] ** -0.5 if scaling is None else scaling
        window = sliding_window if sliding_window and sliding_window < max(lengths) else None
        if softcap is not None or (window is not None and not causal):
            if s_aux is not None:
                raise NotImplementedError("the model has sinks beside a soft cap, or a window to both sides")
            parts = zip(*(each.split(list(lengths)) for each in (q, k, v)), strict=True)
            done = [_attend(q, k, v, scale, causal, window, softcap) for q, k, v in parts]
            return torch.cat(done)[None], None
        sinks = None if s_aux is None else s_aux.to(q.dtype)
        attend = self._kernel(
            dtype=q.dtype,
            head_dim=q.shape[-1],
            value_dim=v.shape[-1],
            causal=causal,
            has_window=window is not None,
            has_sinks=sinks is not None,
        )
        return attend(q, k, v, lengths, scale, causal=causal, window=window, sinks=sinks)[None], None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Attend within one sequence, as the eager attention of transformers' models does.

    :param q: ``[T, H, D]``.
    :param window: Number of last tokens that a token sees, itself among them.
    :param softcap: Scores become ``softcap * tanh(score / softcap)``.
    """
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    places = torch.arange(len(q), device=q.device)
    ago = places[:, None] - places
    hidden = ago < 0 if causal else torch.zeros_like(ago, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (ago >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", weights, v)
