"""Two hubs on loopback, each with as much of its protocol as its client uses."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

import pytest

from anygauge.config.schema import Config
from anygauge.testing.tiny import tiny_qwen3

COMMIT = "5f3c" * 10
MODEL = "Tiny/Qwen3"
DATA = "Tiny/sums"
TOKEN = "hf_good"
ROWS = b'{"prompt": "1+1=", "label": "2"}\n'


@dataclass
class Repository:
    """Files of a name on a hub."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": COMMIT})
    access: str = "open"
    """``open``; ``gated`` or ``private``, for all but the good token."""


class Hub(ThreadingHTTPServer):
    """A hub, what it holds and what it was asked."""

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler], repositories: dict[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.repositories = repositories
        self.asked: list[str] = []
        self.status: int | None = None
        """Status of every answer, to simulate an outage of the hub."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def downloaded(self) -> set[str]:
        """Return the names of the files that were sent."""
        return {Path(line).name for line in self.asked if line.startswith("GET") and "/resolve/" in line}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        return

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {unquote(self.path)}")
        if self.server.status is not None:
            self.refuse(self.server.status, "ServerError", "a bad day")
        else:
            self.answer(urlparse(unquote(self.path)))

    def answer(self, url: Any) -> None:
        raise NotImplementedError

    def refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message, "Code": status, "Message": message, "Success": False}).encode()
        self.send(status, body, {"X-Error-Code": code, "X-Error-Message": message})

    def send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


class HuggingFaceHandler(Handler):
    """``/api/models/O/N/{revision,tree}/R`` and ``/O/N/resolve/R/FILE``; data sets alike."""

    def answer(self, url: Any) -> None:
        parts = url.path.strip("/").split("/")
        is_api = parts[0] == "api"
        parts = parts[1:] if is_api else parts
        is_data = parts[0] == "datasets"
        parts = parts[1:] if parts[0] in ("models", "datasets") else parts
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = self.server.repositories.get(f"{'datasets/' if is_data else ''}{name}")
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}"):
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif repository is None or (repository.access == "private" and given is None):
            self.refuse(404 if given else 401, "RepoNotFound", "Repository not found")
        elif repository.access == "gated" and given is None and "resolve" in rest:
            self.refuse(401, "GatedRepo", "Access to this repository is restricted")
        else:
            self.answer_for(name, repository, rest or ["revision", "main"])

    def answer_for(self, name: str, repository: Repository, rest: list[str]) -> None:
        kind, revision, *path = rest
        commit = repository.revisions.get(revision, revision)
        if commit not in repository.revisions.values():
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif kind == "revision":
            siblings = [{"rfilename": file} for file in repository.files]
            self.send_json({"id": name, "sha": commit, "siblings": siblings})
        elif kind == "tree":
            files = repository.files.items()
            self.send_json(
                [{"type": "file", "path": file, "size": len(data), "oid": oid(data)} for file, data in files]
            )
        elif (data := repository.files.get("/".join(path))) is None:
            self.refuse(404, "EntryNotFound", "Entry not found")
        else:
            self.send(200, data, {"ETag": f'"{oid(data)}"', "X-Repo-Commit": commit})


class ModelScopeHandler(Handler):
    """``/api/v1/models/O/N/repo/files``, ``/api/v1/models/O/N/repo?FilePath=``; data sets alike."""

    def answer(self, url: Any) -> None:
        parts = url.path.strip("/").split("/")
        if parts[:2] != ["api", "v1"] or len(parts) < 6 or parts[5] != "repo":
            self.refuse(404, "", "not found")
            return
        kind, name, query = parts[2], "/".join(parts[3:5]), parse_qs(url.query)
        repository = self.server.repositories.get(f"{'datasets/' if kind == 'datasets' else ''}{name}")
        if repository is None or query["Revision"][0] not in ("master", *repository.revisions):
            self.refuse(404, "", "not found")
        elif repository.access == "private":
            self.refuse(403, "", "no permission")
        elif len(parts) > 6:
            self.send_json({"Code": 200, "Success": True, "Data": {"Files": listing(repository.files)}})
        else:
            self.send(200, repository.files[query["FilePath"][0]], {"ETag": "x"})


def listing(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {
            "Path": file,
            "Name": Path(file).name,
            "Type": "blob",
            "Size": len(data),
            "Sha256": hashlib.sha256(data).hexdigest(),
        }
        for file, data in files.items()
    ]


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a complete Hugging Face directory, in several weight files."""
    path = tmp_path_factory.mktemp("hub") / "tiny"
    return tiny_qwen3(path, hidden=16, layers=1, heads=2, head_dim=8, mlp=16, max_shard_size="5KB")


@pytest.fixture
def repositories(checkpoint: Path) -> dict[str, Repository]:
    """Return what both hubs hold: a model with much that no run needs, and a data set."""
    files = {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())}
    files |= {
        "README.md": b"# Tiny",
        "pytorch_model.bin": b"code",
        "modeling_evil.py": b"raise SystemExit",
        "original/consolidated.pth": b"code",
        "onnx/config.json": b"{}",
    }
    return {
        MODEL: Repository(files),
        f"datasets/{DATA}": Repository({"main/train.jsonl": ROWS, "main/test.jsonl": ROWS}),
    }


def serve(handler: type[BaseHTTPRequestHandler], repositories: dict[str, Repository]) -> Iterator[Hub]:
    with Hub(handler, repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


@pytest.fixture
def hugging_face(
    repositories: dict[str, Repository], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Hub]:
    """Serve the Hugging Face hub to a client that has no token and shows no bars."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    yield from serve(HuggingFaceHandler, repositories)


@pytest.fixture
def model_scope(repositories: dict[str, Repository], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve ModelScope."""
    for name in ("MODELSCOPE_API_TOKEN", "MODELSCOPE_ENDPOINT", "MODELSCOPE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    yield from serve(ModelScopeHandler, repositories)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """Return a function that makes a config of names: a hub's address, a model, tables."""

    def make(endpoint: str | None = None, *, model: Any = MODEL, **tables: Any) -> Config:
        hub = {"endpoint": endpoint, "cache": str(tmp_path / "cache"), **tables.pop("hub", {})}
        tree = {
            "run": {"name": "t"},
            "model": model,
            "data": {"train": [f"hf://datasets/{DATA}/main/train.jsonl@[:1]"]},
            "reward": {"function": "exact_match"},
            "hub": hub,
            **tables,
        }
        return Config.model_validate(tree)

    return make
