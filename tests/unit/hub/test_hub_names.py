"""Which strings are names."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.hub.names import data_name, did_you_mean, model_name


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None),
        ("o/n_1.x", "o/n_1.x", None),
        ("Qwen/Qwen3-0.6B@refs/pr/3", "Qwen/Qwen3-0.6B", "refs/pr/3"),
        ("Qwen/Qwen3-0.6B@main", "Qwen/Qwen3-0.6B", "main"),
    ],
)
def test_a_model_name(text: str, repository: str, revision: str | None) -> None:
    name = model_name("model.path", Path(text))
    assert name is not None
    assert (name.repository, name.revision) == (repository, revision)
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "/models/Qwen3",
        "../models/Qwen3",
        "../Qwen3",
        "Qwen3",
        "a/b/c",
        ".cache/model",
        "~/model",
        "a--b/c",
        "a/b..c",
        "a/b.",
        "o/" + "n" * 95,
        "o/na me",
        "o/näme",
    ],
)
def test_a_path_that_is_no_name(text: str) -> None:
    assert model_name("model.path", Path(text)) is None


def test_what_exists_here_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_name("model.path", Path("Qwen/Qwen3-0.6B")) is not None
    (tmp_path / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    assert model_name("model.path", Path("Qwen/Qwen3-0.6B")) is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hf://datasets/o/n/f.jsonl", ("o/n", None, "f.jsonl", "")),
        ("hf://datasets/o/n/a/b.parquet@[1:2]", ("o/n", None, "a/b.parquet", "@[1:2]")),
        ("hf://datasets/o/n@v1/a/b.parquet@[-2:]", ("o/n", "v1", "a/b.parquet", "@[-2:]")),
        ("hf://datasets/o/n/a@b.jsonl", ("o/n", None, "a@b.jsonl", "")),
    ],
)
def test_a_data_name(text: str, parts: tuple[str, str | None, str, str]) -> None:
    name = data_name("data.train[0]", text)
    assert name is not None
    assert (name.repository, name.revision, name.file, name.rows) == parts
    assert str(name) == text


@pytest.mark.parametrize(
    "text", ["train.jsonl", "o/n/train.jsonl", "hf://datasets/o/n", "hf://o/n/f.jsonl", "hf://datasets/o/n/"]
)
def test_a_data_path_that_is_no_name(text: str) -> None:
    assert data_name("data.train[0]", text) is None


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("models/qwen", "did you mean models/qwen3?"),
        ("models/none", "did you mean models/llama or models/qwen3?"),
        ("model/qwen3", "did you mean models/qwen3?"),
        ("other/runs", "did you mean runs?"),
        ("model/other", None),
        ("Qwen/Qwen3-0.6B", None),
    ],
)
def test_a_name_that_may_have_been_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, meant: str | None
) -> None:
    for folder in ("models/qwen3", "models/llama", "runs"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    name = model_name("model.path", Path(text))
    assert name is not None
    start = f"it is not a directory in {tmp_path}"
    assert name.local_clause() == (start if meant is None else f"{start}; {meant}")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("runs/arithmetic-inputs/modle", "runs/arithmetic-inputs/model"),
        ("runs/arithmetic-input/model", "runs/arithmetic-inputs/model"),
        ("run/arithmetic-input/modle", "runs/arithmetic-inputs/model"),
        ("runs/arithmetic-inputs/hf", "runs/arithmetic-inputs/checkpoints or runs/arithmetic-inputs/model"),
        ("elsewhere/below/runs", "runs"),
        ("rusn", "runs"),
        ("runs/other-thing/model", None),
        ("nowhere", None),
    ],
)
def test_each_part_of_a_path_may_be_misspelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, meant: str | None
) -> None:
    for folder in ("runs/arithmetic-inputs/model", "runs/arithmetic-inputs/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "runs/modle").touch()  # a file is not meant
    monkeypatch.chdir(tmp_path)
    assert did_you_mean(Path(text)) == ("" if meant is None else f"; did you mean {meant}?")
    if meant and text.startswith("run"):
        absolute = did_you_mean(tmp_path / text)
        assert (
            absolute
            == "; did you mean " + " or ".join(f"{tmp_path}/{each}" for each in meant.split(" or ")) + "?"
        )


def test_data_on_a_hub_are_no_path() -> None:
    name = data_name("data.train[0]", "hf://datasets/openai/gsm8k/a.parquet")
    assert name is not None
    assert name.local_clause() == ""
