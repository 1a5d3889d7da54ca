"""SmolLM3, dense, with layers without rotary angles (https://huggingface.co/blog/smollm3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anygauge_models.architecture import Variant, sliding_windows, unsupported
from anygauge_models.dense import DenseDecoder

__all__ = ["SMOLLM3"]

_KEY = "no_rope_layers"
"""Despite its name, 1 marks the layers that have angles."""


def _rotary_layers(hf: Mapping[str, Any]) -> Sequence[bool]:
    count, interval = hf["num_hidden_layers"], hf["no_rope_layer_interval"]
    if (given := hf.get(_KEY)) is None:
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if len(given) < count:
        raise unsupported("smollm3", _KEY, given, f"a number for each of {count} layers")
    return [bool(each) for each in given[:count]]


def _refused(hf: Mapping[str, Any]) -> list[Variant]:
    _rotary_layers(hf)
    return [
        *sliding_windows(hf),
        *((key, bool(hf.get(key)), "false") for key in ("attention_bias", "mlp_bias")),
    ]


SMOLLM3 = DenseDecoder(family="smollm3", refused=_refused, rotary_layers=_rotary_layers).spec(
    "SmolLM3ForCausalLM",
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
    no_rope_layer_interval=4,
    rope_theta=2_000_000.0,
)
