"""Contents that the run has processed, as SGLang's models read them.

SGLang's own processors sample the frames of a video, resize them and tokenize the text around them again. A
request with contents has all of its tokens, and each content says where its placeholders are, so that nothing
is left to decide.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.multimodal.processors.glm4v import Glm4vImageProcessor
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor

from anygauge.disk import read_json
from anygauge.plugins import load_plugins
from anygauge.serving.sglang.client.media import CONTENT, LONGEST_S, read_content
from anygauge_hooks.media import Content, Media, MediaSpec
from anygauge_hooks.models import text_config

__all__ = ["GlmProcessor", "QwenProcessor"]

_SECOND = 100
"""Frames of features in a second of sound."""


class _Family:
    """The model's family, with the functions that the trainer and the embedded engine call too."""

    def __init__(self, path: Path) -> None:
        self.hf: Mapping[str, Any] = text_config(read_json(path / "config.json"))
        spec = load_plugins().model(self.hf["architectures"]).media
        assert spec is not None, "the run has media"
        self.media: MediaSpec = spec

    def item(self, medium: Media, content: Content) -> Any:
        """Return what one of SGLang's models reads of a medium."""
        features, others = (self._sound if medium.kind == "audio" else self._pixels)(medium, content)
        return MultimodalDataItem(
            modality=Modality.from_str(medium.kind),
            feature=features,
            offsets=[(start, start + count - 1) for start, count in medium.spans],
            model_specific_data=others,
        )

    def _pixels(self, medium: Media, content: Content) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tower = next(each for each in self.media.towers(self.hf) if medium.kind in each.kinds)
        patches = tower.inputs(self.hf, [content], torch.device("cpu"))["hidden_states"]
        return patches, {f"{medium.kind}_grid_thw": torch.tensor([medium.grid])}

    def _sound(self, medium: Media, content: Content) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        frames, bands = content.data.shape
        width = LONGEST_S * _SECOND
        # of a part of a second alone, SGLang's encoder computes other features than the trainer's
        if not _SECOND <= frames <= width:
            raise ValueError(
                f"The recording {medium.source or medium.key} has {frames / _SECOND:g} s; servers of SGLang "
                f"take 1 to {LONGEST_S} s."
            )
        features, mask = torch.zeros(1, bands, width), torch.zeros(1, width, dtype=torch.long)
        features[0, :, :frames] = torch.from_numpy(content.data.T.copy())
        mask[:, :frames] = 1
        return features, {"feature_attention_mask": mask}

    def positions(self, length: int, media: Sequence[Media]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions in three axes, and what is added to later places to make them positions."""
        positions = torch.from_numpy(np.ascontiguousarray(self.media.positions(self.hf, length, media)))
        return positions, (positions.max() + 1 - length).reshape(1, 1)


class _ReadsContents:
    """Lets a processor of SGLang read contents; other media are left to that processor."""

    server_args: Any
    mm_tokens: Any

    @cached_property
    def _family(self) -> _Family:
        return _Family(Path(self.server_args.model_path))

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the items of a request; called by SGLang with its tokens, or its text."""
        lists = (image_data, request_obj.video_data, request_obj.audio_data)
        sent = [each for items in lists for each in items or ()]
        if not any(isinstance(each, str) and each.startswith(CONTENT) for each in sent):
            parent: Any = super()
            return await parent.process_mm_data_async(image_data, input_text, request_obj, *args, **kwargs)
        return await asyncio.to_thread(self._output, input_text, sent)

    def _output(self, tokens: list[int], sent: Sequence[str]) -> Any:
        read = sorted(map(_read, sent), key=lambda pair: pair[0].spans)
        positions, delta = self._family.positions(len(tokens), [medium for medium, _ in read])
        return MultimodalProcessorOutput(
            input_ids=tokens,
            mm_items=[self._family.item(*pair) for pair in read],
            im_token_id=self.mm_tokens.image_token_id,
            video_token_id=self.mm_tokens.video_token_id,
            audio_token_id=self.mm_tokens.audio_token_id,
            mrope_positions=positions,
            mrope_position_delta=delta,
        )


class QwenProcessor(_ReadsContents, QwenVLImageProcessor):
    """Processor of Qwen3-VL and Qwen3-Omni."""


class GlmProcessor(_ReadsContents, Glm4vImageProcessor):
    """Processor of GLM-4.1V, GLM-4.5V and GLM-4.6V."""


def _read(sent: str) -> tuple[Media, Content]:
    """Return a medium and its content from a string of a request."""
    medium, data = read_content(sent)
    array = np.load(io.BytesIO(data), allow_pickle=False)
    return medium, Content(medium.kind, array, medium.seconds)
