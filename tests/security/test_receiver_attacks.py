"""Strangers at the port of a weight receiver: nothing of theirs is kept, and the sender gets through."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.weight_sync import secret_server
from anygauge.weight_sync.receiver import SECRET_HEADER, Receiver
from anygauge.weight_sync.secret_server import HEAD_BYTES, LARGEST_BODY, STRANGERS
from anygauge_tests.http_requests import Reply, ask

MIB = 2**20
WAIT_S = 20.0


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    nobody = SGLangPeer(address="http://127.0.0.1:9")
    running = Receiver(nobody, host="127.0.0.1", bucket_bytes=1 << 16, deadline_s=20)
    yield running
    running.close()


def connect(receiver: Receiver) -> socket.socket:
    host, port = receiver.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def head(*lines: str, secret: str | bytes | None = None, path: str = "/state") -> bytes:
    shown = secret.encode() if isinstance(secret, str) else secret
    named = b"" if shown is None else SECRET_HEADER.encode() + b": " + shown + b"\r\n"
    rest = "".join(f"{line}\r\n" for line in lines).encode()
    return f"POST {path} HTTP/1.1\r\nHost: receiver\r\n".encode() + named + rest + b"\r\n"


def answer(receiver: Receiver, data: bytes) -> tuple[int, bytes]:
    """Return the status that comes back, 0 if there is none, and everything after it."""
    with connect(receiver) as stream:
        stream.sendall(data)
        with stream.makefile("rb") as file:
            try:
                status, rest = file.readline(), file.read()
            except ConnectionResetError:
                return 0, b""
    return int(status.split()[1]) if status.startswith(b"HTTP/") else 0, rest


def test_the_secret_is_looked_at_before_the_body(receiver: Receiver) -> None:
    status, _ = answer(receiver, head(f"Content-Length: {800 * MIB}"))
    assert status == 403, "no byte of the body was sent"
    status, _ = answer(receiver, head(f"Content-Length: {800 * MIB}", secret="0" * 32))
    assert status == 403


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["Content-Length: -1"], 400),
        (["Content-Length: +2"], 400),
        (["Content-Length: two"], 400),
        (["Content-Length: 1_0"], 400),
        (["Content-Length: \u0662"], 400),
        (["Content-Length: 2", "Content-Length: 900"], 400),
        (["Transfer-Encoding: chunked"], 411),
        (["Transfer-Encoding: chunked", "Content-Length: 2"], 411),
        ([], 411),
        ([f"Content-Length: {LARGEST_BODY + 1}"], 413),
        (["Content-Length: " + "9" * 5000], 413),
    ],
)
def test_a_length_that_is_none_is_refused_although_the_secret_is_right(
    receiver: Receiver, lines: list[str], expected: int
) -> None:
    status, _ = answer(receiver, head(*lines, secret=receiver.secret))
    assert status == expected


@pytest.mark.parametrize("secret", ["ä" * 16, b"\xff\xfe\x00", "", " ", "0" * 31])
def test_a_secret_in_any_bytes_is_refused_without_a_traceback(
    receiver: Receiver, secret: str | bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _ = answer(receiver, head("Content-Length: 2", secret=secret) + b"{}")
    assert status == 403
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
        b"\r\n\r\n",
        b"POST\r\n\r\n",
        b"POST / HTTP/9.9\r\n\r\n",
        b"DELETE /state HTTP/1.1\r\n\r\n",
        b"POST /state HTTP/1.1\r\n" + b"a: b\r\n" * 150 + b"\r\n",
        b"POST /state HTTP/1.1\r\nno colon here\r\n\r\n",
        b"POST /state HTTP/1.1\r\n: \r\n\x00: \x00\r\n\r\n",
    ],
    ids=["tls", "empty", "no path", "version", "method", "150 headers", "no colon", "no name"],
)
def test_what_is_no_request_ends_its_connection_alone(
    receiver: Receiver, data: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _ = answer(receiver, data)
    assert status == 0 or 400 <= status < 600
    assert "Traceback" not in capfd.readouterr().err
    assert state(receiver) == {"version": None}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the deadline of heads away, so that it is not what ends a connection."""
    monkeypatch.setattr(secret_server, "HEAD_S", 3600.0)


def test_a_head_without_end_is_cut_off(receiver: Receiver, patient: None) -> None:
    with connect(receiver) as stream:
        received = b"unread"
        try:
            for _ in range(64):
                stream.sendall(b"x" * HEAD_BYTES)
            received = stream.recv(1)
        except ConnectionError:  # a reset, since what was sent was not read
            received = b""
    assert received == b""


def test_a_head_that_never_comes_to_its_end_has_a_deadline(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_server, "HEAD_S", 0.05)
    with connect(receiver) as stream:
        stream.sendall(b"POST /sta")
        assert stream.recv(1) == b"", "it is closed"


def test_idle_connections_are_bounded_and_the_sender_gets_through(receiver: Receiver, patient: None) -> None:
    with ExitStack() as stack:
        for _ in range(10 * STRANGERS):
            stack.enter_context(connect(receiver))
        assert state(receiver) == {"version": None}
        ends = time.monotonic() + WAIT_S
        while connections(receiver) > STRANGERS and time.monotonic() < ends:
            time.sleep(0.01)
        assert connections(receiver) <= STRANGERS


def test_a_sender_that_has_shown_the_secret_is_not_put_out_by_strangers(receiver: Receiver) -> None:
    request = head("Content-Length: 2", secret=receiver.secret) + b"{}"
    with connect(receiver) as sender, ExitStack() as stack:
        sender.sendall(request)
        assert b'{"version": null}' in sender.recv(4096)
        for _ in range(4 * STRANGERS):
            stack.enter_context(connect(receiver))
        assert state(receiver) == {"version": None}, "which was accepted after all of them"
        sender.sendall(request)
        assert b'{"version": null}' in sender.recv(4096)


def test_what_breaks_a_request_is_told_to_the_sender_and_not_to_the_terminal(
    receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    for path, data in (
        ("/begin", b"[" * 100_000),
        ("/begin", b"[]"),
        ("/begin", b"{}"),
        ("/changes", b"\xff" * 40),
        ("/changes", b""),
        ("/nothing", b"{}"),
    ):
        reply = post(receiver, path, data)
        assert reply.status >= 400
        assert reply.json()["message"]
    assert "Traceback" not in capfd.readouterr().err


def test_the_server_says_nothing_of_itself(receiver: Receiver) -> None:
    for data in (head("Content-Length: 0"), b"DELETE / HTTP/1.1\r\n\r\n"):
        _, rest = answer(receiver, data)
        assert b"python" not in rest.lower()


def post(receiver: Receiver, path: str, data: bytes) -> Reply:
    url = f"http://{receiver.address}{path}"
    return ask(url, data, {SECRET_HEADER: receiver.secret})


def state(receiver: Receiver) -> object:
    return post(receiver, "/state", b"{}").json()


def connections(receiver: Receiver) -> int:
    return sum(each.name == secret_server.THREAD for each in threading.enumerate())
