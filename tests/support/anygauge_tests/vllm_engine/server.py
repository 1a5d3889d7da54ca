"""A server with the endpoints of vLLM that a run needs, in threads of the process that starts it.

Shapes are those of ``/v1/completions`` with ``return_token_ids``, and of the endpoints for RL
(https://docs.vllm.ai/en/latest/training/weight_transfer/): ``/pause``, ``/resume``, ``/abort_requests``
and, in development mode, ``/collective_rpc``. Answers say nothing of the version of the weights.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

from anygauge_hooks.serving import ServerPeer

__all__ = ["VllmServer"]

RELOAD = "reload_weights"


class VllmServer:
    """An :class:`~anygauge_hooks.serving.EngineServer` of one model.

    :param path: Hugging Face directory.
    :param peer: Class of the peer that other processes get.
    """

    def __init__(self, path: Path, peer: type[ServerPeer]) -> None:
        self._path, self._peer = path, peer
        self._http: _HTTPServer | None = None

    def start(self, encoders: Sequence[str] = ()) -> str:
        """Load the model and serve it."""
        self._http = _HTTPServer(self._path)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self.address

    @property
    def address(self) -> str:
        """``http://host:port``."""
        assert self._http is not None, "it was started"
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def is_alive(self) -> bool:
        """Return whether it was started."""
        return self._http is not None

    def facts(self) -> Mapping[str, str]:
        """Return what it is."""
        return {"version": "shape of 0.29", "model": str(self._path)}

    def peer(self) -> ServerPeer:
        """Return how other processes speak to it."""
        return self._peer(address=self.address)

    def close(self) -> None:
        """Stop to serve."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.engine = _Engine(path)


class _Engine:
    """The model, which answers one request at a time."""

    def __init__(self, path: Path) -> None:
        self._running = threading.Event()
        self._running.set()
        self._one = threading.Lock()
        self.load(path)

    def load(self, path: Path) -> None:
        """Load weights."""
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def pause(self) -> None:
        """Make no tokens."""
        self._running.clear()

    def resume(self) -> None:
        """Go on."""
        self._running.set()

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a choice."""
        self._running.wait()
        tokens, log_probs = list(body["prompt"]), []
        generator = torch.Generator().manual_seed(body["seed"])
        ends = {self._model.generation_config.eos_token_id, *body["stop_token_ids"]}
        reason = "length"
        with self._one, torch.inference_mode():
            for _ in range(body["max_tokens"]):
                logits = self._model(torch.tensor([tokens])).logits[0, -1] / body["temperature"]
                token = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
                tokens.append(token)
                log_probs.append(float(logits.log_softmax(-1)[token]))
                if token in ends and not body["ignore_eos"]:
                    reason = "stop"
                    break
        return {
            "index": 0,
            "text": "",
            "token_ids": tokens[len(body["prompt"]) :],
            "logprobs": {"token_logprobs": log_probs},
            "finish_reason": reason,
        }


class _Handler(BaseHTTPRequestHandler):
    server: _HTTPServer

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        engine, path = self.server.engine, urlsplit(self.path).path
        if path == "/v1/completions":
            self._answer(200, {"id": body["request_id"], "choices": [engine.complete(body)]})
            return
        if path == "/pause":
            engine.pause()
        elif path == "/resume":
            engine.resume()
        elif path == "/collective_rpc" and body["method"] == RELOAD:
            engine.load(Path(body["kwargs"]["weights_path"]))
        elif path != "/abort_requests":
            self._answer(404, {"error": f"no route {path}"})
            return
        self._answer(200, {})

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
