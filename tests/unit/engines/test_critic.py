"""The critic: values against a model of transformers with a score, its training, its head, and its resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from anygauge.algorithms.values import value_loss
from anygauge.config import Config
from anygauge.config.roles import critic_config, teacher_config
from anygauge.plugins import Plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.engines import CriticEngine, WorkerContext
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config

LENGTHS = ((17, 5), (5, 1), (40, 20), (33, 30))
"""Tokens and response tokens of each sample; more than one micro-batch of 64."""

MakeCritic = Callable[..., CriticEngine]


def make_config(path: Path, critic: dict[str, Any] | None = None, **train: Any) -> Config:
    return engine_config(
        path,
        rollout={"temperature": 0.5},
        algorithm={"advantage": "gae"},
        critic={"lr": 1e-2, **(critic or {})},
        train={"lr": 1e-3, "micro_batch_tokens": 64, "dtype": "float32", **train},
    )


@pytest.fixture
def make_critic(context: WorkerContext, plugins: Plugins) -> MakeCritic:
    def make(path: Path, critic: dict[str, Any] | None = None, **train: Any) -> CriticEngine:
        spec = plugins.get("register_train_engines", "megatron")
        engine: CriticEngine = spec.make_critic(critic_config(make_config(path, critic, **train)), context)
        return engine

    return make


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return tiny_qwen3(directory, vocab_size=64, head_dim=32, init_std=0.2, tied=request.param)


@pytest.fixture(scope="module")
def scored(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint with a score in the place of the language model's head."""
    directory = tmp_path_factory.mktemp("scored")
    for path in checkpoint.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    weights = load_file(directory / "model.safetensors")
    weights.pop("lm_head.weight", None)
    hidden = weights["model.norm.weight"].shape[0]
    weights["score.weight"] = torch.randn(1, hidden, generator=torch.Generator().manual_seed(5))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_samples() -> list[TrainSample]:
    return batches.random_samples(LENGTHS, 18, 64)


def reference_values(
    path: Path, samples: Sequence[TrainSample]
) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """Return what transformers' decoder and a score make of each sequence, unpacked."""
    model = AutoModel.from_pretrained(path)
    score = load_file(path / "model.safetensors")["score.weight"].requires_grad_()
    values = []
    for sample in samples:
        hidden = model(torch.tensor(sample.tokens)[None]).last_hidden_state[0]
        values.append((hidden @ score[0])[-sample.response_length - 1 : -1])
    return model, score, values


def train(
    critic: CriticEngine, samples: Sequence[TrainSample], clip: float | None = None
) -> dict[str, float]:
    """Take a step toward returns of 1."""
    total = sum(sample.response_length for sample in samples)
    return dict(
        batches.train_values(
            critic,
            samples,
            partial(value_loss, clip=clip),
            loss_weights=[[1 / total] * sample.response_length for sample in samples],
            old_values=batches.values(critic, samples),
            returns=[torch.ones(sample.response_length) for sample in samples],
        )
    )


def test_a_new_head_expects_nothing(make_critic: MakeCritic, checkpoint: Path) -> None:
    samples = make_samples()
    values = batches.values(make_critic(checkpoint), samples)
    assert [len(each) for each in values] == [sample.response_length for sample in samples]
    assert all(bool((each == 0).all()) for each in values)


def test_values_are_the_score_of_the_token_before(make_critic: MakeCritic, scored: Path) -> None:
    samples = make_samples()
    actual = batches.values(make_critic(scored), samples)
    with torch.no_grad():
        _, _, expected = reference_values(scored, samples)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
    assert torch.cat(expected).std() > 1


def test_gradients_equal_transformers(make_critic: MakeCritic, scored: Path) -> None:
    from anygauge.engines.megatron.weights.mapping import hf_tensors

    samples = make_samples()
    critic: Any = make_critic(scored, clip_grad=0.0)
    metrics = train(critic, samples)
    model, score, values = reference_values(scored, samples)
    loss = (torch.cat(values) - 1).square().mean() / 2
    loss.backward()
    assert metrics["value_loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    expected["score.weight"] = score.grad
    stored = critic.policy.tensors
    actual = dict(hf_tensors((rule, stored[rule.canonical].main_grad) for rule in critic.policy.rules))
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        error = (gradient - expected[name]).norm() / expected[name].norm()
        assert error < 1e-4, f"{name}: {error}"


def test_it_learns_what_to_expect(make_critic: MakeCritic, checkpoint: Path) -> None:
    samples, critic = make_samples(), make_critic(checkpoint)
    losses = [train(critic, samples)["value_loss"] for _ in range(6)]
    assert losses[0] == pytest.approx(0.5)
    assert losses[-1] < losses[0] / 3


def test_the_result_does_not_depend_on_micro_batches(make_critic: MakeCritic, checkpoint: Path) -> None:
    samples = make_samples()
    one, many = (make_critic(checkpoint, micro_batch_tokens=size) for size in (10_000, 1))
    for _ in range(3):
        assert train(one, samples, 0.2) == pytest.approx(train(many, samples, 0.2), rel=1e-4)


def test_the_head_is_exported_and_read_back(
    make_critic: MakeCritic, checkpoint: Path, tmp_path: Path
) -> None:
    samples, critic = make_samples(), make_critic(checkpoint)
    train(critic, samples)
    before = batches.values(critic, samples)
    engine: Any = critic
    engine.save_hf(str(tmp_path / "critic"))
    again = batches.values(make_critic(checkpoint, {"path": tmp_path / "critic"}), samples)
    assert torch.cat(before).abs().max() > 0
    assert all(torch.equal(one, other) for one, other in zip(before, again, strict=True))


def test_a_resume_is_exact(make_critic: MakeCritic, checkpoint: Path, tmp_path: Path) -> None:
    samples, critic = make_samples(), make_critic(checkpoint)
    train(critic, samples)
    critic.save_checkpoint(str(tmp_path))
    while not critic.checkpoint_written():
        pass
    resumed = make_critic(checkpoint)
    resumed.load_checkpoint(str(tmp_path))
    for _ in range(2):
        assert train(resumed, samples) == train(critic, samples)
    pairs = zip(batches.values(critic, samples), batches.values(resumed, samples), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_what_is_the_policys_alone_does_not_reach_other_roles(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        {"lr_warmup_steps": 3},
        router_replay=True,
        freeze=("lm_head.weight",),
        min_lr=5e-4,
        warmup_steps=7,
    )
    critic = critic_config(config)
    assert critic.train.lr == 1e-2
    assert critic.train.warmup_steps == 3
    assert not critic.train.router_replay
    assert critic_config(make_config(tmp_path, {"warmup_steps": 4})).critic.warmup_steps == 0
    assert not teacher_config(config).train.router_replay
    assert (critic.train.freeze, teacher_config(config).train.freeze) == (("lm_head.weight",), ())
    assert critic_config(make_config(tmp_path, {"lr": 1e-4}, min_lr=5e-4)).train.min_lr == 1e-4
    assert config.train.router_replay


def test_keys_of_the_critic_take_the_place_of_the_policys(tmp_path: Path) -> None:
    own = {"lr": 2e-3, "lr_warmup_steps": 3, "dtype": "bfloat16", "megatron": {"layernorm_epsilon": 1e-4}}
    megatron = {"apply_query_key_layer_scaling": False}
    train = critic_config(make_config(tmp_path, own, warmup_steps=7, megatron=megatron)).train
    assert (train.lr, train.warmup_steps, train.dtype) == (2e-3, 3, "bfloat16")
    assert train.megatron == own["megatron"]
    train = critic_config(make_config(tmp_path, {"lr": None}, warmup_steps=7, megatron=megatron)).train
    assert (train.lr, train.warmup_steps, train.dtype, train.megatron) == (1e-3, 7, "float32", megatron)


def test_a_frozen_model_has_log_probs_and_no_optimizer(
    context: WorkerContext, plugins: Plugins, checkpoint: Path
) -> None:
    spec = plugins.get("register_train_engines", "megatron")
    samples = make_samples()
    frozen, policy = (make(make_config(checkpoint), context) for make in (spec.make_forward_only, spec.make))
    pairs = zip(
        batches.log_probs(frozen, samples, temperature=0.5),
        batches.log_probs(policy, samples, temperature=0.5),
        strict=True,
    )
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not hasattr(frozen, "optimizer")
    assert not any(parameter.requires_grad for chunk in frozen.chunks for parameter in chunk.parameters())
