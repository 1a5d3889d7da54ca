"""When a response ends: end-of-sequence tokens, stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from anygauge_hooks.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.rl import SamplingParams

__all__ = ["StopRules", "Stopper", "decode"]


def decode(tokenizer: Any, sequences: Sequence[Sequence[int]], *, special: bool) -> list[str]:
    """Return the text of token sequences, exactly as the tokenizer has it.

    :param special: Whether special tokens are part of the text.
    """
    if not sequences:
        return []  # transformers takes an empty list for one empty sequence
    texts: list[str] = tokenizer.batch_decode(
        sequences, skip_special_tokens=not special, clean_up_tokenization_spaces=False
    )
    return texts


class StopRules:
    """Stop conditions of one model; makes the :class:`Stopper` of a request.

    :param tokenizer: The model's tokenizer.
    :param eos_ids: The model's end-of-sequence tokens.
    :param vocab_size: Columns of the logits.
    :param device: Where tokens are drawn.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int], vocab_size: int, device: torch.device) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._vocab_size = vocab_size
        self._device = device
        self._pieces: list[str] | None = None
        self._completing = lru_cache(maxsize=8)(self._find_completing)

    def stopper(self, params: SamplingParams) -> Stopper:
        """Return the stop criteria of a request.

        :raises RolloutError: A stop token is not in the vocabulary, or a stop string is empty.
        """
        outside = [token for token in params.stop_token_ids if not 0 <= token < self._vocab_size]
        if outside or "" in params.stop:
            raise RolloutError(
                f"These stop conditions cannot be met: tokens {outside} of a vocabulary of "
                f"{self._vocab_size}, strings {[text for text in params.stop if not text]}.",
                hint="Take them out of rollout.stop_token_ids and rollout.stop.",
            )
        ids = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos_ids)
        completing = self._completing(params.stop) if params.stop else None
        return Stopper(self._tokenizer, self._table(ids), params.stop, completing)

    def _table(self, ids: Iterable[int]) -> Tensor:
        table = torch.zeros(self._vocab_size, dtype=torch.bool)
        table[[token for token in ids if token < self._vocab_size]] = True
        return table.to(self._device)

    def _find_completing(self, stop: tuple[str, ...]) -> Tensor:
        """Return ``[V]``, bool: the tokens that may be the last of a stop string.

        Few are, so that few rows of a step have to be decoded. A token that is part of a character counts,
        and so do all if a string ends in white space, which some tokenizers strip from a lone token.
        """
        if any(text[-1].isspace() for text in stop):
            return torch.ones(self._vocab_size, dtype=torch.bool, device=self._device)
        if self._pieces is None:
            size = min(self._vocab_size, len(self._tokenizer))
            self._pieces = decode(self._tokenizer, [[token] for token in range(size)], special=True)
        last = {text[-1] for text in stop} | {"\N{REPLACEMENT CHARACTER}"}
        return self._table(token for token, piece in enumerate(self._pieces) if last.intersection(piece))


class Stopper:
    """Decides, token by token, which responses of a request end."""

    def __init__(
        self, tokenizer: Any, stop_ids: Tensor, strings: tuple[str, ...], completing: Tensor | None
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._strings = strings
        self._completing = completing
        # A token is at least one byte. The extra ones complete a character that the window would cut.
        self._window = max((len(text.encode()) for text in strings), default=0) + 4

    def ended(self, responses: Tensor, rows: Tensor, length: int) -> Tensor:
        """Return which rows end with their newest token.

        Asked after every token, so a stop string is found at the token that completes it.

        :param responses: ``[B, R]``, int64: the tokens so far, of all rows.
        :param rows: ``[A]``, int64: the rows that are still going.
        :param length: Tokens that each of these rows has by now.
        :returns: ``[A]``, bool.
        """
        newest = responses[:, length - 1].index_select(0, rows)
        ended = self._stop_ids[newest]
        if self._completing is not None:
            candidates = (self._completing[newest] & ~ended).nonzero()[:, 0]
            if len(candidates):
                window = responses[rows[candidates], max(0, length - self._window) : length]
                ended[candidates] |= self._contain_stop(window)
        return ended

    def _contain_stop(self, window: Tensor) -> Tensor:
        texts = decode(self._tokenizer, window.tolist(), special=True)
        flags = [any(stop in text for stop in self._strings) for text in texts]
        return torch.tensor(flags, dtype=torch.bool, device=window.device)
