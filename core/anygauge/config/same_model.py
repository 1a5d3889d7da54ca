"""Compare two ``config.json`` of one family: whether they describe the same function of the weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from anygauge.config.rules.architecture import architecture_hints

if TYPE_CHECKING:
    from torch import nn

    from anygauge_hooks.engines import TrainEngineSpec
    from anygauge_hooks.media import MediaKind
    from anygauge_hooks.models import ModelSpec

__all__ = ["differing_keys"]

_TOWER_TRAINING = ("architectures", "dtype", "initializer_range", "transformers_version")
"""Fields of a tower's config that say nothing of what it computes."""
_MODEL_TRAINING = (
    *_TOWER_TRAINING,
    "max_position_embeddings",
    "torch_dtype",
    "use_cache",
    "quantization_config",
)
"""The same of a whole model's config, for engines that do not describe their models."""


def differing_keys(
    spec: ModelSpec,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
    engine: TrainEngineSpec,
    kinds: Collection[MediaKind] = (),
) -> list[str]:
    """Return the keys in which two ``config.json`` describe different models.

    :param one: Config of a model that the family has; so is ``other``.
    :param engine: The train engine that builds both.
    :param kinds: Kinds of media that are shown; towers that take nothing of them have no part in it.
    """

    def description(hf: Mapping[str, Any]) -> object:
        return architecture_hints(spec, hf, engine) or _description(spec, hf, engine, kinds)

    different = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
    if not different or (known := description(one)) == description(other):
        return []
    changed = {key: {**one, key: other.get(key)} for key in different}
    return [key for key, hf in changed.items() if description(hf) != known] or different


def _description(
    spec: ModelSpec, hf: Mapping[str, Any], engine: TrainEngineSpec, kinds: Collection[MediaKind]
) -> object:
    """Return what a model computes with given weights; the longest sequence has no part in it."""
    options = {name: each for name, each in spec.model_options(hf).items() if name != "max_sequence_length"}
    if engine.describe_model is not None:
        return engine.describe_model(spec, hf), options, _media_inputs(spec, hf, kinds)
    return {name: value for name, value in hf.items() if name not in _MODEL_TRAINING}, options


def _media_inputs(spec: ModelSpec, hf: Mapping[str, Any], kinds: Collection[MediaKind]) -> object:
    """Return what a model's towers compute, and in the place of which tokens; or why it cannot be said."""
    import torch

    if spec.media is None:
        return ()
    try:
        towers = [tower for tower in spec.media.towers(hf) if tower.kinds & set(kinds)]
        with torch.device("meta"):
            return tuple(spec.media.forbidden(hf)), [_tower(each.build(hf)) for each in towers]
    except Exception as error:  # noqa: BLE001 - foreign code: a family's tower, built by transformers
        return repr(error)


def _tower(module: nn.Module) -> object:
    """Return the modules of a tower, and all that transformers knows of it, defaults filled in."""
    configs = {
        id(tower_config): tower_config
        for submodule in module.modules()
        if (tower_config := getattr(submodule, "config", None))
    }
    tower_configs = [
        {name: value for name, value in config.to_dict().items() if name not in _TOWER_TRAINING}
        for config in configs.values()
        if hasattr(config, "to_dict")
    ]
    return str(module), tower_configs
