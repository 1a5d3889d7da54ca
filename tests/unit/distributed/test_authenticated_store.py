"""The store where ranks meet, as torch uses it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, HashStore, PrefixStore  # type: ignore[attr-defined]  # not listed

from anygauge.distributed import secure_channel
from anygauge.distributed.authenticated_store import AuthenticatedStore
from anygauge.distributed.rendezvous import host_store, join_store

SOON = timedelta(milliseconds=50)
TOKEN = "secret of the run"


@pytest.fixture
def served() -> Iterator[AuthenticatedStore]:
    store = host_store("127.0.0.1", token=TOKEN, peers=(), timeout_s=30)
    yield store
    store.close()


@pytest.fixture
def joined(served: AuthenticatedStore) -> Iterator[AuthenticatedStore]:
    store = join_store("127.0.0.1", served.port, token=TOKEN, timeout_s=30)
    yield store
    store.close()


def answers(store: Any) -> list[Any]:
    """Return what a store of torch answers to each operation."""
    store.set("a", "1")
    store.append("a", "2")
    store.multi_set(["b", "c"], ["3", "\x00" * 9])
    return [
        store.get("a"),
        store.multi_get(["b", "c"]),
        store.add("count", 2),
        store.add("count", -5),
        store.get("count"),
        store.check(["a", "b"]),
        store.check(["a", "absent"]),
        store.compare_set("d", "unexpected", "4"),
        store.check(["d"]),
        store.compare_set("d", "", "4"),
        store.compare_set("d", "5", "6"),
        store.compare_set("d", "4", "6"),
        store.num_keys(),
        store.delete_key("d"),
        store.delete_key("d"),
        store.num_keys(),
        store.wait(["a", "b"]),
        store.wait(["a", "b"], SOON),
        store.has_extended_api(),
    ]


def test_it_answers_as_stores_of_torch_do(joined: AuthenticatedStore) -> None:
    assert answers(PrefixStore("inside/", joined)) == answers(HashStore())
    assert joined.get("inside//a") == b"12"


def test_a_value_may_hold_any_bytes(served: AuthenticatedStore, joined: AuthenticatedStore) -> None:
    value = bytes(range(256)) * 5000
    joined.set("key", value)
    assert served.get("key") == value


def test_a_key_that_does_not_come_is_waited_for_as_long_as_was_asked(joined: AuthenticatedStore) -> None:
    with pytest.raises(DistStoreError, match="absent"):
        joined.wait(["absent"], SOON)
    joined.set_timeout(SOON)
    with pytest.raises(DistStoreError, match="absent"):
        PrefixStore("inside", joined).get("absent")


def test_a_waiting_thread_keeps_no_other_from_the_store(joined: AuthenticatedStore) -> None:
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(PrefixStore("x", joined).get, key) for key in "ab"]
        for key in "ab":
            PrefixStore("x", joined.clone()).set(key, key)
        assert [each.result(30) for each in waiting] == [b"a", b"b"]


def test_a_request_that_the_server_cannot_carry_out_is_an_error(joined: AuthenticatedStore) -> None:
    joined.set("text", "no number")
    with pytest.raises(DistStoreError, match=r"refused b'add'.*no number"):
        joined.add("text", 1)
    with pytest.raises(ValueError, match="the limit is"):
        joined.set("key", bytes(secure_channel.LONGEST + 1))
    assert joined.get("text") == b"no number"


def test_a_server_that_ends_is_a_lost_connection(
    served: AuthenticatedStore, joined: AuthenticatedStore
) -> None:
    served.close()
    with pytest.raises(ConnectionError, match="store of rank 0 was closed"):
        joined.get("key")


def test_groups_of_gloo_meet_there(served: AuthenticatedStore, joined: AuthenticatedStore) -> None:
    def member(rank: int) -> torch.Tensor:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=30)
        group = dist.ProcessGroupGloo(PrefixStore("group", (served, joined)[rank]), rank, 2, options)
        total = torch.ones(2) + rank
        group.allreduce([total]).wait()
        return total

    with ThreadPoolExecutor(2) as threads:
        assert [each.tolist() for each in threads.map(member, range(2))] == [[3.0, 3.0]] * 2
