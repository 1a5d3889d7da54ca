"""Who may join the store that the ranks of a group meet at."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from anygauge.distributed.admission import admit_only
from anygauge.distributed.authenticated_store import AuthenticatedStore
from anygauge.distributed.rendezvous import host_store, join_store
from anygauge_hooks.errors import PlacementError
from anygauge_tests.processes import has_ipv6

SOON_S = 0.3
FAMILIES = [
    pytest.param("127.0.0.1", id="IPv4"),
    pytest.param("::1", id="IPv6", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback")),
]


@contextmanager
def hosted(host: str, token: str) -> Iterator[AuthenticatedStore]:
    with closing(host_store(host, token=token, peers=(), timeout_s=10)) as store:
        yield store


@pytest.mark.parametrize("host", FAMILIES)
def test_ranks_meet(host: str) -> None:
    with (
        hosted(host, "secret") as served,
        closing(join_store(host, served.port, token="secret", timeout_s=10)) as joined,
    ):
        joined.set("key", "value")
        assert served.get("key") == b"value"


def test_who_has_not_the_token_is_told_that_it_is_another_store() -> None:
    with (
        hosted("127.0.0.1", "secret") as served,
        pytest.raises(PlacementError, match="not that of this group"),
    ):
        join_store("127.0.0.1", served.port, token="another", timeout_s=10)


def test_a_store_that_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PlacementError, match=f"127.0.0.1:{port} cannot be reached: ConnectionRefusedError"):
        join_store("127.0.0.1", port, token="secret", timeout_s=0.1)


def test_a_loopback_store_is_not_reached_from_outside() -> None:
    with hosted("127.0.0.1", "secret") as served, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", served.port), timeout=SOON_S)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def connect(listener: socket.socket, source: str) -> bytes:
    with socket.create_connection(listener.getsockname(), timeout=SOON_S, source_address=(source, 0)) as ours:
        theirs, _ = listener.accept()
        with theirs:
            ours.sendall(b"hello")
            return theirs.recv(5)


def test_only_the_hosts_of_the_run_are_heard(listener: socket.socket) -> None:
    admit_only(listener, ["127.0.0.3", "::1", "127.0.0.1", "fe80::1%lo"])
    assert connect(listener, "127.0.0.1") == b"hello"
    assert connect(listener, "127.0.0.3") == b"hello"
    with pytest.raises(TimeoutError):
        connect(listener, "127.0.0.4")


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 loopback")
def test_only_the_hosts_of_the_run_are_heard_over_ipv6() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        address = listener.getsockname()[:2]
        admit_only(listener, ["fd00::1", "::1"])
        socket.create_connection(address, timeout=SOON_S).close()
        admit_only(listener, ["fd00::1", "::2", "127.0.0.1"])
        with pytest.raises(TimeoutError):
            socket.create_connection(address, timeout=SOON_S)


def test_a_run_has_room_for_hundreds_of_nodes(listener: socket.socket) -> None:
    admit_only(listener, [*(f"10.0.{i // 256}.{i % 256}" for i in range(1000)), "127.0.0.1"])
    assert connect(listener, "127.0.0.1") == b"hello"


def test_a_kernel_without_filters_is_an_error(listener: socket.socket) -> None:
    listener.close()
    with pytest.raises(PlacementError, match="cannot limit who connects"):
        admit_only(listener, ["127.0.0.1"])
