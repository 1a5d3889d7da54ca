"""One and two data-parallel processes train alike, through the actors that a run uses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.testing.tiny import tiny_qwen3
from anygauge_tests.batches import TrainSample, plan_samples, sample_of
from anygauge_tests.engine_config import engine_config

SHARD = "model-00001-of-00001.safetensors"
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10_000}
Metrics = list[dict[str, float]]


def make_config(path: Path, num_workers: int, **train: Any) -> Config:
    return engine_config(
        path,
        run={"name": "parallel", "steps": 4},
        algorithm={"kl_coef": 0.1, "entropy_coef": 0.01, "loss_aggregation": "sample_mean"},
        train={"lr": 1e-3, "micro_batch_tokens": 64, "optimizer_steps": 3, **train},
        placement={"launcher": "local", "train_workers": num_workers, "threads_per_worker": 1},
    )


def make_samples() -> list[TrainSample]:
    generator = torch.Generator().manual_seed(0)
    return [
        sample_of(
            torch.randint(0, 18, (length,), generator=generator).tolist(),
            response,
            log_prob=-2.5,
            advantage=length % 3 - 1.0,
        )
        for length, response in [(9, 4), (30, 11), (5, 2), (17, 16), (12, 3), (8, 7), (21, 1)]
    ]


class Trained(NamedTuple):
    """Results of training on all samples, and again on a few of them."""

    first: Metrics
    second: Metrics
    weights: Mapping[str, torch.Tensor]


Train = Callable[..., Trained]


@pytest.fixture(scope="module")
def train(launch_actors: Callable[..., WorkerGroup], tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains with a number of processes and some options, each case once.

    All ranks report the same. From a checkpoint between the two times, the second gives the same bits again.
    """
    model = tiny_qwen3(tmp_path_factory.mktemp("model"), init_std=0.2)
    plugins = load_plugins()
    backend = plugins.get("register_backends", "cpu")

    @functools.cache
    def run(
        num_workers: int,
        dtype: str = "float32",
        *,
        overlap: bool = False,
        engine: str = "megatron",
        replicate: int = 1,
        reshards: bool = True,
    ) -> Trained:
        directory = tmp_path_factory.mktemp("trained")
        megatron = OVERLAP if overlap else {}
        # FSDP's ranks meet in every layer: of so small micro-batches some ranks need fewer than others.
        tokens = {"micro_batch_tokens": 24} if engine == "fsdp" else {}
        options = {"dtype": dtype, "megatron": megatron, "engine": engine, **tokens}
        parallel = {"replicate": replicate, "reshard_after_forward": reshards}
        config = make_config(model, num_workers, parallel=parallel, **options)
        samples, steps = make_samples(), config.train.optimizer_steps
        # Of so few, one of two ranks has none of its own in the last two steps.
        each, few = (
            [
                ((share,), {})
                for share in plan_samples(part, steps, num_workers, config.algorithm.loss_aggregation)
            ]
            for part in (samples, samples[:4])
        )
        with launch_actors(config, backend, plugins) as group:
            first = group.call("train", per_rank=each)
            save(group, directory / "saved")
            second = group.call("train", per_rank=few)
            group.call("save_hf", path=str(directory / "hf"))
            group.call("load_checkpoint", path=str(directory / "saved"))
            again = group.call("train", per_rank=few)
        assert all(result == first[0] for result in first)
        assert all(result == second[0] for result in [*second, *again])
        return Trained(first[0], second[0], load_file(directory / "hf" / SHARD))

    return run


def save(group: WorkerGroup, path: Path) -> None:
    path.mkdir()
    group.call("save_checkpoint", path=str(path))
    while not all(written is True for written in group.call("checkpoint_written")):
        pass


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_two_processes_give_the_losses_of_one(train: Train, engine: str) -> None:
    one, two = train(1, engine=engine), train(2, engine=engine)
    for step, other in zip([*one.first, *one.second], [*two.first, *two.second], strict=True):
        assert other == pytest.approx(step, rel=1e-5, abs=1e-5)
    assert one.first[0]["kl_loss"] == pytest.approx(0.0, abs=1e-9)
    assert one.second[2]["kl_loss"] > 1e-6
    for name, tensor in one.weights.items():
        torch.testing.assert_close(two.weights[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.fsdp
def test_weights_that_stay_gathered_change_nothing(train: Train) -> None:
    freed, kept = train(2, engine="fsdp"), train(2, engine="fsdp", reshards=False)
    for step, other in zip([*freed.first, *freed.second], [*kept.first, *kept.second], strict=True):
        assert other == pytest.approx(step, rel=1e-5, abs=1e-5)
    for name, tensor in freed.weights.items():
        torch.testing.assert_close(kept.weights[name], tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.fsdp)])
def test_two_copies_of_a_sharded_model_are_one(train: Train, workers: int) -> None:
    """Each is sharded over half of the processes; a checkpoint has the rows of one."""
    one, copies = train(1, engine="fsdp"), train(workers, engine="fsdp", replicate=2)
    for step, other in zip([*one.first, *one.second], [*copies.first, *copies.second], strict=True):
        assert other == pytest.approx(step, rel=1e-5, abs=1e-5)
    for name, tensor in one.weights.items():
        torch.testing.assert_close(copies.weights[name], tensor, rtol=0, atol=1e-5, msg=name)


def test_two_processes_agree_with_one_in_bfloat16(train: Train) -> None:
    one, two = train(1, "bfloat16").first, train(2, "bfloat16").first
    assert two[0] == pytest.approx(one[0], rel=3e-2, abs=3e-2)
    # Of 22 tokens one more or less is clipped after an update, as processors round it; float32's own gradient
    # norm is then 2.5 % away.
    for step, other in zip(one[1:], two[1:], strict=True):
        rounded = step.keys() - {"pg_clipfrac", "grad_norm"}
        assert {name: other[name] for name in rounded} == pytest.approx(
            {name: step[name] for name in rounded}, rel=3e-2, abs=3e-2
        )


def test_overlapped_communication_changes_nothing(train: Train) -> None:
    plain, overlapped = train(2), train(2, overlap=True)
    for step, other in zip(
        [*plain.first, *plain.second], [*overlapped.first, *overlapped.second], strict=True
    ):
        assert other == pytest.approx(step, rel=1e-5, abs=1e-6)
    # every rank takes part in gathering the last step's weights, and one of them writes
    before, after = plain.weights, overlapped.weights
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)
