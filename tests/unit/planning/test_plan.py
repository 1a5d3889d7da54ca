"""Arithmetic of a plan: sizes of models, layouts, batches, and what follows from them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import anygauge_models
from anygauge.config import Config
from anygauge.config.families import with_defaults
from anygauge.engines.megatron.layers.context_parallel import Cut, cut_sequences
from anygauge.planning.fit import check_fit, plan_warnings
from anygauge.planning.memory import GIB, ServerMemory
from anygauge.planning.model_sizes import model_shape, read_config
from anygauge.planning.plan import Assumptions, Plan, make_plan
from anygauge.planning.rates import RATES
from anygauge.planning.shape import ModelShape, read_shape
from anygauge.planning.text import table_lines
from anygauge.planning.traffic import token_bytes, update_bytes
from anygauge.plugins import load_plugins
from anygauge_hooks.errors import ConfigError, DoesNotFitError
from anygauge_tests.published_sizes import QWEN3_4B, QWEN3_30B_A3B

TINY = Path(anygauge_models.__file__).parent / "tiny"
PLUGINS = load_plugins()
LEFT_OUT = ("tie_word_embeddings", "num_key_value_heads", "first_k_dense_replace", "mlp_layer_types")
"""Keys for which transformers has defaults, other ones for each family."""


def config_of(**sections: Any) -> Config:
    base: dict[str, Any] = {
        "run": {"name": "t"},
        "model": {"path": "m"},
        "reward": {"function": "none"},
        "data": {"train": [], "max_prompt_tokens": 512},
        "rollout": {"max_new_tokens": 512},
        "train": {"dtype": "bfloat16"},
    }
    return Config.model_validate({**base, **sections})


def plan_of(
    hf: dict[str, Any] | ModelShape,
    *,
    gib: float | None = 80,
    facts: Mapping[str, Any] | None = None,
    **sections: Any,
) -> tuple[Config, Plan]:
    """Return a config and its plan.

    :param facts: Further fields of ``Assumptions``.
    """
    config = config_of(**sections)
    shape = hf if isinstance(hf, ModelShape) else read_shape(hf)
    memory = None if gib is None else gib * GIB
    known = {"backend": "cuda", "master_bytes": 2, "rates": RATES["H200"], **(facts or {})}
    return config, make_plan(config, shape, Assumptions(device_bytes=memory, **known))


def parallel(workers: int, **sizes: int) -> dict[str, Any]:
    return {
        "train": {"dtype": "bfloat16", "parallel": sizes},
        "placement": {"train_workers": workers},
    }


# -------------------------------------------------------------------------
# Models
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    [
        *(
            "deepseek_v3",
            "glm4",
            "glm4_moe",
            "glm4_moe_lite",
            "llama",
            "mistral",
            "phi3",
            "qwen2",
            "qwen3",
            "qwen3_5",
        ),
        *("qwen3_5_moe", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "gemma3", "olmo2", "olmo3"),
    ],
)
def test_parameters_are_those_of_transformers_model(family: str) -> None:
    hf = json.loads((TINY / f"{family}.json").read_text())
    bare = {key: value for key, value in hf.items() if key not in LEFT_OUT}
    for config in (hf, bare):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        count = sum(parameter.numel() for parameter in model.parameters())
        # norms of heads and biases are left out, which are a larger part of a tiny model
        shape = read_shape(with_defaults(PLUGINS, config, "megatron"))
        assert shape.parameters == pytest.approx(count, rel=0.011)
        assert shape.is_tied == (model.get_input_embeddings().weight is model.lm_head.weight)


def test_another_family_has_the_defaults_of_transformers() -> None:
    hf = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 4}
    shape = read_shape(with_defaults(PLUGINS, hf, "fsdp"))
    assert (shape.layers, shape.hidden, shape.is_tied) == (4, 2304, True)
    unknown = {"architectures": ["NoneForCausalLM"], "model_type": "none", "text_config": QWEN3_4B}
    assert read_shape(with_defaults(PLUGINS, unknown, "megatron")) == read_shape(QWEN3_4B)


def test_layers_of_experts_may_be_named_one_by_one() -> None:
    kinds = ["dense", "sparse", "dense", "sparse"]
    hf = QWEN3_30B_A3B | {"num_hidden_layers": 4, "mlp_layer_types": kinds, "first_k_dense_replace": 1}
    assert read_shape(hf).experts.layers == 2  # type: ignore[union-attr]


def test_published_parameters() -> None:
    shape = read_shape(QWEN3_30B_A3B)
    assert shape.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert shape.active_parameters + 2 * shape.embedding == pytest.approx(3.35e9, rel=0.01)
    assert read_shape(QWEN3_4B).parameters == pytest.approx(4.02e9, rel=1e-3)


def test_published_parameters_of_gpt_oss() -> None:
    """Table 1 of https://arxiv.org/abs/2508.10925: experts in every layer, of the only intermediate size."""
    hf = json.loads((TINY / "gpt_oss.json").read_text())
    hf |= {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36, "vocab_size": 201_088}
    hf |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
    hf |= {"num_local_experts": 128, "num_experts_per_tok": 4, "layer_types": ["full_attention"] * 36}
    shape = read_shape(hf)
    assert shape.parameters == pytest.approx(116.83e9, rel=1e-3)
    assert shape.active_parameters + shape.embedding == pytest.approx(5.13e9, rel=0.01)


@pytest.mark.parametrize("file", sorted(TINY.glob("*.json")), ids=lambda file: file.stem)
def test_every_family_has_a_plan(file: Path) -> None:
    hf = json.loads(file.read_text())
    text = {**hf, **hf.get("text_config", {})}
    _, plan = plan_of(hf)
    shape = plan.shape
    assert (shape.layers, shape.hidden) == (text["num_hidden_layers"], text["hidden_size"])
    assert (shape.experts is not None) == ("num_experts_per_tok" in text)
    assert plan.train.peak > plan.train.state > 0


def test_a_cache_has_the_keys_and_values_of_layers_with_attention() -> None:
    assert read_shape(QWEN3_4B).cache_numbers == 36 * 2 * 8 * 128
    hybrid = json.loads((TINY / "qwen3_5.json").read_text())
    attends = hybrid["layer_types"].count("full_attention")
    assert (
        read_shape(hybrid).cache_numbers == attends * 2 * hybrid["num_key_value_heads"] * hybrid["head_dim"]
    )
    latent = json.loads((TINY / "deepseek_v3.json").read_text())
    assert read_shape(latent).cache_numbers == 3 * (latent["kv_lora_rank"] + latent["qk_rope_head_dim"])


def test_a_size_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="hidden_size = None"):
        read_shape({name: value for name, value in QWEN3_4B.items() if name != "hidden_size"})


def test_what_the_sizes_do_not_explain_is_another_part(tmp_path: Path) -> None:
    assert model_shape(tmp_path, QWEN3_4B).others == 0
    shapes = {"tower": [500_000_000], "model": [4, 1_005_000_000]}
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    shape = model_shape(tmp_path, QWEN3_4B)
    assert shape.parameters == 4_520_000_000
    assert shape.others == pytest.approx(0.498e9, rel=0.01)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file or directory\.\n"):
        read_config(tmp_path / "none")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: it is not an object\.\n"):
        read_config(tmp_path)


# -------------------------------------------------------------------------
# Layouts
# -------------------------------------------------------------------------


def test_data_parallel_ranks_divide_the_optimizer_alone() -> None:
    one, eight = (plan_of(QWEN3_4B, **parallel(count))[1].train for count in (1, 8))
    assert (eight.weights, eight.gradients) == (one.weights, one.gradients)
    assert (eight.masters, eight.moments) == (one.masters / 8, one.moments / 8)


def test_tensor_parallel_ranks_divide_everything() -> None:
    one, two = (plan_of(QWEN3_4B, **parallel(count, tensor=count))[1].train for count in (1, 2))
    for name in ("weights", "masters", "gradients", "moments"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2, rel=1e-3), name
    assert two.activations == pytest.approx(one.activations / 2, rel=0.01)


def test_without_sequence_parallelism_hidden_states_are_whole() -> None:
    sizes = {"dtype": "bfloat16", "parallel": {"tensor": 2, "sequence": False}}
    _, whole = plan_of(QWEN3_4B, train=sizes, placement={"train_workers": 2})
    _, split = plan_of(QWEN3_4B, **parallel(2, tensor=2))
    more = whole.train.activations - split.train.activations
    hidden = 2560 * 16_384 * 2 / 2
    assert more == pytest.approx((4 * 36 + 2) * hidden)


def test_pipeline_stages_wait_for_as_many_micro_batches() -> None:
    rollout = {"max_new_tokens": 512, "prompts_per_step": 64}
    one = plan_of(QWEN3_4B, rollout=rollout, **parallel(1))[1]
    four = plan_of(QWEN3_4B, rollout=rollout, **parallel(4, pipeline=4))[1]
    assert four.batches.micro_batches == 32
    assert four.train.activations == pytest.approx(one.train.activations, rel=0.03)
    # the fullest stage has a quarter of the layers, and the embedding
    assert four.layout.rank.total == pytest.approx((4.02e9 - 389e6) / 4 + 389e6, rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_context_parallel_ranks_divide_tokens_and_keep_the_keys_that_they_see(ranks: int) -> None:
    one, some = (plan_of(QWEN3_4B, **parallel(count, context=count))[1].train for count in (1, ranks))
    parts = cut_sequences([4096, 1024], Cut(context=ranks, rank=1))
    seen = sum(parts.key_lengths) / len(parts.own_rows)
    keys = 36 * (seen * 2 * 1024 - 1024) * 16_384 / ranks
    assert some.activations == pytest.approx(one.activations / ranks + 2 * keys)
    assert (some.gradients, some.moments) == (one.gradients, one.moments / ranks)
    train = {"dtype": "bfloat16", "recompute": "selective"}
    plans = [
        plan_of(QWEN3_4B, **parallel(n, context=n) | {"train": train | {"parallel": {"context": n}}})
        for n in (1, ranks)
    ]
    own, again = (plan.train.activations for _, plan in plans)
    assert again == own / ranks  # they are gathered once more


def test_expert_parallel_ranks_divide_experts() -> None:
    one = plan_of(QWEN3_30B_A3B, **parallel(8))[1]
    eight = plan_of(QWEN3_30B_A3B, **parallel(8, expert=8))[1]
    assert eight.layout.rank.experts == one.layout.rank.experts / 8
    assert eight.layout.rank.dense == one.layout.rank.dense
    # as many ranks hold all experts together, so each moment is there once in both
    assert eight.train.moments == pytest.approx(one.train.moments)


def test_fsdp_shards_weights_too_and_gathers_some() -> None:
    sections = {"placement": {"train_workers": 4}, "train": {"dtype": "bfloat16", "engine": "fsdp"}}
    one = plan_of(QWEN3_4B, train=sections["train"])[1].train
    four = plan_of(QWEN3_4B, **sections)[1].train
    assert four.masters == one.masters / 4
    assert four.weights == 0
    assert one.weights == 2 * read_shape(QWEN3_4B).parameters - 2 * 2560  # a norm is counted in no rank


FSDP = {"dtype": "bfloat16", "engine": "fsdp"}


def test_fsdp_gathers_the_ends_of_the_model_and_two_layers_for_the_loss() -> None:
    one = plan_of(QWEN3_4B, gib=None, train=FSDP)[1].train
    four = plan_of(QWEN3_4B, gib=None, train=FSDP, placement={"train_workers": 4})[1].train
    shape = read_shape(QWEN3_4B)
    layer = shape.layer_parameters / 36
    assert four.work - one.work == pytest.approx(2 * (shape.embedding + 2 * layer))


def test_fsdp_has_gradients_twice_at_the_end_of_a_backward_pass() -> None:
    short = {"max_new_tokens": 8, "prompts_per_step": 1, "samples_per_prompt": 1}
    data = {"train": [], "max_prompt_tokens": 8}
    _, plan = plan_of(QWEN3_4B, train=FSDP, rollout=short, data=data)
    own = plan.train.peak - plan.train.others
    assert own == pytest.approx((2 + 4 + 8 + 6) * read_shape(QWEN3_4B).parameters, rel=0.01)


def test_fsdp_keeps_gradients_from_one_micro_batch_to_the_next() -> None:
    once = FSDP | {"micro_batch_tokens": 262_144}
    assert plan_of(QWEN3_4B, train=once)[1].train.gradients == 0
    kept = plan_of(QWEN3_4B, train=FSDP)[1].train.gradients
    assert kept == pytest.approx(4 * read_shape(QWEN3_4B).parameters, rel=1e-6)


def test_a_critic_has_the_state_and_checkpoint_of_another_model() -> None:
    """It is trained in full beside adapters, in a dtype of its own, and has no output layer."""
    small = read_shape(QWEN3_4B | {"num_hidden_layers": 9, "tie_word_embeddings": False})
    own = small.parameters - small.embedding
    sft: dict[str, Any] = {"run": {"name": "t", "task": "sft"}, "reward": {}}
    sft |= {"train": {"dtype": "bfloat16", "lora": {"rank": 16}}, "placement": {"train_workers": 2}}
    alone = plan_of(QWEN3_4B, **sft)[1]
    beside = plan_of(QWEN3_4B, facts={"critic": small}, **sft)[1]
    assert (alone.train.others, beside.train.weights) == (0, alone.train.weights)
    assert beside.train.others == pytest.approx((2 + 1 + 4 + 4) * own, rel=1e-4)
    assert beside.checkpoint - alone.checkpoint == 14 * own
    assert beside.export - alone.export == 2 * own
    exact = sft | {"critic": {"dtype": "float32", "parallel": {"expert": 1}}}
    whole = plan_of(QWEN3_4B, facts={"critic": small}, **exact)[1]
    assert whole.train.others == pytest.approx((4 + 4 + 4) * own, rel=1e-4)
    assert whole.checkpoint - alone.checkpoint == 12 * own


def test_adapters_have_an_optimizer_and_the_rest_has_none() -> None:
    lora = {"dtype": "bfloat16", "lora": {"rank": 16}}
    _, plan = plan_of(QWEN3_4B, train=lora)
    adapters = 16 * 36 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
    assert plan.layout.rank.adapters == adapters
    assert plan.train.moments == 8 * adapters
    assert plan.checkpoint == 14 * adapters
    whole = plan.train.weights
    base = {"engine": "fsdp", "dtype": "bfloat16", "lora": {"rank": 16, "base": "nf4"}}
    _, plan = plan_of(QWEN3_4B, train=base)
    layers = read_shape(QWEN3_4B).layer_parameters
    assert plan.train.weights == pytest.approx(whole - (2 - 0.516) * layers, rel=1e-3)
    few = {"dtype": "bfloat16", "lora": {"rank": 16, "targets": ["q_proj", "v_proj"]}}
    _, plan = plan_of(QWEN3_4B, train=few)
    assert plan.layout.rank.adapters == 16 * 36 * (2560 + 4096 + 2560 + 1024)


# -------------------------------------------------------------------------
# Batches and phases
# -------------------------------------------------------------------------


def test_batches() -> None:
    rollout = {"prompts_per_step": 6, "samples_per_prompt": 8, "max_new_tokens": 512}
    train = {"dtype": "bfloat16", "optimizer_steps": 2, "micro_batch_tokens": 4096}
    _, plan = plan_of(QWEN3_4B, rollout=rollout, train=train, placement={"train_workers": 4})
    own = plan.batches
    assert (own.samples, own.rank_samples, own.mini_batch_samples) == (48, 12, 6)
    assert (own.sample_tokens, own.tokens, own.micro_batches) == (1024, 49_152, 2)
    assert (own.micro_batch_tokens, own.loss_tokens) == (4096, 2048)


def test_a_long_sample_has_a_micro_batch_of_its_own() -> None:
    _, plan = plan_of(QWEN3_4B, train={"dtype": "bfloat16", "micro_batch_tokens": 100})
    assert plan.batches.micro_batch_tokens == 1024
    assert plan.batches.micro_batches == plan.batches.mini_batch_samples


def test_the_loss_keeps_what_its_budget_holds() -> None:
    def logits(gib: float | None, budget: float | None) -> float:
        train = {"dtype": "bfloat16", "loss_memory_gib": budget}
        return plan_of(QWEN3_4B, gib=gib, train=train)[1].train.logits

    all_of_them = 8192 * 151_936 * 2
    assert logits(None, None) == logits(1000, None) == all_of_them
    assert logits(80, 0.5) == 0.5 * GIB
    _, plan = plan_of(QWEN3_4B)
    free = 80 * GIB - 0.75 * GIB - plan.train.state - plan.train.activations
    assert plan.train.logits == max(0, free / 10) < all_of_them


def test_an_embedded_engine_is_in_the_memory_of_its_trainer() -> None:
    _, plan = plan_of(QWEN3_4B)
    assert plan.train.others == plan.server.weights == 2 * read_shape(QWEN3_4B).parameters  # type: ignore[union-attr]
    assert plan.layout.devices == 1
    assert sum(plan.phases["train"]) == plan.fullest == plan.train.peak
    assert plan.phases["train"][1] == plan.server.weights  # type: ignore[union-attr]
    own = plan.train.weights + plan.train.masters + plan.train.gradients + plan.train.moments
    assert plan.phases["generate"] == (own, plan.server.total)  # type: ignore[union-attr]
    _, sft = plan_of(QWEN3_4B, run={"name": "t", "task": "sft"}, reward={})
    assert (sft.train.others, sft.server) == (0, None)
    assert "generate" not in sft.seconds


def test_logits_of_a_micro_batch_are_whole_without_the_fused_loss() -> None:
    _, plan = plan_of(QWEN3_4B, train={"dtype": "bfloat16", "fused_loss": False})
    assert (plan.train.logits, plan.train.work) == (0, 4 * 8192 * 151_936)


SERVED = {"engine": "sglang", "max_batch_tokens": 100_000, "max_new_tokens": 512}


def test_a_cache_is_divided_among_as_many_devices_as_there_are_key_heads() -> None:
    def cache(devices: int, hf: dict[str, Any] = QWEN3_4B, **sglang: Any) -> float:
        rollout = SERVED | {"sglang": {"tp_size": devices, **sglang}}
        _, plan = plan_of(hf, gib=None, rollout=rollout, placement={"rollout_workers": 1})
        assert plan.server is not None
        return plan.server.cache

    assert cache(1) == 8 * cache(8) == 8 * cache(16)
    assert cache(8, pp_size=2) == cache(8) / 2
    # data-parallel ranks that share the weights have a cache each
    assert cache(8, dp_size=4, enable_dp_attention=True) == cache(2)
    # all heads of latent attention read the same numbers
    latent = json.loads((TINY / "deepseek_v3.json").read_text())
    assert cache(1, latent) == cache(4, latent)
    hybrid = json.loads((TINY / "qwen3_5.json").read_text())
    assert cache(1, hybrid) == hybrid["num_key_value_heads"] * cache(16, hybrid)


def test_devices_are_shared_in_turns_where_asked_or_where_both_do_not_fit() -> None:
    def plan(gib: float, offload: str, bucket: int = 2**30) -> Plan:
        placement = {"rollout_workers": 1, "colocated": True, "offload": offload}
        sync = {"bucket_bytes": bucket}
        return plan_of(QWEN3_4B, gib=gib, rollout=SERVED, placement=placement, weight_sync=sync)[1]

    both, asked, small = plan(300, "auto"), plan(300, "always"), plan(100, "auto")
    assert (both.sleeps, asked.sleeps, small.sleeps) == (False, True, True)
    forced = plan(100, "never")
    assert not forced.sleeps
    assert sum(forced.phases["train"]) > 100 * 2**30
    assert both.host_asleep == 0
    assert asked.host_asleep == asked.train.asleep
    assert both.spare is not None
    assert both.spare - plan(300, "auto", 2**31).spare == 2 * 2**30  # type: ignore[operator]


def test_a_reference_is_kept_on_the_host() -> None:
    _, plan = plan_of(QWEN3_4B, algorithm={"kl_coef": 0.1}, **parallel(2))
    assert plan.host_asleep == 2 * plan.train.weights


def test_servers_apart_have_devices_of_their_own() -> None:
    rollout = {"engine": "sglang", "sglang": {"tp_size": 2}}
    placement = {"train_workers": 4, "rollout_workers": 2}
    _, plan = plan_of(QWEN3_4B, rollout=rollout, placement=placement)
    assert plan.layout.devices == 8
    assert plan.server is not None
    assert plan.server.weights == read_shape(QWEN3_4B).parameters
    # a cache without a limit takes what is left of 0.85 of the device
    assert plan.server.weights + plan.server.cache == pytest.approx(0.85 * 80 * GIB)
    assert all(engine == 0 for _, engine in plan.phases.values())


def test_a_server_may_quantize_its_layers_and_its_cache() -> None:
    def server(**sglang: Any) -> ServerMemory:
        rollout = SERVED | {"sglang": sglang}
        _, plan = plan_of(QWEN3_4B, rollout=rollout, placement={"rollout_workers": 1})
        assert plan.server is not None
        return plan.server

    plain, small = server(), server(quantization="fp8")
    assert plain.weights - small.weights == read_shape(QWEN3_4B).layer_parameters
    assert small.cache == plain.cache == 2 * server(**{"kv-cache-dtype": "fp8_e4m3"}).cache


def test_every_group_of_servers_is_planned() -> None:
    groups = [
        {"kind": "prefill", "servers": 1, "sglang": {"mem_fraction_static": 0.5}},
        {"kind": "decode", "servers": 2, "sglang": {"tp_size": 4}},
        {"model": "judge", "path": "judge", "servers": 1, "sglang": {"tp_size": 2}},
    ]
    rollout = {"engine": "sglang", "max_new_tokens": 512, "groups": groups}
    placement = {"train_workers": 1, "rollout_workers": 4}
    config, plan = plan_of(QWEN3_4B, gib=90, rollout=rollout, placement=placement)
    assert (plan.layout.devices, plan.layout.other_servers) == (1 + 1 + 2 * 4 + 2, 1)
    prefill, decode = plan.servers
    assert (prefill.weights, plan.server) == (4 * decode.weights, decode)
    assert prefill.weights + prefill.cache == pytest.approx(0.5 * 90 * GIB)
    assert any("memory of 1 servers of encoders or of other" in text for text in plan_warnings(config, plan))
    lines = [line.split("  ")[1] for line in table_lines(config, plan) if line.startswith("  servers")]
    assert lines == ["servers for prefill", "servers for decode"]
    shape = replace(read_shape(QWEN3_4B), vocabulary=24_000_000)
    lora = {"dtype": "bfloat16", "parallel": {"tensor": 8}, "lora": {"rank": 16}}
    placement = {"train_workers": 8, "rollout_workers": 4}
    both = {"rollout": rollout, "placement": placement, "train": lora}
    with pytest.raises(DoesNotFitError, match=r"take 12\d\.\d GiB on each device of a server"):
        check_fit(*plan_of(shape, gib=90, **both))


def test_generation_beside_training_is_no_part_of_the_step() -> None:
    rollout = {"engine": "sglang", "schedule": "one_step_off"}
    placement = {"train_workers": 1, "rollout_workers": 1}
    _, plan = plan_of(QWEN3_4B, rollout=rollout, placement=placement)
    trained = sum(seconds for part, seconds in plan.seconds.items() if part != "generate")
    assert plan.total_seconds == max(trained, plan.seconds["generate"])


def test_log_prob_passes_are_of_the_later_optimizer_steps_and_of_a_reference() -> None:
    def passes(steps: int, **algorithm: Any) -> float:
        train = {"dtype": "bfloat16", "optimizer_steps": steps}
        _, plan = plan_of(QWEN3_4B, train=train, algorithm=algorithm)
        return plan.seconds.get("log_probs", 0) / plan.seconds["train"]

    assert passes(1) == 0
    assert passes(2, kl_coef=0.1) == pytest.approx(3 * passes(2), rel=0.01)
    assert passes(2, old_log_probs="rollout") == 0


def test_a_pass_over_all_samples_where_something_reads_it_before() -> None:
    train = {"dtype": "bfloat16", "optimizer_steps": 2}
    half, whole = (
        plan_of(QWEN3_4B, train=train, facts={"reads_old_log_probs": reads})[1].seconds["log_probs"]
        for reads in (False, True)
    )
    assert whole == pytest.approx(2 * half)


def test_a_pipeline_is_idle_at_its_ends() -> None:
    def seconds(micro_batch: int) -> float:
        sizes = {"dtype": "bfloat16", "micro_batch_tokens": micro_batch, "parallel": {"pipeline": 2}}
        return plan_of(QWEN3_4B, train=sizes, placement={"train_workers": 2})[1].seconds["train"]

    assert seconds(262_144) / seconds(8192) == pytest.approx(2 / (33 / 32), rel=0.02)


def test_gradients_and_weights_are_exchanged_once_in_each_optimizer_step() -> None:
    def plan(workers: int, micro_batch: int) -> Plan:
        train = {"dtype": "bfloat16", "micro_batch_tokens": micro_batch}
        rollout = {"max_new_tokens": 512, "prompts_per_step": 32 * workers}
        return plan_of(QWEN3_4B, train=train, rollout=rollout, placement={"train_workers": workers})[1]

    moved = 6 * plan(1, 16_384).layout.rank.total / 2  # float32 gradients, bfloat16 weights
    saved = 32 * plan(1, 16_384).layout.rank.total / 2  # of the optimizer
    rates = RATES["H200"]
    for micro_batch in (1024, 16_384):
        more = plan(2, micro_batch).seconds["train"] - plan(1, micro_batch).seconds["train"]
        assert more == pytest.approx(moved / rates.link - saved / rates.copy, rel=1e-3)


def test_ranks_exchange_what_other_ranks_own_of_each_kind_of_weight() -> None:
    config, plan = plan_of(QWEN3_30B_A3B, **parallel(8, expert=2))
    rank = plan.layout.rank
    assert update_bytes(config, plan.layout) == 6 * (rank.dense * 7 / 8 + rank.experts * 3 / 4)


def test_passes_exchange_hidden_states_as_often_as_they_run() -> None:
    def per_token(
        hf: dict[str, Any] = QWEN3_4B, *, trains: bool = True, recompute: str = "none", **sizes: int
    ) -> float:
        sections = parallel(math.prod(sizes.values()), **sizes)
        config, plan = plan_of(hf, **sections | {"train": sections["train"] | {"recompute": recompute}})
        return token_bytes(config, plan.shape, plan.layout, trains=trains)

    half, keys = 2 * 2560 / 2, 36 * 2 * 1024 / 2
    assert per_token() == 0
    assert per_token(tensor=2, trains=False) == (4 * 36 + 2) * half
    assert per_token(tensor=2) == (6 * 36 + 5) * half
    assert per_token(tensor=2, recompute="full") == (10 * 36 + 5) * half
    assert per_token(context=2, trains=False) == 2 * keys
    assert per_token(context=2) == (2 + 4) * keys  # gradients in float32
    assert per_token(context=2, recompute="selective") == (2 + 2 + 4) * keys
    assert per_token(context=2, tensor=2) == (6 * 36 + 5) * half / 2 + (2 + 4) * keys / 2
    assert per_token(context=2, pipeline=2) == (2 + 4) * keys / 2
    # no dense MLP gathers hidden states; tokens go to experts and back, twice
    split, routed = 2 * 2048 / 2, 2 * 48 * 4 * 8 * 2048
    both = per_token(QWEN3_30B_A3B, tensor=2, expert=4)
    assert both == (3 * 48 + 5) * split + routed * 3 / 4 / 2


def test_fsdp_gathers_weights_in_each_micro_batch_beside_its_work() -> None:
    def seconds(workers: int, link: float, *, reshards: bool = True) -> Mapping[str, float]:
        rollout = {"max_new_tokens": 512, "prompts_per_step": 4 * workers}
        train = FSDP | {"optimizer_steps": 2, "parallel": {"reshard_after_forward": reshards}}
        placement = {"train_workers": workers}
        facts = {"rates": replace(rates, link=link)}
        return plan_of(QWEN3_4B, facts=facts, train=train, rollout=rollout, placement=placement)[1].seconds

    rates, total = RATES["H200"], plan_of(QWEN3_4B, train=FSDP)[1].layout.rank.total
    optimizer = 32 * total / 2 / rates.copy
    one, two = (seconds(workers, rates.link)["train"] for workers in (1, 2))
    assert one - two == pytest.approx(2 * optimizer)  # hidden
    # half of the bytes, of two mini-batches: bfloat16 weights twice, float32 gradients; weights once
    for reshards, weights in ((True, 2 * 2), (False, 2)):
        slow = seconds(2, 1e9, reshards=reshards)
        update = optimizer + rates.step_s
        assert slow["train"] == pytest.approx(2 * ((weights + 4) * total / 2 / 1e9 + update))
        # of the second mini-batch
        assert slow["log_probs"] == pytest.approx(2 * total / 2 / 1e9)


def test_the_fsdp_engine_takes_longer() -> None:
    one, other = (
        plan_of(QWEN3_4B, train=train)[1].seconds["train"] for train in (FSDP, {"dtype": "bfloat16"})
    )
    assert one / other == pytest.approx(RATES["H200"].fsdp, rel=0.01)


def test_samples_come_in_waves_where_the_cache_is_small() -> None:
    def seconds(cache: int) -> float:
        rollout = {"max_new_tokens": 512, "max_batch_tokens": cache}
        return plan_of(QWEN3_4B, rollout=rollout)[1].seconds["generate"]

    assert seconds(2 * 1024) > 20 * seconds(256 * 1024)


def test_a_decode_step_of_one_sample_reads_the_experts_that_it_visits() -> None:
    rollout = SERVED | {"prompts_per_step": 1, "samples_per_prompt": 1}
    _, plan = plan_of(QWEN3_30B_A3B, rollout=rollout, placement={"rollout_workers": 1})
    all_weights = 2 * read_shape(QWEN3_30B_A3B).parameters / RATES["H200"].copy
    assert plan.seconds["generate"] < 512 * all_weights / 2


# -------------------------------------------------------------------------
# What fits
# -------------------------------------------------------------------------


def test_a_run_that_only_generates_has_no_trainer() -> None:
    only: dict[str, Any] = {"debug": {"mode": "rollout_only"}, "gib": 60}
    config, plan = plan_of(QWEN3_4B, facts={"critic": read_shape(QWEN3_4B)}, **only)
    assert plan.server is not None
    assert plan.phases == {"generate": (0, plan.server.total)}
    assert (plan.checkpoint, plan.export, plan.host_asleep) == (0, 0, 0)
    assert plan.seconds.keys() == {"generate"}
    check_fit(config, plan)
    text = "\n".join(table_lines(config, plan))
    assert "embedded engines" in text
    assert not any(word in text for word in ("training ranks", "Adam's moments", "checkpoint"))
    placement = {"rollout_workers": 1, "colocated": True, "offload": "always"}
    _, plan = plan_of(QWEN3_4B, rollout=SERVED, placement=placement, **only)
    assert (plan.sleeps, plan.phases) == (False, {"generate": (0, plan.server.total)})  # type: ignore[union-attr]


def test_a_run_that_only_trains_has_no_engine() -> None:
    debug = {"mode": "train_only", "replay_batches": "dump"}
    _, plan = plan_of(QWEN3_4B, debug=debug)
    assert (plan.server, plan.layout.server, plan.train.others) == (None, None, 0)
    assert plan.phases == {"train": (plan.train.peak, 0)}
    assert not {"generate", "sync"} & plan.seconds.keys()


def test_what_cannot_fit_is_an_error() -> None:
    config, plan = plan_of(QWEN3_4B, gib=60)
    with pytest.raises(DoesNotFitError, match=r"take 67\.4 GiB on each training device, which has 60\.0 GiB"):
        check_fit(config, plan)
    config, plan = plan_of(QWEN3_4B, gib=80)
    check_fit(config, plan)
    check_fit(*plan_of(QWEN3_4B, gib=None))
    apart = {"rollout": {"engine": "sglang"}, "placement": {"train_workers": 64, "rollout_workers": 1}}
    sharded = {"dtype": "bfloat16", "parallel": {"expert": 64}}
    with pytest.raises(DoesNotFitError, match="each device of a server"):
        check_fit(*plan_of(QWEN3_30B_A3B, gib=40, train=sharded, **apart))


def test_what_probably_fails_is_a_warning() -> None:
    config, plan = plan_of(QWEN3_4B, gib=80)
    (warning,) = plan_warnings(config, plan)
    assert warning.startswith("train needs ")
    assert "Lower train.micro_batch_tokens, 1024 at least" in warning
    assert not list(plan_warnings(*plan_of(QWEN3_4B, gib=160)))
    assert not list(plan_warnings(*plan_of(QWEN3_4B, gib=None)))


def test_trainers_and_servers_that_never_sleep_and_do_not_fit_are_a_warning() -> None:
    def warnings(offload: str = "never", gib: float = 160, **rollout: Any) -> list[str]:
        placement = {"rollout_workers": 1, "colocated": True, "offload": offload}
        served = {"engine": "sglang", "max_new_tokens": 512, **rollout}
        return [*plan_warnings(*plan_of(QWEN3_4B, gib=gib, rollout=served, placement=placement))]

    (unbounded,) = warnings()
    assert "never sleep (placement.offload), and lack " in unbounded
    assert "Nothing bounds the KV cache of the servers: set rollout.max_batch_tokens" in unbounded
    for limit in ({"max_batch_tokens": 800_000}, {"sglang": {"mem_fraction_static": 0.6}}):
        (too_many,) = warnings(**limit)
        assert "Lower the limit of the KV cache" in too_many
    assert warnings(max_batch_tokens=32_768) == []
    assert warnings("auto") == []
    (alone,) = warnings(gib=80)
    assert "train needs " in alone
    assert "Lower train.micro_batch_tokens" in alone


def test_trainers_and_servers_that_never_sleep_and_cannot_fit_are_an_error() -> None:
    def plan(offload: str) -> tuple[Config, Plan]:
        placement = {"rollout_workers": 1, "colocated": True, "offload": offload}
        return plan_of(QWEN3_4B, gib=64, rollout=SERVED, placement=placement)

    told = r"59\.9 GiB and the weights of a server 7\.5 GiB .* has 64\.0 GiB\. .*\"never\" both stay awake"
    with pytest.raises(DoesNotFitError, match=told):
        check_fit(*plan("never"))
    check_fit(*plan("auto"))


def test_idle_pipeline_stages_are_a_warning() -> None:
    train = {"dtype": "bfloat16", "micro_batch_tokens": 262_144, "parallel": {"pipeline": 4}}
    config, plan = plan_of(QWEN3_4B, gib=None, train=train, placement={"train_workers": 4})
    (warning,) = plan_warnings(config, plan)
    assert warning.startswith("1 micro-batches for 4 pipeline stages leave each stage idle for 75%")


def test_a_host_that_cannot_hold_what_sleeps_is_a_warning() -> None:
    placement = {"rollout_workers": 1, "colocated": True, "offload": "always"}
    host = {"host_bytes": 20 * GIB}
    config, plan = plan_of(QWEN3_4B, gib=160, rollout=SERVED, placement=placement, facts=host)
    (warning,) = plan_warnings(config, plan)
    assert warning == "trainers asleep take 45 GiB of host memory, and there are 20 GiB"


def test_a_cache_that_holds_no_sample_is_a_warning() -> None:
    rollout = SERVED | {"max_batch_tokens": 1023}
    config, plan = plan_of(QWEN3_4B, gib=160, rollout=rollout, placement={"rollout_workers": 1})
    (warning,) = plan_warnings(config, plan)
    assert warning.startswith(
        "the KV cache of a rollout engine holds 1023 tokens, and a sample can have 1024;"
    )


@pytest.mark.parametrize(
    ("context", "given", "tokens"),
    [(40_960, None, 512), (256, None, 192), (64, None, 1), (None, None, 512), (256, 16, 16)],
)
def test_a_prompt_without_a_limit_takes_what_the_response_leaves(
    context: int | None, given: int | None, tokens: int
) -> None:
    data = {"train": [], "max_prompt_tokens": given}
    hf = QWEN3_4B | {"max_position_embeddings": context}
    _, plan = plan_of(hf, data=data, rollout={"max_new_tokens": 64})
    assert plan.batches.prompt_tokens == tokens


def test_a_small_model_has_parameters() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128, "vocab_size": 512}
    config, plan = plan_of(
        QWEN3_4B | sizes | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    )
    head, *others = table_lines(config, plan)
    assert plan.shape.parameters == pytest.approx(0.2e6, abs=0.05e6)
    assert head.startswith("m: 0.2 M parameters on ")
    assert any(line.endswith(" 0.2 M") for line in others)
