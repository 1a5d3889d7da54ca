"""Names in a config that is loaded, checked and run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import main
from anygauge.config import LoadedConfig, dump_config, load_config
from anygauge.plugins import load_plugins
from anygauge_hooks.errors import ConfigError, HubError

COMMIT = "5f3c" * 10
Load = Callable[..., LoadedConfig]
CONFIG = """\
model = "{model}"
[run]
name = "named"
[data]
train = ["hf://datasets/Tiny/sums/main/train.jsonl"]
[reward]
function = "exact_match"
[hub]
endpoint = "{url}"
cache = "cache"
[placement]
launcher = "local"
"""


@pytest.fixture
def load(hugging_face: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a loader of a config of names: the model, overrides, and whether it may download."""
    monkeypatch.chdir(tmp_path)

    def load(*overrides: str, model: str = "Tiny/Qwen3", download: bool = True) -> LoadedConfig:
        Path("c.toml").write_text(CONFIG.format(model=model, url=hugging_face.url))
        return load_config(
            "c.toml",
            overrides,
            backend="cpu",
            plugins=load_plugins(only=["cpu", "models"]),
            download=download,
        )

    return load


def test_a_loaded_config_keeps_its_names_pinned(load: Load, tmp_path: Path) -> None:
    config = load().config
    assert (str(config.model.path), config.model.revision) == ("Tiny/Qwen3", COMMIT)
    assert config.data.train[0].path == f"hf://datasets/Tiny/sums@{COMMIT}/main/train.jsonl"
    Path("again.toml").write_text(dump_config(config))
    again = load_config("again.toml", backend="cpu", plugins=load_plugins(only=["cpu", "models"]))
    assert again.config == config


def test_nothing_is_downloaded_for_a_config_with_problems(load: Load, hugging_face: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer_steps"):
        load("train.optimizer_steps=7")
    assert hugging_face.asked == []


def test_a_dry_run_downloads_nothing_and_says_what_it_did_not_check(
    load: Load, hugging_face: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load(download=False).config.model.revision is None
    assert main(["train", "c.toml", "--backend", "cpu", "--dry-run"]) == 0
    output = capsys.readouterr()
    assert "not checked: model.path = 'Tiny/Qwen3' is not in the cache" in output.err
    assert "not checked: data.train[0] = " in output.err
    assert tomllib.loads(output.out)["model"]["path"] == "Tiny/Qwen3"
    assert hugging_face.asked == []
    load()
    assert main(["train", "c.toml", "--backend", "cpu", "--dry-run"]) == 0
    output = capsys.readouterr()
    assert "not checked" not in output.err
    assert tomllib.loads(output.out)["model"]["revision"] == COMMIT
    assert main(["train", "c.toml", "--backend", "cpu", "--dry-run", "--data.input_key", "question"]) == 1
    assert "train.jsonl:1: field 'question' is missing" in capsys.readouterr().err


def test_what_was_downloaded_is_checked(load: Load, repositories: dict[str, Any]) -> None:
    files = repositories["Tiny/Qwen3"].files
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | {"architectures": ["Nope"]}).encode()
    for attempt in ("downloaded", "cached"):
        with pytest.raises(ConfigError, match=r"model\.path") as caught:
            load(download=attempt == "downloaded")
        assert "Nope" in str(caught.value)


def test_an_unknown_name_is_an_error_of_the_hub(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HubError, match="has no such model"):
        load(model="Tiny/nothing")
    assert main(["train", "c.toml", "--backend", "cpu"]) == 1
    assert "[AG503]" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_by_name(load: Load, hugging_face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    hugging_face.asked.clear()
    sizes = {
        "run.steps": 1,
        "run.report": "false",
        "rollout.prompts_per_step": 1,
        "rollout.samples_per_prompt": 2,
        "rollout.max_new_tokens": 2,
        "save.every": "none",
    }
    options = [f"--{key}={value}" for key, value in sizes.items()]
    assert main(["train", "c.toml", "--backend", "cpu", *options]) == 0
    run = tomllib.loads(Path("runs/named/config.toml").read_text())
    assert run["model"]["path"] == "Tiny/Qwen3"
    assert run["model"]["revision"] == COMMIT
    assert Path("runs/named/hf/tokenizer.json").is_file()
    assert hugging_face.asked == []
