"""Checkpoints of two data-parallel ranks in new processes, and of another number of them than before."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.testing.tiny import tiny_qwen3
from anygauge_tests.batches import plan_samples, random_samples

SHARD = "model-00001-of-00001.safetensors"
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10_000}
Metrics = list[dict[str, float]]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def start(directory: Path, num_workers: int, **train: Any) -> WorkerGroup:
    """Start actors; each call of one test may use another directory for logs."""
    config = Config.model_validate(
        {
            "run": {"name": "ranks", "steps": 4, "task": "sft"},
            "model": {"path": directory.parent / "model"},
            "data": {"train": []},
            "train": {"lr": 1e-3, "micro_batch_tokens": 64, **train},
            "placement": {"launcher": "local", "train_workers": num_workers, "threads_per_worker": 1},
        }
    )
    plugins = load_plugins()
    directory.mkdir()
    return launch_workers(
        config,
        plugins.get("register_backends", "cpu"),
        plugins,
        worker_class="anygauge.trainer.actors:ActorWorker",
        role="actor",
        run_directory=directory,
    )


def train(group: WorkerGroup, seed: int) -> Metrics:
    """Take two optimizer steps on samples drawn with a seed."""
    lengths = [(length, length - 2) for length in (9, 30, 5, 17, 12, 8)]
    samples = random_samples(lengths, 0, 18, seed=seed)
    shares = plan_samples(samples, 2, len(group.workers), "token_mean")
    found: Metrics = group.call("train", per_rank=[((share,), {}) for share in shares])[0]
    return found


def save(group: WorkerGroup, path: Path) -> None:
    path.mkdir()
    group.call("save_checkpoint", path=str(path))
    while not all(written is True for written in group.call("checkpoint_written")):
        time.sleep(0.01)


def weights(group: WorkerGroup, path: Path) -> dict[str, torch.Tensor]:
    group.call("save_hf", path=str(path))
    return load_file(path / SHARD)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    tiny_qwen3(tmp_path / "model", init_std=0.2)
    return tmp_path


CASES: Sequence[Any] = [
    pytest.param({"dtype": "float32"}, id="float32"),
    pytest.param({"dtype": "bfloat16", "megatron": OVERLAP}, id="bfloat16-overlap"),
    pytest.param({"dtype": "float32", "megatron": OVERLAP}, id="float32-overlap"),
    pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
    pytest.param({"megatron": {"decoupled_weight_decay": False}}, id="torch-adam"),
]


@pytest.mark.parametrize("options", CASES)
def test_two_ranks_go_on_to_the_bit(root: Path, options: dict[str, Any]) -> None:
    with start(root / "first", 2, **options) as group:
        train(group, 0)
        save(group, root / "saved")
        expected = [train(group, seed) for seed in (1, 2)]
        trained = weights(group, root / "expected")
    with start(root / "second", 2, **options) as group:
        group.call("load_checkpoint", path=str(root / "saved"))
        assert [train(group, seed) for seed in (1, 2)] == expected
        assert_equal(weights(group, root / "found"), trained)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(root: Path, before: int, after: int) -> None:
    with start(root / "first", before) as group:
        train(group, 0)
        save(group, root / "saved")
        saved = weights(group, root / "expected")
        expected = train(group, 1)
    with start(root / "second", after) as group:
        group.call("load_checkpoint", path=str(root / "saved"))
        assert_equal(weights(group, root / "found"), saved)
        for one, other in zip(train(group, 1), expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
