"""Attacks on the store where ranks meet, by a process that reaches its port and does not know the secret."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import timedelta

import pytest
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # not listed

from anygauge.distributed import store_server
from anygauge.distributed.authenticated_store import AuthenticatedStore
from anygauge.distributed.rendezvous import host_store, join_store
from anygauge.distributed.secure_channel import LONGEST, NONCE_BYTES, PROOF_BYTES, Keys, pack

HOST = "127.0.0.1"
TOKEN = "secret of the run"
SOON_S = 0.5
GARBAGE = [
    pytest.param(b"", id="nothing"),
    pytest.param(bytes(NONCE_BYTES + PROOF_BYTES), id="zeros"),
    pytest.param(b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n" * 9, id="http"),
    pytest.param(b"\xff" * 2**20, id="a megabyte"),
]


@pytest.fixture
def served() -> Iterator[AuthenticatedStore]:
    """Serve the store with a value that nobody else may see or change."""
    with closing(host_store(HOST, token=TOKEN, peers=(), timeout_s=30)) as store:
        store.set("address", "of rank 0")
        yield store


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=30)


def rest_of(connection: socket.socket) -> bytes:
    """Return what the other end sends until it closes the connection."""
    received = b""
    with suppress(ConnectionError):
        while piece := connection.recv(65536):
            received += piece
    return received


def holds_what_it_held(store: AuthenticatedStore) -> bool:
    with closing(join_store(HOST, store.port, token=TOKEN, timeout_s=30)) as member:
        return (member.num_keys(), member.get("address")) == (1, b"of rank 0")


def test_the_store_of_torch_gets_no_answer(
    served: AuthenticatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "HANDSHAKE_S", 0.2)
    with pytest.raises((DistError, RuntimeError)):
        TCPStore(HOST, served.port, is_master=False, timeout=timedelta(seconds=SOON_S))
    assert holds_what_it_held(served)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_answered_with_no_more_than_the_servers_proof(
    served: AuthenticatedStore, garbage: bytes
) -> None:
    with connect(served.port) as stranger:
        with suppress(OSError):  # it is closed while it writes
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
        assert len(rest_of(stranger)) <= NONCE_BYTES + PROOF_BYTES
    assert holds_what_it_held(served)


@pytest.mark.parametrize("fields", [[b"get", b"0", b"address"], [b"set", b"address", b"mine"], [b"count"]])
def test_requests_after_a_wrong_proof_are_not_read(served: AuthenticatedStore, fields: list[bytes]) -> None:
    with connect(served.port) as stranger:
        nonce = bytes(NONCE_BYTES)
        stranger.sendall(nonce)
        keys = Keys(b"a guess", nonce, stranger.recv(NONCE_BYTES, socket.MSG_WAITALL))
        stranger.recv(PROOF_BYTES, socket.MSG_WAITALL)
        stranger.sendall(keys.client_proof + keys.to_server().seal(pack(fields)))
        assert rest_of(stranger) == b""
    assert holds_what_it_held(served)


def test_the_servers_own_proof_is_not_that_of_a_client(served: AuthenticatedStore) -> None:
    with connect(served.port) as stranger:
        stranger.sendall(bytes(NONCE_BYTES))
        stranger.recv(NONCE_BYTES, socket.MSG_WAITALL)
        stranger.sendall(stranger.recv(PROOF_BYTES, socket.MSG_WAITALL))
        assert rest_of(stranger) == b""


def test_memory_does_not_grow_with_what_strangers_send(served: AuthenticatedStore) -> None:
    with connect(served.port) as stranger:
        stranger.settimeout(SOON_S)
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe|timed out"):
            stranger.sendall(bytes(100 * 2**20))


def test_idle_strangers_do_not_keep_a_member_out(
    served: AuthenticatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "HANDSHAKE_S", 3600)
    with ExitStack() as strangers:
        first = strangers.enter_context(connect(served.port))
        for _ in range(2 * store_server.MOST_STRANGERS):
            strangers.enter_context(connect(served.port))
        assert holds_what_it_held(served)
        assert rest_of(first) == b""


def test_connections_that_come_at_once_are_bounded_too(served: AuthenticatedStore) -> None:
    """Each is a descriptor of a training process, which may have no more than 1,024."""
    loop = served._server._loop  # type: ignore[union-attr]
    held, connected = threading.Event(), threading.Event()
    counts: list[int] = []

    def count(left: int) -> None:
        counts.append(len(os.listdir("/proc/self/fd")))
        if left:
            loop.call_soon(count, left - 1)

    loop.call_soon_threadsafe(lambda: (held.set(), connected.wait(), count(200)))
    assert held.wait(30)
    with ExitStack() as strangers:
        for _ in range(4 * store_server.MOST_STRANGERS):
            strangers.enter_context(connect(served.port))
        connected.set()
        assert holds_what_it_held(served)
    assert max(counts) - counts[0] < 2 * store_server.MOST_STRANGERS


def test_a_member_that_is_put_out_by_a_flood_connects_again(
    served: AuthenticatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its proof is on the way, and the server closes the connection before it reads that."""
    check, times = store_server.check_proof, iter(range(9))

    def closes_the_first(proof: bytes, expected: bytes) -> None:
        if next(times) == 0:
            raise ConnectionAbortedError
        check(proof, expected)

    monkeypatch.setattr(store_server, "check_proof", closes_the_first)
    assert holds_what_it_held(served)


def test_strangers_do_not_fill_the_log(served: AuthenticatedStore, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3 * store_server.MOST_WARNINGS):
        with connect(served.port) as stranger:
            stranger.sendall(bytes(NONCE_BYTES + PROOF_BYTES))
            rest_of(stranger)
    assert len(caplog.records) == store_server.MOST_WARNINGS


def test_a_stranger_that_says_nothing_is_hung_up_on(
    served: AuthenticatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_server, "HANDSHAKE_S", 0.05)
    with connect(served.port) as stranger:
        stranger.sendall(b"a")
        assert rest_of(stranger) == b""


class Neighbor(threading.Thread):
    """A process on the path between a member and the server, which may change and keep what passes.

    :param change: Applied to what the member sends, after its proof.
    """

    def __init__(self, port: int, change: Callable[[bytes], bytes]) -> None:
        super().__init__(daemon=True)
        self._server = connect(port)
        self._listener = socket.create_server((HOST, 0))
        self._change = change
        self.port = int(self._listener.getsockname()[1])
        self.seen = b""

    def run(self) -> None:
        with self._listener, self._server as server:
            member, _ = self._listener.accept()
            with member:
                threading.Thread(target=self._copy_back, args=(member,), daemon=True).start()
                while len(self.seen) < NONCE_BYTES + PROOF_BYTES:
                    self._pass_on(member.recv(NONCE_BYTES + PROOF_BYTES - len(self.seen)))
                with suppress(OSError):  # the server closes the connection, or the member
                    while piece := member.recv(65536):
                        self._pass_on(self._change(piece))
                    server.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, piece: bytes) -> None:
        self.seen += piece
        self._server.sendall(piece)

    def _copy_back(self, member: socket.socket) -> None:
        with suppress(OSError):
            while piece := self._server.recv(65536):
                member.sendall(piece)
            member.shutdown(socket.SHUT_RDWR)


def through(neighbor: Neighbor) -> AuthenticatedStore:
    neighbor.start()
    return join_store(HOST, neighbor.port, token=TOKEN, timeout_s=30)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "another value": lambda data: data.replace(b"rank 1", b"rank 9"),
    "sent twice": lambda data: data + data,
    "another length": lambda data: data[:3] + bytes([data[3] + 1]) + data[4:] + b"\x00",
    "a length beyond all bounds": lambda data: (LONGEST + 1).to_bytes(4, "big") + data[4:],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_message_ends_its_connection(
    served: AuthenticatedStore, change: Callable[[bytes], bytes]
) -> None:
    neighbor = Neighbor(served.port, change)
    with closing(through(neighbor)) as member, suppress(ConnectionError):
        member.set("address", "of rank 0")  # of several requests one must fail: the first may be the original
        member.set("other", "rank 1")
        member.delete_key("other")
        pytest.fail("a changed message was taken for the original")
    neighbor.join(30)
    assert served.get("address") == b"of rank 0"
    assert not served.check(["other"]) or served.get("other") == b"rank 1"


def test_a_recorded_connection_cannot_be_played_again(served: AuthenticatedStore) -> None:
    neighbor = Neighbor(served.port, lambda data: data)
    with closing(through(neighbor)) as member:
        member.add("count", 1)
    neighbor.join(30)
    with connect(served.port) as stranger:
        stranger.sendall(neighbor.seen)
        assert len(rest_of(stranger)) <= NONCE_BYTES + PROOF_BYTES
    assert served.get("count") == b"1"


def test_who_connects_first_changes_nothing(served: AuthenticatedStore) -> None:
    """The race at the start, won by the attacker each time: it is there before any rank."""
    with ExitStack() as strangers:
        for garbage in (b"", bytes(64), pack([b"set", b"address", b"mine"])):
            stranger = strangers.enter_context(connect(served.port))
            stranger.sendall(garbage)
        assert holds_what_it_held(served)
