"""Which rows of a file a path names: slices as Python's, and names of data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.config.data_files import dataset_name, split_slice
from anygauge.config.rules.file import _data_file
from anygauge.config.schema import Config, Data, DataFile
from anygauge.data.lines import read_slice
from anygauge.data.source import FileSource
from anygauge_hooks.errors import ConfigError, DataError

ROWS = 9
BOUNDS = st.none() | st.integers(-ROWS - 3, ROWS + 3)


def written(bound: int | None) -> str:
    return "" if bound is None else str(bound)


@pytest.fixture(scope="session")
def nine_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file whose rows are the numbers from 0, with blank lines between them."""
    path = tmp_path_factory.mktemp("slices") / "train.jsonl"
    path.write_text("".join(f"{number}\n{' ' * (number % 2)}\n" for number in range(ROWS)))
    return path


@given(start=BOUNDS, stop=BOUNDS)
def test_a_slice_takes_the_rows_that_pythons_does(
    nine_rows: Path, start: int | None, stop: int | None
) -> None:
    path, rows = split_slice(f"{nine_rows}@[{written(start)}:{written(stop)}]")
    assert path == str(nine_rows)
    assert [int(line.content) for line in read_slice(Path(path), rows)] == list(range(ROWS))[start:stop]


def test_lines_have_their_numbers_and_offsets(nine_rows: Path) -> None:
    content = nine_rows.read_bytes()
    for line in read_slice(nine_rows, slice(3, None)):
        assert content[line.offset :].startswith(line.content)
        assert content.splitlines()[line.number - 1] == line.content.strip()


@pytest.mark.parametrize("path", ["a.jsonl", "a@b/c.jsonl", "a@[1:2]/c.jsonl", "hf://datasets/a/b/c.jsonl"])
def test_a_path_without_a_slice(path: str) -> None:
    assert split_slice(path) == (path, slice(None))


def test_spaces_and_signs() -> None:
    assert split_slice("hf://datasets/a/b/c.parquet@[ -100 : ]") == (
        "hf://datasets/a/b/c.parquet",
        slice(-100, None),
    )


@pytest.mark.parametrize(
    "text",
    ["[]", "[1]", "[1:2:3]", "[a:b]", "[1:", "[:2", "[1.5:]", "[1:2]x", "[1:2]@[3:4]", "[--1:]", "[1e3:]"],
)
def test_what_is_no_slice(text: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="is not a slice: write @"):
        split_slice(f"a.jsonl@{text}")
    with pytest.raises(ConfigError, match=r"Data file a\.jsonl@.* is not a slice"):
        FileSource(Data(train=(DataFile(path=f"a.jsonl@{text}"),)), tokenizer)


@pytest.mark.parametrize(
    ("path", "meant"),
    [("x.jsonl[:16]", "x.jsonl@[:16]"), ("x.jsonl[ -4 : ]", "x.jsonl@[ -4 : ]"), ("x.jsonl", None)],
)
def test_a_slice_without_its_sign(path: str, meant: str | None) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "r", "task": "sft"},
            "model": "m",
            "data": {"train": [path]},
        }
    )
    (problem,) = _data_file("data.train[0]", config.data.train[0])
    assert problem.hint.startswith(f"no such file; did you mean {meant}?" if meant else "no such file")
    assert ("did you mean" in problem.hint) is bool(meant)


def test_a_slice_without_rows(nine_rows: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"has no rows in @\[20:\]: it has 9, numbered from 0 to 8") as caught:
        FileSource(Data(train=(DataFile(path=f"{nine_rows}@[20:]"),)), tokenizer)
    assert "@[:9] takes all of them, @[8:] the last" in str(caught.value)


def test_a_slice_of_a_file_without_rows(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("\n")
    with pytest.raises(DataError, match=r"train\.jsonl has no rows\.\n  Write one JSON object per line"):
        FileSource(Data(train=(DataFile(path=f"{path}@[2:]"),)), tokenizer)


def test_rows_outside_of_a_slice_may_be_wrong(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{\n{"prompt": "a", "label": ""}\n{"prompt": "b", "label": ""}\n[]\n')
    source = FileSource(Data(train=(DataFile(path=f"{path}@[1:-1]"),)), tokenizer)
    assert [(prompt.text, prompt.source) for prompt in source.all()] == [
        ("a", f"{path}:2"),
        ("b", f"{path}:3"),
    ]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("data/train.jsonl", "train"),
        ("train.jsonl@[:-5]", "train"),
        ("hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet", "train-00000-of-00001"),
        ("my data (new).jsonl", "my-data-new-"),
        ("a.b.jsonl", "a.b"),
        ("..", "data"),
    ],
)
def test_a_data_set_is_named_after_its_file(path: str, name: str) -> None:
    assert dataset_name(DataFile(path=path)) == name
    assert dataset_name(DataFile(path=path, name="own")) == "own"
