"""Tiny multimodal model as a complete Hugging Face directory, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

__all__ = ["CHAT_TEMPLATE", "VISION_TOKENS", "add_vision_tokens", "tiny_qwen3_vl"]

VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML with images among the text, as in Qwen's multimodal models."""


def add_vision_tokens(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Give a tokenizer the tokens that mark images and videos, and return it."""
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in VISION_TOKENS])
    return tokenizer


def tiny_qwen3_vl(
    directory: str | Path,
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 64,
    layers: int = 2,
    tower_layers: int = 2,
    levels: Sequence[int] = (0,),
    patch: int = 8,
    pixels: tuple[int, int] = (16 * 16, 48 * 48),
    max_positions: int = 4096,
    init_std: float = 0.02,
    seed: int = 0,
) -> Path:
    """Write a complete Hugging Face directory of a randomly initialized Qwen3-VL in float32, return its path.

    :param tokenizer: From :func:`add_vision_tokens`.
    :param hidden: Width of decoder and tower.
    :param levels: Layers of the tower whose features are added after the decoder's first layers.
    :param patch: Side of a patch in pixels; four of them become a token.
    :param pixels: Fewest and most of an image; others are resized.
    :param init_std: Standard deviation of the weights; larger ones make the logits differ more.
    """
    path = Path(directory)
    tokenizer.save_pretrained(str(path))
    config = Qwen3VLConfig(
        text_config=_decoder(tokenizer, hidden, layers, max_positions, init_std),
        vision_config=_tower(hidden, tower_layers, levels, patch, init_std),
        tie_word_embeddings=True,
        **_token_ids(tokenizer),
    )
    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(
        do_sample=True, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(path)
    _write_processor(path, patch, pixels)
    return path


def _decoder(
    tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, max_positions: int, init_std: float
) -> dict[str, Any]:
    return {
        "vocab_size": -(-len(tokenizer) // 32) * 32,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": max_positions,
        "initializer_range": init_std,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": True,
    }


def _tower(hidden: int, layers: int, levels: Sequence[int], patch: int, init_std: float) -> dict[str, Any]:
    return {
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_heads": 4,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "num_position_embeddings": 36,
        "initializer_range": init_std,
        "deepstack_visual_indexes": list(levels),
    }


def _token_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)), strict=True))


def _write_processor(path: Path, patch: int, pixels: tuple[int, int]) -> None:
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": pixels[0], "longest_edge": pixels[1]},
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    video = settings | {"video_processor_type": "Qwen3VLVideoProcessor"}
    del video["image_processor_type"]
    (path / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2) + "\n", encoding="utf-8")
