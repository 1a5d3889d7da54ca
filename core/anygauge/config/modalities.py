"""Which media a run's model sees and hears."""

from __future__ import annotations

from anygauge.config.schema import Config
from anygauge_hooks.media import MediaKind

__all__ = ["modalities"]


def modalities(config: Config) -> frozenset[MediaKind]:
    """Return the kinds of media that the model of a run takes: what is named, or what its data have."""
    if config.model.modalities is not None:
        return frozenset(config.model.modalities)
    return frozenset(config.data.multimodal_keys)
