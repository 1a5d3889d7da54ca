"""A real tokenizer without a model directory, and files of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WriteRows = Callable[..., Path]

CHAT_TEMPLATE = (
    "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('a chat begins with a user') }}{% endif %}"
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Return a byte-level tokenizer that puts ``<s>`` before a plain text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0} | {
        char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)
    }
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Return a function that writes rows (objects, or raw lines as strings) to a file."""

    def write(*rows: Any, name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


MARKS_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% else %}<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}</{{ message['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MEDIA_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


@pytest.fixture(scope="session")
def vision_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer with the tokens and a template of a model that sees."""
    from transformers import PreTrainedTokenizerFast

    vision = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str()),
        bos_token="<s>",
        eos_token="</assistant>",
    )
    vision.add_special_tokens({"additional_special_tokens": list(MEDIA_TOKENS)})
    vision.chat_template = MARKS_TEMPLATE
    return vision


@pytest.fixture(scope="session")
def processor(vision_tokenizer: Any) -> Any:
    """Return Qwen3-VL's processor with patches of 4 pixels, four to a token."""
    from anygauge_models.image_processing import Budget
    from anygauge_models.qwen3_vl.processor import Processor

    image, video = vision_tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"])
    return Processor(
        kinds={"image": image, "video": video},
        marks={
            "image": "<|vision_start|><|image_pad|><|vision_end|>",
            "video": "<|vision_start|><|video_pad|><|vision_end|>",
        },
        patch=4,
        merge=2,
        temporal=2,
        image=Budget(64, 64 * 64),
        video=Budget(64, 64 * 64 * 8),
        fewest_frames=2,
        most_frames=16,
    )
