"""Secrets that are literal values of a config, in what is written down of it."""

from __future__ import annotations

import logging
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from anygauge.config import Config, dump_config, write_resolved
from anygauge.config.secret_values import MASK, mask_rule, masked, secret_values
from anygauge.observability.logs import driver_log
from anygauge.observability.trackio import make_trackio_tracker
from anygauge.observability.wandb import make_wandb_tracker
from anygauge.plugins import load_plugins
from anygauge.run_directory.resume import is_changed
from anygauge_hooks.types import RunInfo

HIDDEN = "sk-1234'56"
OPTIONS: dict[str, Any] = {
    "headers": {
        "Authorization": f"Bearer {HIDDEN}",
        "X-Team": "secret-team",
        "Accept": "Bearer $SCORER_TOKEN",
    },
    "url": "http://me:pass-word@scorer/score",
    "api_key": "key-value",
    "clients": [{"password": "hunter22", "name": "kept"}],
    "attempts": 3,
}
KEPT = {
    **dict.fromkeys(("input_key", "label_key", "eos_token", "pad-token", "tokenizer", "max_tokens"), "kept"),
    **{"key": "score", "api_key_env": "SCORER_KEY", "access_token": "${TOKEN}", "secret": "", "token": 7},
}


def config(options: dict[str, Any]) -> Config:
    reward = {"function": "remote", "options": options}
    tree = {"run": {"name": "r"}, "model": "m", "data": {"train": ["d.jsonl"]}, "reward": reward}
    return Config.model_validate(tree)


def test_secrets_are_known_by_the_names_of_their_keys() -> None:
    found = ("Bearer sk-1234'56", "secret-team", "pass-word", "key-value", "hunter22")
    assert secret_values(config(OPTIONS)) == found
    assert masked(KEPT) == KEPT
    for name in ("X-API-Key", "admin_api_key", "hf_token", "token", "client_secret", "credentials", "Cookie"):
        assert masked({name: "value", "deep": [{name: {"inner": "value"}}]}) == {
            name: MASK,
            "deep": [{name: {"inner": MASK}}],
        }


def test_the_config_of_a_run_has_masks_and_says_so_where_it_is_used_again(tmp_path: Path) -> None:
    write_resolved(config(OPTIONS), tmp_path / "config.toml")
    text = (tmp_path / "config.toml").read_text()
    assert not [each for each in secret_values(config(OPTIONS)) if each in text]
    written = tomllib.loads(text)
    assert written["reward"]["options"]["headers"]["Accept"] == "Bearer $SCORER_TOKEN"
    assert written["reward"]["options"]["url"] == f"http://me:{MASK}@scorer/score"
    assert HIDDEN in dump_config(config(OPTIONS))
    problems = list(mask_rule(config(written["reward"]["options"]), ()))
    assert {problem.path.rpartition(".")[2] for problem in problems} == {
        *("Authorization", "X-Team", "url", "api_key")
    }
    assert not list(mask_rule(config(OPTIONS), ()))


def test_traced_hook_calls_have_no_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYGAUGE_TRACE_HOOKS", "1")
    traced = config(OPTIONS)
    rollout = traced.rollout.model_copy(update={"admin_api_key": "admin-value"})
    traced = traced.model_copy(update={"rollout": rollout})
    plugins = load_plugins(only=["cpu"])
    run = RunInfo(name="r", directory="/r", backend="cpu", total_steps=1, config=traced)
    plugins.notify("before_train", run=run)
    plugins.notify("after_train", run=run)  # or the display would follow a run of the next test
    plugins.collect("check_config", config=traced, backend=plugins.get("register_backends", "cpu"))
    text = capfd.readouterr().err
    assert f"admin_api_key='{MASK}'" in text
    assert "Bearer $SCORER_TOKEN" in text
    assert not [each for each in secret_values(traced) if each in text]


def test_another_secret_makes_no_other_run(tmp_path: Path) -> None:
    write_resolved(config(OPTIONS), tmp_path / "config.toml")
    assert not is_changed(tmp_path / "config.toml", config(OPTIONS))
    assert not is_changed(tmp_path / "config.toml", config({**OPTIONS, "api_key": "another"}))
    assert is_changed(tmp_path / "config.toml", config({**OPTIONS, "attempts": 4}))


def test_a_config_of_an_earlier_version_has_its_secrets(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump_config(config(OPTIONS)))
    assert not is_changed(tmp_path / "config.toml", config(OPTIONS))


@pytest.mark.parametrize(("name", "make"), [("wandb", make_wandb_tracker), ("trackio", make_trackio_tracker)])
def test_trackers_upload_no_secret(
    name: str, make: Callable[[RunInfo], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Mock()
    monkeypatch.setitem(sys.modules, name, client)
    monkeypatch.setenv("WANDB_MODE", "offline")
    make(RunInfo(name="r", directory=str(tmp_path), backend="cpu", total_steps=1, config=config(OPTIONS)))
    uploaded = repr(client.init.call_args)
    assert "Bearer $SCORER_TOKEN" in uploaded
    assert not [each for each in secret_values(config(OPTIONS)) if each in uploaded]


@pytest.mark.parametrize(
    "argument",
    [
        "--reward.options.headers.Authorization=Bearer sk-1234'56",
        """--reward.options.headers={Authorization = "Bearer sk-1234'56", x = "\\u006b"}""",
    ],
)
def test_the_log_has_no_secret(argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["anygauge", "train", argument])
    secrets = secret_values(config({**OPTIONS, "secret": "äöü\n"}))
    with driver_log(tmp_path, backend="cpu", secrets=secrets) as path:
        logging.getLogger("anygauge.rollout").warning("refused: %r", {"key": HIDDEN, "other": "äöü\n"})
    text = path.read_text()
    assert "anygauge train --reward.options.headers" in text.replace("'", "")
    assert not [each for each in ("1234", "äöü", "key-value") if each in text]
    assert text.count(MASK) == 3
