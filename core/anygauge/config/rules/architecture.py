"""Check which train engines support a ``config.json``, before anything is built from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anygauge.config.families import family
from anygauge.hub.quantization import fp8_block, quantization
from anygauge_hooks.errors import AnygaugeError, UnknownNameError
from anygauge_hooks.models import text_config

if TYPE_CHECKING:
    from anygauge_hooks.engines import TrainEngineSpec
    from anygauge_hooks.models import ModelSpec
    from anygauge_hooks.types import LoadedPlugins

__all__ = ["architecture_hints", "engine_support", "support_text"]

_COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
)
"""Keys that are positive whole numbers in every family that has them; some write null for a default."""


def architecture_hints(
    spec: ModelSpec, hf: Mapping[str, Any], engine: TrainEngineSpec | None = None
) -> list[str]:
    """Return the problems of a ``config.json``.

    :param engine: The train engine that is to build the model; ``None`` checks what all engines read.
    """
    if problems := [*_quantization(hf), *_counts(text_config(hf))]:
        return problems
    try:
        if engine is not None and engine.describe_model is not None:
            engine.describe_model(spec, hf)
        spec.model_options(hf)
        spec.unused_weights(hf)
        spec.carried_weights(hf)
        spec.flops_per_token(hf, 1)
    except AnygaugeError as error:
        return [" ".join(part for part in (error.args[0], error.hint) if part)]
    except KeyError as error:
        return [f"its config.json lacks {error}"]
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        return [f"its config.json has a bad value: {error}"]
    return []


def engine_support(plugins: LoadedPlugins, hf: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the train engines that support a model, with its family in each, and why others do not.

    :param hf: The Hugging Face config.
    """
    families, reasons = {}, {}
    for name, engine in plugins.named("register_train_engines").items():
        try:
            spec = family(plugins, hf, name)
            hints = architecture_hints(spec, hf, engine)
        except UnknownNameError:
            hints = ["no model plugin registers its architecture."]
        except AnygaugeError as error:
            hints = [str(error.args[0])]
        if hints:
            reasons[name] = hints[0]
        else:
            families[name] = spec.name
    return families, reasons


def support_text(hf: Mapping[str, Any], families: Mapping[str, str]) -> str:
    """Return a sentence that names the train engines of :func:`engine_support`."""
    names = ", ".join(map(str, hf["architectures"]))
    engines = " and ".join(f"{name!r} (family {each})" for name, each in sorted(families.items()))
    return f"{names} is supported by train.engine = {engines}"


def _quantization(hf: Mapping[str, Any]) -> Iterator[str]:
    if quantization(hf) is None:
        return
    try:
        fp8_block(hf)
    except ValueError as error:
        yield (
            "its config.json has a quantization_config whose weights cannot be read, only FP8 weights can: "
            f"{error}; name the model that was quantized"
        )


def _counts(hf: Mapping[str, Any]) -> Iterator[str]:
    for key in _COUNTS:
        value = hf.get(key)
        if value is not None and (type(value) is not int or value < 1):
            yield f"its config.json has a bad {key}: {value!r} is not a positive integer"
