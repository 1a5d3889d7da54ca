"""CSV files: the rows of JSONL ones, or an error that names file and row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.schema import Data, DataFile
from anygauge.data.source import FileSource
from anygauge_hooks.errors import DataError

ROWS = [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(20)]


def open_source(path: Path | str, tokenizer: Any, **settings: Any) -> FileSource:
    return FileSource(Data(train=(DataFile(path=str(path)),), **settings), tokenizer, seed=1)


def write(path: Path, *lines: Any, encoding: str = "utf-8") -> Path:
    with path.open("w", encoding=encoding, newline="") as stream:
        csv.writer(stream).writerows(lines)
    return path


@pytest.mark.parametrize("rows", ["", "@[3:7]", "@[-14:9]", "@[:-14]"])
def test_rows_are_those_of_a_jsonl_file(tmp_path: Path, tokenizer: Any, rows: str) -> None:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write(tmp_path / "train.csv", ["prompt", "label"], *(row.values() for row in ROWS))
    one = open_source(f"{tmp_path}/train.csv{rows}", tokenizer, max_prompt_tokens=5)
    other = open_source(f"{tmp_path}/train.jsonl{rows}", tokenizer, max_prompt_tokens=5)
    assert one.num_dropped == other.num_dropped
    assert [(each.tokens, each.label) for each in one.all()] == [
        (each.tokens, each.label) for each in other.all()
    ]
    assert [each.tokens for each in one.next(30)] == [each.tokens for each in other.next(30)]


def test_quotes_commas_and_a_byte_order_mark(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.csv", ["prompt", "label"], ["1+1=", 'a "b", c\n\u00e9'], encoding="utf-8-sig")
    (prompt,) = open_source(path, tokenizer).all()
    assert prompt.label == 'a "b", c\n\u00e9'


def test_a_field_longer_than_the_limit_of_python(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "a.csv", ["prompt", "label"], ["1+1=", "x" * 200_000])
    (prompt,) = open_source(path, tokenizer).all()
    assert len(prompt.label) == 200_000


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"prompt,label\n1+1=,2\n1+1=,2,3\n", "line 3 or behind it: it has 3 cells, and the first row has 2"),
        (b"prompt,label\n1+1=\n", "line 2 or behind it: it has 1 cells, and the first row has 2"),
        (b"prompt,prompt\n", "has two columns 'prompt'"),
        (b"prompt,label\n1+1=,\xff\n", "codec can't decode byte 0xff"),
        (b'prompt,label\n1+1=,"2\n', "unexpected end of data"),
        (b"prompt,label\n", "has no rows"),
        (b"", "has no rows"),
        (b"question,answer\n1+1=,2\n", "row 1: field 'prompt' is missing"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, tokenizer: Any, content: bytes, problem: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError) as error:
        open_source(tmp_path / "a.csv", tokenizer)
    assert f"{tmp_path}/a.csv" in str(error.value)
    assert problem in str(error.value)
