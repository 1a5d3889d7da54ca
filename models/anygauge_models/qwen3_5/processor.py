"""Images and video of Qwen3.5 on the host: as those of Qwen3-VL, with tokens of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge_models.qwen3_5.config import placeholders
from anygauge_models.qwen3_vl.processor import processor_with

if TYPE_CHECKING:
    from anygauge_hooks.media import MediaProcessor

__all__ = ["make_processor"]


def make_processor(directory: Path, hf: Mapping[str, Any]) -> MediaProcessor:
    """Return the processor of a model.

    :raises ConfigError: Its settings are another family's.
    """
    return processor_with(directory, hf, "qwen3_5", placeholders(hf))
