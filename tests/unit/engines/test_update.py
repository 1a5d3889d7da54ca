"""The update of the weights: an optimizer that takes all with its step, and Megatron's way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anygauge_cpu.optimizer
from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.testing.optimizers import taking
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_hooks.rl import TrainSample

VOCAB = 64
MakeEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, head_dim=32, init_std=0.2)


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins, checkpoint: Path) -> MakeEngine:
    def make(**train: Any) -> Any:
        config = Config.model_validate(
            {
                "run": {"name": "test", "steps": 10},
                "model": {"path": checkpoint},
                "data": {"train": []},
                "reward": {"function": "none"},
                "train": {"lr": 1e-2, "micro_batch_tokens": 48, "weight_decay": 0.1, **train},
            }
        )
        return plugins.get("register_train_engines", "megatron").make(config, context)

    return make


def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    value = -(inputs.log_probs * inputs.weights).sum()
    return value, {"loss": value.detach()}


def take_step(engine: Any, seed: int = 0) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    samples = [
        TrainSample(
            tokens=torch.randint(18, VOCAB, (length,), generator=generator).tolist(),
            response_length=length - 2,
            loss_mask=[1] * (length - 2),
            rollout_log_probs=[-0.5] * (length - 2),
            advantages=[1.0] * (length - 2),
        )
        for length in (17, 40, 33)
    ]
    return dict(
        engine.train_step(
            samples,
            loss,
            temperature=1.0,
            weights=[[0.01] * sample.response_length for sample in samples],
            old_log_probs=[sample.rollout_log_probs for sample in samples],
            reference_log_probs=None,
            entropy_grad=False,
        )
    )


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_step_does_what_megatrons_three_do(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, dtype: str, clip: float
) -> None:
    engines = [make_engine(dtype=dtype, clip_grad=clip)]
    monkeypatch.setattr(anygauge_cpu.optimizer, "fused_adamw", taking)
    engines.append(make_engine(dtype=dtype, clip_grad=clip))
    for seed in range(3):
        expected, actual = (take_step(engine, seed) for engine in engines)
        assert actual == expected
        for one, other in zip(*(engine.chunks[0].named_parameters() for engine in engines), strict=True):
            assert one[0] == other[0]
            assert one[1].equal(other[1]), one[0]
    inner = engines[1].optimizer.chained_optimizers[0].optimizer
    assert inner.steps == 3, "the method was called"


def test_the_norm_is_that_of_all_gradients_and_clipping_keeps_to_it(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anygauge_cpu.optimizer, "fused_adamw", taking)
    engine = make_engine(clip_grad=0.01)
    metrics = take_step(engine)
    gradients = [weight.main_grad.flatten() for weight in engine.chunks[0].parameters()]
    assert metrics["grad_norm"] > 0.1
    assert metrics["grad_norm"] == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-5)
    (inner,) = (part.optimizer for part in engine.optimizer.chained_optimizers)
    averages = torch.cat([state["exp_avg"].flatten() for state in inner.state.values()])
    assert averages.norm().item() == pytest.approx(0.01 * (1 - 0.9), rel=1e-3)
