"""The directory in which wrong inputs are tried: models, rows, rewards, a config, a server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer

__all__ = ["make_place", "open_server"]

CONFIG = """[run]
name = "new"
directory = "runs"
steps = 2

[model]
path = "model"

[data]
train = ["rows.jsonl"]
cache = "cache"

[reward]
function = "exact_match"

[rollout]
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 4

[train]
lr = 1e-3

[eval]
data = ["eval.jsonl"]
interval = 2

[save]
every = 1

[placement]
launcher = "local"
threads_per_worker = 1
"""
FUNCTIONS = """
import os, time
from anygauge_hooks import hookimpl


def raises(response, label): raise RuntimeError("judge is down")
def nan(response, label): return float("nan")
def infinite(response, label): return float("inf")
def nothing(response, label): print(response)
def text(response, label): return "0.5"
def pair(response, label): return [0.5, 0.5]
def parts(response, label): return {"format": 1.0}
def exits(response, label): os._exit(3)
def leaves(response, label): raise SystemExit("bye")
def hangs(response, label): time.sleep(600)
def large(response, label): return len(bytearray(1 << 40))
def verl(data_source, solution_str, ground_truth, extra_info=None): return 0.0
def trl(prompts, completions, answer, **kwargs): return [0.0] * len(completions)
def short(response, label): return [0.0]
def colored(response, label): raise RuntimeError("\\x1b[2J\\x1b[31mred")
async def waits(response, label): raise RuntimeError("the judge did not answer")
NUMBER = 3


def loss_raises(inputs): raise ZeroDivisionError("of mine")
def loss_exits(inputs): os._exit(9)
def filter_raises(group, **options): raise KeyError("group")
async def rollout_raises(*args, **options): raise ValueError("no tool")


class UnknownHook:
    @hookimpl
    def register_rewards(self): return []


class WrongArgument:
    @hookimpl
    def after_train_step(self, run, metric): pass
"""
NOT_A_NUMBER = """
from safetensors.torch import load_file, save_file

weights = load_file("model/model.safetensors")
weights["model.norm.weight"].fill_(float("nan"))
save_file(weights, "model/model.safetensors")
"""


def make_place(root: Path) -> None:
    """Write everything but the earlier run ``runs/first``, which a run of ``run.toml`` makes."""
    tiny_qwen3(root / "model", init_std=0.3)
    tiny_qwen3(root / "chat", tokenizer=tiny_tokenizer(root / "chat", texts=["What is 1+2? It is 3."]))
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(3) for b in range(4)]
    for name in ("rows", "eval"):
        (root / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    (root / "run.toml").write_text(CONFIG, encoding="utf-8")
    (root / "mine.py").write_text(FUNCTIONS, encoding="utf-8")
    (root / "not_a_number.py").write_text(NOT_A_NUMBER, encoding="utf-8")
    (root / "broken.py").write_text("def score(response)\n    return 0\n", encoding="utf-8")


class _Answers(BaseHTTPRequestHandler):
    """Answers of a reward server that is wrong in the way that its path says."""

    def do_POST(self) -> None:
        """Answer."""
        body = {
            "/garbage": b"<html>\x1b[31m502 Bad Gateway",
            "/nan": b"NaN",
            "/text": b'"very good"',
            "/nested": b"[" * 100_000,
        }.get(self.path, b"\x1b]0;owned\x07 no such model")
        if self.path == "/slow":
            time.sleep(5)
        with suppress(ConnectionError):  # the client waits no longer
            self._send(body)

    def _send(self, body: bytes) -> None:
        self.send_response(500 if self.path == "/500" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def open_server() -> Iterator[int]:
    """Yield the port of a server whose answers are wrong; the port is taken, too."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
