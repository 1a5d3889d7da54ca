"""Tiny multimodal models as directories that a real server reads, and their expected answers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch.nn.utils.rnn import pad_sequence

from anygauge.config.schema import RolloutClient
from anygauge.serving.image_encoder import ImageEncoder
from anygauge.serving.sglang.client import EngineClient
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.media import Content, Media, MediaKind
from anygauge_hooks.models import ModelSpec, text_config
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_tests.media import DictStore
from anygauge_tests.vision_models import with_vision_tower, write_vision_model

__all__ = ["PATCH", "VisionReference", "published", "write_served"]

PATCH = 16
SIZES = {"wide": (32, 96), "square": (64, 64), "other": (64, 64)}
CLIPS = {"clip": (4, 32, 64), "other clip": (4, 32, 64)}
SOUNDS = {"sound": 150, "other sound": 150, "longer": 230, "short": 37}
_QWEN = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "video_processor_type": "Qwen3VLVideoProcessor",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 256 * 256},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_OMNI = {
    **_QWEN,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "video_processor_type": "Qwen2VLVideoProcessor",
    "processor_class": "Qwen3OmniMoeProcessor",
}
_GLM = {
    "image_processor_type": "Glm4vImageProcessor",
    "video_processor_type": "Glm4vVideoProcessor",
    "processor_class": "Glm4vProcessor",
    "size": {"shortest_edge": 2 * 32 * 32, "longest_edge": 2 * 256 * 256},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class VisionReference:
    """A model of transformers, media, and requests with them."""

    def __init__(self, spec: ModelSpec, path: Path) -> None:
        """Load a directory, whose patches have :data:`PATCH` pixels on a side."""
        from transformers import AutoModelForMultimodalLM

        assert spec.media is not None
        self.path = path
        self.model: Any = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.hf = text_config(self.model.config.to_dict())
        self.media = spec.media
        self.kinds: list[MediaKind] = ["image", "video"]
        if "audio_config" in self.hf:
            self.kinds.append("audio")
        self.forbidden = tuple(self.media.forbidden(self.hf))
        rng = np.random.default_rng(0)
        shapes = {**SIZES, **CLIPS}
        self.store = DictStore(
            {
                key: Content("video" if key in CLIPS else "image", rng.integers(0, 255, (*size, 3), np.uint8))
                for key, size in shapes.items()
            }
        )
        bands = self.hf.get("audio_config", {}).get("num_mel_bins", 0)
        for key, frames in SOUNDS.items():
            data = rng.standard_normal((frames, bands), np.float32)
            self.store.put(key, Content("audio", data))

    def request(self, name: str, *parts: int | str, count: int = 16) -> GenerateRequest:
        """Return a request of tokens, and of media by their keys."""
        tokens: list[int] = []
        media: list[Media] = []
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
            else:
                medium, ids = self._shown(part)
                media.append(medium.moved(len(tokens)))
                tokens += ids
        params = SamplingParams(max_new_tokens=count, ignore_eos=True, forbidden=self.forbidden)
        return GenerateRequest(name, tuple(tokens), params, seed=1, media=tuple(media))

    def _shown(self, key: str) -> tuple[Media, list[int]]:
        """Return a medium and its tokens; the frames of a video have text between them, or are one block."""
        if key in SOUNDS:
            return self._sound(key)
        kind: MediaKind = "video" if key in CLIPS else "image"
        frames, height, width = CLIPS.get(key) or (2, *SIZES[key])
        grid = (frames // 2, height // PATCH, width // PATCH)
        pieces = 1 if "audio_token_id" in self.hf else grid[0]
        count = math.prod(grid) // 4 // pieces
        glm = "image_start_token_id" in self.hf
        start, end = (self._id(f"{'image' if glm else 'vision'}_{side}") for side in ("start", "end"))
        holders = [self._id("image" if glm else kind)] * count
        before, after = (
            ([self._id("video_start")], [self._id("video_end")]) if kind == "video" and glm else ([], [])
        )
        ids, spans = before, list[tuple[int, int]]()
        for piece in range(pieces):
            spans.append((len(ids) + 2, count))
            ids = [*ids, 6 + piece, start, *holders, end]
        return Media(kind, key, tuple(spans), grid, float(kind == "video")), ids + after

    def _sound(self, key: str) -> tuple[Media, list[int]]:
        whole, rest = divmod(SOUNDS[key], 100)
        count = 13 * whole + -(-rest // 8)
        start, pad, end = (self._id(name) for name in ("audio_start", "audio", "audio_end"))
        return Media("audio", key, ((1, count),), (SOUNDS[key], 1, 1)), [start, *[pad] * count, end]

    def _id(self, name: str) -> int:
        return int(self.hf[f"{name}_token_id"])

    def difference(
        self, request: GenerateRequest, said: Generation, swapped: Mapping[str, str] | None = None
    ) -> float:
        """Return how far log-probs are from those of the model, at most.

        :param swapped: Media that the model is shown in the place of others.
        """
        media = [each._replace(key=(swapped or {}).get(each.key, each.key)) for each in request.media]
        whole = (*request.tokens, *said.tokens)
        positions = torch.from_numpy(self.media.positions(self.hf, len(whole), request.media))
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.tensor([whole]), position_ids=positions[:, None], **self._inputs(media)
            ).logits[0]
        left = logits.index_fill(1, torch.tensor(self.forbidden), -torch.inf).log_softmax(-1)
        right = left[len(request.tokens) - 1 : -1].gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
        return float((torch.tensor(said.log_probs) - right).abs().max())

    def _inputs(self, media: Sequence[Media]) -> dict[str, Any]:
        """Return what transformers is given of media."""
        inputs: dict[str, Any] = {}
        tower = self.media.towers(self.hf)[0]
        for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
            if shown := [each for each in media if each.kind == kind]:
                contents = [self.store.get(each.key) for each in shown]
                inputs[pixels] = tower.inputs(self.hf, contents, torch.device("cpu"))["hidden_states"]
                inputs[f"{kind}_grid_thw"] = torch.tensor([each.grid for each in shown])
        if sounds := [torch.tensor(self.store.get(each.key).data) for each in media if each.kind == "audio"]:
            inputs["input_features"] = pad_sequence(sounds, batch_first=True).mT
            ones = [torch.ones(len(each), dtype=torch.long) for each in sounds]
            inputs["feature_attention_mask"] = pad_sequence(ones, batch_first=True)
        return inputs

    def generate(self, server: SGLangPeer, *requests: GenerateRequest) -> list[Generation]:
        """Return what a server answers; it has all requests at once."""

        async def run() -> list[Generation]:
            limits = RolloutClient(request_timeout_s=120)
            pictures = ImageEncoder(self.store)
            client = EngineClient(server.address, limits, image_encoder=pictures, keys=server.keys)
            try:
                return await asyncio.gather(*map(client.generate, requests))
            finally:
                await client.close()

        return asyncio.run(run())


def write_served(spec: ModelSpec, path: Path) -> Path:
    """Write a tiny model of a family with a tokenizer and the settings of its pixels, return its path."""
    tiny = spec.tiny()
    fields = tiny if "vision_config" in tiny else with_vision_tower(spec)
    marks = _marks(fields)
    tokenizer = tiny_tokenizer(path, texts=["what is in the picture "] * 4)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks.values()])
    tokenizer.save_pretrained(path)
    text: dict[str, Any] = {"vocab_size": -(-len(tokenizer) // 32) * 32}
    if "mlp_only_layers" in fields["text_config"]:
        text["mlp_only_layers"] = []  # SGLang has experts in all layers, whatever a config says
    parts = {
        "text_config": text,
        "vision_config": {"patch_size": PATCH, "image_size": 4 * PATCH},
        # on the host SGLang rounds it up to a multiple of this
        "audio_config": {"encoder_ffn_dim": 64, "initializer_range": 0.3},
    }
    changes = {part: {**fields[part], **changed} for part, changed in parts.items() if part in fields}
    write_vision_model(
        spec, path, **changes, **{key: tokenizer.convert_tokens_to_ids(mark) for key, mark in marks.items()}
    )
    _write_settings(path, marks)
    return path


def published(path: Path) -> Path:
    """Return a directory of the model that a thinker is one part of, as it is published; else the path."""
    alone = json.loads((path / "config.json").read_text())
    if alone["model_type"] != "qwen3_omni_moe_thinker":
        return path
    whole = path / "whole"
    whole.mkdir()
    for file in (*path.glob("*token*"), *path.glob("*preprocessor*")):
        (whole / file.name).write_bytes(file.read_bytes())
    tensors = load_file(path / "model.safetensors")
    save_file({f"thinker.{name}": each for name, each in tensors.items()}, whole / "model.safetensors")
    name = "Qwen3OmniMoeForConditionalGeneration"
    config = {"architectures": [name], "model_type": "qwen3_omni_moe", "thinker_config": alone}
    (whole / "config.json").write_text(json.dumps(config))
    return whole


def _marks(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that keys of the config are the numbers of, as published tokenizers write them."""
    keys = [key for key in fields if key.endswith("_token_id")]
    return {key: _mark(key, glm="image_start_token_id" in keys) for key in keys}


def _mark(key: str, *, glm: bool) -> str:
    kind, _, part = key.removesuffix("_token_id").partition("_")
    if not glm:
        return f"<|{kind}_{part or 'pad'}|>"
    return f"<|{part.replace('start', 'begin')}_of_{kind}|>" if part else f"<|{kind}|>"


def _write_settings(path: Path, marks: Mapping[str, str]) -> None:
    settings = _GLM if "image_start_token_id" in marks else _OMNI if "audio_token_id" in marks else _QWEN
    text = json.dumps({**settings, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2})
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (path / name).write_text(text)
    if settings is _OMNI:
        _name_marks(path / "tokenizer_config.json", marks)


def _name_marks(path: Path, marks: Mapping[str, str]) -> None:
    """Let the tokenizer say which token is what: the processor of Qwen3-Omni asks it."""
    names = {key.removesuffix("_id").replace("start", "bos").replace("end", "eos"): key for key in marks}
    named = {name: marks[key] for name, key in names.items()}
    path.write_text(json.dumps({**json.loads(path.read_text()), "extra_special_tokens": named}))
