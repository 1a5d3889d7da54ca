"""Tiny multimodal models, images for them, and samples of both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anygauge.plugins import load_plugins
from anygauge_hooks.media import Content, Media, MediaStore
from anygauge_hooks.models import ModelSpec
from anygauge_tests.batches import TrainSample, sample_of

__all__ = [
    "mixed_samples",
    "random_audio",
    "random_image",
    "random_video",
    "reference_log_probs",
    "vision_sample",
    "write_vision_model",
]


def with_vision_tower(spec: ModelSpec) -> dict[str, Any]:
    """Return the tiny config of a family of text models, inside a multimodal one as it is published.

    The heads of the tower are as large as in the published ones.
    """
    sees, text = load_plugins().get("register_models", "qwen3_vl").tiny(), dict(spec.tiny())
    vision = {**sees["vision_config"], "hidden_size": 144, "num_heads": 2}
    vision["model_type"] = f"{spec.name}_vision"
    del vision["deepstack_visual_indexes"], text["architectures"]
    return {
        **sees,
        "architectures": [spec.architectures[-1]],
        "model_type": spec.name,
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def write_vision_model(spec: ModelSpec, path: Path, **changes: Any) -> Path:
    """Write a tiny model of a multimodal family, with weights that are far from uniform.

    :param changes: Of the family's tiny config.
    """
    from transformers import AutoConfig, AutoModelForMultimodalLM

    tiny = spec.tiny()
    fields = {**(tiny if "vision_config" in tiny else with_vision_tower(spec)), **changes}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    for part in ("text_config", "vision_config"):
        if hasattr(config, part):
            getattr(config, part).initializer_range = 0.1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.dim() == 1:
                    tensor.add_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(path)
    return path


def random_image(store: MediaStore, hf: Mapping[str, Any], height: int, width: int, seed: int) -> Media:
    """Draw an image of so many patches, put it into the store and return what samples have of it.

    :param hf: The Hugging Face config; its tower merges squares of patches into features.
    """
    patch, merge = (hf["vision_config"][key] for key in ("patch_size", "spatial_merge_size"))
    pixels = np.random.default_rng(seed).integers(0, 256, (height * patch, width * patch, 3), dtype=np.uint8)
    key = f"{height}x{width}-{seed}"
    store.put(key, Content("image", pixels))
    return Media("image", key, ((0, height * width // merge**2),), (1, height, width))


def random_video(
    store: MediaStore, hf: Mapping[str, Any], times: int, height: int, width: int, seed: int
) -> Media:
    """Draw a video of so many patches, put it into the store and return what samples have of it.

    :param hf: The Hugging Face config. Each of its patches in time is a picture between marks of its own, or
        all are one between two marks.
    """
    keys = ("patch_size", "spatial_merge_size", "temporal_patch_size")
    patch, merge, temporal = (hf["vision_config"][key] for key in keys)
    shape = (times * temporal, height * patch, width * patch, 3)
    key = f"{times}x{height}x{width}-{seed}"
    store.put(key, Content("video", np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), 1.0))
    count = height * width // merge**2
    together = hf["model_type"].startswith("qwen3_omni")
    spans = ((0, times * count),) if together else tuple((i * (count + 2), count) for i in range(times))
    return Media("video", key, spans, (times, height, width), 1.0)


def random_audio(store: MediaStore, hf: Mapping[str, Any], frames: int, features: int, seed: int) -> Media:
    """Put a spectrum into the store and return what samples have of it.

    :param hf: The Hugging Face config; a tower that hears windows is given whole ones.
    :param features: That its tower makes of so many frames.
    """
    audio = hf["audio_config"]
    window = 2 * audio["max_position_embeddings"] if "max_position_embeddings" in audio else 1
    shape = (-(-frames // window) * window, audio["num_mel_bins"])
    data = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    key = f"{frames}-{seed}"
    store.put(key, Content("audio", data, frames / 100))
    return Media("audio", key, ((0, features),), (frames, 1, 1), frames / 100)


def vision_sample(
    hf: Mapping[str, Any], parts: Iterable[int | Media], response: int, seed: int = 0
) -> TrainSample:
    """Return a sample of so many tokens of text, or a medium between its marks, one after another.

    :param hf: The Hugging Face config, whose special tokens are its last.
    """
    sight = "vision" if "vision_start_token_id" in hf else "image"
    special = [
        hf[f"{kind}{part}_token_id"]
        for kind in ("image", "audio", "vision")
        for part in ("", "_start")
        if f"{kind}{part}_token_id" in hf
    ]
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    media: list[Media] = []
    for part in parts:
        if isinstance(part, int):
            tokens += torch.randint(0, min(special), (part,), generator=generator).tolist()
        else:
            marks = "audio" if part.kind == "audio" else sight
            start, holder, end = (
                hf[f"{key}_token_id"] for key in (f"{marks}_start", part.kind, f"{marks}_end")
            )
            media.append(part.moved(len(tokens) + 1))
            for _, count in part.spans:
                tokens += [start, *[holder] * count, end]
    text = sample_of(tokens, response, log_prob=-2.5, advantage=float(seed % 3 - 1) or 0.5)
    return text._replace(media=tuple(media))


def mixed_samples(hf: Mapping[str, Any], store: MediaStore) -> list[TrainSample]:
    """Return text alone, one image, the same image again, and two images of other shapes in one sample."""
    one, wide, tall = (
        random_image(store, hf, *size, seed) for seed, size in enumerate(((4, 4), (2, 6), (6, 4)))
    )
    return [
        vision_sample(hf, [9], 4, 1),
        vision_sample(hf, [3, one, 6], 5, 2),
        vision_sample(hf, [2, one, 4], 3, 3),
        vision_sample(hf, [1, wide, 2, tall, 5], 4, 4),
    ]


def reference_log_probs(model: Any, hf: Any, sample: TrainSample, spec: Any, store: Any) -> torch.Tensor:
    """Return the log-probs of a response by transformers, which counts positions and runs its own tower."""
    ids = torch.tensor([sample.tokens])
    given: dict[str, Any] = {}
    if sample.media:
        (tower,) = spec.media.towers(hf)
        contents = [store.get(media.key) for media in sample.media]
        given["pixel_values"] = tower.inputs(hf, contents, ids.device)["hidden_states"]
        given["image_grid_thw"] = torch.tensor([media.grid for media in sample.media])
        given["mm_token_type_ids"] = (ids == hf["image_token_id"]).int()
    logits = model(input_ids=ids, **given).logits[0, -sample.response_length - 1 : -1]
    logits = logits.index_fill(1, torch.tensor(spec.media.forbidden(hf)), -torch.inf)
    answer = ids[0, -sample.response_length :]
    log_probs: torch.Tensor = logits.log_softmax(-1).gather(1, answer[:, None])[:, 0]
    return log_probs
