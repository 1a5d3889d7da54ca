"""The Megatron engine against transformers: logits, gradients, updates, and what it writes.

One process; two data-parallel processes are in ``tests/integration/test_data_parallel.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from anygauge.config import Config
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.engines import LossInputs, TrainEngine, WorkerContext
from anygauge_hooks.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    UnknownNameError,
    WeightMappingError,
)
from anygauge_hooks.rl import TrainSample

MakeEngine = Callable[..., TrainEngine]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture(scope="module")
def context(plugins: Plugins) -> Iterator[WorkerContext]:
    backend = plugins.get("register_backends", "cpu")
    prepare_megatron(plugins, backend)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield WorkerContext(
        rank=0, world_size=1, backend=backend, device=plugins.make_device(backend, 0), plugins=plugins
    )
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins) -> MakeEngine:
    def make(path: Path, **train: Any) -> TrainEngine:
        config = Config.model_validate(
            {
                "run": {"name": "test", "steps": 10},
                "model": {"path": path},
                "data": {"train": []},
                "reward": {"function": "none"},
                "train": {"lr": 1e-3, "micro_batch_tokens": 64, **train},
            }
        )
        engine: TrainEngine = plugins.get("register_train_engines", "megatron").make(config, context)
        return engine

    return make


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), tied=request.param)


def tiny_model(directory: Path, **options: Any) -> Path:
    """Write a model whose norms differ from 1, so that a lost norm is seen."""
    path = tiny_qwen3(directory, vocab_size=64, head_dim=32, init_std=0.2, **options)
    model = AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(path)
    return path


LENGTHS = ((17, 5), (5, 1), (40, 20), (2, 1), (33, 30))
"""Tokens and response tokens of each sample; more than one micro-batch of 64."""


def make_samples(lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[TrainSample]:
    # The padding token is left out: transformers gives it no gradient, and its row is 0.
    generator = torch.Generator().manual_seed(1)
    return [
        TrainSample(
            tokens=torch.randint(18, 64, (length,), generator=generator).tolist(),
            response_length=response,
            loss_mask=[1] * response,
            rollout_log_probs=[-0.5] * response,
            advantages=[1.0] * response,
        )
        for length, response in lengths
    ]


def reference_log_probs(model: Any, samples: Sequence[TrainSample], temperature: float) -> list[torch.Tensor]:
    """Return what transformers computes, one sequence at a time, unpacked."""
    result = []
    for sample in samples:
        tokens = torch.tensor(sample.tokens)[None]
        log_probs = (model(tokens).logits[0] / temperature).log_softmax(-1)
        taken = log_probs[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
        result.append(taken[-sample.response_length :])
    return result


def uniform_weights(samples: Sequence[TrainSample]) -> list[list[float]]:
    total = sum(sample.response_length for sample in samples)
    return [[1 / total] * sample.response_length for sample in samples]


def likelihood(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = -(inputs.log_probs * inputs.weights).sum()
    return loss, {"loss": loss.detach()}


def take_step(
    engine: TrainEngine, samples: Sequence[TrainSample], loss: Any = likelihood, temperature: float = 1.0
) -> dict[str, float]:
    return dict(
        engine.train_step(
            samples,
            loss,
            temperature=temperature,
            weights=uniform_weights(samples),
            old_log_probs=[sample.rollout_log_probs for sample in samples],
            reference_log_probs=None,
            entropy_grad=False,
        )
    )


def test_log_probs_equal_transformers(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    actual = make_engine(checkpoint).log_probs(samples, temperature=0.7)
    with torch.no_grad():
        expected = reference_log_probs(AutoModelForCausalLM.from_pretrained(checkpoint), samples, 0.7)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_logits_equal_transformers(make_engine: MakeEngine, checkpoint: Path) -> None:
    from anygauge.engines.megatron.inputs import model_inputs
    from anygauge.engines.megatron.scope import make_scope

    engine: Any = make_engine(checkpoint)
    tokens = torch.tensor(make_samples()[2].tokens)
    with torch.no_grad(), make_scope(engine.context.device):
        actual = engine.model(**model_inputs(tokens, (len(tokens),), engine.policy.rotary))[0]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(checkpoint)(tokens[None]).logits[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_equal_transformers(make_engine: MakeEngine, checkpoint: Path, recompute: str) -> None:
    samples = make_samples()
    engine: Any = make_engine(checkpoint, recompute=recompute, clip_grad=0.0)
    metrics = take_step(engine, samples)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    taken = torch.cat(reference_log_probs(reference, samples, 1.0))
    (-taken.mean()).backward()
    assert metrics["loss"] == pytest.approx(-taken.mean().item(), rel=1e-5)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, actual in gradients(engine).items():
        error = (actual - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, f"{name}: {error}"
    assert gradients(engine).keys() == expected.keys()


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Return the main gradients under Hugging Face names."""
    from anygauge.engines.megatron.mapping import canonical_name, from_canonical

    policy = engine.policy
    stored = {canonical_name(name): p.main_grad for name, p in policy.model.named_parameters()}
    groups = policy.options.transformer.num_query_groups
    heads = policy.options.transformer.num_attention_heads // groups
    return {
        name: tensor
        for rule in policy.rules
        for name, tensor in zip(
            rule.hf, from_canonical(rule, stored[rule.canonical], groups, heads), strict=True
        )
    }


def test_steps_follow_adamw(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    engine = make_engine(checkpoint, clip_grad=0.5)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(4):
        metrics = take_step(engine, samples)
        optimizer.zero_grad()
        loss = -torch.cat(reference_log_probs(reference, samples, 1.0)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_result_does_not_depend_on_micro_batches(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    one = take_step(make_engine(checkpoint, micro_batch_tokens=10_000), samples)
    many = take_step(make_engine(checkpoint, micro_batch_tokens=1), samples)
    assert many == pytest.approx(one, rel=1e-5)


def test_bfloat16_trains(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    full, half = make_engine(checkpoint), make_engine(checkpoint, dtype="bfloat16")
    losses = [(take_step(full, samples)["loss"], take_step(half, samples)["loss"]) for _ in range(5)]
    assert losses[-1][1] < losses[0][1]
    for exact, rounded in losses:
        assert rounded == pytest.approx(exact, rel=0.05)
    assert {tensor.dtype for _, tensor in half.weights()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"lr_schedule": "constant"}, [1e-3] * 4),
        ({"lr_schedule": "constant", "warmup_steps": 2}, [5e-4, 1e-3, 1e-3, 1e-3]),
        (
            {"lr_schedule": "cosine", "min_lr": 1e-4},
            [1e-4 + 4.5e-4 * (1 + math.cos(math.pi * n / 11)) for n in (1, 2, 3, 4)],
        ),
    ],
    ids=["constant", "warmup", "cosine"],
)
def test_learning_rate(
    make_engine: MakeEngine, tmp_path: Path, options: dict[str, Any], expected: list[float]
) -> None:
    engine = make_engine(tiny_model(tmp_path), **options)
    samples = make_samples()
    assert [take_step(engine, samples)["lr"] for _ in expected] == pytest.approx(expected)


def test_export_is_complete_and_exact(make_engine: MakeEngine, checkpoint: Path, tmp_path: Path) -> None:
    engine = make_engine(checkpoint)
    samples = make_samples()
    take_step(engine, samples)
    engine.save_hf(str(tmp_path / "out"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors.index.json",
    } <= names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected = reference_log_probs(loaded, samples, 1.0)
    for one, other in zip(engine.log_probs(samples, temperature=1.0), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()
    with pytest.raises(CheckpointError, match="exists"):
        engine.save_hf(str(tmp_path / "out"))


def test_export_without_training_is_the_identity(
    make_engine: MakeEngine, checkpoint: Path, tmp_path: Path
) -> None:
    make_engine(checkpoint).save_hf(str(tmp_path / "out"))
    before = load_file(checkpoint / "model.safetensors")
    after = load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_reference_role_keeps_its_weights(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    engine = make_engine(checkpoint, lr=1e-2)
    before = engine.log_probs(samples, temperature=1.0)
    engine.load_role("reference", str(checkpoint))
    take_step(engine, samples)
    trained = engine.log_probs(samples, temperature=1.0)
    frozen = engine.log_probs(samples, temperature=1.0, role="reference")
    assert all(torch.equal(one, other) for one, other in zip(before, frozen, strict=True))
    assert not torch.equal(before[2], trained[2])
    again = engine.log_probs(samples, temperature=1.0)
    assert all(torch.equal(one, other) for one, other in zip(trained, again, strict=True))
    with pytest.raises(UnknownNameError, match="critic"):
        engine.log_probs(samples, temperature=1.0, role="critic")


def test_non_finite_loss_changes_nothing(make_engine: MakeEngine, checkpoint: Path) -> None:
    def broken(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = inputs.log_probs.sum() * math.nan
        return loss, {"loss": loss.detach()}

    engine = make_engine(checkpoint)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    with pytest.raises(NonFiniteError, match="no weight was changed"):
        take_step(engine, make_samples(), broken)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights())


def test_megatron_fields_pass_through(make_engine: MakeEngine, checkpoint: Path) -> None:
    engine: Any = make_engine(
        checkpoint,
        megatron={
            "deallocate_pipeline_outputs": True,
            "pad_buckets_for_high_nccl_busbw": True,
            "log_num_zeros_in_grad": True,
        },
    )
    options = engine.policy.options
    assert options.transformer.deallocate_pipeline_outputs
    assert options.ddp.pad_buckets_for_high_nccl_busbw
    assert options.optimizer.log_num_zeros_in_grad
    assert take_step(engine, make_samples())["grad_norm"] > 0


def test_overlap_gives_the_same_result(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    plain = make_engine(checkpoint)
    overlap = make_engine(checkpoint, megatron={"overlap_grad_reduce": True, "overlap_param_gather": True})
    for _ in range(3):
        assert take_step(overlap, samples) == pytest.approx(take_step(plain, samples), rel=1e-5)
    exported = dict(overlap.weights())
    assert all(torch.allclose(tensor, exported[name], atol=1e-6) for name, tensor in plain.weights())


def test_megatron_refusal_keeps_its_reason(make_engine: MakeEngine, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="fp8_param must be used together with fp8 mode"):
        make_engine(checkpoint, megatron={"fp8_param": True})


def test_weights_that_do_not_fit_are_all_listed(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    weights["model.extra.weight"] = torch.zeros(1)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMappingError) as caught:
        make_engine(path)
    assert "model.norm.weight: missing in the checkpoint" in str(caught.value)
    assert "model.extra.weight: in the checkpoint but unknown" in str(caught.value)


def test_weights_of_a_wrong_shape_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 64)
    weights["model.norm.weight"] = torch.zeros(7)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        WeightMappingError, match=r"2 weights[\s\S]*q_proj[\s\S]*shape \(7,\), the model has \(64,\)"
    ):
        make_engine(path)


def test_a_torn_weight_file_is_named(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        make_engine(path)


def test_an_unknown_architecture_is_named(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tiny_model(tmp_path)
    config = path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "Qwen9ForCausalLM"))
    with pytest.raises(UnknownNameError, match=r"Qwen9ForCausalLM; known: .*Qwen3ForCausalLM"):
        make_engine(path)


def test_the_backend_makes_the_inner_optimizer(make_engine: MakeEngine, checkpoint: Path) -> None:
    engine: Any = make_engine(checkpoint)
    take_step(engine, make_samples())
    [part] = engine.optimizer.chained_optimizers
    assert all(group["fused"] for group in part.optimizer.param_groups)
    for state in part.optimizer.state.values():
        assert {"step", "exp_avg", "exp_avg_sq"} <= state.keys()


@pytest.mark.parametrize(
    "options",
    [{"decoupled_weight_decay": False}, {"optimizer": "sgd", "use_distributed_optimizer": False}],
    ids=["adam", "sgd"],
)
def test_an_optimizer_that_was_asked_for_is_kept(
    make_engine: MakeEngine, checkpoint: Path, options: dict[str, Any]
) -> None:
    engine: Any = make_engine(checkpoint, megatron=options)
    [part] = engine.optimizer.chained_optimizers
    assert type(part.optimizer) is (torch.optim.SGD if "optimizer" in options else torch.optim.Adam)
    assert take_step(engine, make_samples())["grad_norm"] > 0


def test_an_unknown_optimizer_is_a_config_error(make_engine: MakeEngine, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="Megatron refuses"):
        make_engine(checkpoint, megatron={"optimizer": "nonsense"})


@pytest.mark.parametrize("length", [(6, 6), (6, 0)], ids=["no prompt", "no response"])
def test_a_sample_that_cannot_be_trained_on_is_refused(
    make_engine: MakeEngine, checkpoint: Path, length: tuple[int, int]
) -> None:
    with pytest.raises(DataError, match="Sample 1 of 6 tokens"):
        make_engine(checkpoint).log_probs(make_samples([(5, 2), length]), temperature=1.0)


def test_the_schedule_waits_for_a_finite_step(make_engine: MakeEngine, checkpoint: Path) -> None:
    def broken(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return inputs.log_probs.sum() * math.inf, {}

    engine: Any = make_engine(checkpoint, lr_schedule="cosine")
    with pytest.raises(NonFiniteError, match="Optimizer step 1:"):
        take_step(engine, make_samples(), broken)
    assert engine.schedule.num_steps == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("use_sliding_window", True), ("attention_bias", True)],
)
def test_a_variant_of_the_architecture_is_refused(
    make_engine: MakeEngine, tmp_path: Path, key: str, value: Any
) -> None:
    path = tiny_model(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(ConfigError, match=f"{key} = {value!r} is not supported by the qwen3 family"):
        make_engine(path)


def test_ranks_with_different_weights_are_found() -> None:
    from anygauge.engines.megatron.agreement import _fingerprint

    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    swapped = weight[[1, 0, 2, 3, 4]]
    assert torch.equal(_fingerprint(weight), _fingerprint(weight.clone()))
    assert not torch.equal(_fingerprint(weight), _fingerprint(swapped))
    assert not torch.equal(_fingerprint(weight), _fingerprint(weight + 1e-3))


def test_every_field_that_the_engine_sets_is_refused(make_engine: MakeEngine, checkpoint: Path) -> None:
    from anygauge.engines.megatron import options as module
    from anygauge.engines.megatron.fields import option_problems

    engine: Any = make_engine(checkpoint)
    policy = engine.policy
    ours = module._transformer(engine.config, policy.spec.transformer_config(policy.hf), torch.float32)
    allowed = {"optimizer", "use_distributed_optimizer"}
    names = ours.keys() | module._optimizer(engine.config).keys() - allowed
    assert {problem.path.rpartition(".")[2] for problem in option_problems(dict.fromkeys(names, 3))} == names
