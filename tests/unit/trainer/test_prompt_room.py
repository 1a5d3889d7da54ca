"""How long a prompt may be is known before a process starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.config.schema import Rollout
from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_tokenizer
from anygauge.trainer.inputs import longest_context, prompt_room, read_eval_sets, stop_tokens
from anygauge_hooks.errors import DataError


@pytest.fixture(params=["alone", "inside another"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Return a config of a text model with 16 positions, and a prompt of 9 tokens to evaluate."""
    text = {"max_position_embeddings": 16}
    hf = {
        "architectures": ["Qwen3ForCausalLM"],
        **(text if request.param == "alone" else {"text_config": text}),
    }
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "1111+111=", "label": "1222"}) + "\n")
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": tmp_path},
            "data": {"train": ["t.jsonl"]},
            "reward": {"function": "exact_match"},
            "eval": {"data": [str(tmp_path / "eval.jsonl")], "max_new_tokens": 8},
        }
    )


@pytest.mark.parametrize(
    ("context", "task", "room"), [(16, "rl", 12), (3, "rl", 0), (None, "rl", None), (16, "sft", 16)]
)
def test_a_response_leaves_room(context: int | None, task: str, room: int | None) -> None:
    assert prompt_room(context, task, 4) == room


@pytest.mark.parametrize(
    ("hf", "rollout", "longest"),
    [
        ({"max_position_embeddings": 1024}, {}, 1024),
        ({}, {}, None),
        ({"max_position_embeddings": 1024}, {"engine": "sglang"}, 1018),
        ({"max_position_embeddings": 1024}, {"engine": "sglang", "sglang": {"context-length": 512}}, 506),
        ({}, {"engine": "sglang"}, None),
    ],
)
def test_a_server_may_take_less_than_its_model(
    config: Config, hf: dict[str, Any], rollout: dict[str, Any], longest: int | None
) -> None:
    """SGLang refuses as a prompt what leaves less than six tokens of its context: so a response cut there."""
    served = config.model_copy(update={"rollout": Rollout.model_validate(rollout)})
    assert longest_context(served, load_plugins(), hf) == longest


def test_evaluation_has_its_own_response_length(config: Config, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, alphabet="0123456789+=")
    plugins = load_plugins(only=["cpu", "models"])
    with pytest.raises(DataError, match=r"eval\.jsonl:1: field 'prompt' has 9 tokens; .* room for 8"):
        read_eval_sets(config, plugins, tokenizer)
    shorter = config.model_copy(update={"eval": config.eval.model_copy(update={"max_new_tokens": 7})})
    (eval_set,) = read_eval_sets(shorter, plugins, tokenizer)
    assert len(eval_set.prompts) == 1


@pytest.mark.parametrize(
    ("generation", "of_config", "expected"),
    [
        (None, None, ["<eos>"]),
        (None, [5, 1], ["<eos>", "5", "1"]),
        ({"eos_token_id": 6}, [5, 1], ["<eos>", "6"]),
        ({"eos_token_id": [1, 6, 7]}, None, ["<eos>", "1", "6", "7"]),
        ({}, [5], ["<eos>"]),
    ],
)
def test_stop_tokens_are_those_of_tokenizer_and_model(
    tmp_path: Path, generation: dict[str, Any] | None, of_config: list[int] | None, expected: list[str]
) -> None:
    tokenizer = tiny_tokenizer(tmp_path, alphabet="0123456789")
    hf = {} if of_config is None else {"eos_token_id": of_config}
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_tokens(tmp_path, {"text_config": hf}, tokenizer) == expected
