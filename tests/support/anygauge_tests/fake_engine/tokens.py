"""The tokens of a fake engine: a function of the prompt, the seed, the position and the weights' version.

Responses use the upper half of the vocabulary. What a prompt ends with from there is the beginning of the
response, so that a request that goes on from a partial response continues it exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["EOS", "Source", "Tokens", "expected", "source_of"]

EOS = 2
"""The token that ends a response by itself."""
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_LENGTH_SALT = 0x5851F42D4C957F2D


class Tokens(NamedTuple):
    """Tokens that follow a prompt."""

    ids: NDArray[np.int64]
    log_probs: NDArray[np.float64]


class Source(NamedTuple):
    """Source of a request's tokens."""

    key: int
    """Hash of prompt and seed."""
    done: int
    """Tokens of the response that are in the prompt already."""
    vocab: int

    def tokens(self, version: str, start: int, end: int) -> Tokens:
        """Return the tokens at the positions ``start`` to ``end`` of what is still to come."""
        positions = np.arange(self.done + start, self.done + end, dtype=np.uint64)
        bits = _mixed(positions * _STEP + np.uint64(self.key ^ _digest(version.encode())))
        half = self.vocab // 2
        ids = half + (bits % np.uint64(self.vocab - half)).astype(np.int64)
        return Tokens(ids, -8.0 * ((bits >> np.uint64(40)).astype(np.float64) + 1) / 2**24)

    def unit(self) -> float:
        """Return a number in [0, 1) that decides the length of the response."""
        return float(_mixed(np.array([self.key ^ _LENGTH_SALT], np.uint64))[0] >> np.uint64(11)) / 2**53


def source_of(prompt: Sequence[int], seed: int, vocab: int) -> Source:
    """Return where the tokens after a prompt come from."""
    half, done = vocab // 2, 0
    for token in reversed(prompt):
        if token < half:
            break
        done += 1
    beginning = np.asarray(prompt[: len(prompt) - done], np.int64).tobytes()
    return Source(_digest(beginning + seed.to_bytes(9, "little", signed=True)), done, vocab)


def expected(
    prompt: Sequence[int], seed: int, version: str | int, start: int, end: int, vocab: int = 32768
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the ids and log-probs that weights of a version give after a prompt, without end of sequence."""
    tokens = source_of(prompt, seed, vocab).tokens(str(version), start, end)
    return tuple(tokens.ids.tolist()), tuple(tokens.log_probs.tolist())


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread the bits of each value over all others (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
