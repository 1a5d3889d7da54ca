"""Families of models for transformers' classes, also of models that no plugin knows. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from anygauge_hooks.errors import ConfigError
from anygauge_hooks.models import ModelSpec, text_config, transformers_model

__all__ = ["causal_lm_family", "check_model"]

NAME = "transformers"
"""Name of the family of all such models."""
_ENDINGS = ("ForCausalLM", "LMHeadModel")
"""How transformers ends the names of its causal language models."""
_TOWERS = ("vision_config", "audio_config", "thinker_config")
"""Keys of a config that say that a model takes more than text."""


def causal_lm_family(hf: Mapping[str, Any]) -> ModelSpec:
    """Return a family of one architecture.

    :param hf: The Hugging Face config.
    :raises ConfigError: It is of no causal language model, or of one that transformers does not have.
    """
    _check_text(hf)
    return ModelSpec(
        name=NAME,
        architectures=tuple(hf["architectures"]),
        model_options=_model_options,
        flops_per_token=_flops_per_token,
        tiny=_no_tiny_config,
        read_config=_read_config,
    )


def check_model(hf: Mapping[str, Any], spec: ModelSpec) -> None:
    """Check that transformers has a model, and that its family can feed what it takes beside text.

    :raises ConfigError: One of them is not so.
    """
    if transformers_model(spec) is not None:
        return
    if spec.media is None or not spec.media.towers(hf):
        _check_text(hf)
    else:
        _check_known(hf)


def _check_text(hf: Mapping[str, Any]) -> None:
    """Check that a config is of a causal language model that reads text alone and transformers has.

    :raises ConfigError: It is not.
    """
    names = [str(name) for name in hf.get("architectures") or ()]
    if not any(name.endswith(_ENDINGS) for name in names):
        shown = ", ".join(names) or "(none given)"
        if any(key in hf for key in _TOWERS):
            raise ConfigError(
                f"its architecture {shown} takes images or sound, and no family prepares them for it, which "
                "train.engine = 'fsdp' needs.",
                hint="docs/models.md lists the families with media, and shows how to add one.",
            )
        raise ConfigError(
            f"its architecture {shown} is no causal language model of text, which "
            "train.engine = 'fsdp' needs.",
            hint="Take the text model, or a model and an engine with a family for it.",
        )
    _check_known(hf)


def _check_known(hf: Mapping[str, Any]) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if hf.get("model_type") not in CONFIG_MAPPING_NAMES and "auto_map" not in hf:
        raise ConfigError(
            f"transformers has no model_type {hf.get('model_type')!r}.",
            hint="Install a newer release of transformers, or correct config.json.",
        )


def _model_options(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    text = text_config(hf)
    return {
        "vocab_size": text["vocab_size"],
        "max_sequence_length": text.get("max_position_embeddings"),
        "tie_embeddings": bool(text.get("tie_word_embeddings", False)),
    }


def _read_config(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the defaults of transformers, whose import takes seconds."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if hf.get("model_type") not in CONFIG_MAPPING:
        return text_config(hf)  # code of its own, which is not run here
    config: Mapping[str, Any] = CONFIG_MAPPING[hf["model_type"]].from_dict({**hf}).to_dict()
    return text_config(config)


def _flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
    """Estimate the floating-point operations of a forward pass per token, causal attention counted once.

    Configs name their sizes in several ways; what is not named counts as a plain transformer has it.
    """
    text = text_config(hf)
    hidden = _first(text, "hidden_size", "n_embd", "d_model", default=0)
    layers = _first(text, "num_hidden_layers", "n_layer", "num_layers", default=0)
    heads = _first(text, "num_attention_heads", "n_head", "num_heads", default=1)
    size = _first(text, "head_dim", default=hidden // heads)
    groups = _first(text, "num_key_value_heads", default=heads)
    experts = _first(text, "num_experts_per_tok", "moe_topk", default=1)
    narrow = ("moe_intermediate_size",) if experts > 1 else ()
    width = _first(text, *narrow, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    matrices = hidden * size * (2 * heads + 2 * groups) + 3 * hidden * width * experts
    attention = 2 * layers * heads * size * sequence_length
    return float(2 * (layers * matrices + hidden * text["vocab_size"]) + attention)


def _first(text: Mapping[str, Any], *names: str, default: int) -> int:
    """Return the first of some sizes that a config names."""
    return next((value for name in names if isinstance(value := text.get(name), int)), default)


def _no_tiny_config() -> NoReturn:
    raise ConfigError(
        "A model that only transformers knows has no tiny config.", hint="Write one for its architecture."
    )
