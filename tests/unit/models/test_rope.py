"""Angles of positions in time, height and width are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from anygauge_hooks.errors import ConfigError
from anygauge_models.rope import half_rotary

rotary = half_rotary(lambda hf: hf["head_dim"])
INTERLEAVED = {"rope_theta": 5e6, "rope_type": "default", "mrope_interleaved": True}
MODELS: dict[str, tuple[Any, Any, int, dict[str, Any]]] = {
    "sectioned": (
        *(Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, 128),
        {"rope_theta": 1e6, "rope_type": "default", "mrope_section": [16, 24, 24]},
    ),
    "interleaved": (
        *(Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, 128),
        {**INTERLEAVED, "mrope_section": [24, 20, 20]},
    ),
    "interleaved-uneven": (
        *(Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, 64),
        {**INTERLEAVED, "mrope_section": [18, 10, 4]},
    ),
}


def positions_in_three(tokens: int) -> Tensor:
    return torch.randint(0, 5000, (3, tokens), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MODELS)
def test_positions_in_three_dimensions_have_the_angles_of_transformers(name: str) -> None:
    config, module, width, parameters = MODELS[name]
    hidden = {"hidden_size": 4 * width, "num_attention_heads": 4, "head_dim": width}
    model = module(config(**hidden, rope_parameters=dict(parameters)))
    positions = positions_in_three(50)
    expected = model(torch.zeros(1), positions.unsqueeze(1))
    found = rotary({"head_dim": width, "rope_parameters": parameters}, positions)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other[0])


@pytest.mark.parametrize("name", MODELS)
def test_text_has_the_same_angles_in_one_dimension_and_in_three(name: str) -> None:
    *_, width, parameters = MODELS[name]
    hf = {"head_dim": width, "rope_parameters": parameters}
    positions = torch.arange(3000)
    for one, other in zip(rotary(hf, positions), rotary(hf, positions.expand(3, -1)), strict=True):
        assert torch.equal(one, other)


def test_the_way_in_which_qwen2_vl_was_published_is_read() -> None:
    old = {
        "head_dim": 128,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    new = {"head_dim": 128, "rope_parameters": MODELS["sectioned"][3]}
    for one, other in zip(
        rotary(old, positions_in_three(9)), rotary(new, positions_in_three(9)), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("sections", [None, [16, 24], [16, 24, 23]])
def test_sections_that_do_not_cover_a_head_are_refused(sections: Any) -> None:
    hf = {"head_dim": 128, "rope_parameters": {**MODELS["sectioned"][3], "mrope_section": sections}}
    with pytest.raises(ConfigError, match=r"mrope_section .* and 64 pairs of dimensions that turn"):
        rotary(hf, positions_in_three(4))
