"""Hostile files and arguments end in errors with a code: endless nesting, impossible paths."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import main
from anygauge.config.model_files import missing_parts, read_model
from anygauge.config.validate import keys
from anygauge.data.fields import _parse_object
from anygauge.data.problems import BadRowError
from anygauge.disk import parse_toml, read_json
from anygauge.observability.report.metrics_file import read_metrics
from anygauge.observability.report.run_record import read_record
from anygauge.plugins import load_plugins
from anygauge.strict_json import MAX_DEPTH, parse_json

DEPTHS = (MAX_DEPTH + 1, 300, 600, 900, 100_000)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def table(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


# -------------------------------------------------------------------------
# Nesting
# -------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_what_is_nested_without_end_is_no_file_of_ours(depth: int, tmp_path: Path) -> None:
    for text in (nested(depth), table(depth), "[" * depth):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=r"nested too deeply|Expecting value"):
            read_json(tmp_path / "run.json")
        assert read_record(tmp_path) is None
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_toml(f"a = {nested(depth)}")
    (tmp_path / "metrics.jsonl").write_text(f'{{"train/step": 1, "a": {nested(depth)}}}\n')
    assert not read_metrics(tmp_path / "metrics.jsonl").series


def test_what_files_hold_is_read() -> None:
    assert parse_json(nested(MAX_DEPTH)) != []
    assert parse_json(b'{"a": [1, {"b": null}], "c": "[["}') == {"a": [1, {"b": None}], "c": "[["}
    assert parse_json("7") == 7
    assert parse_toml("a.b = 1") == {"a": {"b": 1}}
    with pytest.raises(ValueError, match="Extra data"):
        parse_json("{}{}")


@pytest.mark.parametrize("depth", [64, 300, 600, 900, 100_000])
@pytest.mark.parametrize("make", [nested, table])
def test_a_row_that_is_nested_without_end_is_a_bad_row(depth: int, make: Callable[[int], str]) -> None:
    with pytest.raises(BadRowError, match="nested too deeply"):
        _parse_object(b'{"prompt": "a", "metadata": %s}' % make(depth).encode())


def test_the_deepest_row_reaches_the_process_that_scores() -> None:
    row: Any = _parse_object(b'{"prompt": "a", "metadata": %s}' % nested(63).encode())
    assert pickle.loads(pickle.dumps(row)) == json.loads(json.dumps(row)) == row


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"]
)
def test_a_model_that_is_nested_without_end_has_a_problem(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    text = nested(100_000).encode()
    header = len(text).to_bytes(8, "little") if name.endswith("safetensors") else b""
    (tmp_path / name).write_bytes(header + text)
    assert [*missing_parts(tmp_path), *read_model(tmp_path, load_plugins())[1]]


# -------------------------------------------------------------------------
# The command line
# -------------------------------------------------------------------------

LONG, LONGER = "a" * 5000, "a/" * 5000


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.toml"
    path.write_text('[run]\nname = "a"\n[model]\npath = "none"\n[data]\ntrain = ["none.jsonl"]\n')
    return str(path)


def ended(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what a command that fails writes."""
    with suppress(SystemExit):  # of argparse
        assert main(list(arguments)) == 1
    return capsys.readouterr().err


PATHS = (
    *("run.directory", "data.cache", "media.root", "model.path", "reference.path", "teacher.path"),
    *("critic.path", "weight_sync.directory", "hub.cache", "debug.replay_rollouts", "debug.replay_batches"),
)


@pytest.mark.parametrize("key", PATHS)
@pytest.mark.parametrize("path", [LONG, LONGER], ids=["long", "longer"])
def test_a_key_with_an_impossible_path_is_named(
    key: str, path: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ended(capsys, "train", config, "--dry-run", f"--{key}={path}")
    assert f"{key}: found 'aa" in text or f"{key}: found 'a/a" in text
    assert "bytes; choose a shorter one" in text
    assert "[AG201]" in text


@pytest.mark.parametrize("path", [LONG, LONGER], ids=["long", "longer"])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["train", "{path}"], "[AG201]"),
        (["train", "{config}", "--data.train={path}"], "[AG201]"),
        (["report", "{path}"], "argument RUN_DIR: the path has"),
        (["eval", "{config}", "--checkpoint", "{path}"], "argument --checkpoint: the path has"),
        (["convert", "--to-hf", "{path}", "out"], "argument --to-hf: the path has"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_an_argument_with_an_impossible_path_is_named(
    command: list[str], code: str, path: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ended(capsys, *(part.format(path=path, config=config) for part in command))
    assert code in text
    assert "Traceback" not in text


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 3_000])
def test_a_config_that_is_nested_without_end_is_refused(
    depth: int, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in (f"--reward.options={{x = {nested(depth)}}}", f"--reward.options{'.a' * depth}=1"):
        assert "[AG201]" in ended(capsys, "train", config, "--dry-run", value)
    Path(config).write_text(f"[reward.options{'.a' * depth}]\n")
    assert "nested too deeply" in ended(capsys, "train", config, "--dry-run")


def test_every_path_of_the_schema_is_in_the_list() -> None:
    paths = {path for path, field in keys() if "Path" in str(field.annotation)}
    assert paths == set(PATHS)
