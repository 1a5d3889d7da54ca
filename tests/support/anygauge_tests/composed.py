"""A tiny GLM with vision and audio, of the modules of transformers: what docs/glm_omni.md defines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel
from transformers.models.glmasr.modeling_glmasr import GlmAsrModel, GlmAsrMultiModalProjector

__all__ = ["Composed", "write_composed"]


class Composed(nn.Module):
    """The model as docs/glm_omni.md defines it, one sample at a time."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        super().__init__()
        text, vision, audio = (
            AutoConfig.for_model(**hf[f"{part}_config"], initializer_range=0.1)
            for part in ("text", "vision", "audio")
        )
        self.audio_config = audio
        self.model: Any = nn.Module()
        self.model.language_model = AutoModel.from_config(text)
        self.model.visual = AutoModel.from_config(vision)
        self.model.audio_tower = AutoModel.from_config(audio)
        both: Any = SimpleNamespace(audio_config=audio, text_config=text, projector_hidden_act="gelu")
        self.model.multi_modal_projector = GlmAsrMultiModalProjector(both)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    def forward(
        self, input_ids: Tensor, positions: Tensor, spans: Sequence[tuple[int, int]], seen: Any, heard: Any
    ) -> Any:
        """Return an object with ``logits``, ``[1, S, V]``.

        :param input_ids: ``[1, S]``.
        :param positions: ``[3, S]``.
        :param spans: Places of all features: of what is seen, then of what is heard.
        :param seen: Patches and their grids, or nothing.
        :param heard: Spectra ``[windows, mels, frames]`` and how many frames of each are sound, or nothing.
        """
        hidden = self.model.language_model.embed_tokens(input_ids)
        features = [*self._seen(*seen), *self._heard(*heard)]
        if features:
            places = torch.cat([torch.arange(start, start + count) for start, count in spans])
            hidden = hidden.index_copy(1, places, torch.cat(features)[None])
        output = self.model.language_model(inputs_embeds=hidden, position_ids=positions[:, None])
        return SimpleNamespace(logits=self.lm_head(output.last_hidden_state))

    def _seen(self, pixels: Tensor | None = None, grid: Tensor | None = None) -> list[Tensor]:
        return [] if pixels is None else [self.model.visual(pixels, grid_thw=grid).pooler_output]

    def _heard(self, spectrum: Tensor | None = None, frames: Tensor | None = None) -> list[Tensor]:
        if spectrum is None or frames is None:
            return []
        this: Any = SimpleNamespace(
            audio_tower=self.model.audio_tower,
            multi_modal_projector=self.model.multi_modal_projector,
            config=SimpleNamespace(audio_config=self.audio_config, return_dict=True),
        )
        mask = torch.arange(spectrum.shape[2])[None] < frames[:, None]
        return [GlmAsrModel.get_audio_features(this, spectrum, mask, return_dict=True).pooler_output]

    def save_pretrained(self, path: Any) -> None:
        """Write the weights, under the names of a directory."""
        tensors = {name: each.contiguous() for name, each in self.state_dict().items()}
        save_file(tensors, Path(path) / "model.safetensors")


def write_composed(path: Path, hf: Mapping[str, Any]) -> Composed:
    """Write a directory with weights that are far from uniform, and return the model.

    :param hf: Its config; the decoder is dense.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Composed(hf).eval()
        with torch.no_grad():
            for each in model.parameters():
                if each.dim() == 1:
                    each.add_(torch.randn_like(each) * 0.1)
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(hf))
    return model
