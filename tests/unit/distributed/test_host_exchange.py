"""Decisions of ranks through a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import HashStore  # type: ignore[attr-defined]  # not listed

from anygauge.distributed.process_groups import HostExchange

SIZE = 3


def test_every_rank_gets_the_answer_of_rank_0_and_keys_do_not_pile_up() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=30))

    def rank(number: int) -> list[str]:
        exchange = HostExchange(store, number, SIZE)
        return [exchange.decide(f"{call}.{number}", " ".join) for call in range(5)]

    with ThreadPoolExecutor(SIZE) as ranks:
        answers = list(ranks.map(rank, range(SIZE)))
    assert answers == [[f"{call}.0 {call}.1 {call}.2" for call in range(5)]] * SIZE
    assert store.num_keys() == 1, "the last answer, which somebody may not have read yet"


def test_a_rank_alone_decides() -> None:
    assert HostExchange(HashStore(), 0, 1).decide("mine", " ".join) == "mine"
