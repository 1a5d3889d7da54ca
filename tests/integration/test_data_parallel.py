"""One and two data-parallel processes train alike, through the actors that a run uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge.trainer.launch import launch_workers
from anygauge.trainer.plan import plan_steps
from anygauge.trainer.worker_group import WorkerGroup
from anygauge_hooks.rl import TrainSample

SHARD = "model-00001-of-00001.safetensors"


def make_config(path: Path, num_workers: int, **train: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "parallel", "steps": 4},
            "model": {"path": path},
            "data": {"train": []},
            "reward": {"function": "none"},
            "algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01, "aggregation": "sample_mean"},
            "train": {"lr": 1e-3, "micro_batch_tokens": 64, "optimizer_steps": 3, **train},
            "placement": {"launcher": "local", "num_workers": num_workers, "threads_per_worker": 1},
        }
    )


def make_samples() -> list[TrainSample]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for length, response in [(9, 4), (30, 11), (5, 2), (17, 16), (12, 3), (8, 7), (21, 1)]:
        samples.append(
            TrainSample(
                tokens=torch.randint(0, 18, (length,), generator=generator).tolist(),
                response_length=response,
                loss_mask=[1] * response,
                rollout_log_probs=[-2.5] * response,
                advantages=[float(length % 3 - 1)] * response,
            )
        )
    return samples


def train(directory: Path, config: Config) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Train twice on the same samples, export, and return the metrics of both; all ranks report the same.

    From a checkpoint between the two, the second gives the same bits again.
    """
    directory.mkdir()
    plugins = load_plugins()
    shares = plan_steps(make_samples(), 3, config.placement.num_workers, config.algorithm.aggregation)
    with launch_workers(
        config,
        plugins.get("register_backends", "cpu"),
        plugins,
        worker_class="anygauge.trainer.actors:ActorWorker",
        role="actor",
        run_directory=directory,
    ) as group:
        first = group.call("train", per_rank=[((share,), {}) for share in shares])
        save(group, directory / "saved")
        second = group.call("train", per_rank=[((share,), {}) for share in shares])
        group.call("save_hf", path=str(directory / "hf"))
        group.call("load_checkpoint", path=str(directory / "saved"))
        again = group.call("train", per_rank=[((share,), {}) for share in shares])
    assert all(result == first[0] for result in first)
    assert all(result == second[0] for result in [*second, *again])
    return first[0], second[0]


def save(group: WorkerGroup, path: Path) -> None:
    path.mkdir()
    group.call("save_checkpoint", path=str(path))
    while not all(written is True for written in group.call("checkpoint_written")):
        pass


def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", init_std=0.2)
    one = train(tmp_path / "one", make_config(model, 1))
    two = train(tmp_path / "two", make_config(model, 2))
    for step, other in zip([*one[0], *one[1]], [*two[0], *two[1]], strict=True):
        assert other == pytest.approx(step, rel=1e-5, abs=1e-5)
    assert one[0][0]["kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert one[1][2]["kl_loss"] > 1e-6


def test_two_processes_agree_with_one_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", init_std=0.2)
    # Rounding grows from step to step, so only the first ones are compared.
    one, _ = train(tmp_path / "one", make_config(model, 1, dtype="bfloat16"))
    two, _ = train(tmp_path / "two", make_config(model, 2, dtype="bfloat16"))
    for step, other in zip(one, two, strict=True):
        assert other == pytest.approx(step, rel=3e-2, abs=3e-2)


def test_overlapped_communication_changes_nothing(tmp_path: Path) -> None:
    model = tiny_qwen3(tmp_path / "model", init_std=0.2)
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10_000}
    plain = train(tmp_path / "plain", make_config(model, 2))
    overlapped = train(tmp_path / "overlap", make_config(model, 2, megatron=overlap))
    for step, other in zip([*plain[0], *plain[1]], [*overlapped[0], *overlapped[1]], strict=True):
        assert other == pytest.approx(step, rel=1e-5, abs=1e-6)
    # every rank takes part in gathering the last step's weights, and one of them writes
    before, after = (load_file(tmp_path / name / "hf" / SHARD) for name in ("plain", "overlap"))
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
