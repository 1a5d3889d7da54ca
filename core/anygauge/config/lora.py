"""Settings of LoRA: those of ``[train.lora]`` and of a peft adapter that training starts from."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.config.schema import Lora
from anygauge.disk import read_json
from anygauge_hooks.errors import CheckpointError

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "PEFT_PREFIX",
    "LoraSettings",
    "adapter_config",
    "lora_settings",
    "read_adapter_config",
]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a peft adapter."""
PEFT_PREFIX = "base_model.model."
"""How peft begins the names of an adapter's tensors."""
ALL_LINEAR = "all-linear"
"""Word of peft for all linear layers but the output layer."""
_TAKEN = {"r", "lora_alpha", "target_modules", "modules_to_save"}
_INERT = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size"),
}
"""Keys of an adapter's config that change nothing of what its weights compute here. The layout that
``fan_in_fan_out`` tells follows from the layer."""
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base weights as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Shape and place of the adapters."""

    rank: int
    alpha: float
    targets: Sequence[str] | str | None
    """Names, or one regular expression; ``None`` is all linear layers but the output layer."""
    modules_to_save: Sequence[str]

    @property
    def scale(self) -> float:
        """Return the factor of an adapter's output."""
        return self.alpha / self.rank


def lora_settings(lora: Lora) -> LoraSettings:
    """Return the settings of a table that is on.

    :raises CheckpointError: There is no adapter in ``path`` that can be used.
    """
    stored = None if lora.path is None else read_adapter_config(lora.path)
    rank = lora.rank or (stored.rank if stored else 0)
    alpha, modules = lora.alpha, lora.modules_to_save
    if alpha is None:
        alpha = stored.alpha if stored else 2.0 * rank
    if modules is None:
        modules = tuple(stored.modules_to_save) if stored else ()
    targets = stored.targets if stored and lora.targets is None else _without_word(lora.targets)
    return LoraSettings(rank=rank, alpha=alpha, targets=targets, modules_to_save=modules)


def _without_word(targets: Any) -> Any:
    return None if targets == ALL_LINEAR else targets


def read_adapter_config(directory: Path) -> LoraSettings:
    """Read ``adapter_config.json`` of a peft adapter.

    :raises CheckpointError: There is none, or it asks for what is not built.
    """
    path = directory / ADAPTER_CONFIG
    try:
        config = read_json(path)
        settings = LoraSettings(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            targets=_without_word(config["target_modules"]),
            modules_to_save=tuple(config.get("modules_to_save") or ()),
        )
        if settings.rank < 1 or not 0 < settings.alpha < math.inf:
            raise ValueError(f"r = {settings.rank}, lora_alpha = {settings.alpha}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{directory} is not a peft adapter: its {ADAPTER_CONFIG} cannot be read: {error!r}.",
            hint=f"Name a directory with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as peft's save_pretrained "
            "writes them.",
        ) from error
    if unsupported := list(_unsupported(config)):
        raise CheckpointError(
            f"{path} has {', '.join(unsupported)}, which LoRA here does not support.",
            hint="Merge the adapter with peft (merge_and_unload), and start from the merged model.",
        )
    if not (directory / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{directory} has no {ADAPTER_WEIGHTS}.",
            hint="Save the adapter with peft's save_pretrained(..., safe_serialization=True).",
        )
    return settings


def _unsupported(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("peft_type", "LORA") != "LORA":
        yield f"peft_type = {config['peft_type']!r}"
    if not isinstance(config["target_modules"], str | list):
        yield f"target_modules = {config['target_modules']!r}"
    if config.get("bias", "none") != "none":
        yield f"bias = {config['bias']!r}"
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        yield f"init_lora_weights = {config['init_lora_weights']!r}"
    for key in sorted(config.keys() - _TAKEN - _INERT - {"bias", "init_lora_weights"}):
        if config[key] or _is_zero(config[key]):
            yield f"{key} = {config[key]!r}"


def _is_zero(value: Any) -> bool:
    """Return whether a value is a number, such as that of the first layer in ``layers_to_transform``."""
    return type(value) in (int, float) and not value


def adapter_config(
    settings: LoraSettings | None,
    base: Path,
    targets: Collection[str],
    saved: Sequence[str],
    *,
    transposed: bool = False,
) -> dict[str, Any]:
    """Return the content of ``adapter_config.json``.

    :param base: Directory of the weights that the adapter belongs to.
    :param targets: Names that choose the layers with an adapter.
    :param saved: Names of the modules that are trained in full.
    :param transposed: Whether the weights of these layers are ``[in, out]``.
    """
    assert settings is not None, "the model has no adapters"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "target_modules": list(targets),
        "modules_to_save": list(saved) or None,
    }
