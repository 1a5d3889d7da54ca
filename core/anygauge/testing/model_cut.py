"""Cut a model to its first layers, as a Hugging Face directory of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from anygauge.engines.dequantize import open_unquantized
from anygauge.engines.hf_directory import read_config, write_directory
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.models import text_config

__all__ = ["cut_model"]

_COUNT = "num_hidden_layers"
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def cut_model(source: Path, target: Path, count: int) -> None:
    """Write the first layers of a model, with all that is not a layer.

    :param target: Must not exist.
    :param count: Number of layers, fewer than the model has.
    :raises ConfigError: The model has no more, or does not say how many in ``num_hidden_layers``.
    """
    config = read_config(source)
    whole = text_config(config).get(_COUNT)
    if not isinstance(whole, int) or count >= whole:
        raise ConfigError(
            f"{source} cannot be cut to {count} layers: its config.json has {_COUNT} = {whole!r}.",
            hint="Give fewer layers than the model has, or leave --layers out.",
        )
    changes = _cut(config, whole, count)
    if "text_config" in config:
        changes |= {"text_config": {**config["text_config"], **_cut(config["text_config"], whole, count)}}
    with open_unquantized(source) as tensors:
        kept = [name for name in sorted(tensors.names) if _number(name) < count]
        write_directory(
            target, source, ((name, tensors(name)) for name in kept), torch.float32, changes=changes
        )


def _cut(config: Mapping[str, Any], whole: int, count: int) -> dict[str, Any]:
    """Return the keys that count layers, or have an item for each."""
    items = {
        key: each[:count] for key, each in config.items() if isinstance(each, list) and len(each) == whole
    }
    return {**items, **({_COUNT: count} if _COUNT in config else {})}


def _number(name: str) -> int:
    """Return the number of a tensor's layer; -1 for one that is of none."""
    layer = _LAYER.search(name)
    return int(layer[1]) if layer else -1
