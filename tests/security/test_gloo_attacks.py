"""Attacks on the ports of gloo, which answer whoever connects."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]  # not listed

from anygauge.distributed import connections
from anygauge.distributed.connections import Connections
from anygauge_hooks.errors import PlacementError

WORLD = 2
STRANGER = """
import socket, sys
kept = []
for data in sys.argv[3:]:
    kept.append(socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30))
    kept[-1].sendall(bytes.fromhex(data))
print("connected", flush=True)
sys.stdin.read()
"""
SEQUENCE_NUMBERS = [struct.pack("q", number).hex() for number in range(4)]
"""What a rank sends first, so that the listening rank takes it for the one that it waits for."""
ATTACKS = {
    "idle": [""],
    "half a number": ["01"],
    "garbage": ["ff" * 4096],
    "in place of a rank": SEQUENCE_NUMBERS,
    "in place of a rank, with garbage": [number + "ab" * 4096 for number in SEQUENCE_NUMBERS],
}


@contextmanager
def stranger(port: int, attack: list[str]) -> Iterator[None]:
    """Run a process that has connected to a port, and sent something over each connection."""
    command = [sys.executable, "-S", "-c", STRANGER, "127.0.0.1", str(port), *attack]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"connected\n"
        yield
        process.kill()


def form_group(rank: int, store: Any) -> Any:
    """Return the group of a rank once it is confirmed; ranks are threads."""
    options: Any = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=30)
    with Connections(store, rank, WORLD).confirmed():
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        make: Any = ProcessGroupGloo
        return make(PrefixStore("group", store), rank, WORLD, options)


def port_of_first_rank(before: set[Any]) -> int:
    while not (new := set(connections._listening()) - before):
        time.sleep(0.001)
    return int(new.pop()[1])


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORLD) as threads:
        yield threads


Start = Callable[[], tuple[int, Callable[[], list[Future[Any]]]]]


@pytest.fixture
def start(threads: ThreadPoolExecutor) -> Start:
    """Start rank 0 alone; return its port, and a function that starts rank 1."""

    def started() -> tuple[int, Callable[[], list[Future[Any]]]]:
        store, before = HashStore(), set(connections._listening())
        first = threads.submit(form_group, 0, store)
        return port_of_first_rank(before), lambda: [first, threads.submit(form_group, 1, store)]

    return started


def test_ranks_alone_are_confirmed(start: Start) -> None:
    _, join = start()
    groups = [each.result(60) for each in join()]
    sums = [torch.ones(1) for _ in groups]
    for work in [group.allreduce([each]) for group, each in zip(groups, sums, strict=True)]:
        work.wait()
    assert [each.item() for each in sums] == [2.0, 2.0]


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_who_connects_before_a_rank_ends_the_start(start: Start, attack: list[str]) -> None:
    port, join = start()
    with stranger(port, attack):
        first = join()[0]
        with pytest.raises(PlacementError, match=f"no rank has connected .* to 127.0.0.1:{port}"):
            first.result(60)


def test_who_connects_to_a_group_that_is_made_changes_nothing(start: Start) -> None:
    port, join = start()
    groups = [each.result(60) for each in join()]
    with stranger(port, [data for attack in ATTACKS.values() for data in attack]):
        for number in range(20):
            sums = [torch.full((1000,), float(number)) for _ in groups]
            for work in [group.allreduce([each]) for group, each in zip(groups, sums, strict=True)]:
                work.wait()
            assert all(each.eq(2.0 * number).all() for each in sums)


def test_ranks_that_cannot_connect_are_an_error_with_a_hint() -> None:
    peers = Connections(HashStore(), 0, WORLD)
    with (
        pytest.raises(PlacementError, match="could not connect to each other: timed out") as caught,
        peers.confirmed(),
    ):
        raise RuntimeError("timed out connecting")
    assert "kept busy" in str(caught.value)
