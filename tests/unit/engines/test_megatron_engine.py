"""The Megatron engine against transformers: logits, gradients, updates, and what it writes.

One process; two data-parallel processes are in ``tests/integration/test_data_parallel.py``.
"""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from anygauge.config.schema import Train
from anygauge.plugins import Plugins
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
from anygauge_hooks.megatron import megatron_model
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample, train_step
from anygauge_tests.engine_config import engine_config

MakeEngine = Callable[..., TrainEngine]


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins) -> MakeEngine:
    def make(path: Path, **train: Any) -> TrainEngine:
        config = engine_config(path, train={"lr": 1e-3, "micro_batch_tokens": 64, **train})
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
    return batches.random_samples(lengths, 18, 64)


def reference_log_probs(model: Any, samples: Sequence[TrainSample], temperature: float) -> list[torch.Tensor]:
    """Return what transformers computes, one sequence at a time, unpacked."""
    result = []
    for sample in samples:
        tokens = torch.tensor(sample.tokens)[None]
        log_probs = (model(tokens).logits[0] / temperature).log_softmax(-1)
        taken = log_probs[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
        result.append(taken[-sample.response_length :])
    return result


def test_log_probs_equal_transformers(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    actual = batches.log_probs(make_engine(checkpoint), samples, temperature=0.7)
    with torch.no_grad():
        expected = reference_log_probs(AutoModelForCausalLM.from_pretrained(checkpoint), samples, 0.7)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_log_probs_alone_are_put_together_over_ranks(
    make_engine: MakeEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under context parallelism each tensor that is put together is a collective."""
    from anygauge.engines.megatron import passes

    engine: Any = make_engine(checkpoint)
    samples, seen = make_samples(), []
    monkeypatch.setattr(passes, "whole_responses", lambda values, batch: seen.append(batch) or values)
    batches.log_probs(engine, samples, temperature=1.0)
    assert len(seen) == len(engine._packed.plans) > 1


def test_logits_equal_transformers(make_engine: MakeEngine, checkpoint: Path) -> None:
    from anygauge.engines.megatron.inputs import inputs_on_device, model_inputs
    from anygauge.engines.megatron.scope import make_scope

    engine: Any = make_engine(checkpoint)
    tokens = torch.tensor(make_samples()[2].tokens)
    with torch.no_grad(), make_scope(engine.context.device):
        inputs = model_inputs(tokens, (len(tokens),))
        actual = engine.chunks[0](**inputs_on_device(inputs, engine.policy.rotary, engine.device))[0]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(checkpoint)(tokens[None]).logits[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.1


@pytest.mark.parametrize("recompute", ["none", "elementwise", "selective", "full"])
def test_gradients_equal_transformers(make_engine: MakeEngine, checkpoint: Path, recompute: str) -> None:
    samples = make_samples()
    engine: Any = make_engine(checkpoint, recompute=recompute, clip_grad=0.0)
    metrics = train_step(engine, samples)
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
    from anygauge.engines.megatron.weights.mapping import hf_tensors

    stored = engine.policy.tensors
    return dict(hf_tensors((rule, stored[rule.canonical].main_grad) for rule in engine.policy.rules))


def test_steps_follow_adamw(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    adam: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.5}
    engine = make_engine(checkpoint, clip_grad=0.5, adam_betas=(0.6, 0.8), adam_eps=1e-3, **adam)
    reference = AutoModelForCausalLM.from_pretrained(checkpoint)
    groups = [
        {"params": [each for each in reference.parameters() if (each.dim() > 1) is decays], **decay}
        for decays, decay in ((True, {}), (False, {"weight_decay": 0.0}))
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.6, 0.8), eps=1e-3, **adam)
    for _ in range(4):
        metrics = train_step(engine, samples)
        optimizer.zero_grad()
        loss = -torch.cat(reference_log_probs(reference, samples, 1.0)).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        optimizer.step()
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_result_does_not_depend_on_micro_batches(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    one = train_step(make_engine(checkpoint, micro_batch_tokens=10_000), samples)
    for budget in (1, 16, 32, 64):
        many = train_step(make_engine(checkpoint, micro_batch_tokens=budget), samples)
        assert many == pytest.approx(one, rel=1e-5)


def test_micro_batches_are_on_the_device_in_their_turn_alone(
    make_engine: MakeEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a step would take 1 KB for each token of a model with heads of 128."""
    from anygauge.engines.megatron import inputs

    made: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(*args: Any, make: Any = inputs.inputs_on_device) -> Any:
        alive.append(sum(ref() is not None for ref in made))
        found = make(*args)
        made.append(weakref.ref(found["packed_seq_params"]))
        return found

    monkeypatch.setattr(inputs, "inputs_on_device", watched)
    engine = make_engine(checkpoint, micro_batch_tokens=1)
    samples = make_samples([(9, 4)] * 6)
    train_step(engine, samples)
    batches.log_probs(engine, samples, temperature=1.0)
    assert alive == [0] * 12


def test_chunks_of_a_rank_share_their_micro_batches() -> None:
    from anygauge.engines.megatron.inputs import MicroBatches

    loaded: list[Any] = []
    plans: Any = [1, 2, 3]

    def load(plan: Any, routes: Any) -> Any:
        loaded.append(plan)
        return {plan}

    one, other = MicroBatches(batches.make_batch(make_samples()), plans, load).readers(2)
    assert [next(one), next(one)] == [{1}, {2}]
    assert loaded == [1, 2]
    assert list(other) == [{1}, {2}, {3}]
    assert list(one) == [{3}]
    assert loaded == [1, 2, 3]


def test_the_passes_over_a_batch_share_its_micro_batches(make_engine: MakeEngine, checkpoint: Path) -> None:
    engine: Any = make_engine(checkpoint)
    batch = batches.make_batch(make_samples(), loss_weights=torch.full((57,), 1 / 57))
    batch.old_log_probs = engine.log_probs(batch, temperature=1.0)
    packed = engine._packed
    engine.load_role("reference", str(checkpoint))
    engine.log_probs(batch, temperature=1.0, role="reference")
    engine.train_step(batch, batches.likelihood, temperature=1.0, entropy_grad=False)
    assert engine._packed is packed
    engine.log_probs(batches.make_batch(make_samples()), temperature=1.0)
    assert engine._packed is not packed, "another batch is another object"


def test_a_step_without_old_log_probs_takes_its_own(make_engine: MakeEngine, checkpoint: Path) -> None:
    def clipped(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio = (inputs.log_probs - inputs.old_log_probs).exp()
        return -(ratio * inputs.advantages * inputs.loss_weights).sum(), {"ratio": ratio.sum().detach()}

    weights = []
    for computes in (True, False):
        engine: Any = make_engine(checkpoint)
        batch = batches.make_batch(make_samples(), loss_weights=torch.full((57,), 1 / 57))
        batch.advantages = torch.linspace(-1, 2, 57)
        if computes:
            batch.old_log_probs = engine.log_probs(batch, temperature=0.7)
        metrics = engine.train_step(batch, clipped, temperature=0.7, entropy_grad=False)
        assert metrics["ratio"] == pytest.approx(57, rel=1e-5)
        weights.append({name: tensor.clone() for name, tensor in engine.weights()})
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-5, atol=1e-6, msg=name)


def test_bfloat16_trains(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    full, half = make_engine(checkpoint), make_engine(checkpoint, dtype="bfloat16")
    losses = [(train_step(full, samples)["loss"], train_step(half, samples)["loss"]) for _ in range(5)]
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
    assert [train_step(engine, samples)["lr"] for _ in expected] == pytest.approx(expected)


def test_export_is_complete_and_exact(make_engine: MakeEngine, checkpoint: Path, tmp_path: Path) -> None:
    engine = make_engine(checkpoint)
    samples = make_samples()
    train_step(engine, samples)
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
    for one, other in zip(batches.log_probs(engine, samples, temperature=1.0), expected, strict=True):
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


def test_a_later_export_asks_no_rank_again_what_it_holds(
    make_engine: MakeEngine, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anygauge.engines.megatron import model

    planned, plan = [], model.plan_gathering
    monkeypatch.setattr(model, "plan_gathering", lambda *args: planned.append(args) or plan(*args))
    engine = make_engine(checkpoint, lr=1e-2)
    exports = []
    for name in ("before", "after"):
        engine.save_hf(str(tmp_path / name))
        exports.append(load_file(tmp_path / name / "model-00001-of-00001.safetensors"))
        expected = {key: tensor.clone() for key, tensor in engine.weights()}
        assert all(torch.equal(exports[-1][key], tensor) for key, tensor in expected.items())
        train_step(engine, make_samples())
    assert any(not torch.equal(exports[0][key], exports[1][key]) for key in exports[0])
    assert len(planned) == 1


def test_reference_role_keeps_its_weights(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    engine = make_engine(checkpoint, lr=1e-2)
    before = batches.log_probs(engine, samples, temperature=1.0)
    engine.load_role("reference", str(checkpoint))
    train_step(engine, samples)
    trained = batches.log_probs(engine, samples, temperature=1.0)
    frozen = batches.log_probs(engine, samples, temperature=1.0, role="reference")
    assert all(torch.equal(one, other) for one, other in zip(before, frozen, strict=True))
    assert not torch.equal(before[2], trained[2])
    again = batches.log_probs(engine, samples, temperature=1.0)
    assert all(torch.equal(one, other) for one, other in zip(trained, again, strict=True))
    with pytest.raises(UnknownNameError, match="critic"):
        batches.log_probs(engine, samples, temperature=1.0, role="critic")


def test_non_finite_loss_changes_nothing(make_engine: MakeEngine, checkpoint: Path) -> None:
    def broken(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = inputs.log_probs.sum() * math.nan
        return loss, {"loss": loss.detach()}

    engine = make_engine(checkpoint)
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    with pytest.raises(NonFiniteError, match="no weight was changed"):
        train_step(engine, make_samples(), broken)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights())


def test_overlap_gives_the_same_result(make_engine: MakeEngine, checkpoint: Path) -> None:
    samples = make_samples()
    plain = make_engine(checkpoint)
    overlap = make_engine(checkpoint, megatron={"overlap_grad_reduce": True, "overlap_param_gather": True})
    for _ in range(3):
        assert train_step(overlap, samples) == pytest.approx(train_step(plain, samples), rel=1e-5)
    exported = dict(overlap.weights())
    assert all(torch.allclose(tensor, exported[name], atol=1e-6) for name, tensor in plain.weights())


def test_megatron_refusal_keeps_its_reason(make_engine: MakeEngine, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="fp8_param must be used together with fp8 mode"):
        make_engine(checkpoint, megatron={"fp8_param": True})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"layernorm_epsilon": 0.1}, "layernorm_epsilon = 0.1 would train another model"),
        ({"average_in_collective": True}, "Megatron refuses the config of the train engine"),
    ],
)
def test_an_option_that_no_run_can_have_is_a_config_error(
    make_engine: MakeEngine, checkpoint: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine(checkpoint, megatron=options)


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
    train_step(engine, make_samples())
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
    assert train_step(engine, make_samples())["grad_norm"] > 0


def test_an_unknown_optimizer_is_a_config_error(make_engine: MakeEngine, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="Megatron refuses"):
        make_engine(checkpoint, megatron={"optimizer": "nonsense"})


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), torch.distributed.DistBackendError("lost")]
)
def test_what_is_no_refusal_keeps_its_kind(
    make_engine: MakeEngine, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from anygauge.engines.megatron import optimizer

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(optimizer, "get_megatron_optimizer", fail)
    with pytest.raises(type(error)) as caught:
        make_engine(checkpoint)
    assert caught.value is error


@pytest.mark.parametrize(
    ("sizes", "expected"), [((1, 1), 3), ((2, 1), 7), ((1, 2), 7)], ids=["dense", "expert", "expert_tensor"]
)
def test_ranks_that_share_experts_have_as_many_micro_batches(
    make_engine: MakeEngine,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int],
    expected: int,
) -> None:
    """They wait for each other in every layer; another rank needs 7 here."""
    from anygauge.engines.megatron.ranks import common_count

    engine: Any = make_engine(checkpoint)
    config = engine.policy.options.transformer
    config.expert_model_parallel_size, config.expert_tensor_parallel_size = sizes
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda most, *_: most.clamp_(min=7))
    assert common_count(3, config=config, device=engine.device) == expected


@pytest.mark.parametrize("length", [(6, 6), (6, 0)], ids=["no prompt", "no response"])
def test_a_sample_that_cannot_be_trained_on_is_refused(
    make_engine: MakeEngine, checkpoint: Path, length: tuple[int, int]
) -> None:
    with pytest.raises(DataError, match="Sample 1 of 6 tokens"):
        batches.log_probs(make_engine(checkpoint), make_samples([(5, 2), length]), temperature=1.0)


def test_the_schedule_waits_for_a_finite_step(make_engine: MakeEngine, checkpoint: Path) -> None:
    def broken(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return inputs.log_probs.sum() * math.inf, {}

    engine: Any = make_engine(checkpoint, lr_schedule="cosine")
    with pytest.raises(NonFiniteError, match="Optimizer step 1:"):
        train_step(engine, make_samples(), broken)
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


def fingerprint(weight: torch.Tensor) -> int:
    from anygauge.engines.megatron.replica_check import fingerprints

    return int(fingerprints([weight])[0])


def nudged(weight: torch.Tensor) -> torch.Tensor:
    """Return a copy whose last element differs by its least bit."""
    copy = weight.clone()
    copy.view(torch.int16 if copy.element_size() == 2 else torch.int32)[-1, -1] ^= 1
    return copy


def with_nan(weight: torch.Tensor) -> torch.Tensor:
    copy = weight.clone()
    copy[3, 2] = math.nan
    return copy


@pytest.mark.usefixtures("context")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [5, 2**19], ids=["small", "large"])
@pytest.mark.parametrize(
    "change",
    [
        nudged,
        with_nan,
        lambda weight: with_nan(weight * 0),
        lambda weight: weight[torch.arange(len(weight)).flip(0)],
        lambda weight: torch.cat((weight[1:2], weight[:1], weight[2:])),
        lambda weight: weight[:, [0, 2, 1]],
        lambda weight: -weight,
    ],
    ids=["bit", "nan", "nan among zeros", "reversed", "swapped rows", "swapped columns", "negated"],
)
def test_a_fingerprint_sees_every_bit_and_the_order(change: Any, rows: int, dtype: torch.dtype) -> None:
    from anygauge.engines.megatron.replica_check import CHUNK

    weight = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert (weight.numel() > CHUNK) == (rows > 5)
    assert fingerprint(weight) == fingerprint(weight.clone())
    assert fingerprint(change(weight)) not in (fingerprint(weight), fingerprint(weight * 0))


@pytest.mark.usefixtures("context")
def test_a_fingerprint_is_exact_whatever_the_layout() -> None:
    """Else two kinds of devices would have two; the sum is written out here in Python's integers."""
    from anygauge.engines.megatron.replica_check import _factors

    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    pairs = zip(weight.view(torch.int16).flatten().tolist(), _factors(12).tolist(), strict=True)
    expected = sum(bits * factor for bits, factor in pairs) % 2**64
    assert fingerprint(weight) % 2**64 == expected
    assert fingerprint(weight.t().contiguous().t()) == fingerprint(weight)


def test_every_field_that_the_engine_sets_is_refused(make_engine: MakeEngine, checkpoint: Path) -> None:
    from anygauge.engines.megatron import options as module
    from anygauge.engines.megatron.config_fields import option_problems

    engine: Any = make_engine(checkpoint)
    policy = engine.policy
    ours = module._transformer(
        engine.config, megatron_model(policy.spec).transformer_config(policy.hf), torch.float32
    )
    allowed = {"optimizer", "use_distributed_optimizer"}
    names = ours.keys() | module._optimizer(engine.config).keys() - allowed
    assert {
        problem.path.rpartition(".")[2]
        for problem in option_problems(Train(megatron=dict.fromkeys(names, 3)))
    } == names
