"""Two runs of one config with ``run.deterministic`` give the same bits; what is set for it is documented."""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.load import load_config
from anygauge.device import DETERMINISTIC_ENV
from anygauge.plugins import load_plugins
from anygauge.trainer.run import train
from anygauge_tests.observer import Tracking
from anygauge_tests.recipe import tiny_recipe

ROW = re.compile(r"^\| `([A-Z_0-9]+)` \| `([^`]+)` \|", re.M)


class Recorder(Tracking):
    """Keeps every metric."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        # times and memory are nobody's business here
        self.metrics.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})


def make_config(root: Path) -> Path:
    return tiny_recipe(
        root,
        model={"hidden": 16, "layers": 1, "heads": 2, "head_dim": 8, "mlp": 16},
        run__steps=3,
        run__deterministic=True,
        run__report=False,
        run__trackers=["memory"],
        reward__function="even",
        algorithm__kl_coef=0.01,
        algorithm__entropy_coef=0.01,
        train__lr=1e-2,
        train__optimizer_steps=2,
        train__micro_batch_tokens=32,
        eval__data=[root / "data.jsonl"],
        save__every="none",
        placement__train_workers=2,
    )


def finished(config: Path, name: str, **debug: Any) -> tuple[list[dict[str, float]], Path]:
    """Return every metric of a run, and its directory."""
    plugins, recorder = load_plugins(), Recorder()
    plugins.register(recorder, "recorder")
    given = [("run.name", name), *((f"debug.{key}", value) for key, value in debug.items())]
    loaded = load_config(config, given, backend="cpu", plugins=plugins)
    return recorder.metrics, Path(train(loaded, plugins).directory)


def digests(directory: Path) -> dict[str, str]:
    """Return the digest of each file in a directory."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], Path]:
    """Return a run that dumped its batches: its metrics and its directory."""
    return finished(make_config(tmp_path_factory.mktemp("deterministic")), "first", dump_batches=True)


@pytest.mark.usefixtures("forked_actors")  # theirs are other processes than those of the first run
def test_two_runs_give_the_same_bits(first: tuple[list[dict[str, float]], Path]) -> None:
    metrics, directory = first
    again, other = finished(directory.parent / "run.toml", "second", dump_batches=True)
    assert again == metrics
    assert digests(other / "hf") == digests(directory / "hf")
    assert digests(other / "dumps") == digests(directory / "dumps")
    losses = [row["train/loss"] for row in metrics if "train/loss" in row]
    assert len(set(losses)) == len(losses) == 3
    [weights] = (directory / "hf").glob("*.safetensors")
    assert digests(directory / "hf")[weights.name] not in digests(directory.parent / "model").values()


@pytest.mark.usefixtures("forked_actors")
def test_replayed_batches_of_two_workers_give_the_same_bits(
    first: tuple[list[dict[str, float]], Path],
) -> None:
    metrics, directory = first
    replay = {"mode": "train_only", "replay_batches": str(directory / "dumps")}
    again, other = finished(directory.parent / "run.toml", "replay", **replay)
    assert [train_metrics(row) for row in again] == [row for row in map(train_metrics, metrics) if row]
    assert digests(other / "hf") == digests(directory / "hf")


def train_metrics(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("train/")}


@pytest.mark.parametrize("backend", ["cpu", "cuda", "npu"])
def test_the_document_has_what_is_set(backend: str) -> None:
    text = (Path(__file__).parents[2] / "docs/determinism.md").read_text()
    section = text.split(f"\n### {backend}\n")[1].split("\n#")[0]
    env = importlib.import_module(f"anygauge_{backend}.env")
    assert dict(ROW.findall(section)) == dict(getattr(env, "DETERMINISTIC", {}))
    everywhere = text.split("\n### ")[0]
    assert dict(ROW.findall(everywhere)) == dict(DETERMINISTIC_ENV)
