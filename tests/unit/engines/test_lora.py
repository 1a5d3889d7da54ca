"""LoRA on both engines, against peft: log-probs, gradients, files, merged weights, checkpoints.

One process; two are in ``tests/integration/test_lora_run.py``, a divided model in
``tests/distributed/test_parallel_lora.py``.
"""

from __future__ import annotations

import json
import logging
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

from anygauge.config.schema import Lora
from anygauge.engines.fsdp.lora import add_adapters
from anygauge.engines.fsdp.weights import whole
from anygauge.engines.megatron.conversion.convert import megatron_to_hf
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import save_random, tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import AnygaugeError, CheckpointError, ConfigError, WeightMappingError
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config

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
Model = tuple[str, dict[str, Any], dict[str, Any]]
LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8},
    **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4},
}
DELTA = {
    **{"head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 2},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4},
    **{"linear_value_head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    **{"shared_expert_intermediate_size": 8},
}
MODELS: dict[str, Model] = {
    "fsdp-Qwen2": ("Qwen2", {}, {"target_modules": "all-linear", "modules_to_save": ["lm_head", "norm"]}),
    "fsdp-GPT2": (
        "GPT2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4},
        {"target_modules": "all-linear", "fan_in_fan_out": True},
    ),
    "fsdp-Phi": (
        "Phi",
        {},
        {"target_modules": r".*\.0\.self_attn\.[qv]_proj", "modules_to_save": ["lm_head"]},
    ),
    "fsdp-Mixtral": ("Mixtral", {"num_local_experts": 4}, {"target_modules": ["q_proj", "o_proj"]}),
    "megatron-Qwen2": (
        "Qwen2",
        {},
        {"target_modules": "all-linear", "modules_to_save": ["lm_head", "norm"]},
    ),
    "megatron-Qwen3": (
        "Qwen3",
        {"head_dim": 8},
        {"target_modules": r".*\.1\.(self_attn\.[qv]|mlp\.up)_proj"},
    ),
    "megatron-Qwen3Next": ("Qwen3Next", DELTA, {"target_modules": ["in_proj_qkvz", "in_proj_ba", "q_proj"]}),
    "megatron-Phi3": ("Phi3", {}, {"target_modules": "all-linear"}),
    "megatron-DeepseekV3": (
        "DeepseekV3",
        LATENT,
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]},
    ),
}
"""Engine and architecture, what is odd about this, and what has an adapter in peft: all norms of Qwen2 end in
``norm``, GPT-2's weights are transposed, Phi's output layer has a bias, and Mixtral's experts are no linear
layers. In Megatron, Qwen's linears are fused and Phi-3's are fused in the checkpoint too; some of DeepSeek's
are not divided. A head's queries, keys and values are together in Qwen3-Next."""
ENGINES = ("fsdp", "megatron")
LORA = {"rank": 4, "alpha": 12.0}


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins) -> MakeEngine:
    def make(path: Path, lora: Mapping[str, Any] | None = None, engine: str = "fsdp", **train: Any) -> Any:
        config = engine_config(
            path,
            train={
                "engine": engine,
                "lr": 0.02,
                "micro_batch_tokens": 64,
                "lora": lora or {},
                **train,
            },
        )
        return plugins.get("register_train_engines", engine).make(config, context)

    return make


def write_model(directory: Path, name: str, **options: Any) -> Path:
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    tiny_tokenizer(directory, alphabet="0123456789+-*/=.")
    return save_random(AutoModelForCausalLM, config, directory)


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
    return batches.random_samples(((17, 5), (5, 1), (40, 20), (33, 30)), 18, VOCAB)


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


def take_step(engine: Any) -> dict[str, float]:
    return batches.train_step(engine, make_samples())


def saved(engine: Any, directory: Path) -> Path:
    directory.mkdir()
    engine.save_checkpoint(str(directory))
    engine._checkpoint._write.result()
    return directory


def trained(engine: Any) -> dict[str, Tensor]:
    """Return this rank's trained weights: float32 on the FSDP engine, and what the model has on the other."""
    if hasattr(engine, "shards"):
        return {shard.name: shard.tensor for shard in engine.shards if shard.tensor.requires_grad}
    return {name: tensor for name, tensor in engine.policy.tensors.items() if tensor.requires_grad}


def frozen(engine: Any) -> dict[str, Tensor]:
    if hasattr(engine, "shards"):
        return {shard.name: shard.local for shard in engine.shards if not shard.tensor.requires_grad}
    return {name: tensor for name, tensor in engine.policy.tensors.items() if not tensor.requires_grad}


def gradients_of_step(engine: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a step that changes nothing, and the gradients under the names of a checkpoint."""
    taken: dict[str, Tensor] = {}
    if hasattr(engine, "shards"):

        def keep(*_: Any) -> None:
            taken.update({name: whole(tensor.grad) for name, tensor in trained(engine).items()})

        engine.optimizer.step = keep
        return take_step(engine)["loss"], taken
    from anygauge.engines.megatron.weights.mapping import hf_tensors

    engine._weight_update.step = lambda norm: None
    loss, stored = take_step(engine)["loss"], engine.policy.tensors
    rules = engine.policy.adapters.trained_rules
    return loss, dict(hf_tensors((rule, stored[rule.canonical].main_grad) for rule in rules))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", MODELS)
def test_an_adapter_of_pefts_trains_as_in_peft(make_engine: MakeEngine, tmp_path: Path, case: str) -> None:
    """Log-probs, loss and gradients from the adapter's directory; no key of it is in the config."""
    name, options, lora = MODELS[case]
    path = write_model(tmp_path / "model", name, **options)
    adapter = peft_adapter(path, tmp_path / "adapter", **lora)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), adapter, is_trainable=True)
    engine = make_engine(path, {"path": adapter}, engine=case.partition("-")[0])
    expected = expected_log_probs(model.eval())
    close(log_probs(engine), expected)
    loss, taken = gradients_of_step(engine)
    assert loss == pytest.approx(-expected.mean().item(), rel=1e-5)
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


@pytest.mark.parametrize("case", MODELS)
def test_peft_and_transformers_load_an_export(make_engine: MakeEngine, tmp_path: Path, case: str) -> None:
    """Merged or beside the base, an export is the trained model, and training can start from its adapter."""
    name, options, lora = MODELS[case]
    path = write_model(tmp_path / "model", name, **options)
    saved, targets, own = lora.get("modules_to_save"), lora["target_modules"], case.partition("-")[0]
    chosen = {"modules_to_save": saved, "targets": None if targets == "all-linear" else targets}
    engine = make_engine(path, {**LORA, **chosen}, engine=own)
    before = log_probs(engine)
    for _ in range(2):
        take_step(engine)
    after = log_probs(engine)
    assert (after - before).abs().max() > 1e-2
    engine.save_hf(str(tmp_path / "out"))
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    close(after, expected_log_probs(merged.eval()))
    base = AutoModelForCausalLM.from_pretrained(path)
    peft = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    close(after, expected_log_probs(peft))
    again = make_engine(path, {"path": tmp_path / "out" / "adapter"}, engine=own)
    assert log_probs(again).equal(after)
    assert trained(again).keys() == trained(engine).keys()


@pytest.mark.parametrize("engine", ENGINES)
def test_targets_that_name_experts_say_once_that_these_stay_frozen(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    path = write_model(tmp_path / "model", "DeepseekV3", **LATENT)
    make_engine(path, {"rank": 2, "targets": ["o_proj", "down_proj"]}, engine=engine)
    make_engine(path, {"rank": 2, "targets": ["o_proj"]}, engine=engine)
    (told,) = [record.getMessage() for record in caplog.records if "stay frozen" in record.getMessage()]
    assert told.startswith("LoRA: 4 weights of experts have no adapter and stay frozen, such as ")
    assert told.endswith(" model.layers.1.mlp.experts.0.down_proj")


def test_merged_weights_of_a_mixture_of_experts_are_the_trained_model(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Shared experts and dense layers have adapters, whose names peft takes for those of experts."""
    path = write_model(tmp_path / "model", "DeepseekV3", **LATENT)
    caplog.set_level(logging.INFO)
    engine = make_engine(path, LORA, engine="megatron")
    (told,) = [record for record in caplog.records if "stay frozen" in record.getMessage()]
    assert told.levelno == logging.INFO
    assert told.getMessage().startswith(
        "LoRA: 12 weights of experts have no adapter and stay frozen, such as "
    )
    assert {name.rpartition(".")[2] for name in engine.policy.adapters.layers} == {
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    for _ in range(2):
        take_step(engine)
    engine.save_hf(str(tmp_path / "out"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    close(log_probs(engine), expected_log_probs(merged))
    config = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert "model.layers.1.mlp.shared_experts.up_proj" in config["target_modules"]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_export_has_what_its_key_says(
    make_engine: MakeEngine, qwen2: Path, tmp_path: Path, engine: str
) -> None:
    for export, files in {
        "merged": {"config.json"},
        "adapter": {"adapter"},
        "both": {"config.json", "adapter"},
    }.items():
        made = make_engine(qwen2, {**LORA, "export": export}, engine)
        take_step(made)
        made.save_hf(str(tmp_path / export))
        assert {path.name for path in (tmp_path / export).iterdir()} & {"config.json", "adapter"} == files
    stored = load_file(tmp_path / "both" / "adapter" / "adapter_model.safetensors")
    sent = {f"base_model.model.{name}": tensor for name, tensor in made.adapter_weights()}
    assert sent.keys() == stored.keys()
    assert all(tensor.equal(sent[name]) for name, tensor in stored.items())


def test_adapters_are_gathered_before_they_are_sent(
    make_engine: MakeEngine, qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer step may have left them on other ranks."""
    engine = make_engine(qwen2, LORA, "megatron")
    gathered: list[bool] = []
    monkeypatch.setattr(engine, "_gather_parameters", lambda: gathered.append(True))
    for overlaps in (False, True):
        engine.policy.options.ddp.overlap_param_gather = overlaps
        assert dict(engine.adapter_weights())
        assert gathered == [True] * overlaps


@pytest.mark.parametrize("name", ENGINES)
def test_new_adapters_change_nothing_and_a_reference_without_them_is_the_base(
    make_engine: MakeEngine, qwen2: Path, name: str
) -> None:
    base = log_probs(make_engine(qwen2, engine=name))
    engine = make_engine(qwen2, {**LORA, "modules_to_save": ["lm_head", "norm"]}, name)
    engine.load_role("reference", str(qwen2))
    assert log_probs(engine).equal(base)
    for weight, tensor in make_engine(qwen2, engine=name).weights():
        assert dict(engine.weights())[weight].equal(tensor)
    take_step(engine)
    after = log_probs(engine)
    assert not after.equal(base)
    assert log_probs(engine, role="reference").equal(base)
    assert log_probs(engine).equal(after)
    engine.load_role("late", str(qwen2))
    assert log_probs(engine, role="late").equal(base)
    assert log_probs(engine).equal(after)
    copies = engine._roles._trained._kept["reference"]
    assert sum(copy.numel() for copy in copies) == VOCAB * 32 + 32, "of lm_head and the last norm alone"


@pytest.mark.parametrize("name", ENGINES)
def test_another_reference_is_kept_as_a_copy(
    make_engine: MakeEngine, qwen2: Path, tmp_path: Path, name: str
) -> None:
    other = write_model(tmp_path / "other", "Qwen2", initializer_range=0.1)
    engine = make_engine(qwen2, LORA, name)
    take_step(engine)
    after = log_probs(engine)
    engine.load_role("reference", str(other))
    assert log_probs(engine, role="reference").equal(log_probs(make_engine(other, engine=name)))
    assert log_probs(engine).equal(after)


@pytest.mark.parametrize("name", ENGINES)
def test_only_adapters_and_saved_modules_are_trained(
    make_engine: MakeEngine, qwen2: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Frozen weights have the dtype that the model computes in and no gradient; masters are float32."""
    caplog.set_level("INFO")
    lora = {**LORA, "targets": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    engine = make_engine(qwen2, lora, name, dtype="bfloat16")
    assert "LoRA: 4 layers have adapters; 3,200 of 20,896 parameters are trained" in caplog.text
    learning, still = ({n: t.detach().clone() for n, t in each(engine).items()} for each in (trained, frozen))
    assert take_step(engine)["loss"] > take_step(engine)["loss"]
    assert len(learning) == 2 * 2 * 2 + 1
    assert all(not tensor.equal(learning[weight]) for weight, tensor in trained(engine).items())
    for weight, tensor in frozen(engine).items():
        assert tensor.equal(still[weight]), weight
        assert tensor.dtype == torch.bfloat16
        assert getattr(tensor, "main_grad", None) is None
    assert {tensor.dtype for tensor in masters(engine)} == {torch.float32}
    assert sum(tensor.numel() for tensor in masters(engine)) == 3200
    assert sum(each.numel() for each in moments(engine)) == 2 * 3200


def masters(engine: Any) -> list[Tensor]:
    inner = engine.optimizer.inner if hasattr(engine, "shards") else engine.optimizer
    return [each for group in inner.param_groups for each in group["params"]]


def moments(engine: Any) -> list[Tensor]:
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    inner = [getattr(part, "inner", None) or part.optimizer for part in parts]
    states = (value for each in inner for state in each.state.values() for value in state.values())
    return [value for value in states if isinstance(value, Tensor) and value.dim()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENGINES)
def test_steps_after_a_resume_are_those_that_would_have_come(
    make_engine: MakeEngine, qwen2: Path, tmp_path: Path, name: str, dtype: str
) -> None:
    lora = {**LORA, "modules_to_save": ["lm_head"]}
    engine = make_engine(qwen2, lora, name, dtype=dtype)
    take_step(engine)
    directory = saved(engine, tmp_path / "saved")
    names = {key.partition("/")[2] for key in load_file(directory / "rank-00000.safetensors")}
    assert names == trained(engine).keys()
    with pytest.raises(CheckpointError, match=r"has adapters alone, of the weights of .*qwen2\."):
        megatron_to_hf(directory, tmp_path / "hf", load_plugins(), model=qwen2)
    expected = [take_step(engine) for _ in range(2)]
    moved = qwen2.rename(tmp_path / "moved")
    resumed = make_engine(moved, lora, name, dtype=dtype)
    for each in (resumed, engine):
        each.load_checkpoint(str(directory))
        assert [take_step(each) for _ in range(2)] == expected
    assert log_probs(resumed).equal(log_probs(engine))


@pytest.mark.parametrize("name", ENGINES)
def test_a_checkpoint_of_another_base_is_refused(
    make_engine: MakeEngine, qwen2: Path, tmp_path: Path, name: str
) -> None:
    engine = make_engine(qwen2, LORA, name)
    take_step(engine)
    directory = saved(engine, tmp_path / "saved")
    file = qwen2 / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    save_file(tensors, file, {"format": "pt"})
    for lora in (LORA, {**LORA, "alpha": 8.0}, None):
        other = make_engine(qwen2, lora, name)
        before = log_probs(other)
        with pytest.raises(
            CheckpointError, match=r"adapters of rank 4 and alpha 12\.0 on .*qwen2 \(checksum"
        ):
            other.load_checkpoint(str(directory))
        assert log_probs(other).equal(before)
    whole = saved(make_engine(qwen2, engine=name), tmp_path / "whole")
    with pytest.raises(CheckpointError, match="a model without adapters; the engine has adapters of rank 4"):
        engine.load_checkpoint(str(whole))


@pytest.mark.parametrize("name", ENGINES)
def test_a_sleep_changes_no_bit(make_engine: MakeEngine, qwen2: Path, name: str) -> None:
    engine, undisturbed = (make_engine(qwen2, LORA, name) for _ in range(2))
    for each in (engine, undisturbed):
        take_step(each)
    engine.set_memory_state("weights")
    assert all(tensor.equal(dict(engine.weights())[weight]) for weight, tensor in undisturbed.weights())
    engine.set_memory_state("nothing")
    assert sum(tensor.untyped_storage().nbytes() for tensor in engine._model_tensors()) == 0
    engine.set_memory_state("everything")
    assert take_step(engine) == take_step(undisturbed)


OPTIONS: Sequence[tuple[str, dict[str, Any]]] = (
    ("fsdp", {"recompute": "full"}),
    ("fsdp", {"fused_loss": False}),
    ("fsdp", {"micro_batch_tokens": 1}),
    ("megatron", {"recompute": "full"}),
    ("megatron", {"recompute": "elementwise", "micro_batch_tokens": 1}),
    ("megatron", {"megatron": {"use_distributed_optimizer": False}}),
)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_options_change_no_result(
    make_engine: MakeEngine, qwen2: Path, name: str, options: dict[str, Any]
) -> None:
    lora = {**LORA, "targets": r"model\.layers\.0\..*"}
    plain, other = make_engine(qwen2, lora, name), make_engine(qwen2, lora, name, **options)
    for _ in range(2):
        assert take_step(other) == pytest.approx(take_step(plain), rel=1e-5)


def test_both_engines_take_the_same_steps(make_engine: MakeEngine, qwen2: Path) -> None:
    """Adapters have the same first values."""
    engines = [make_engine(qwen2, LORA, name) for name in ENGINES]
    for _ in range(3):
        one, other = (take_step(engine) for engine in engines)
        assert other == pytest.approx(one, rel=1e-5)


REFUSED: Sequence[tuple[dict[str, Any], str]] = (
    ({"targets": ["q_proj", "nope"]}, "'nope' matches no linear layer.*down_proj, gate_proj, k_proj, o_proj"),
    ({"targets": "q_proj"}, "'q_proj' matches no linear layer"),  # an expression matches whole names
    ({"targets": ["lm_head"]}, r"chooses the output layer lm_head.*modules_to_save = \['lm_head'\]"),
    ({"targets": ".*"}, "chooses the output layer lm_head"),
    ({"modules_to_save": ["head"]}, "no module 'head' has weights.*embed_tokens"),
    ({"targets": ["o_proj"], "modules_to_save": ["o_proj"]}, "'o_proj' matches no linear layer"),
)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("keys", "text"), REFUSED)
def test_modules_that_cannot_be_chosen_are_refused(
    make_engine: MakeEngine, qwen2: Path, keys: dict[str, Any], text: str, engine: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){text}") as caught:
        make_engine(qwen2, {**LORA, **keys}, engine)
    assert caught.value.code == "AG201"


def test_a_part_of_a_fused_weight_is_not_trained_in_full(make_engine: MakeEngine, qwen2: Path) -> None:
    lora = {**LORA, "targets": ["o_proj"], "modules_to_save": ["gate_proj"]}
    with pytest.raises(ConfigError, match=r"gate_proj\.weight is one tensor with .*up_proj\.weight here"):
        make_engine(qwen2, lora, "megatron")
    make_engine(qwen2, {**lora, "modules_to_save": ["gate_proj", "up_proj"]}, "megatron")


@pytest.mark.parametrize("engine", ENGINES)
def test_a_shared_weight_is_not_trained_in_full(make_engine: MakeEngine, tmp_path: Path, engine: str) -> None:
    tied = write_model(tmp_path, "Qwen2", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"lm_head shares a weight with model\.embed_tokens"):
        make_engine(tied, {**LORA, "modules_to_save": ["lm_head"]}, engine)


def test_a_layer_that_shares_its_weight_gets_no_adapter() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, device="meta") for _ in range(3)))
    model[2].weight = model[0].weight
    with pytest.raises(ConfigError, match="share their weight with another module: 0, 2"):
        add_adapters(SimpleNamespace(model=model, output_name="output"), Lora(rank=1), torch.float32)


def test_linears_of_a_provider_get_no_adapter() -> None:
    from anygauge.engines.megatron import lora as megatron_lora

    model = torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(
        ConfigError, match=r"no adapters for torch\.nn\.modules\.linear\.Linear, the class of fc1"
    ):
        megatron_lora._linears([model], {"fc1.weight": model[0].weight})


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_that_does_not_fit_is_refused(
    make_engine: MakeEngine, qwen2: Path, tmp_path: Path, engine: str
) -> None:
    other = write_model(tmp_path / "other", "Qwen2", num_hidden_layers=3, intermediate_size=40)
    adapter = peft_adapter(other, tmp_path / "adapter", target_modules=["up_proj"])
    with pytest.raises(ConfigError, match=r"other layers than the adapter.*k_proj"):
        make_engine(qwen2, {"path": adapter, "targets": ["k_proj", "up_proj"]}, engine)
    text = r"layers\.0\.mlp\.up_proj\.lora_B\.weight is \[40, 3\] and not \[48, 3\].*"
    with pytest.raises(WeightMappingError, match=r"2\.mlp\.up_proj\.lora_A\.weight is not known|" + text):
        make_engine(qwen2, {"path": adapter}, engine)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(AnygaugeError, match="use_dora = True, which LoRA here does not support"):
        make_engine(other, {"path": adapter}, engine)
