"""Attacks on the ports of gloo, which answer whoever connects."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import FileStore, HashStore, PrefixStore, Store  # type: ignore[attr-defined]  # not listed

from anygauge.distributed import process_groups
from anygauge.distributed.peer_verification import KEY
from anygauge_hooks.errors import PlacementError

WORLD = 2
LISTENING_HOST, CONNECTING_HOST = "127.0.0.1", "127.0.0.2"
"""Hosts of two ranks: gloo lets the one with the higher address connect to the other."""
PLACE = struct.pack("q", 1)
"""First bytes that rank 1 sends, so that rank 0 takes the connection for rank 1's."""
HEADER = struct.Struct("6Q")
"""Header of each later message: whole length, kind, slot, offset, length of the data, offset at the
receiver."""
DATA, WILL_SEND, WILL_RECEIVE = 1, 2, 3
HARMLESS = {
    "nothing": b"",
    "half a number": PLACE[:4],
    "garbage": b"\xff" * 4096,
    "http": b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "a number of no rank": struct.pack("q", 7) + b"\xab" * 4096,
}


def make_group(store: Any, host: str, rank: int, timeout_s: float = 60.0) -> Any:
    """Return a group, or the text of the error that making it ends with: the error would hold the group."""
    timeout = timedelta(seconds=timeout_s)
    given = SimpleNamespace(store=store, group_rank=rank, group_size=WORLD, timeout=timeout)
    try:
        return process_groups._serial_group(host, given, None)
    except PlacementError as error:
        return str(error)


def published_port(store: Any, device: int = 0) -> int:
    """Return the port of rank 0, once it has published that."""
    data = store.get(f"{device}/0")
    (name_bytes,) = struct.unpack_from("Q", data)
    port: int
    (port,) = struct.unpack_from("!H", data, 8 + name_bytes + 8 + 2)  # lengths, family
    return port


def sums(groups: list[Any]) -> list[float]:
    tensors = [torch.full((1000,), rank + 1.0) for rank, _ in enumerate(groups)]
    for work in [group.allreduce([each]) for group, each in zip(groups, tensors, strict=True)]:
        work.wait()
    assert all(each.eq(each[0]).all() for each in tensors)
    return [each[0].item() for each in tensors]


class Start:
    """Two ranks that make a group as threads, and a stranger who connects to rank 0 before rank 1 does."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._threads = stack.enter_context(ThreadPoolExecutor(WORLD))
        self.store: Any = PrefixStore("group", HashStore())

    def first(self, **options: Any) -> Future[Any]:
        return self._threads.submit(make_group, self.store, LISTENING_HOST, 0, **options)

    def second(self, store: Any = None, **options: Any) -> Future[Any]:
        return self._threads.submit(make_group, store or self.store, CONNECTING_HOST, 1, **options)

    def stranger(self, data: bytes, device: int = 0) -> socket.socket:
        address = LISTENING_HOST, published_port(self.store, device)
        connection = self._stack.enter_context(socket.create_connection(address, timeout=60))
        connection.sendall(data)
        return connection


@pytest.fixture
def start() -> Iterator[Start]:
    process_groups._create_devices.cache_clear()  # of a process that has made no group, as PLACE is the first
    with ExitStack() as stack:
        yield Start(stack)


@pytest.mark.parametrize("data", HARMLESS.values(), ids=HARMLESS)
def test_who_takes_no_place_changes_nothing(start: Start, data: bytes) -> None:
    """Clients that wait for another server do this in healthy runs."""
    first = start.first()
    for _ in range(3):
        start.stranger(data)
    assert sums([each.result(60) for each in (first, start.second())]) == [3.0, 3.0]


def test_who_connects_to_a_group_that_is_made_changes_nothing(start: Start) -> None:
    groups = [each.result(60) for each in (start.first(), start.second())]
    for data in (*HARMLESS.values(), PLACE, PLACE + b"\xab" * 4096):
        start.stranger(data)
        assert sums(groups) == [3.0, 3.0]


def takes_part(stranger: socket.socket, reply: Callable[[bytes], bytes]) -> None:
    """Exchange codes with rank 0 as rank 1 would.

    :param reply: Makes what is sent of what rank 0 has sent.
    """

    def message(kind: int, length: int, slot: int, data: bytes = b"") -> bytes:
        return HEADER.pack(HEADER.size + len(data), kind, slot, 0, length, 0) + data

    def receive(count: int) -> bytes:
        return stranger.recv(count, socket.MSG_WAITALL)

    received, is_awaited = b"", False
    while not (received and is_awaited):
        _, kind, slot, _, length, _ = HEADER.unpack(receive(HEADER.size))
        if kind == WILL_SEND:
            stranger.sendall(message(WILL_RECEIVE, length, slot))
        elif kind == DATA:
            received = receive(length)
        is_awaited |= kind == WILL_RECEIVE
    stranger.sendall(message(WILL_SEND, len(received), slot))
    stranger.sendall(message(DATA, len(received), slot, reply(received)))


def zeros(code: bytes) -> bytes:
    return bytes(len(code))


@pytest.mark.parametrize("reply", [zeros, bytes], ids=["zeros", "reflected"])
def test_who_speaks_in_the_place_of_a_rank_ends_the_start(
    start: Start, reply: Callable[[bytes], bytes]
) -> None:
    first = start.first()
    stranger = start.stranger(PLACE)
    second = start.second()
    takes_part(stranger, reply)
    assert "Something else has connected to rank 0 of a process group instead of rank 1." in first.result(60)
    assert "could not connect to each other: " in second.result(60)


def test_who_is_silent_in_the_place_of_a_rank_ends_the_start_at_its_deadline(start: Start) -> None:
    first = start.first(timeout_s=1.0)
    start.stranger(PLACE)
    second = start.second(timeout_s=1.0)
    for each in (first, second):
        assert "The ranks of a process group could not connect to each other" in each.result(60)


class LateStore(Store):
    """The store of a rank that learns a key late.

    :param late: The key, as it ends.
    :param may_go_on: Set when the rank may learn it.
    """

    def __init__(self, store: Any, late: str, may_go_on: threading.Event) -> None:
        super().__init__()
        self._store, self._late, self._may_go_on = store, late, may_go_on

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        if key.endswith(self._late):
            assert self._may_go_on.wait(60)
        value: bytes = self._store.get(key)
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout)


def test_every_network_interface_of_a_group_is_verified(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        process_groups, "_host_devices", lambda gloo, host: [gloo.create_device(hostname=host) for _ in "ab"]
    )
    may_go_on = threading.Event()
    first, second = start.first(), start.second(store=LateStore(start.store, "1/0", may_go_on))
    stranger = start.stranger(PLACE, device=1)
    may_go_on.set()
    takes_part(stranger, zeros)
    assert "instead of rank 1" in first.result(60)
    assert "could not connect to each other: " in second.result(60)


RANK_0 = f"""
import sys
from datetime import timedelta
from types import SimpleNamespace
from torch.distributed import FileStore
from anygauge.distributed.process_groups import _serial_group
store, timeout = FileStore(sys.argv[1], {WORLD}), timedelta(seconds=60)
given = SimpleNamespace(store=store, group_rank=0, group_size={WORLD}, timeout=timeout)
_serial_group("{LISTENING_HOST}", given, None)
"""


@pytest.mark.soak
def test_data_that_no_rank_waits_for_ends_its_process(start: Start, tmp_path: Path) -> None:
    """The run then ends as with every worker that dies (AG701)."""
    path = str(tmp_path / "store")
    start.store = FileStore(path, WORLD)
    start.store.set(KEY, "")  # rank 0 may end before it sets one, which rank 1 would wait for
    with subprocess.Popen([sys.executable, "-c", RANK_0, path], stderr=subprocess.DEVNULL) as first:
        unexpected = HEADER.pack(HEADER.size + 64, DATA, 5, 0, 64, 0) + bytes(64)
        start.stranger(PLACE + unexpected)
        second = start.second()
        assert first.wait(60) == -signal.SIGABRT
    assert "could not connect to each other: " in second.result(60)
