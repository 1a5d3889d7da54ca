"""LoRA on the FSDP engine, against peft: log-probs, gradients, files, merged weights, checkpoints.

One process; two are in ``tests/integration/test_data_parallel.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from anygauge.config import Config
from anygauge.config.schema import Lora
from anygauge.engines.fsdp.lora import add_adapters
from anygauge.engines.fsdp.weights import whole
from anygauge.plugins import Plugins
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_hooks.errors import AnygaugeError, CheckpointError, ConfigError, WeightMappingError
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample

# peft 0.21.2 asks transformers 5.23.0 by an old name
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

MakeEngine = Callable[..., Any]
VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2": ({}, {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}),
    "GPT2": (
        {"n_embd": 32, "n_layer": 2, "n_head": 4},
        {"target_modules": "all-linear", "fan_in_fan_out": True},
    ),
    "Phi": ({}, {"target_modules": r".*\.0\.self_attn\.[qv]_proj", "modules_to_save": ["lm_head"]}),
    "Mixtral": ({"num_local_experts": 4}, {"target_modules": ["q_proj", "o_proj"]}),
}
"""Architectures, what is odd about them, and what has an adapter in peft: GPT-2's weights are transposed,
Phi's output layer has a bias, and Mixtral's experts are no linear layers."""
LORA = {"rank": 4, "alpha": 12.0}


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins) -> MakeEngine:
    def make(path: Path, lora: Mapping[str, Any] | None = None, **train: Any) -> Any:
        config = Config.model_validate(
            {
                "run": {"name": "test", "steps": 10},
                "model": {"path": path},
                "data": {"train": []},
                "reward": {"function": "none"},
                "train": {
                    "engine": "fsdp",
                    "lr": 0.02,
                    "micro_batch_tokens": 64,
                    "lora": lora or {},
                    **train,
                },
            }
        )
        return plugins.get("register_train_engines", "fsdp").make(config, context)

    return make


def write_model(directory: Path, name: str, *, seed: int = 0, **options: Any) -> Path:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name][0], **options})
    tiny_tokenizer(directory, alphabet="0123456789+-*/=.")
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def qwen2(tmp_path: Path) -> Path:
    return write_model(tmp_path / "qwen2", "Qwen2")


def peft_adapter(model: Path, directory: Path, **options: Any) -> Path:
    """Write an adapter of peft's with random values."""
    torch.manual_seed(7)
    base = AutoModelForCausalLM.from_pretrained(model)
    adapted = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, **options))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    adapted.save_pretrained(directory)
    return directory


def make_samples() -> list[TrainSample]:
    """Return samples of more than one micro-batch of 64 tokens."""
    generator = torch.Generator().manual_seed(1)
    return [
        TrainSample(
            tokens=torch.randint(18, VOCAB, (length,), generator=generator).tolist(),
            response_length=response,
            loss_mask=[1] * response,
            rollout_log_probs=[-0.5] * response,
            advantages=[1.0] * response,
        )
        for length, response in ((17, 5), (5, 1), (40, 20), (33, 30))
    ]


def expected_log_probs(model: Any) -> Tensor:
    """Return what a model of transformers or peft computes, one sequence at a time."""
    result = []
    for sample in make_samples():
        tokens = torch.tensor(sample.tokens)[None]
        taken = model(tokens).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[0, 1:, None])[:, 0]
        result.append(taken[-sample.response_length :])
    return torch.cat(result)


def log_probs(engine: Any, **options: Any) -> Tensor:
    return torch.cat(list(batches.log_probs(engine, make_samples(), temperature=1.0, **options)))


def likelihood(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    return -(inputs.log_probs * inputs.loss_weights).sum(), {}


def take_step(engine: Any) -> dict[str, float]:
    samples = make_samples()
    total = sum(sample.response_length for sample in samples)
    return dict(
        batches.train_step(
            engine,
            samples,
            likelihood,
            temperature=1.0,
            loss_weights=[[1 / total] * sample.response_length for sample in samples],
            old_log_probs=[sample.rollout_log_probs for sample in samples],
            reference_log_probs=None,
            entropy_grad=False,
        )
    )


def saved(engine: Any, directory: Path) -> Path:
    directory.mkdir()
    engine.save_checkpoint(str(directory))
    engine._checkpoint._write.result()
    return directory


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_of_pefts_trains_as_in_peft(make_engine: MakeEngine, tmp_path: Path, name: str) -> None:
    """Log-probs, loss and gradients from the adapter's directory; no key of it is in the config."""
    path = write_model(tmp_path / "model", name)
    adapter = peft_adapter(path, tmp_path / "adapter", **MODELS[name][1])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), adapter, is_trainable=True)
    engine = make_engine(path, {"path": adapter})
    expected = expected_log_probs(model.eval())
    close(log_probs(engine), expected)
    taken: dict[str, Tensor] = {}
    engine.optimizer.step = lambda *_: taken.update(
        {shard.name: whole(shard.tensor.grad) for shard in engine.shards if shard.tensor.requires_grad}
    )
    assert take_step(engine)["loss"] == pytest.approx(-expected.mean().item(), rel=1e-5)
    (-expected.mean()).backward()
    wanted = {
        parameter_name.removeprefix("base_model.model.")
        .replace(".default", "")
        .replace(".modules_to_save", ""): p
        for parameter_name, p in model.named_parameters()
        if p.requires_grad
    }
    assert taken.keys() == wanted.keys()
    for parameter_name, parameter in wanted.items():
        error = (taken[parameter_name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{parameter_name}: {error}"


@pytest.mark.parametrize("name", MODELS)
def test_peft_and_transformers_load_an_export(make_engine: MakeEngine, tmp_path: Path, name: str) -> None:
    """Merged or beside the base, an export is the trained model, and training can start from its adapter."""
    path = write_model(tmp_path / "model", name)
    options = {key: MODELS[name][1].get(key) for key in ("modules_to_save",)}
    targets = MODELS[name][1]["target_modules"]
    engine = make_engine(path, {**LORA, **options, "targets": None if targets == "all-linear" else targets})
    before = log_probs(engine)
    for _ in range(2):
        take_step(engine)
    trained = log_probs(engine)
    assert (trained - before).abs().max() > 1e-2
    engine.save_hf(str(tmp_path / "out"))
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    close(trained, expected_log_probs(merged.eval()))
    base = AutoModelForCausalLM.from_pretrained(path)
    peft = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    close(trained, expected_log_probs(peft))
    again = make_engine(path, {"path": tmp_path / "out" / "adapter"})
    assert log_probs(again).equal(trained)
    assert {shard.name for shard in again.shards} == {shard.name for shard in engine.shards}


def test_an_export_has_what_its_key_says(make_engine: MakeEngine, qwen2: Path, tmp_path: Path) -> None:
    for export, files in {
        "merged": {"config.json"},
        "adapter": {"adapter"},
        "both": {"config.json", "adapter"},
    }.items():
        make_engine(qwen2, {**LORA, "export": export}).save_hf(str(tmp_path / export))
        assert {path.name for path in (tmp_path / export).iterdir()} & {"config.json", "adapter"} == files


def test_new_adapters_change_nothing_and_a_reference_without_them_is_the_base(
    make_engine: MakeEngine, qwen2: Path
) -> None:
    base = log_probs(make_engine(qwen2))
    engine = make_engine(qwen2, {**LORA, "modules_to_save": ["lm_head", "norm"]})
    engine.load_role("reference", str(qwen2))
    assert log_probs(engine).equal(base)
    for name, tensor in make_engine(qwen2).weights():
        assert dict(engine.weights())[name].equal(tensor)
    take_step(engine)
    trained = log_probs(engine)
    assert not trained.equal(base)
    assert log_probs(engine, role="reference").equal(base)
    assert log_probs(engine).equal(trained)
    engine.load_role("late", str(qwen2))
    assert log_probs(engine, role="late").equal(base)
    assert log_probs(engine).equal(trained)
    copies = engine._roles._trained._kept["reference"]
    assert sum(copy.numel() for copy in copies) == VOCAB * 32 + 32, "of lm_head and the last norm alone"


def test_another_reference_is_kept_as_a_copy(make_engine: MakeEngine, qwen2: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", "Qwen2", seed=5)
    engine = make_engine(qwen2, LORA)
    take_step(engine)
    trained = log_probs(engine)
    engine.load_role("reference", str(other))
    assert log_probs(engine, role="reference").equal(log_probs(make_engine(other)))
    assert log_probs(engine).equal(trained)


def test_only_adapters_and_saved_modules_are_trained(
    make_engine: MakeEngine, qwen2: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen weights have the dtype that the model computes in; what is trained is float32."""
    caplog.set_level("INFO")
    engine = make_engine(
        qwen2, {**LORA, "targets": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}, dtype="bfloat16"
    )
    assert "LoRA: 4 layers have adapters; 3,200 of 20,896 parameters are trained" in caplog.text
    before = {shard.name: shard.local.clone() for shard in engine.shards}
    assert take_step(engine)["loss"] > take_step(engine)["loss"]
    trained = {shard.name for shard in engine.shards if shard.tensor.grad is not None}
    ends = ("q_proj", "down_proj")
    assert {name.rpartition(".lora_")[0].rpartition(".")[2] for name in trained - {"lm_head.weight"}} == {
        *ends
    }
    assert len(trained) == 2 * 2 * 2 + 1
    for shard in engine.shards:
        is_trained = shard.name in trained
        assert shard.local.equal(before[shard.name]) != is_trained, shard.name
        assert shard.local.dtype == (torch.float32 if is_trained else torch.bfloat16), shard.name
    states = [each for each in engine.optimizer.state() if each.dim()]
    assert sum(each.numel() for each in states) == 2 * sum(before[name].numel() for name in trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_after_a_resume_are_those_that_would_have_come(
    make_engine: MakeEngine, qwen2: Path, tmp_path: Path, dtype: str
) -> None:
    lora = {**LORA, "modules_to_save": ["lm_head"]}
    engine = make_engine(qwen2, lora, dtype=dtype)
    take_step(engine)
    directory = saved(engine, tmp_path / "saved")
    names = {key.partition("/")[2] for key in load_file(directory / "rank-00000.safetensors")}
    assert names == {shard.name for shard in engine.shards if shard.tensor.requires_grad}
    expected = [take_step(engine) for _ in range(2)]
    moved = qwen2.rename(tmp_path / "moved")
    resumed = make_engine(moved, lora, dtype=dtype)
    for each in (resumed, engine):
        each.load_checkpoint(str(directory))
        assert [take_step(each) for _ in range(2)] == expected
    assert log_probs(resumed).equal(log_probs(engine))


def test_a_checkpoint_of_another_base_is_refused(
    make_engine: MakeEngine, qwen2: Path, tmp_path: Path
) -> None:
    engine = make_engine(qwen2, LORA)
    take_step(engine)
    directory = saved(engine, tmp_path / "saved")
    file = qwen2 / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    save_file(tensors, file, {"format": "pt"})
    for other in (make_engine(qwen2, LORA), make_engine(qwen2, {**LORA, "alpha": 8.0}), make_engine(qwen2)):
        before = log_probs(other)
        with pytest.raises(
            CheckpointError, match=r"adapters of rank 4 and alpha 12\.0 on .*qwen2 \(checksum"
        ):
            other.load_checkpoint(str(directory))
        assert log_probs(other).equal(before)
    whole = saved(make_engine(qwen2), tmp_path / "whole")
    with pytest.raises(CheckpointError, match="a model without adapters; the engine has adapters of rank 4"):
        engine.load_checkpoint(str(whole))


def test_a_sleep_changes_no_bit(make_engine: MakeEngine, qwen2: Path) -> None:
    engine, undisturbed = make_engine(qwen2, LORA), make_engine(qwen2, LORA)
    for each in (engine, undisturbed):
        take_step(each)
    engine.set_memory_state("weights")
    assert all(tensor.equal(dict(engine.weights())[name]) for name, tensor in undisturbed.weights())
    engine.set_memory_state("nothing")
    assert sum(tensor.untyped_storage().nbytes() for tensor in engine._model_tensors()) == 0
    engine.set_memory_state("everything")
    assert take_step(engine) == take_step(undisturbed)


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"fused_loss": False}, {"micro_batch_tokens": 1}])
def test_options_change_no_result(make_engine: MakeEngine, qwen2: Path, options: dict[str, Any]) -> None:
    lora = {**LORA, "targets": r"model\.layers\.0\..*"}
    plain, other = make_engine(qwen2, lora), make_engine(qwen2, lora, **options)
    for _ in range(2):
        assert take_step(other) == pytest.approx(take_step(plain), rel=1e-5)


REFUSED: Sequence[tuple[dict[str, Any], str]] = (
    ({"targets": ["q_proj", "nope"]}, "'nope' matches no linear layer.*down_proj, gate_proj, k_proj, o_proj"),
    ({"targets": "q_proj"}, "'q_proj' matches no linear layer"),  # an expression matches whole names
    ({"targets": ["lm_head"]}, r"chooses the output layer lm_head.*modules_to_save = \['lm_head'\]"),
    ({"targets": ".*"}, "chooses the output layer lm_head"),
    ({"modules_to_save": ["head"]}, "no module 'head' has weights.*embed_tokens"),
    ({"targets": ["q_proj"], "modules_to_save": ["q_proj"]}, "'q_proj' matches no linear layer"),
)


@pytest.mark.parametrize(("keys", "text"), REFUSED)
def test_modules_that_cannot_be_chosen_are_refused(
    make_engine: MakeEngine, qwen2: Path, keys: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){text}") as caught:
        make_engine(qwen2, {**LORA, **keys})
    assert caught.value.code == "AG201"


def test_a_shared_weight_is_not_trained_in_full(make_engine: MakeEngine, tmp_path: Path) -> None:
    tied = write_model(tmp_path, "Qwen2", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"lm_head shares a weight with model\.embed_tokens"):
        make_engine(tied, {**LORA, "modules_to_save": ["lm_head"]})


def test_a_layer_that_shares_its_weight_gets_no_adapter() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, device="meta") for _ in range(3)))
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match="share their weight with another module: 0, 2"):
        add_adapters(SimpleNamespace(model=model, output_name="output"), Lora(rank=1), torch.float32)


def test_an_adapter_that_does_not_fit_is_refused(
    make_engine: MakeEngine, qwen2: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", "Qwen2", num_hidden_layers=3, intermediate_size=40)
    adapter = peft_adapter(other, tmp_path / "adapter", target_modules=["up_proj"])
    with pytest.raises(ConfigError, match=r"other layers than the adapter.*k_proj"):
        make_engine(qwen2, {"path": adapter, "targets": ["k_proj", "up_proj"]})
    text = r"layers\.0\.mlp\.up_proj\.lora_B\.weight is \[40, 3\] and not \[48, 3\].*"
    with pytest.raises(WeightMappingError, match=r"2\.mlp\.up_proj\.lora_A\.weight is not known|" + text):
        make_engine(qwen2, {"path": adapter})
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(AnygaugeError, match="use_dora = True, which LoRA here does not support"):
        make_engine(other, {"path": adapter})
