"""How long a prompt may be is known before a process starts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anygauge.config import Config
from anygauge.data.jsonl import JsonlSource
from anygauge.plugins import Plugins
from anygauge.testing.tiny import tiny_tokenizer
from anygauge.trainer.run import load_eval_prompts, prompt_room
from anygauge_hooks.errors import DataError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Return a config of a model with 16 positions, and a prompt of 9 tokens to evaluate."""
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 16}')
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "1111+111=", "label": "1222"}) + "\n")
    return Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": tmp_path},
            "data": {"train": ["t.jsonl"]},
            "reward": {"function": "exact_match"},
            "eval": {"data": [tmp_path / "eval.jsonl"], "max_new_tokens": 8},
        }
    )


@pytest.mark.parametrize(
    ("hf", "room"), [({"max_position_embeddings": 16}, 12), ({"max_position_embeddings": 3}, 0), ({}, None)]
)
def test_a_response_leaves_room(config: Config, hf: dict[str, Any], room: int | None) -> None:
    (config.model.path / "config.json").write_text(json.dumps(hf))
    assert prompt_room(config, 4) == room


def test_evaluation_has_its_own_response_length(config: Config, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, alphabet="0123456789+=")
    plugins = cast(Plugins, SimpleNamespace(get=lambda hook, name: SimpleNamespace(fn=JsonlSource)))
    with pytest.raises(DataError, match=r"eval\.jsonl:1: field 'prompt' has 9 tokens; .* room for 8"):
        load_eval_prompts(config, plugins, tokenizer)
    shorter = config.model_copy(update={"eval": config.eval.model_copy(update={"max_new_tokens": 7})})
    assert len(load_eval_prompts(shorter, plugins, tokenizer)) == 1
