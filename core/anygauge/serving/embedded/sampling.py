"""Token sampling: one uniform number per sample and position, mapped to a token by the inverse CDF.

The numbers come from a counter-based hash instead of a generator, so that a sample's draws depend on nothing
but its own seed and the position, whichever other samples share its batch and in whatever order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.media import Media
    from anygauge_hooks.rl import SamplingParams

__all__ = ["PendingSample", "PromptKey", "draw", "seed_tensor", "uniforms"]

PromptKey = tuple[tuple[int, ...], tuple[str, ...]]

_MAX_ELEMENTS = 1 << 26
"""Largest ``[rows, V]`` that is worked on at once: with a large vocabulary copies would fill the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSample:
    """One sample to generate."""

    index: int
    """Position in the request."""
    tokens: tuple[int, ...]
    """The prompt."""
    seed: int
    max_new_tokens: int
    media: tuple[Media, ...] = ()
    """Media of the prompt."""

    @property
    def prompt(self) -> PromptKey:
        """Key of samples with the same prompt: equal tokens may stand for different images."""
        return self.tokens, tuple(medium.key for medium in self.media)


def _signed(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def seed_tensor(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Return seeds of any size as int64 ``[B]``, modulo ``2 ** 64``."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)


def uniforms(seeds: Tensor, position: int, count: int = 1) -> Tensor:
    """Return numbers in ``[0, 1)`` for each seed, pure functions of the seed and the position.

    SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2660193.2660195, figure 17), with the mixed
    seed as its state so that the streams of neighboring seeds share nothing.

    :param seeds: ``[B]``, int64.
    :param position: Index of the first token within its response.
    :param count: Number of tokens, ``N``.
    :returns: ``[N, B]``, float32, multiples of ``2 ** -24``.
    """
    steps = [_signed((position + 1 + index) * _GAMMA) for index in range(count)]
    bits = _mix(_mix(seeds) + torch.tensor(steps, device=seeds.device)[:, None])
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # int64 shifts in copies of the sign; torch has no arithmetic on uint64 on most devices.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def draw(
    logits: Tensor,
    prefix: Tensor,
    numbers: Tensor,
    params: SamplingParams,
    forbidden: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw the next token of every sample.

    :param logits: ``[P, V]``, one row for each distinct prefix, any floating dtype.
    :param prefix: ``[B]``, int64: the row of ``logits`` that each sample draws from.
    :param numbers: ``[B]``, float32, those of the samples at this position, see :func:`uniforms`.
    :param params: Temperature 0 takes the most probable token.
    :param forbidden: int64, ``params.forbidden`` on the device of the logits; ``None`` if it is empty.
    :returns: Tokens ``[B]``, int64, and their log-probabilities ``[B]``, float32, under the whole
        distribution at the sampling temperature: truncation by ``top_k`` and ``top_p`` does not enter, and
        what is forbidden is no part of it. At temperature 0 they are those of temperature 1.
    """
    rows = max(1, _MAX_ELEMENTS // logits.shape[-1])
    parts = [
        _draw(logits.index_select(0, some), u, params, forbidden)
        for some, u in zip(prefix.split(rows), numbers.split(rows), strict=True)
    ]
    tokens, log_probs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _draw(
    logits: Tensor, u: Tensor, params: SamplingParams, forbidden: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = logits.to(torch.float32)
    if forbidden is not None:
        scores = scores.index_fill(-1, forbidden, -torch.inf)
    if params.temperature not in (0, 1):
        scores = scores / params.temperature
    log_probs = torch.log_softmax(scores, dim=-1)
    if params.temperature == 0:
        tokens = log_probs.argmax(dim=-1)
    elif params.top_k == 0 and params.top_p == 1:
        tokens = _inverse_cdf(log_probs.exp(), u)
    else:
        weights, order = _truncate(log_probs.exp(), params)
        tokens = order.gather(-1, _inverse_cdf(weights, u)[:, None])[:, 0]
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


def _truncate(probs: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the weights that are left, most probable first, and their tokens.

    ``top_p`` applies to what ``top_k`` leaves, renormalized: the fewest tokens that hold this share of it
    (https://arxiv.org/abs/1904.09751 equation 2).
    """
    if 0 < params.top_k < probs.shape[-1]:
        weights, order = probs.topk(params.top_k, dim=-1)
    else:
        weights, order = probs.sort(dim=-1, descending=True, stable=True)
    if params.top_p < 1:
        before = weights.cumsum(dim=-1) - weights
        limit = params.top_p * weights.sum(dim=-1, keepdim=True)
        # The most probable token stays whatever the rounding.
        weights = torch.cat([weights[:, :1], weights[:, 1:].masked_fill(before[:, 1:] >= limit, 0)], dim=-1)
    return weights, order


def _inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Return ``[B]``: the first index whose cumulated weight exceeds ``u`` times the total."""
    cdf = weights.cumsum(dim=-1)
    index = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0]
    return index.clamp_(max=weights.shape[-1] - 1)
