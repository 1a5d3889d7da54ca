"""Rotary angles of Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anygauge_hooks.errors import ConfigError
from anygauge_models.qwen3.config import head_dim

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rotary"]


def rotary(hf: Mapping[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of each position's angles (https://arxiv.org/abs/2104.09864 eq. 15).

    :param positions: ``[T]``, int64.
    :returns: Two ``[T, head_dim]`` float32 tensors, the half-rotated layout's two halves alike.
    :raises ConfigError: The checkpoint scales its angles in a way that is not implemented.
    """
    import torch

    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"Rotary scaling {kind!r} of the checkpoint is not supported; supported: 'default'.",
            hint="Remove rope_scaling from config.json if the model is used within its trained length.",
        )
    theta = float(parameters.get("rope_theta", hf.get("rope_theta", 10_000.0)))
    size = head_dim(hf)
    # The powers are taken as transformers takes them, so that angles agree to the bit.
    exponents = torch.arange(0, size, 2, dtype=torch.int64, device=positions.device).float() / size
    inverse_frequencies = 1.0 / (theta**exponents)
    angles = torch.outer(positions.float(), inverse_frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()
