"""Real servers of a tiny Qwen3. Each file of tests shares one: a start costs some twenty seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.config.validate import validate
from anygauge.plugins import Plugins
from anygauge.serving.sglang.server import SGLangServer, make_server
from anygauge_cpu.env import declare_missing_operators
from anygauge_hooks.engines import WorkerContext

START_S = 600.0
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# what the CPU backend does in each process of its own; here before the tests import anything of transformers
declare_missing_operators()

MakeServer = Callable[..., SGLangServer]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer of any text, whose chat template shows tools."""
    from anygauge.testing.tiny import CHAT_TEMPLATE, tiny_tokenizer

    made = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), texts=["what is the weather in Paris "] * 4)
    made.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}" + CHAT_TEMPLATE
    return made


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    from anygauge.testing.tiny import tiny_qwen3

    # weights so large that a wrong scale or a wrong token shows in the log-probs
    directory = tmp_path_factory.mktemp("tiny")
    return tiny_qwen3(directory, init_std=0.2, dtype="float32", tokenizer=tokenizer)


@pytest.fixture(scope="session")
def make_config(tiny_model: Path) -> Callable[..., Config]:
    def make(directory: Path, sglang: dict[str, Any] | None = None, **rollout: Any) -> Config:
        tree = {
            "run": {"name": "served", "directory": str(directory)},
            "model": {"path": str(tiny_model)},
            "data": {"train": ["none.jsonl"]},
            "train": {"dtype": "float32"},
            "rollout": {
                "engine": "sglang",
                "max_batch_tokens": 8192,
                "sglang": {"context_length": 1024, "max_running_requests": 16, **(sglang or {})},
                **rollout,
            },
            "placement": {"rollout_workers": 2, "start_timeout_s": START_S},
        }
        checked = validate(tree)
        assert not checked.problems, checked.problems
        return checked.config

    return make


@pytest.fixture(scope="module")
def servers(plugins: Plugins, make_config: Callable[..., Config]) -> Iterator[MakeServer]:
    """Return a maker of servers that are ended with the file."""
    backend = plugins.get("register_backends", "cpu")
    made: list[SGLangServer] = []

    def make(directory: Path, *, rank: int = 0, **rollout: Any) -> SGLangServer:
        context = WorkerContext(
            rank=rank, world_size=2, backend=backend, device=plugins.make_device(backend, 0), plugins=plugins
        )
        made.append(make_server(make_config(directory, **rollout), context))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture(scope="module")
def make_vision_model(plugins: Plugins, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """Return a maker of servers of models that see, which are ended with the file."""
    backend = plugins.get("register_backends", "cpu")
    made: list[SGLangServer] = []

    def make(
        path: Path,
        *,
        rank: int = 0,
        kinds: Sequence[str] = ("image",),
        sglang: dict[str, Any] | None = None,
        **rollout: Any,
    ) -> SGLangServer:
        tree = {
            "run": {"name": "seeing", "directory": str(tmp_path_factory.mktemp("run"))},
            "model": {"path": str(path), "modalities": list(kinds)},
            "data": {"train": ["none.jsonl"]},
            "train": {"dtype": "float32", "freeze": ["vision"] if rollout else []},
            "rollout": {
                "engine": "sglang",
                "max_batch_tokens": 8192,
                "sglang": {
                    "context_length": 512,
                    "max_running_requests": 16,
                    "sleep_on_idle": True,  # else each server that waits keeps a core busy
                    **(sglang or {}),
                },
                **rollout,
            },
            "placement": {"rollout_workers": 2 if rollout else 1, "start_timeout_s": START_S},
        }
        checked = validate(tree)
        assert not checked.problems, checked.problems
        device = plugins.make_device(backend, 0)
        context = WorkerContext(rank=rank, world_size=2, backend=backend, device=device, plugins=plugins)
        made.append(make_server(checked.config, context))
        return made[-1]

    yield make
    for server in made:
        server.close()
