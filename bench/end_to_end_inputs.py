"""Data, rewards and models of ``bench/end_to_end.py``, which its runs import: those of older trees too."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["FIRST_TOKEN", "even_characters", "last_number", "make_inputs", "make_model", "note_first"]

MAKE_INPUTS = Path(__file__).parents[1] / "examples" / "arithmetic" / "make_inputs.py"
HELD_OUT = 512
FIRST_TOKEN = "END_TO_END_FIRST_TOKEN"
"""Environment variable: file that gets the time of a run's first sample, in seconds since 1970."""
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL_SIZES = {**SMALL, "head_dim": 16, "intermediate_size": 128, "initializer_range": 0.2}
GPU = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8}
GPU_SIZES = {**GPU, "head_dim": 64, "intermediate_size": 3072, "initializer_range": 0.02}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}


def last_number(response: str, label: str) -> float:
    """Return 1 if the last number of a response is the label."""
    numbers = re.findall(r"-?\d+", response.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == str(label).strip())


def even_characters(response: str) -> float:
    """Return the share of characters with an even code: a reward that differs among random responses."""
    return sum(ord(character) % 2 == 0 for character in response) / max(1, len(response))


def note_first(sample: Any, prompt: Any) -> None:
    """Write when the first sample of a run was there; its response is one token."""
    path = Path(os.environ[FIRST_TOKEN])
    if not path.exists():
        path.write_text(str(time.time()), encoding="utf-8")


def questions(count: int) -> list[dict[str, str]]:
    """Return sums and differences of two numbers below 200 in words, no pair twice."""
    draw = random.Random(0)
    pairs = draw.sample([(a, b) for a in range(10, 200) for b in range(10, 200)], count)
    return [_question(draw.randrange(3), a, b) for a, b in pairs]


def _question(kind: int, a: int, b: int) -> dict[str, str]:
    more, less = max(a, b), min(a, b)
    text, answer = [
        (f"What is {a} + {b}?", a + b),
        (f"Ann had {a} stamps and was given {b}. How many stamps does she have?", a + b),
        (f"What is {more} - {less}?", more - less),
    ][kind]
    return {"question": text, "answer": str(answer)}


def make_inputs(directory: Path, task: str, model: Path | None) -> dict[str, Any]:
    """Write what the runs of a task read, and return the keys that name it.

    :param task: ``sums`` and ``demo`` have data of their own; the keys of any other name theirs.
    :param model: ``None`` for the model of the demo.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if model is None or task == "demo":
        made = directory / "demo"
        subprocess.run([sys.executable, str(MAKE_INPUTS), "--out", str(made)], check=True)
        model = model or made / "model"
    if task == "sums":
        made = write_questions(directory)
    keys = {} if task not in ("sums", "demo") else _data_keys(made)
    return {"model.path": str(model), **keys}


def _data_keys(directory: Path) -> dict[str, Any]:
    """Return the keys of data; one held-out prompt alone comes first."""
    held_out = [str(directory / "eval.jsonl")]
    sets = {f"eval.datasets.{name}.files": held_out for name in ("first", "eval")}
    return {"data.train": [str(directory / "train.jsonl")], **sets}


def write_questions(directory: Path) -> Path:
    """Write ``eval.jsonl`` and ``train.jsonl`` and return their directory."""
    rows = questions(6000 + HELD_OUT)
    for name, part in (("eval", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        text = "".join(f"{json.dumps(row)}\n" for row in part)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return directory


def make_model(directory: Path, kind: str, like: Path, *, is_small: bool) -> Path:
    """Write a random Qwen3 with the tokenizer of another model, and return its directory.

    :param kind: ``dense``, or ``experts`` for a mixture.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from anygauge_cpu.env import declare_missing_operators

    declare_missing_operators()  # transformers imports torchvision with some models
    tokenizer = AutoTokenizer.from_pretrained(like)
    sizes = SMALL_SIZES if is_small else GPU_SIZES
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(_config(kind, sizes, tokenizer))
    ends: Mapping[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    made.generation_config = GenerationConfig(do_sample=True, **ends)
    made.to(torch.float32 if is_small else torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _config(kind: str, sizes: Mapping[str, Any], tokenizer: Any) -> Any:
    from transformers import AutoConfig

    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    common = {**sizes, **ends, "vocab_size": len(tokenizer), "bos_token_id": None}
    if kind == "dense":
        return AutoConfig.for_model("qwen3", **common, tie_word_embeddings=True)
    width = sizes["intermediate_size"] // 4
    # SGLang's Qwen3-MoE never ties its output layer; no published one does
    experts = {**EXPERTS, "moe_intermediate_size": width, "tie_word_embeddings": False}
    return AutoConfig.for_model("qwen3_moe", **common, **experts)
