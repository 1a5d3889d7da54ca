"""GLM-ASR's encoder and projector as one module. Needs torch: import it where the module is built."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers.models.glmasr.configuration_glmasr import GlmAsrEncoderConfig
from transformers.models.glmasr.modeling_glmasr import GlmAsrEncoder, GlmAsrMultiModalProjector

__all__ = ["AudioTower", "make_projector", "projected"]


def make_projector(config: GlmAsrEncoderConfig, width: int, activation: str) -> GlmAsrMultiModalProjector:
    """Return the projector from an encoder to a decoder of this width."""
    text = SimpleNamespace(hidden_size=width)
    parts: Any = SimpleNamespace(audio_config=config, text_config=text, projector_hidden_act=activation)
    return GlmAsrMultiModalProjector(parts)


def projected(projector: GlmAsrMultiModalProjector, encoded: Tensor, kept: Tensor) -> Tensor:
    """Return the features of some outputs of the encoder, several of which are joined to one.

    :param encoded: ``[windows, positions, hidden]``.
    :param kept: ``[N]``, int64: index of the joined outputs to keep.
    :returns: ``[N, width]``.
    """
    joined = encoded.reshape(-1, projector.linear_1.in_features).index_select(0, kept)
    features: Tensor = projector(joined)
    return features


class AudioTower(nn.Module):
    """Features of sound in the decoder's width.

    :param audio: Fields of the encoder's config.
    :param width: Width of the decoder.
    :param activation: Activation of the projector.
    """

    def __init__(self, audio: Mapping[str, Any], width: int, activation: str) -> None:
        super().__init__()
        config = GlmAsrEncoderConfig(**audio)
        self.encoder = GlmAsrEncoder(config)
        self.projector = make_projector(config, width, activation)

    def forward(self, spectrum: Tensor, kept: Tensor) -> Tensor:
        """Return the features of the sound in some windows.

        :param spectrum: ``[windows, mels, frames]``.
        :param kept: ``[N]``, int64: which of the joined outputs of all windows are of sound, not of silence
            behind it.
        :returns: ``[N, width]``.
        """
        encoded = self.encoder(spectrum.to(self.encoder.conv1.weight.dtype)).last_hidden_state
        return projected(self.projector, encoded, kept)

    def gradient_checkpointing_enable(self, *options: Any) -> None:
        """Let the encoder compute its layers again in the backward pass."""
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        next(getattr(self.encoder, name) for name in names if hasattr(self.encoder, name))(*options)
