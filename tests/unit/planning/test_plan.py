"""Arithmetic of a plan: sizes of models, layouts, batches, and what follows from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import anygauge_models
from anygauge.config import Config
from anygauge.planning.fit import check_fit, plan_warnings
from anygauge.planning.memory import GIB
from anygauge.planning.model_sizes import model_shape
from anygauge.planning.plan import Assumptions, Plan, make_plan
from anygauge.planning.rates import RATES
from anygauge.planning.shape import ModelShape, read_shape
from anygauge_hooks.errors import ConfigError, DoesNotFitError

TINY = Path(anygauge_models.__file__).parent / "tiny"
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151_936,
    "tie_word_embeddings": False,
}
"""Published sizes of https://huggingface.co/Qwen/Qwen3-30B-A3B, a model of 30.5 B parameters."""
DENSE = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
"""Published sizes of Qwen3-4B."""


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
    hf: dict[str, Any] | ModelShape, *, gib: float | None = 80, **sections: Any
) -> tuple[Config, Plan]:
    config = config_of(**sections)
    shape = hf if isinstance(hf, ModelShape) else read_shape(hf)
    memory = None if gib is None else gib * GIB
    return config, make_plan(
        config, shape, Assumptions(backend="cuda", master_bytes=2, device_bytes=memory, rates=RATES["H200"])
    )


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
        *("deepseek_v3", "glm4", "glm4_moe", "llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_5"),
        *("qwen3_5_moe", "qwen3_moe", "seed_oss", "smollm3"),
    ],
)
def test_parameters_are_those_of_transformers_model(family: str) -> None:
    hf = json.loads((TINY / f"{family}.json").read_text())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**hf))
    count = sum(parameter.numel() for parameter in model.parameters())
    # norms of heads and biases are left out, which are a larger part of a tiny model
    assert read_shape(hf).parameters == pytest.approx(count, rel=0.011)


def test_published_parameters() -> None:
    shape = read_shape(QWEN3_30B_A3B)
    assert shape.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert shape.active_parameters + 2 * shape.embedding == pytest.approx(3.35e9, rel=0.01)
    assert read_shape(DENSE).parameters == pytest.approx(4.02e9, rel=1e-3)


def test_a_cache_has_the_keys_and_values_of_layers_with_attention() -> None:
    assert read_shape(DENSE).cache_numbers == 36 * 2 * 8 * 128
    hybrid = json.loads((TINY / "qwen3_5.json").read_text())
    attends = hybrid["layer_types"].count("full_attention")
    assert (
        read_shape(hybrid).cache_numbers == attends * 2 * hybrid["num_key_value_heads"] * hybrid["head_dim"]
    )
    latent = json.loads((TINY / "deepseek_v3.json").read_text())
    assert read_shape(latent).cache_numbers == 3 * (latent["kv_lora_rank"] + latent["qk_rope_head_dim"])


def test_a_size_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="hidden_size = None"):
        read_shape({name: value for name, value in DENSE.items() if name != "hidden_size"})


def test_what_the_sizes_do_not_explain_is_another_part(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert model_shape(tmp_path).others == 0
    shapes = {"tower": [500_000_000], "model": [4, 1_005_000_000]}
    header = json.dumps({name: {"shape": shape} for name, shape in shapes.items()}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    shape = model_shape(tmp_path)
    assert shape.parameters == 4_520_000_000
    assert shape.others == pytest.approx(0.498e9, rel=0.01)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        model_shape(tmp_path / "none")


# -------------------------------------------------------------------------
# Layouts
# -------------------------------------------------------------------------


def test_data_parallel_ranks_divide_the_optimizer_alone() -> None:
    one, eight = (plan_of(DENSE, **parallel(count))[1].train for count in (1, 8))
    assert (eight.weights, eight.gradients) == (one.weights, one.gradients)
    assert (eight.masters, eight.moments) == (one.masters / 8, one.moments / 8)


def test_tensor_parallel_ranks_divide_everything() -> None:
    one, two = (plan_of(DENSE, **parallel(count, tensor=count))[1].train for count in (1, 2))
    for name in ("weights", "masters", "gradients", "moments"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2, rel=1e-3), name
    assert two.activations == pytest.approx(one.activations / 2, rel=0.01)


def test_without_sequence_parallelism_hidden_states_are_whole() -> None:
    sizes = {"dtype": "bfloat16", "parallel": {"tensor": 2, "sequence": False}}
    _, whole = plan_of(DENSE, train=sizes, placement={"train_workers": 2})
    _, split = plan_of(DENSE, **parallel(2, tensor=2))
    more = whole.train.activations - split.train.activations
    hidden = 2560 * 16_384 * 2 / 2
    assert more == pytest.approx((4 * 36 + 3) * hidden)


def test_pipeline_stages_wait_for_as_many_micro_batches() -> None:
    rollout = {"max_new_tokens": 512, "prompts_per_step": 64}
    one = plan_of(DENSE, rollout=rollout, **parallel(1))[1]
    four = plan_of(DENSE, rollout=rollout, **parallel(4, pipeline=4))[1]
    assert four.batches.micro_batches == 32
    assert four.train.activations == pytest.approx(one.train.activations, rel=0.03)
    # the fullest stage has a quarter of the layers, and the embedding
    assert four.layout.rank.total == pytest.approx((4.02e9 - 389e6) / 4 + 389e6, rel=1e-3)


def test_context_parallel_ranks_divide_tokens() -> None:
    one, two = (plan_of(DENSE, **parallel(count, context=count))[1].train for count in (1, 2))
    assert two.activations == one.activations / 2
    assert (two.gradients, two.moments) == (one.gradients, one.moments / 2)


def test_expert_parallel_ranks_divide_experts() -> None:
    one = plan_of(QWEN3_30B_A3B, **parallel(8))[1]
    eight = plan_of(QWEN3_30B_A3B, **parallel(8, expert=8))[1]
    assert eight.layout.rank.experts == one.layout.rank.experts / 8
    assert eight.layout.rank.dense == one.layout.rank.dense
    # as many ranks hold all experts together, so each moment is there once in both
    assert eight.train.moments == pytest.approx(one.train.moments)


def test_fsdp_shards_weights_too_and_gathers_some() -> None:
    sections = {"placement": {"train_workers": 4}, "train": {"dtype": "bfloat16", "engine": "fsdp"}}
    one = plan_of(DENSE, train=sections["train"])[1].train
    four = plan_of(DENSE, **sections)[1].train
    assert four.masters == one.masters / 4
    assert four.weights == 0
    assert one.weights == 2 * read_shape(DENSE).parameters - 2 * 2560  # a norm is counted in no rank


def test_adapters_have_an_optimizer_and_the_rest_has_none() -> None:
    lora = {"dtype": "bfloat16", "lora": {"rank": 16}}
    _, plan = plan_of(DENSE, train=lora)
    adapters = 16 * 36 * (2 * (2560 + 4096) + 2 * (2560 + 1024) + 3 * (2560 + 9728))
    assert plan.layout.rank.adapters == adapters
    assert plan.train.moments == 8 * adapters
    assert plan.checkpoint == 14 * adapters
    few = {"dtype": "bfloat16", "lora": {"rank": 16, "targets": ["q_proj", "v_proj"]}}
    _, plan = plan_of(DENSE, train=few)
    assert plan.layout.rank.adapters == 16 * 36 * (2560 + 4096 + 2560 + 1024)


# -------------------------------------------------------------------------
# Batches and phases
# -------------------------------------------------------------------------


def test_batches() -> None:
    rollout = {"prompts_per_step": 6, "samples_per_prompt": 8, "max_new_tokens": 512}
    train = {"dtype": "bfloat16", "optimizer_steps": 2, "micro_batch_tokens": 4096}
    _, plan = plan_of(DENSE, rollout=rollout, train=train, placement={"train_workers": 4})
    own = plan.batches
    assert (own.samples, own.rank_samples, own.mini_batch_samples) == (48, 12, 6)
    assert (own.sample_tokens, own.tokens, own.micro_batches) == (1024, 49_152, 2)
    assert (own.micro_batch_tokens, own.loss_tokens) == (4096, 2048)


def test_a_long_sample_has_a_micro_batch_of_its_own() -> None:
    _, plan = plan_of(DENSE, train={"dtype": "bfloat16", "micro_batch_tokens": 100})
    assert plan.batches.micro_batch_tokens == 1024
    assert plan.batches.micro_batches == plan.batches.mini_batch_samples


def test_the_loss_keeps_what_its_budget_holds() -> None:
    def logits(gib: float | None, budget: float | None) -> float:
        train = {"dtype": "bfloat16", "loss_memory_gib": budget}
        return plan_of(DENSE, gib=gib, train=train)[1].train.logits

    all_of_them = 8192 * 151_936 * 2
    assert logits(None, None) == logits(1000, None) == all_of_them
    assert logits(80, 0.5) == 0.5 * GIB
    _, plan = plan_of(DENSE)
    free = 80 * GIB - 0.75 * GIB - plan.train.state - plan.train.activations
    assert plan.train.logits == max(0, free / 10) < all_of_them


def test_an_embedded_engine_is_in_the_memory_of_its_trainer() -> None:
    _, plan = plan_of(DENSE)
    assert plan.train.others == plan.server.weights == 2 * read_shape(DENSE).parameters  # type: ignore[union-attr]
    assert plan.layout.devices == 1
    _, sft = plan_of(DENSE, run={"name": "t", "task": "sft"}, reward={})
    assert (sft.train.others, sft.server) == (0, None)
    assert "generate" not in sft.seconds


def test_servers_apart_have_devices_of_their_own() -> None:
    rollout = {"engine": "sglang", "sglang": {"tp_size": 2}}
    placement = {"train_workers": 4, "rollout_workers": 2}
    _, plan = plan_of(DENSE, rollout=rollout, placement=placement)
    assert plan.layout.devices == 8
    assert plan.server is not None
    assert plan.server.weights == read_shape(DENSE).parameters
    # a cache without a limit takes what is left of 0.85 of the device
    assert plan.server.weights + plan.server.cache == pytest.approx(0.85 * 80 * GIB)
    assert all(engine == 0 for _, engine in plan.phases.values())


def test_generation_beside_training_is_no_part_of_the_step() -> None:
    rollout = {"engine": "sglang", "schedule": "one_step_off"}
    placement = {"train_workers": 1, "rollout_workers": 1}
    _, plan = plan_of(DENSE, rollout=rollout, placement=placement)
    trained = sum(seconds for part, seconds in plan.seconds.items() if part != "generate")
    assert plan.total_seconds == max(trained, plan.seconds["generate"])


def test_log_prob_passes_are_of_the_later_optimizer_steps_and_of_a_reference() -> None:
    def passes(steps: int, **algorithm: Any) -> float:
        train = {"dtype": "bfloat16", "optimizer_steps": steps}
        _, plan = plan_of(DENSE, train=train, algorithm=algorithm)
        return plan.seconds.get("log_probs", 0) / plan.seconds["train"]

    assert passes(1) == 0
    assert passes(2, kl_coef=0.1) == pytest.approx(3 * passes(2), rel=0.01)
    assert passes(2, old_log_probs="rollout") == 0


# -------------------------------------------------------------------------
# What fits
# -------------------------------------------------------------------------


def test_what_cannot_fit_is_an_error() -> None:
    config, plan = plan_of(DENSE, gib=60)
    with pytest.raises(DoesNotFitError, match=r"take 67\.4 GiB on each training device, which has 60\.0 GiB"):
        check_fit(config, plan)
    config, plan = plan_of(DENSE, gib=80)
    check_fit(config, plan)
    check_fit(*plan_of(DENSE, gib=None))
    apart = {"rollout": {"engine": "sglang"}, "placement": {"train_workers": 64, "rollout_workers": 1}}
    sharded = {"dtype": "bfloat16", "parallel": {"expert": 64}}
    with pytest.raises(DoesNotFitError, match="each device of a server"):
        check_fit(*plan_of(QWEN3_30B_A3B, gib=40, train=sharded, **apart))


def test_what_probably_fails_is_a_warning() -> None:
    config, plan = plan_of(DENSE, gib=80)
    (warning,) = plan_warnings(config, plan)
    assert warning.startswith("train needs ")
    assert "Lower train.micro_batch_tokens, 1024 at least" in warning
    assert not list(plan_warnings(*plan_of(DENSE, gib=160)))
    assert not list(plan_warnings(*plan_of(DENSE, gib=None)))


def test_idle_pipeline_stages_are_a_warning() -> None:
    train = {"dtype": "bfloat16", "micro_batch_tokens": 262_144, "parallel": {"pipeline": 4}}
    config, plan = plan_of(DENSE, gib=None, train=train, placement={"train_workers": 4})
    (warning,) = plan_warnings(config, plan)
    assert warning.startswith("1 micro-batches for 4 pipeline stages leave each stage idle for 75%")
