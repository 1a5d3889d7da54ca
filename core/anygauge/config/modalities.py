"""Modalities of the media that a run's model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anygauge.config.schema import Config
from anygauge_hooks.media import MediaKind

__all__ = ["PARTS", "TOWERS", "media_fields", "modalities", "weight_expressions"]

TOWERS: Mapping[str, frozenset[MediaKind]] = {
    "vision": frozenset({"image", "video"}),
    "audio": frozenset({"audio"}),
}
"""Media kinds of each tower, by the tower's name in ``train.freeze``."""

PARTS = (*TOWERS, "language")
"""Parts of a model that ``train.freeze`` names."""


def weight_expressions(config: Config) -> Sequence[str]:
    """Return the entries of ``train.freeze`` that are regular expressions, and no parts of a model."""
    return [each for each in config.train.freeze if each not in PARTS]


def modalities(config: Config) -> frozenset[MediaKind]:
    """Return the kinds of media that a run's model takes: the configured ones, or those of its data."""
    if config.model.modalities is not None:
        return frozenset(config.model.modalities)
    return frozenset(kind for keys in media_fields(config).values() for kind in keys)


def media_fields(config: Config) -> dict[str, Mapping[MediaKind, str]]:
    """Return the row fields that hold media, by the config key that names them."""
    fields: dict[str, Mapping[MediaKind, str]] = {"data.multimodal_keys": config.data.multimodal_keys}
    for name, dataset in config.eval.datasets.items():
        if dataset.multimodal_keys is not None:
            fields[f"eval.datasets.{name}.multimodal_keys"] = dataset.multimodal_keys
    return fields
