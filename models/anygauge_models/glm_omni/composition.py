"""The model composed of classes of transformers. Needs torch: import it where the model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMultimodalLM
from transformers.models.glmasr.configuration_glmasr import GlmAsrEncoderConfig
from transformers.models.glmasr.modeling_glmasr import GlmAsrEncoder

from anygauge_hooks.models import text_config
from anygauge_models.glm_omni.audio_tower import make_projector, projected
from anygauge_models.glm_omni.config import audio_of, decoder_family
from anygauge_models.vision import module_fields

__all__ = ["compose"]

_OWN = ("architectures", "model_type", "audio_config", "projector_hidden_act", "dtype")
"""Fields of ``config.json`` that GLM-4.1V and GLM-4.5V do not have, or have with other values."""


class AudioEncoder(GlmAsrEncoder):
    """GLM-ASR's encoder with its projector, which checkpoints name beside it: no submodule here."""

    def __init__(self, config: Any, projector: Any) -> None:
        super().__init__(config)
        self.__dict__["projector"] = projector

    def forward(self, spectrum: Tensor, kept: Tensor) -> Tensor:
        """Return the features of audio; see :class:`anygauge_models.glm_omni.audio_tower.AudioTower`."""
        encoded = super().forward(spectrum.to(self.conv1.weight.dtype)).last_hidden_state
        return projected(self.projector, encoded, kept)


def compose(hf: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return GLM-4.1V or GLM-4.5V of transformers with GLM-ASR's encoder and projector added.

    :raises ConfigError: There is no such decoder.
    """
    fields = {key: value for key, value in hf.items() if key not in _OWN}
    config = AutoConfig.for_model(decoder_family(hf).name, **fields)
    model = AutoModelForMultimodalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    audio = GlmAsrEncoderConfig(**module_fields(audio_of(hf)))
    projector = make_projector(audio, text_config(hf)["hidden_size"], hf.get("projector_hidden_act", "gelu"))
    model.model.audio_tower = AudioEncoder(audio, projector).to(dtype)
    model.model.multi_modal_projector = projector.to(dtype)
    return model
