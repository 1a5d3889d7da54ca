"""Requests to a server of weights, against a server of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from anygauge.weight_sync.control import EngineControl, RefusedError


class Handler(BaseHTTPRequestHandler):
    """Echoes a body, or redirects."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
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
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        control = EngineControl(f"http://127.0.0.1:{http.server_port}", lambda _: {}, deadline_s=30)
        yield control
        control.close()
        http.shutdown()
        thread.join()


def test_a_body_arrives_whole_and_a_connection_is_used_again(control: EngineControl) -> None:
    for body in ({"text": "é" * 2_000_000}, json.dumps({"a": [1]}).encode(), {}):
        echo = control.post("/", body, what="an echo")
        assert echo == (json.loads(body) if isinstance(body, bytes) else body)


def test_a_redirect_is_a_refusal(control: EngineControl) -> None:
    with pytest.raises(RefusedError, match=r"/elsewhere refused bucket 3: 307 'full'"):
        control.post("/elsewhere", {"message": "full"}, what="bucket 3")
