"""From the Hugging Face config of GLM-4.6V to Megatron's: as GLM-4.1V."""

from __future__ import annotations

from typing import Any

from anygauge_models.glm4v.config import flops_per_token, forbidden, model_options, transformer_config
from anygauge_models.glm4v.config import tiny as glm4v_tiny

__all__ = ["flops_per_token", "forbidden", "model_options", "tiny", "transformer_config"]


def tiny() -> dict[str, Any]:
    """Return a config that trains on a laptop in seconds."""
    return {
        **glm4v_tiny(),
        "architectures": ["Glm46VForConditionalGeneration"],
        "model_type": "glm46v",
    }
