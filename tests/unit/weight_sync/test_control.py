"""Requests to a server of weights, against a server of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from anygauge.weight_sync.control import EngineControl, RefusedError

WAITS, GOES_ON = threading.Event(), threading.Event()


class Handler(BaseHTTPRequestHandler):
    """Echoes a body, or redirects."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if self.path == "/waits":
            WAITS.set()
            GOES_ON.wait(30)
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(307 if self.path == "/elsewhere" else 200)
        self.send_header("location", "/")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineControl]:
    """Yield a client of a server, where the environment names a proxy that is not there."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        control = EngineControl(f"http://127.0.0.1:{http.server_port}", lambda _: {}, deadline_s=30)
        yield control
        http.shutdown()
        thread.join()


def test_a_body_arrives_whole(control: EngineControl) -> None:
    for body in ({"text": "é" * 2_000_000}, {}):
        assert control.post("/", body, what="an echo") == body
    assert control.post("/", [b'{"a": ', b"", memoryview(b"[1]}")], what="an echo") == {"a": [1]}


def test_one_thread_waits_while_another_asks(control: EngineControl) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(control.post, "/waits", {}, what="an answer")
        assert WAITS.wait(30)
        assert control.post("/", {"a": 1}, what="an echo") == {"a": 1}
        GOES_ON.set()
        assert waiting.result(30) == {}


def test_a_redirect_is_a_refusal(control: EngineControl) -> None:
    with pytest.raises(RefusedError, match=r"/elsewhere refused bucket 3: 307 'full'"):
        control.post("/elsewhere", {"message": "full"}, what="bucket 3")
