"""Expected parameters of a server that fuses a checkpoint's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anygauge.weight_sync.checksum import checksum
from anygauge.weight_sync.parameters import ExpectedParameters

LAYER = "model.layers.0"


def sent(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "model.embed_tokens.weight": (70, 8),
        f"{LAYER}.self_attn.k_proj.weight": (4, 8),  # in the order of the alphabet, as some checkpoints are
        f"{LAYER}.self_attn.q_proj.weight": (8, 8),
        f"{LAYER}.self_attn.v_proj.weight": (4, 8),
        f"{LAYER}.mlp.gate_proj.weight": (6, 8),
        f"{LAYER}.mlp.up_proj.weight": (6, 8),
        "model.norm.weight": (8,),
    }
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def held(weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Return what a server tells that fuses as SGLang does."""
    attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
    qkv = torch.cat([weights[f"{attention}.{part}_proj.weight"] for part in "qkv"])
    gate_up = torch.cat([weights[f"{mlp}.gate_proj.weight"], weights[f"{mlp}.up_proj.weight"]])
    embedding = torch.cat([weights["model.embed_tokens.weight"], torch.zeros(58, 8)])
    parameters = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        f"{attention}.qkv_proj.weight": qkv,
        f"{mlp}.gate_up_proj.weight": gate_up,
        "model.norm.weight": weights["model.norm.weight"],
    }
    return {name: checksum(value.to(dtype)) for name, value in parameters.items()}


def noted(weights: dict[str, Tensor], *dtypes: str) -> ExpectedParameters:
    found = ExpectedParameters(dtypes)
    for name, tensor in weights.items():
        found.add(name, tensor)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_padded_tied_and_converted_parameters_are_what_was_sent(dtype: torch.dtype) -> None:
    expected = noted(sent(), "bfloat16")
    assert expected.differences([held(sent(), dtype)]) == []
    assert expected.unverified == ()


@pytest.mark.parametrize("name", list(sent()))
def test_one_wrong_bit_of_any_tensor_names_it(name: str) -> None:
    wrong = sent()
    wrong[name].view(-1).view(torch.int32)[3] ^= 1
    differences = noted(sent()).differences([held(wrong)])
    assert differences
    assert all(name in text for text in differences if "lm_head" not in text)


def test_what_was_not_sent_is_said_to_be_unverified() -> None:
    told = held(sent()) | {"model.layers.0.self_attn.rotary.table": "0" * 16}
    expected = noted(sent())
    assert expected.differences([told]) == []
    assert expected.unverified == ("model.layers.0.self_attn.rotary.table",)


def test_of_processes_that_divide_a_parameter_only_what_they_all_hold_is_compared() -> None:
    whole, norm = held(sent()), "model.norm.weight"
    ranks = [{norm: whole[norm], "model.embed_tokens.weight": half} for half in ("a" * 16, "b" * 16)]
    expected = noted(sent())
    assert expected.differences(ranks) == []
    assert expected.unverified == ("model.embed_tokens.weight",)
    wrong = [{**rank, norm: "c" * 16} for rank in ranks]
    assert expected.differences(wrong) == [norm]


def test_what_one_process_has_whole_the_others_do_not_have_in_parts() -> None:
    norm = "model.norm.weight"
    ranks = [{norm: held(sent())[norm]}, {norm: "c" * 16}]
    expected = noted(sent())
    assert expected.differences(ranks) == [norm]
    assert expected.unverified == ()


def test_a_model_that_sees_has_other_names_in_a_server() -> None:
    tower = "model.visual.blocks.0"
    weights = {
        name.replace("model.", "model.language_model.", 1): tensor for name, tensor in sent().items()
    } | {f"{tower}.attn.qkv.weight": torch.ones(12, 4), f"{tower}.mlp.linear_fc1.bias": torch.ones(5)}
    weights[hearing := "audio_tower.layers.0.self_attn.out_proj.bias"] = torch.ones(4)
    told = held(sent()) | {
        "visual.blocks.0.attn.qkv_proj.weight": checksum(weights[f"{tower}.attn.qkv.weight"]),
        "model.layers.0.self_attn.rotary_emb.axis_map": "0" * 16,
        "visual.embeddings.position_ids": "0" * 16,
        "audio_tower.positional_embedding.positional_embedding": "0" * 16,
        "audio_tower.layers.0.self_attn.proj.bias": checksum(weights[hearing]),
        "visual.blocks.0.mlp.linear_fc1.bias": checksum(weights[f"{tower}.mlp.linear_fc1.bias"]),
    }
    expected = noted(weights)
    assert expected.differences([told]) == []
    assert expected.unverified == ()
    wrong = told | {"visual.blocks.0.attn.qkv_proj.weight": "0" * 16}
    assert expected.differences([wrong]) == ["visual.blocks.0.attn.qkv_proj.weight"]
