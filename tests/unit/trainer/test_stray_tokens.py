"""Engines that return tokens which the model does not have, through a whole run's own objects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.runtime.event_loop import EventLoop
from anygauge.serving.generation_client import GenerationClient
from anygauge.testing.tiny import tiny_tokenizer
from anygauge.trainer.generation import open_maker
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Prompt, SamplingParams
from anygauge_tests.scripted_engine import ScriptedEngine


@pytest.mark.parametrize("token", [19, 20])
def test_a_token_beyond_the_models_vocabulary_is_refused(
    tmp_path: Path, plugins: Plugins, token: int
) -> None:
    tiny_tokenizer(tmp_path, alphabet="0123456789")  # the model's own vocabulary is padded
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 20}))
    config = Config.model_validate(
        {"run": {"name": "x"}, "model": {"path": str(tmp_path)}, "data": {"train": ["t.jsonl"]}}
    )
    prompts = [Prompt(index=0, tokens=(1,), text="1")]
    with EventLoop() as loop:
        client = GenerationClient(
            ScriptedEngine(lambda request: [token]),
            loop,
            lambda work, what: loop.run(work, timeout_s=20, what=what),
        )
        maker, params = open_maker(config, plugins, client), SamplingParams(max_new_tokens=4)
        if token < 20:
            [group] = maker.sample(prompts, params, [[0]])
            (sample,) = group.samples
            assert sample.response_tokens == (token,)
        else:
            with pytest.raises(RolloutError, match="token 20 as number 0 of 1"):
                maker.sample(prompts, params, [[0]])
