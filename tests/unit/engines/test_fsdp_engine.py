"""The FSDP engine against transformers and the Megatron engine: log-probs, gradients, updates, exports.

One process; two are in ``tests/integration/test_data_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from anygauge.engines.fsdp.attention import ATTENTION
from anygauge.engines.fsdp.weights import whole
from anygauge.engines.norms import TableRmsNorm
from anygauge.kernels import linear_logprob
from anygauge.plugins import Plugins
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_hooks.errors import (
    AsleepError,
    CheckpointError,
    ConfigError,
    NonFiniteError,
    ReplicaError,
    UnknownNameError,
    WeightMappingError,
)
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample, weights
from anygauge_tests.engine_config import engine_config

MakeEngine = Callable[..., Any]
VOCAB = 64
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Llama": {"tie_word_embeddings": True},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "resid_pdrop": 0.5},
    "Phi": {"tie_word_embeddings": False},  # its output layer has a bias
    "Granite": {"logits_scaling": 4.0},
    "Gemma2": {"sliding_window": 4, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "Gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "SmolLM3": {"no_rope_layers": [1, 0]},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.5},
    "GptOss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4, "hidden_size": 64},
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
"""Architectures of transformers without a family of ours, but for Llama, and what is odd about them."""


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins) -> MakeEngine:
    def make(path: Path, kind: str = "make", *, engine: str = "fsdp", **train: Any) -> Any:
        config = engine_config(path, train={"engine": engine, "lr": 1e-3, "micro_batch_tokens": 64, **train})
        return getattr(plugins.get("register_train_engines", engine), kind)(config, context)

    return make


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return tiny_qwen3(tmp_path / "qwen3", vocab_size=VOCAB, head_dim=32, init_std=0.2)


def tiny_model(directory: Path, name: str, **options: Any) -> Path:
    """Write a randomly initialized model whose vectors differ from their first values."""
    kind = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    model = AutoModelForCausalLM.from_config(kind(**{**TINY, **MODELS.get(name, {}), **options}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tiny_tokenizer(directory, alphabet="0123456789+-*/=.")
    model.save_pretrained(directory)
    return directory


def make_samples() -> list[TrainSample]:
    """Return samples of more than one micro-batch of 64 tokens."""
    return batches.random_samples(((17, 5), (5, 1), (40, 20), (2, 1), (33, 30)), 18, VOCAB)


def reference_log_probs(model: Any, temperature: float) -> Tensor:
    """Return what transformers computes, one sequence at a time."""
    result = []
    for sample in make_samples():
        tokens = torch.tensor(sample.tokens)[None]
        log_probs = (model(tokens).logits[0].float() / temperature).log_softmax(-1)
        taken = log_probs[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
        result.append(taken[-sample.response_length :])
    return torch.cat(result)


def log_probs(engine: Any, temperature: float = 1.0, **options: Any) -> Tensor:
    return torch.cat(list(batches.log_probs(engine, make_samples(), temperature=temperature, **options)))


def likelihood(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (
        -(inputs.log_probs * inputs.loss_weights).sum() - 0.1 * (inputs.entropy * inputs.loss_weights).sum()
    )
    return loss, {"tokens": inputs.loss_mask.sum()}


def take_step(engine: Any, loss: Any = likelihood, samples: Sequence[TrainSample] = ()) -> dict[str, float]:
    samples = samples or make_samples()
    return batches.train_step(engine, samples, loss, temperature=0.8, entropy_grad=True)


def gradients(engine: Any) -> dict[str, Tensor]:
    """Return the gradients of the last pass under Hugging Face names."""
    return {shard.name: whole(shard.tensor.grad) for shard in engine.shards}


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FSDP wrap the model of a lone process, too."""
    monkeypatch.setattr("anygauge.engines.fsdp.model.is_sharded", lambda mesh: True)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_trains_as_transformers_has_it(
    make_engine: MakeEngine, tmp_path: Path, name: str
) -> None:
    check_with_transformers(make_engine, tmp_path, name)


@pytest.mark.usefixtures("sharded")
@pytest.mark.parametrize(
    "name", ["GPT2", *(pytest.param(n, marks=pytest.mark.fsdp) for n in MODELS if n != "GPT2")]
)
def test_a_sharded_model_of_transformers_trains_as_transformers_has_it(
    make_engine: MakeEngine, tmp_path: Path, name: str
) -> None:
    check_with_transformers(make_engine, tmp_path, name)


def check_with_transformers(make_engine: MakeEngine, tmp_path: Path, name: str) -> None:
    """Log-probs, loss and gradients equal those of one sequence at a time; nothing leaks."""
    path = tiny_model(tmp_path, name)
    engine = make_engine(path, clip_grad=0.0)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    assert engine.root.is_packed
    torch.testing.assert_close(
        log_probs(engine, 0.7), reference_log_probs(model, 0.7).detach(), rtol=0, atol=1e-5
    )
    taken: list[dict[str, Tensor]] = []

    def looking(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return -(inputs.log_probs * inputs.loss_weights).sum(), {}

    begin, engine.optimizer.step = engine.optimizer.step, lambda *_: taken.append(gradients(engine))
    metrics = take_step(engine, looking)
    engine.optimizer.step = begin
    expected = -reference_log_probs(model, 0.8).mean()
    expected.backward()
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    for parameter_name, parameter in model.named_parameters():
        error = (taken[0][parameter_name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 2e-5, f"{parameter_name}: {error}"


@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 2}}])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.fsdp), "bfloat16"])
def test_a_rank_alone_computes_as_with_fsdp(
    make_engine: MakeEngine, qwen3: Path, request: pytest.FixtureRequest, dtype: str, options: dict[str, Any]
) -> None:
    """Gradients of micro-batches are added up in float32, and each step rounds the weights anew."""
    options = {"dtype": dtype, "micro_batch_tokens": 1, "clip_grad": 0.1, **options}
    whole_model = make_engine(qwen3, **options)
    request.getfixturevalue("sharded")
    with_fsdp = make_engine(qwen3, **options)
    for _ in range(3):
        assert take_step(whole_model) == pytest.approx(take_step(with_fsdp), rel=1e-5)
    for one, other in zip(whole_model.shards, with_fsdp.shards, strict=True):
        assert (one.name, one.tensor.dtype) == (other.name, other.tensor.dtype)
        torch.testing.assert_close(one.local, other.local, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("sharded")
def test_gathered_weights_are_those_of_the_role_that_computes(
    make_engine: MakeEngine, qwen3: Path, tmp_path: Path
) -> None:
    """Also where they stay gathered between micro-batches."""
    other = tiny_qwen3(tmp_path / "other", vocab_size=VOCAB, head_dim=32, init_std=0.2, seed=5)
    engine = make_engine(qwen3, parallel={"reshard_after_forward": False}, micro_batch_tokens=1)
    engine.load_role("reference", str(other))
    own = log_probs(engine)
    expected = reference_log_probs(AutoModelForCausalLM.from_pretrained(other), 1.0)
    torch.testing.assert_close(log_probs(engine, role="reference"), expected.detach(), rtol=0, atol=1e-5)
    assert log_probs(engine).equal(own)
    before = weights(engine)
    reduced: list[bool] = []
    reduce = engine.root.set_requires_gradient_sync
    engine.root.set_requires_gradient_sync = lambda is_last: reduced.append(is_last) or reduce(is_last)
    metrics = take_step(engine)
    assert reduced == [False] * 4 + [True], "once in a step"
    assert metrics == pytest.approx(take_step(make_engine(qwen3)), rel=1e-5)
    assert not any(tensor.equal(before[name]) for name, tensor in weights(engine).items())
    assert not log_probs(engine).equal(own)


def test_the_output_layer_is_known_or_the_models_own(make_engine: MakeEngine, tmp_path: Path) -> None:
    scales = {"Qwen2": 1.0, "Granite": pytest.approx(0.25), "Gemma2": None, "Phi": None}
    for name, scale in scales.items():
        engine = make_engine(tiny_model(tmp_path / name, name))
        assert engine.root.logit_scale == scale, name


def test_a_bias_of_zeros_of_the_output_layer_is_trained(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "phi", "Phi")
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.bias": torch.zeros(VOCAB)}, file, {"format": "pt"})
    engine = make_engine(path)
    assert engine.root.logit_scale is None
    take_step(engine)
    assert dict(engine.weights())["lm_head.bias"].abs().max() > 0


def test_only_the_built_model_is_changed(make_engine: MakeEngine, qwen3: Path) -> None:
    """docs/seams.md lists what is."""
    from transformers.models.qwen3 import modeling_qwen3

    before = {name: dict(vars(kind)) for name, kind in vars(modeling_qwen3).items() if isinstance(kind, type)}
    engine = make_engine(qwen3, recompute="full")
    take_step(engine)
    after = {name: dict(vars(kind)) for name, kind in vars(modeling_qwen3).items() if isinstance(kind, type)}
    assert before == after
    norms = [module for module in engine.root.modules() if hasattr(module, "variance_epsilon")]
    assert len(norms) == 9
    assert all(isinstance(norm, TableRmsNorm) for norm in norms)
    for layer in engine.root.model.model.layers:
        assert type(layer.self_attn).__name__ == "TableQwen3Attention"
        assert type(layer.mlp).__name__ == "TableQwen3MLP"
        assert layer.self_attn.config._attn_implementation == ATTENTION


def test_a_norm_of_another_formula_is_the_models_own(
    make_engine: MakeEngine, qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def doubled(self: Any, hidden_states: Tensor) -> Tensor:
        squares = hidden_states.pow(2).mean(-1, keepdim=True)
        return 2 * self.weight * hidden_states * torch.rsqrt(squares + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", doubled)
    engine = make_engine(qwen3)
    assert engine.root.is_packed
    norms = {type(module) for module in engine.root.modules() if hasattr(module, "variance_epsilon")}
    assert norms == {Qwen3RMSNorm}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_those_of_the_megatron_engine(make_engine: MakeEngine, qwen3: Path, dtype: str) -> None:
    tolerance = 1e-5 if dtype == "float32" else 0.1
    options = {"dtype": dtype, "weight_decay": 0.1, "lr_schedule": "cosine", "warmup_steps": 2}
    ours, theirs = (make_engine(qwen3, engine=name, **options) for name in ("fsdp", "megatron"))
    torch.testing.assert_close(log_probs(ours), log_probs(theirs), rtol=0, atol=tolerance)
    for _ in range(4):
        assert take_step(ours) == pytest.approx(take_step(theirs), rel=tolerance)
    exported = weights(ours)
    for name, tensor in theirs.weights():
        torch.testing.assert_close(exported[name], tensor, rtol=0, atol=5e-5 if dtype == "float32" else 0.01)
        assert exported[name].dtype == tensor.dtype == getattr(torch, dtype)


def test_a_model_that_mixes_packed_sequences_is_padded(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Mamba has a state that runs on from one sequence into the next."""
    sizes = {"state_size": 4, "num_hidden_layers": 2, "hidden_size": 32, "vocab_size": VOCAB}
    path = tiny_model(tmp_path, "Mamba", **sizes)
    engine = make_engine(path)
    assert not engine.root.is_packed
    assert "sequences are padded, one a row" in caplog.text
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    expected = reference_log_probs(model, 1.0)
    torch.testing.assert_close(log_probs(engine), expected.detach(), rtol=0, atol=1e-5)
    before = take_step(engine)["loss"]
    assert take_step(engine)["loss"] < before


@pytest.mark.parametrize(
    "options",
    [{"recompute": "full"}, {"fused_loss": False}, {"micro_batch_tokens": 1}],
)
def test_options_change_no_result(make_engine: MakeEngine, qwen3: Path, options: dict[str, Any]) -> None:
    plain, other = make_engine(qwen3), make_engine(qwen3, **options)
    for _ in range(2):
        assert take_step(other) == pytest.approx(take_step(plain), rel=1e-5)


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize(("train", "most"), [({}, None), ({"loss_memory_gib": 2.0**-20}, 2**10)])
def test_the_loss_keeps_logits_within_its_budget(
    make_engine: MakeEngine,
    qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    train: dict[str, float],
    most: int | None,
) -> None:
    budgets: list[int] = []
    monkeypatch.setattr(linear_logprob._Tiles, "keep", lambda tiles, budget: budgets.append(budget))
    trainer = make_engine(qwen3, engine=engine, **train)
    log_probs(trainer)
    assert not budgets, "no gradient is recorded"
    take_step(trainer)
    assert len(budgets) > 1, "each micro-batch asks"
    (budget,) = set(budgets)
    assert budget == most or (most is None and 2**20 < budget < psutil.virtual_memory().total // 10)


def test_top_k_log_probs_are_those_of_the_megatron_engine(make_engine: MakeEngine, qwen3: Path) -> None:
    batch = batches.make_batch(make_samples())
    ours, theirs = (
        make_engine(qwen3, engine=name).top_k_log_probs(batch, 5, temperature=0.7)
        for name in ("fsdp", "megatron")
    )
    assert ours.ids.equal(theirs.ids)
    torch.testing.assert_close(ours.log_probs, theirs.log_probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.sampled, theirs.sampled, rtol=0, atol=1e-5)


def test_a_loss_that_is_not_finite_changes_no_weight(make_engine: MakeEngine, qwen3: Path) -> None:
    engine = make_engine(qwen3)
    before = weights(engine)
    with pytest.raises(NonFiniteError, match="step 1"):
        take_step(engine, lambda inputs: (inputs.log_probs.sum() * torch.inf, {}))
    assert all(tensor.equal(before[name]) for name, tensor in weights(engine).items())


def test_replicas_that_differ_change_no_weight(
    make_engine: MakeEngine, qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(qwen3)
    before = weights(engine)

    def differ(step: int) -> None:
        raise ReplicaError(f"step {step}", hint="")

    monkeypatch.setattr(engine._replicas, "check", differ)
    with pytest.raises(ReplicaError, match="step 1"):
        take_step(engine)
    assert all(tensor.equal(before[name]) for name, tensor in weights(engine).items())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.2)])
def test_roles_take_turns_in_the_memory_of_the_actor(
    make_engine: MakeEngine, qwen3: Path, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    other = tiny_qwen3(tmp_path / "other", vocab_size=VOCAB, head_dim=32, init_std=0.2, seed=5)
    engine = make_engine(qwen3, dtype=dtype)
    own = log_probs(engine)
    engine.load_role("reference", str(other))
    reference = log_probs(engine, role="reference")
    expected = reference_log_probs(AutoModelForCausalLM.from_pretrained(other), 1.0)
    torch.testing.assert_close(reference, expected.detach(), rtol=0, atol=tolerance)
    assert log_probs(engine).equal(own)
    take_step(engine)
    assert log_probs(engine, role="reference").equal(reference)
    with pytest.raises(UnknownNameError, match="teacher"):
        log_probs(engine, role="teacher")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sleep_changes_no_bit(make_engine: MakeEngine, qwen3: Path, dtype: str) -> None:
    engine, undisturbed = make_engine(qwen3, dtype=dtype), make_engine(qwen3, dtype=dtype)
    for each in (engine, undisturbed):
        take_step(each)
    engine.set_memory_state("weights")
    assert all(tensor.equal(dict(engine.weights())[name]) for name, tensor in undisturbed.weights())
    engine.set_memory_state("nothing")
    assert sum(tensor.untyped_storage().nbytes() for tensor in engine._model_tensors()) == 0
    assert sum(each.untyped_storage().nbytes() for each in engine.root.parameters()) == 0
    assert sum(tensor.untyped_storage().nbytes() for tensor in engine.optimizer.state()) == 0
    with pytest.raises(AsleepError, match="an optimizer step"):
        take_step(engine)
    engine.set_memory_state("everything")
    assert take_step(engine) == take_step(undisturbed)
    assert log_probs(engine).equal(log_probs(undisturbed))


def test_a_critic_is_the_megatron_engines(make_engine: MakeEngine, qwen3: Path, tmp_path: Path) -> None:
    def loss(inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return ((inputs.values - 1).square() * inputs.loss_weights).sum(), {}

    samples = make_samples()
    ours, theirs = (make_engine(qwen3, "make_critic", engine=name) for name in ("fsdp", "megatron"))
    assert all(values.eq(0).all() for values in batches.values(ours, samples))
    weights_of_tokens = [[1 / 57] * sample.response_length for sample in samples]
    zeros = [[0.0] * sample.response_length for sample in samples]
    for _ in range(3):
        one, other = (
            batches.train_values(
                each, samples, loss, loss_weights=weights_of_tokens, old_values=zeros, returns=zeros
            )
            for each in (ours, theirs)
        )
        assert one == pytest.approx(other, rel=1e-4)
    ours.save_hf(str(tmp_path / "critic"))
    again = make_engine(tmp_path / "critic", "make_critic")
    for one, other in zip(batches.values(ours, samples), batches.values(again, samples), strict=True):
        assert one.equal(other)


def test_a_frozen_model_has_no_gradients(make_engine: MakeEngine, qwen3: Path) -> None:
    frozen = make_engine(qwen3, "make_forward_only")
    assert log_probs(frozen).equal(log_probs(make_engine(qwen3)))
    assert not any(parameter.requires_grad for parameter in frozen.root.parameters())
    half = make_engine(qwen3, "make_forward_only", dtype="bfloat16")
    assert {shard.tensor.dtype for shard in half.shards} == {torch.bfloat16}
    assert log_probs(half).equal(log_probs(make_engine(qwen3, dtype="bfloat16")))
    frozen.set_memory_state("nothing")
    frozen.set_memory_state("everything")
    assert log_probs(frozen).equal(log_probs(make_engine(qwen3)))


@pytest.mark.parametrize("name", ["Qwen2", "GPT2", "Mixtral"])
def test_an_export_is_complete_and_exact(make_engine: MakeEngine, tmp_path: Path, name: str) -> None:
    engine = make_engine(tiny_model(tmp_path / "in", name))
    take_step(engine)
    engine.save_hf(str(tmp_path / "out"))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"] | info["mismatched_keys"]
    torch.testing.assert_close(
        log_probs(engine), reference_log_probs(model.eval(), 1.0).detach(), rtol=0, atol=1e-5
    )
    assert log_probs(make_engine(tmp_path / "out")).equal(log_probs(engine))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_after_a_resume_are_those_that_would_have_come(
    make_engine: MakeEngine, qwen3: Path, tmp_path: Path, dtype: str
) -> None:
    options = {"dtype": dtype, "lr_schedule": "cosine", "warmup_steps": 3}
    engine = make_engine(qwen3, **options)
    take_step(engine)
    engine.save_checkpoint(str(tmp_path))
    engine._checkpoint._write.result()
    assert engine.checkpoint_written()
    expected = [take_step(engine) for _ in range(3)]
    fresh = make_engine(qwen3, **options)
    for resumed in (fresh, engine):
        resumed.load_checkpoint(str(tmp_path))
        assert [take_step(resumed) for _ in range(3)] == expected


def test_a_checkpoint_of_another_model_or_a_torn_one_is_refused(
    make_engine: MakeEngine, qwen3: Path, tmp_path: Path
) -> None:
    engine = make_engine(qwen3)
    (tmp_path / "saved").mkdir()
    engine.save_checkpoint(str(tmp_path / "saved"))
    engine._checkpoint._write.result()
    other = make_engine(tiny_qwen3(tmp_path / "other", vocab_size=VOCAB, layers=1))
    before = weights(other)
    with pytest.raises(CheckpointError, match="another model"):
        other.load_checkpoint(str(tmp_path / "saved"))
    assert all(tensor.equal(before[name]) for name, tensor in weights(other).items())
    file = tmp_path / "saved" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read"):
        engine.load_checkpoint(str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "extra is not known"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"is \[3\] and not"),
    ],
)
def test_weights_that_do_not_fit_are_listed(
    make_engine: MakeEngine, qwen3: Path, change: Callable[[dict[str, Tensor]], Any], text: str
) -> None:
    tensors = load_file(qwen3 / "model.safetensors")
    change(tensors)
    save_file(tensors, qwen3 / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMappingError, match=text):
        make_engine(qwen3)


def test_a_model_whose_media_nobody_prepares_is_refused(plugins: Plugins) -> None:
    from anygauge.config.families import family

    with pytest.raises(ConfigError, match="no causal language model of text"):
        family(plugins, {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "fsdp")
    hf = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "vision_config": {}}
    with pytest.raises(ConfigError, match="takes images or sound, and no family prepares them"):
        family(plugins, hf, "fsdp")
    with pytest.raises(ConfigError, match="no model_type 'none'"):
        family(plugins, {"architectures": ["NoneForCausalLM"], "model_type": "none"}, "fsdp")


def test_an_unknown_architecture_names_the_engine_that_trains_it(plugins: Plugins) -> None:
    from anygauge.config.families import family

    hf = {"architectures": ["PhiForCausalLM"], "model_type": "phi"}
    with pytest.raises(UnknownNameError, match=r"train.engine = 'fsdp' trains it"):
        family(plugins, hf, "megatron")
    assert family(plugins, hf, "fsdp").architectures == ("PhiForCausalLM",)
