"""Reward processes get the driver's environment without its keys."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anygauge_tests.scoring import group, rewards, scorer

MODULE = """
import os

def has(response):
    return float(response in os.environ)
"""
KEYS = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "DB_PASSWORD",
    "openai_api_key",
    "SSH_AUTH_SOCK",
)
PLAIN = ("TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY")
"""Variables whose names only resemble those of keys."""


@pytest.mark.parametrize("pass_env", [[], ["HF_TOKEN"]])
def test_a_reward_gets_the_keys_that_are_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pass_env: list[str]
) -> None:
    (tmp_path / "curious.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in (*KEYS, *PLAIN):
        monkeypatch.setenv(name, "s3cret")
    with scorer({"function": "curious:has", "pass_env": pass_env}) as made:
        scored = made.score([group(*KEYS, *PLAIN, "PATH", label="")])
    sys.modules.pop("curious", None)
    assert rewards(scored) == [*(float(name in pass_env) for name in KEYS), *[1.0] * len(PLAIN), 1.0]
