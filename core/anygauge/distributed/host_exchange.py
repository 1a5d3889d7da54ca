"""Decisions of all ranks through the rendezvous store, in which no collective of a device takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed import Store  # type: ignore[attr-defined]  # not listed

__all__ = ["HostExchange"]


class HostExchange:
    """Collects a text from every rank on rank 0, and gives each rank the answer of rank 0.

    A check of collectives cannot use them: where a gather returns a rank's own part, every rank looks the
    same. All ranks must make the same calls in the same order. A key is deleted once it has been read.

    :param store: Shared by all ranks; its timeout limits each wait.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0

    def decide(self, text: str, judge: Callable[[Sequence[str]], str]) -> str:
        """Return what ``judge`` makes of the texts of all ranks; it is called on rank 0 alone."""
        keys = [f"exchange/{self._count}/{rank}" for rank in range(self._size)]
        self._count += 1
        if self._rank == 0:
            return self._answer(text, keys, judge)
        self._store.set(keys[self._rank], text)
        answer: bytes = self._store.get(keys[0])
        self._store.delete_key(keys[self._rank])
        return answer.decode()

    def _answer(self, text: str, keys: Sequence[str], judge: Callable[[Sequence[str]], str]) -> str:
        others = self._store.multi_get(list(keys[1:])) if self._size > 1 else []
        answer = judge([text, *(other.decode() for other in others)])
        if self._size > 1:
            self._store.set(keys[0], answer)
            if self._count > 1:  # every rank has come here, and so has read the answer before
                self._store.delete_key(f"exchange/{self._count - 2}/0")
        return answer
