"""A ``config.json`` that no family has is refused while the config is checked, not by a worker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config import LoadedConfig
from anygauge.config.rules.architecture import architecture_hints
from anygauge.config.same_model import differing_keys
from anygauge.config.schema import Parallel
from anygauge.engines.megatron import plugin as megatron
from anygauge.plugins import Plugins, load_plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec, TrainEngineSpec
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.media import MediaKind
from anygauge_hooks.megatron import megatron_model, with_megatron
from anygauge_hooks.models import ModelSpec, text_config

Load = Callable[..., LoadedConfig]

FAMILIES: Mapping[str, ModelSpec] = load_plugins().named("register_models")
MEGATRON: TrainEngineSpec = load_plugins().get("register_train_engines", "megatron")
OTHER = TrainEngineSpec(name="other", make=MEGATRON.make)
"""An engine that builds any Hugging Face config, and has no checks of its own."""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_of_its_family_is_no_problem(family: str) -> None:
    spec = FAMILIES[family]
    assert architecture_hints(spec, spec.tiny(), MEGATRON) == []


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}
BAD = [
    ("llama", {"mlp_bias": True}, "mlp_bias = True is not supported by the llama family"),
    ("glm4_moe", {"n_group": 4}, "n_group = 4 is not supported"),
    ("glm4_moe", {"first_k_dense_replace": 3}, "first_k_dense_replace = 3 is not supported"),
    ("glm4_moe", {"first_k_dense_replace": 9}, "a layer of experts behind the dense ones"),
    ("deepseek_v3", {"first_k_dense_replace": 3}, "first_k_dense_replace = 3 is not supported"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "needs a layer of experts"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "has a bad value: integer modulo by zero"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "sends each token to 9 experts, and has 8"),
    ("llama", {"num_key_value_heads": 3}, "4 attention heads, no multiple of its 3"),
    ("llama", {"num_hidden_layers": "4"}, "bad num_hidden_layers: '4' is not a positive integer"),
    ("llama", {"num_attention_heads": 0}, "bad num_attention_heads: 0"),
    ("llama", {"hidden_size": ...}, "lacks 'hidden_size'"),
    ("llama", {"vocab_size": ...}, "lacks 'vocab_size'"),
    ("qwen3", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "Rotary scaling 'longrope'"),
    ("llama", {"rope_parameters": LLAMA3}, "lacks 'low_freq_factor'"),
    ("deepseek_v3", {"num_nextn_predict_layers": "1"}, "has a bad value: "),
    ("glm4_moe", {"num_nextn_predict_layers": "1"}, "has a bad value: "),
    (
        "qwen3_5",
        {"layer_types": ["linear_attention"] * 5},
        "describes 5 layers, and its num_hidden_layers is 3",
    ),
    ("qwen3_5_moe", {"layer_types": ["full_attention"] * 2}, "describes 2 layers"),
    ("qwen3", {"quantization_config": {"quant_method": "gptq"}}, "only FP8 weights can: quant_method is 'gp"),
    ("deepseek_v3", {"quantization_config": []}, "name the model that was quantized"),
]


@pytest.mark.parametrize(("family", "changes", "hint"), BAD, ids=[hint for *_, hint in BAD])
def test_another_model_is_refused(family: str, changes: Mapping[str, Any], hint: str) -> None:
    spec = FAMILIES[family]
    hf = {key: value for key, value in {**spec.tiny(), **changes}.items() if value is not ...}
    [problem] = architecture_hints(spec, hf, MEGATRON)
    assert hint in problem


BROKEN: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "unused_weights": lambda hf: [hf["nothing"]],
    "carried_weights": lambda hf: [hf["nothing"]],
    "flops_per_token": lambda hf, *_: hf["nothing"],
}


@pytest.mark.parametrize("part", BROKEN)
def test_what_a_family_reads_later_is_read_before_the_run(part: str) -> None:
    spec = replace(FAMILIES["qwen3"], **{part: BROKEN[part]})
    assert architecture_hints(spec, spec.tiny(), MEGATRON) == ["its config.json lacks 'nothing'"]


def test_weight_rules_are_read_before_the_run() -> None:
    model = replace(megatron_model(FAMILIES["qwen3"]), weight_rules=lambda hf: [hf["nothing"]])
    spec = with_megatron(FAMILIES["qwen3"], model)
    assert architecture_hints(spec, spec.tiny(), MEGATRON) == ["its config.json lacks 'nothing'"]


def test_a_family_without_an_entry_of_the_engine_is_refused() -> None:
    spec = replace(FAMILIES["qwen3"], engines={"another": object()})
    [problem] = architecture_hints(spec, spec.tiny(), MEGATRON)
    assert problem.startswith("The qwen3 family has no MegatronModel in ModelSpec.engines; it has another.")


def test_an_engine_that_builds_any_config_needs_no_entry() -> None:
    spec = replace(FAMILIES["qwen3"], engines={})
    hf = spec.tiny()
    assert architecture_hints(spec, hf, OTHER) == []
    assert differing_keys(spec, hf, {**hf, "use_cache": False, "initializer_range": 1.0}, OTHER) == []
    assert differing_keys(spec, hf, {**hf, "rms_norm_eps": 0.5}, OTHER) == ["rms_norm_eps"]
    assert architecture_hints(spec, {**hf, "head_dim": 0}, OTHER) == [
        "its config.json has a bad head_dim: 0 is not a positive integer"
    ]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_model_may_predict_no_further_token(family: str) -> None:
    spec = FAMILIES[family]
    hf = {**spec.tiny(), "num_nextn_predict_layers": None}
    assert architecture_hints(spec, hf, MEGATRON) == []
    assert spec.unused_weights(hf) == ()


OTHERS = [
    ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, ["rope_parameters"]),
    ("llama", {"rms_norm_eps": 0.5, "initializer_range": 1.0}, ["rms_norm_eps"]),
    ("qwen3_moe", {"norm_topk_prob": False, "max_position_embeddings": 77}, ["norm_topk_prob"]),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}, ["routed_scaling_factor"]),
    ("qwen3_moe", {"mlp_only_layers": [1]}, ["mlp_only_layers"]),
    (
        "llama",
        {"num_key_value_heads": 3, "num_attention_heads": 3},
        ["num_attention_heads", "num_key_value_heads"],
    ),
    ("llama", {"initializer_range": 1.0, "max_position_embeddings": 77, "use_cache": False}, []),
]


@pytest.mark.parametrize(("family", "changes", "keys"), OTHERS, ids=[str(each) for _, each, _ in OTHERS])
def test_keys_that_make_another_function_of_the_same_weights(
    family: str, changes: Mapping[str, Any], keys: list[str]
) -> None:
    spec = FAMILIES[family]
    other = {**spec.tiny(), **changes}
    assert differing_keys(spec, spec.tiny(), other, MEGATRON) == keys
    assert differing_keys(spec, other, spec.tiny(), MEGATRON) == keys


SIGHTS = [
    ("qwen3_vl", "image", {"depth": 3}, ["vision_config"]),
    ("qwen3_vl", "video", {"num_heads": 2}, ["vision_config"]),
    ("qwen3_vl", "image", {"deepstack_visual_indexes": [1, 0]}, ["vision_config"]),
    ("qwen3_vl", "image", {"initializer_range": 0.5, "dtype": "bfloat16"}, []),
    ("qwen3_vl", "image", {"hidden_act": "gelu_pytorch_tanh"}, []),
    ("qwen3_vl", None, {"depth": 3}, []),
    ("qwen3_vl", "image", {"depth": "three"}, ["vision_config"]),
    ("glm4v_moe", "image", {"hidden_act": "gelu"}, ["vision_config"]),
    ("glm_omni", "image", {"rms_norm_eps": 0.5}, ["vision_config"]),
]


@pytest.mark.parametrize(("family", "shown", "changes", "keys"), SIGHTS, ids=[str(each) for each in SIGHTS])
def test_towers_that_make_another_function_of_the_same_weights(
    family: str, shown: MediaKind | None, changes: Mapping[str, Any], keys: list[str]
) -> None:
    spec, kinds = FAMILIES[family], [] if shown is None else [shown]
    one = text_config(spec.tiny())
    other = {**one, "vision_config": {**one["vision_config"], **changes}}
    assert differing_keys(spec, one, other, MEGATRON, kinds) == keys
    assert bool(differing_keys(spec, other, one, MEGATRON, kinds)) == bool(keys)


@pytest.mark.parametrize("kinds", [["audio"], ["image"]])
def test_ears_are_compared_where_something_is_heard(kinds: list[MediaKind]) -> None:
    spec = FAMILIES["qwen3_omni_moe"]
    one = text_config(spec.tiny())
    other = {**one, "audio_config": {**one["audio_config"], "encoder_attention_heads": 1}}
    assert differing_keys(spec, one, other, MEGATRON, kinds) == (["audio_config"] if "audio" in kinds else [])


def test_other_placeholders_make_another_model() -> None:
    spec = FAMILIES["glm4v"]
    other = {**spec.tiny(), "image_token_id": 7}
    assert differing_keys(spec, spec.tiny(), other, MEGATRON) == ["image_token_id"]


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_fp8_weights_are_read_by_train_engines_and_not_by_servers(
    load: Load, plugins: Plugins, model_dir: Path
) -> None:
    write(model_dir, quantization_config=FP8)
    load({})
    served: Any = RolloutEngineSpec(name="server", serve=lambda *_: None)
    plugins.register(SimpleNamespace(register_rollout_engines=hookimpl(lambda: [served])), "server")
    with pytest.raises(ConfigError, match=r"model\.path: .*servers of server would load its FP8 weights"):
        load({"placement": "rollout_workers = 1"}, ["--rollout.engine=server"])
    spec = FAMILIES["qwen3"]
    hf = spec.tiny()
    assert differing_keys(spec, hf, {**hf, "quantization_config": FP8}, OTHER) == []


def test_a_bad_model_is_a_problem_of_its_path(load: Load, model_dir: Path) -> None:
    write(model_dir, num_hidden_layers="4")
    with pytest.raises(ConfigError, match=r"model\.path: .*bad num_hidden_layers: '4'"):
        load()


@pytest.mark.parametrize("architectures", ["ToyForCausalLM", [3], 3])
def test_architectures_are_a_list_of_names(load: Load, model_dir: Path, architectures: Any) -> None:
    write(model_dir, architectures=architectures)
    with pytest.raises(ConfigError, match=r"model\.path: .*of config\.json is not a list of names"):
        load()


def test_a_dense_model_has_no_routes_to_replay(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"train\.router_replay: .*no experts"):
        load({}, ["--train.router_replay=true"])


def test_tables_of_megatron_are_refused_with_another_engine(load: Load, plugins: Plugins) -> None:
    engines = hookimpl(lambda: [OTHER])
    other = SimpleNamespace(register_train_engines=engines, check_config=megatron.check_config)
    plugins.register(other, "other")
    load({}, ["--train.engine=other"])
    for table in ("train", "critic"):
        refused = rf"{table}\.megatron: .*has no effect with train\.engine = 'other'"
        with pytest.raises(ConfigError, match=refused):
            load({}, ["--train.engine=other", f"--{table}.megatron.moe_router_dtype=fp64"])


def test_limits_are_read_where_a_text_model_is_inside_another(load: Load, model_dir: Path) -> None:
    (model_dir / "tokenizer.json").write_text('{"model": {"vocab": {"a": 8}}}')
    inside = {"max_position_embeddings": 4, "vocab_size": 8}
    write(model_dir, max_position_embeddings=..., vocab_size=..., text_config=inside)
    with pytest.raises(ConfigError) as caught:
        load({}, ["--rollout.stop_token_ids=[8]"])
    for hint in ("the model takes 4 ", "the model's vocab_size is 8", "a vocab_size of only 8"):
        assert hint in str(caught.value)


@pytest.mark.parametrize(("engines", "fit"), [((), "none has one yet"), (("own",), "these have: own")])
def test_an_engine_must_have_a_model_of_the_family(
    load: Load, plugins: Plugins, monkeypatch: pytest.MonkeyPatch, engines: tuple[str, ...], fit: str
) -> None:
    assert FAMILIES["glm_omni"].rollout_engines == ("transformers",)
    monkeypatch.setattr(plugins.model(["ToyForCausalLM"]), "rollout_engines", engines)
    refused = rf"rollout\.engine: found 'transformers'.*no model for the toy family; {fit}"
    with pytest.raises(ConfigError, match=refused):
        load({})
    sft = {"run": 'task = "sft"', "data": 'input_key = "messages"'}
    load(sft)
    with pytest.raises(ConfigError, match=refused):
        load({**sft, "eval": 'data = ["."]'})


@pytest.mark.parametrize(
    ("name", "value"), [("bias_update_rate", 0.1), ("bias_update_rate", 0), ("dtype", "fp64")]
)
def test_options_of_experts_are_refused_without_experts(load: Load, name: str, value: Any) -> None:
    refused = rf"train\.megatron\.moe_router_{name}: .*has no effect: the model of model\.path has no experts"
    with pytest.raises(ConfigError, match=refused):
        load({}, [f"--train.megatron.moe_router_{name}={value}"])


def test_two_reasons_to_leave_a_key_out_are_one_problem(load: Load) -> None:
    with pytest.raises(ConfigError, match="has 1 problem:") as raised:
        load({}, ["--train.megatron.moe_token_dispatcher_type=allgather"])
    assert "has no effect: the model of model.path has no experts; leave it out" in str(raised.value)
    assert "The engine sets alltoall" not in str(raised.value)


def set_architecture(
    monkeypatch: pytest.MonkeyPatch, plugins: Plugins, architecture: Callable[[Mapping[str, Any]], Any]
) -> None:
    spec = plugins.model(["ToyForCausalLM"])
    monkeypatch.setitem(
        spec.engines, "megatron", replace(megatron_model(spec), transformer_config=architecture)
    )


def test_a_rate_without_biases_is_refused(
    load: Load, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = {"num_layers": 2, "num_moe_experts": 8}
    set_architecture(monkeypatch, plugins, lambda hf: experts)
    load({}, ["--train.megatron.moe_router_dtype=fp64", "--train.megatron.moe_router_bias_update_rate=0"])
    with pytest.raises(ConfigError, match=r"moe_router_bias_update_rate: .*no routers with biases"):
        load({}, ["--train.megatron.moe_router_bias_update_rate=0.1"])


def test_adapters_need_a_text_model_whose_other_weights_stay(
    load: Load, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load({}, ["--train.lora.rank=2"]).config
    assert MEGATRON.check_model is not None
    seeing = FAMILIES["qwen3_vl"]
    [problem] = MEGATRON.check_model(config, "model.path", seeing, seeing.tiny())
    assert "has adapters for models of text, and this has towers (visual)" in problem.hint
    biased = {"num_layers": 2, "num_moe_experts": 8, "moe_router_enable_expert_bias": True}
    set_architecture(monkeypatch, plugins, lambda hf: biased)
    rate = "--train.megatron.moe_router_bias_update_rate=0.1"
    load({}, [rate])
    with pytest.raises(
        ConfigError, match=r"moe_router_bias_update_rate: .*change the weights below the adap"
    ):
        load({}, [rate, "--train.lora.rank=2"])


@pytest.mark.parametrize("family", ["olmo2", "olmo3"])
def test_heads_that_are_normalized_as_one_are_not_divided(load: Load, family: str) -> None:
    spec, check = FAMILIES[family], MEGATRON.check_model
    assert check is not None
    one = load({}, ["--placement.train_workers=2"]).config
    assert not list(check(one, "model.path", spec, spec.tiny()))
    two = one.model_copy(update={"train": one.train.model_copy(update={"parallel": Parallel(tensor=2)})})
    [problem] = check(two, "model.path", spec, spec.tiny())
    assert (problem.path, problem.found) == ("train.parallel.tensor", 2)
    assert "normalizes queries and keys over all heads" in problem.hint


def test_each_role_has_options_of_its_own_experts(
    load: Load, plugins: Plugins, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense teacher of a policy with experts may take over the policy's table."""
    dense = shutil.copytree(model_dir, tmp_path / "dense")
    write(model_dir, num_experts=8)
    set_architecture(
        monkeypatch, plugins, lambda hf: {"num_layers": 2, "num_moe_experts": hf.get("num_experts")}
    )
    teacher = ["--algorithm.distill_coef=1.0", f"--teacher.path={dense}"]
    load({}, [*teacher, "--train.megatron.moe_router_dtype=fp64"])
    refused = r"^  teacher\.megatron\.moe_router_dtype: .*the model of teacher\.path has no experts"
    with pytest.raises(ConfigError, match=f"(?m){refused}"):
        load({}, [*teacher, "--teacher.megatron.moe_router_dtype=fp64"])


def test_a_critic_without_a_path_has_the_experts_of_the_policy(load: Load) -> None:
    refused = r"critic\.megatron\.moe_router_dtype: .*the model of model\.path has no experts"
    with pytest.raises(ConfigError, match=refused):
        load({}, ["--critic.megatron.moe_router_dtype=fp64"])


def write(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "config.json"
    hf = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in hf.items() if value is not ...}))
