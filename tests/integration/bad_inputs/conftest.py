"""Fixtures of the tests of bad inputs: a model, data, an earlier run and the path of the command.

Every case takes it with ``run.overwrite = true``, on a directory that holds an earlier run: whatever is wrong
must be found, with a code, before that is touched and before any process is waited for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from anygauge.config.load import load_config
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge.trainer import start
from anygauge.trainer.run import train
from anygauge_hooks.errors import AnygaugeError

CODED = re.compile(r"\[AG\d{3}\]\Z")
GOOD = {"prompt": "1+2=", "label": "3"}

Attempt = Callable[..., AnygaugeError]

settings.register_profile(
    "bad_inputs",
    max_examples=60,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="session")
def plugins() -> Plugins:
    return load_plugins(only=["cpu", "models"])


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model, data, a config and an earlier run."""
    root = tmp_path_factory.mktemp("bad")
    tiny_qwen3(root / "model")
    chat = tiny_tokenizer(root / "chat", texts=["What is 1+2? It is 3."])
    tiny_qwen3(root / "chat", tokenizer=chat)
    for name in ("train.jsonl", "eval.jsonl"):
        (root / name).write_text("\n".join(json.dumps(GOOD | {"prompt": f"{n}+2="}) for n in range(8)))
    (root / "run.toml").write_text(
        f"""
        [run]
        name = "kept"
        directory = "{root}/runs"
        overwrite = true
        [model]
        path = "{root}/model"
        [data]
        train = ["{root}/train.jsonl"]
        cache = "{root}/cache"
        [reward]
        function = "exact_match"
        [rollout]
        prompts_per_step = 4
        samples_per_prompt = 2
        max_new_tokens = 4
        [eval]
        data = ["{root}/eval.jsonl"]
        [placement]
        launcher = "local"
        """
    )
    earlier = root / "runs" / "kept"
    (earlier / "logs").mkdir(parents=True)
    (earlier / "config.toml").write_text('[run]\nname = "kept"\n')
    (earlier / "environment.json").write_text("{}\n")
    (earlier / "metrics.jsonl").write_text('{"train/step": 1, "train/loss": 0.5}\n')
    return root


class Workers:
    """Workers that come up until somebody waits for them."""

    cluster = ""

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        """End nothing."""

    def begin(self) -> None:
        """Prepare nothing."""

    def watched(self, watch: object) -> AbstractContextManager[None]:
        """Return a block that watches nothing."""
        return nullcontext()

    def ready(self) -> None:
        raise AssertionError("the input was taken for a good one: the workers are waited for")


@pytest.fixture
def attempt(workplace: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    """Return a function that runs the config with overrides and returns the error that it ends in."""
    monkeypatch.setattr(start, "launch_workers", lambda *_, **__: Workers())
    monkeypatch.chdir(workplace)

    def attempt(*overrides: tuple[str, Any], config: Path = workplace / "run.toml") -> AnygaugeError:
        before = contents(workplace / "runs")
        with pytest.raises(AnygaugeError) as caught:
            train(load_config(config, overrides, backend="cpu", plugins=plugins), plugins)
        assert contents(workplace / "runs") == before
        assert CODED.search(str(caught.value)), str(caught.value)
        assert caught.value.hint, "it says what to do"
        assert len(str(caught.value)) < 4000
        return caught.value

    return attempt


def contents(directory: Path) -> dict[str, bytes]:
    """Return every file of a directory with what it holds, and every directory; not who holds it."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b""
        for path in sorted(directory.rglob("*"))
        if path.name != ".lock"
    }
