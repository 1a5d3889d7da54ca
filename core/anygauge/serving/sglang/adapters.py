"""LoRA adapters of SGLang's servers: layers that can have one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from anygauge.config.lora import lora_settings
from anygauge.disk import read_json
from anygauge.hub.weight_files import weight_files
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.models import text_config
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["TARGETS", "adapter_layers", "adapter_problems"]

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
"""Ends of the names of decoder layers that ``--lora-target-modules`` takes, without those of single models
(``SUPPORTED_LORA_TARGET_MODULES`` in SGLang's ``srt/utils/common.py``)."""
_NEEDS = {
    "q_proj": "v_proj",
    "k_proj": "q_proj",
    "v_proj": "q_proj",
    "up_proj": "gate_proj",
    "q_a_proj": "kv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "q_a_proj",
}
"""The layer that each is fused with, and cannot be loaded without (``normalize_*`` in SGLang's
``srt/lora/lora.py``). ``k_proj`` and ``up_proj`` may be absent: SGLang takes zeros for them."""
_DECODER_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
_ROUTERS = ("gate", "router")
_MATRIX = 2
_FIX = "or send merged weights, by another weight_sync.transport"


def adapter_problems(config: Config) -> Iterator[ConfigProblem]:
    """Yield layers with an adapter that servers cannot load."""
    path, targets = "train.lora.targets", config.train.lora.targets
    layers = adapter_layers(config) or set()
    if unknown := sorted(layers - set(TARGETS)):
        hint = f"SGLang loads no adapters of {', '.join(unknown)}; choose among {', '.join(TARGETS)}, {_FIX}"
        yield ConfigProblem(path=path, found=targets, hint=hint)
    for name in sorted(layers & _NEEDS.keys()):
        if _NEEDS[name] not in layers:
            hint = f"SGLang loads no adapter of {name} without one of {_NEEDS[name]}; add it, {_FIX}"
            yield ConfigProblem(path=path, found=targets, hint=hint)


def adapter_layers(config: Config) -> set[str] | None:
    """Return the ends of the names of the layers with an adapter, such as ``q_proj``.

    Names are taken as they are; all linear layers and a regular expression are looked for in the weights of
    ``model.path``. ``None`` if these do not tell.
    """
    try:
        targets = lora_settings(config.train.lora).targets
        if targets is not None and not isinstance(targets, str):
            return _ends(targets)
        layers = _linear_layers(config.model.path)
    except (CheckpointError, SafetensorError, OSError, ValueError, KeyError):  # a problem of its own
        return None
    return _ends(name for name in layers if targets is None or re.fullmatch(targets, name)) or None


def _ends(names: Collection[str] | Iterator[str]) -> set[str]:
    return {name.rpartition(".")[2] for name in names}


def _linear_layers(directory: Path) -> list[str]:
    """Return the names of the linear layers of a decoder. Experts and routers are none."""
    hf = text_config(read_json(directory / "config.json"))
    layers = []
    for file in weight_files(directory):
        with safe_open(file, framework="np") as tensors:  # which imports no torch
            for name in tensors.keys():  # noqa: SIM118
                layer, is_weight = name.removesuffix(".weight"), name.endswith(".weight")
                match = _DECODER_LAYER.match(name)
                # Layers after the last one are for multi-token prediction, which is not trained.
                if not is_weight or match is None or int(match[1]) >= hf["num_hidden_layers"]:
                    continue
                if ".experts." in name or layer.rpartition(".")[2] in _ROUTERS:
                    continue
                if len(tensors.get_slice(name).get_shape()) == _MATRIX:
                    layers.append(layer)
    return layers
