"""Parquet files: the rows of JSONL ones, or an error that names file, column and row."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anygauge.config.schema import Data, DataFile
from anygauge.data.source import FileSource
from anygauge_hooks.errors import DataError

WriteTable = Callable[..., Path]
ROWS = 25


@pytest.fixture
def write_table(tmp_path: Path) -> WriteTable:
    """Return a function that writes columns to a Parquet file of small row groups."""

    def write(*, name: str = "train.parquet", **columns: Any) -> Path:
        path = tmp_path / name
        pq.write_table(pa.table(columns), path, row_group_size=7)
        return path

    return write


def open_source(path: Path | str, tokenizer: Any, **settings: Any) -> FileSource:
    return FileSource(Data(train=(DataFile(path=str(path)),), **settings), tokenizer, seed=1)


def columns(count: int) -> dict[str, list[Any]]:
    return {
        "prompt": [f"{number}+1=" for number in range(count)],
        "label": [str(number + 1) for number in range(count)],
        "level": [None if number % 3 else number for number in range(count)],
        "tags": [[{"name": "sum", "size": number}] for number in range(count)],
    }


def test_rows_are_those_of_a_jsonl_file(write_table: WriteTable, tmp_path: Path, tokenizer: Any) -> None:
    table = columns(ROWS)
    (tmp_path / "train.jsonl").write_text(
        "".join(
            json.dumps(dict(zip(table, row, strict=True))) + "\n" for row in zip(*table.values(), strict=True)
        )
    )
    parquet = open_source(write_table(**table), tokenizer, max_prompt_tokens=5)
    jsonl = open_source(tmp_path / "train.jsonl", tokenizer, max_prompt_tokens=5)
    assert parquet.num_dropped == jsonl.num_dropped == 15
    for one, other in ((parquet.all(), jsonl.all()), (parquet.next(35), jsonl.next(35))):
        assert [(p.text, p.label, p.metadata, p.tokens, p.dataset) for p in one] == [
            (p.text, p.label, p.metadata, p.tokens, p.dataset) for p in other
        ]


def test_a_place_is_file_and_row(write_table: WriteTable, tokenizer: Any) -> None:
    path = write_table(**columns(10))
    assert [prompt.source for prompt in open_source(f"{path}@[8:]", tokenizer).all()] == [
        f"{path}: row 9",
        f"{path}: row 10",
    ]


@pytest.fixture(scope="session")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet") / "train.parquet"
    pq.write_table(pa.table({"prompt": [str(number) for number in range(9)]}), path, row_group_size=4)
    return path


BOUNDS = st.none() | st.integers(-12, 12)


@settings(max_examples=40)
@given(start=BOUNDS, stop=BOUNDS)
def test_slices_are_pythons(numbers: Path, tokenizer: Any, start: int | None, stop: int | None) -> None:
    bounds = ["" if bound is None else str(bound) for bound in (start, stop)]
    path = f"{numbers}@[{':'.join(bounds)}]"
    expected = [str(number) for number in range(9)][start:stop]
    if expected:
        assert [p.text for p in open_source(path, tokenizer, label_key=None).all()] == expected
    else:
        with pytest.raises(DataError, match=r"has no rows in .*: it has 9, numbered from 0 to 8"):
            open_source(path, tokenizer, label_key=None)


def test_a_later_start_reads_the_kept_rows(
    write_table: WriteTable, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(**columns(10))
    expected = open_source(path, tokenizer, cache=tmp_path / "cache").all()
    monkeypatch.setattr(pq, "ParquetFile", None)
    assert open_source(path, tokenizer, cache=tmp_path / "cache").all() == expected
    (lines,) = (tmp_path / "cache/index").glob("*/lines.jsonl")
    monkeypatch.undo()
    lines.write_bytes(lines.read_bytes()[:-1])
    assert open_source(path, tokenizer, cache=tmp_path / "cache").all() == expected


def test_kept_rows_that_change_during_the_run(
    write_table: WriteTable, tokenizer: Any, tmp_path: Path
) -> None:
    source = open_source(write_table(**columns(3)), tokenizer, cache=tmp_path / "cache", shuffle=False)
    (lines,) = (tmp_path / "cache/index").glob("*/lines.jsonl")
    lines.write_bytes(lines.read_bytes().replace(b"1+1=", b"1+9="))
    source.next(1)
    with pytest.raises(
        DataError, match=r"train\.parquet: row 2: the row has changed .*\n.*Do not change .*index"
    ):
        source.next(1)
    lines.unlink()
    with pytest.raises(DataError, match=r"train\.parquet: row \d: .*No such file"):
        source.next(1)


@pytest.mark.parametrize("damage", ["truncated", "empty", "text", "pages"])
def test_a_file_that_is_none(write_table: WriteTable, tokenizer: Any, damage: str) -> None:
    path = write_table(**columns(ROWS))
    content = path.read_bytes()
    changed = {
        "truncated": content[:-50],
        "empty": b"",
        "text": b"prompt,label\n1+1=,2\n",
        "pages": content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :],
    }
    path.write_bytes(changed[damage])
    with pytest.raises(DataError, match=rf"Cannot read {path}.*\n  Is it a complete Parquet file"):
        open_source(path, tokenizer)


@pytest.mark.parametrize("name", ["missing.parquet", "folder.parquet"])
def test_a_file_that_cannot_be_read(tmp_path: Path, tokenizer: Any, name: str) -> None:
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(DataError, match=rf"{name}(: No such file| is a directory)"):
        open_source(tmp_path / name, tokenizer)


def test_no_rows(write_table: WriteTable, tokenizer: Any) -> None:
    path = write_table(prompt=pa.array([], pa.string()))
    with pytest.raises(DataError, match=r"train\.parquet has no rows\."):
        open_source(path, tokenizer)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([b"x"], "binary"),
        ([[b"x"]], "list<.*binary"),
        ([{"bytes": b"x", "path": ""}], "struct<.*binary"),
        ([Decimal("1.5")], "decimal128"),
    ],
)
def test_a_column_that_json_cannot_hold(
    write_table: WriteTable, tokenizer: Any, caplog: pytest.LogCaptureFixture, values: list[Any], kind: str
) -> None:
    path = write_table(prompt=["1+1="], label=["2"], image=values)
    (prompt,) = open_source(path, tokenizer).all()
    assert prompt.metadata == {}
    assert "columns that JSON cannot hold are left out: image" in caplog.text
    with pytest.raises(DataError, match=f"Column 'image' of .* is of the type {kind}.*, which JSON cannot"):
        open_source(path, tokenizer, label_key="image")


def test_with_a_metadata_key_no_other_column_is_read(
    write_table: WriteTable, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_table(prompt=["1+1="], label=["2"], image=[b"x"], extra=[{"level": 3, "name": None}])
    (prompt,) = open_source(path, tokenizer, metadata_key="extra").all()
    assert prompt.metadata == {"level": 3}
    assert not caplog.messages


def test_names_with_dots(write_table: WriteTable, tokenizer: Any) -> None:
    path = write_table(**{"a.b": ["1+1="], "a": [{"b": "x"}], "label": ["2"], "x": [{"y": 1}]})
    (prompt,) = open_source(path, tokenizer, input_key="a.b", metadata_key="x").all()
    assert (prompt.text, prompt.metadata) == ("1+1=", {"y": 1})


def test_bad_rows_are_named(write_table: WriteTable, tokenizer: Any) -> None:
    path = write_table(prompt=["1+1=", None, " ", "4"], label=["2", "3", "4", None], score=[0.5, 1, 2, 3])
    with pytest.raises(DataError) as error:
        open_source(path, tokenizer)
    for problem in (
        "row 2: field 'prompt' is null",
        "row 3: field 'prompt' is empty",
        "row 4: field 'label' is",
    ):
        assert f"{path}: {problem}" in str(error.value)


def test_a_missing_column(write_table: WriteTable, tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"row 1: field 'label' is missing \(the row has 'question', 'prompt'\)"
    ):
        open_source(write_table(question=["a"], prompt=["b"]), tokenizer)


def test_a_number_that_json_has_not(write_table: WriteTable, tokenizer: Any) -> None:
    path = write_table(prompt=["a", "b"], label=["", ""], score=pa.array([1.0, float("nan")]))
    with pytest.raises(DataError, match=r"row 2: is not JSON, which has no NaN"):
        open_source(path, tokenizer)


def test_text_that_is_none(write_table: WriteTable, tokenizer: Any) -> None:
    path = write_table(prompt=pa.array([b"a", b"\xff\xfe"]).view(pa.string()), label=["", ""])
    with pytest.raises(DataError, match=r"Cannot read .*train\.parquet.*'utf-8' codec can't decode"):
        open_source(path, tokenizer)


def test_columns_of_one_name(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), path)
    with pytest.raises(DataError, match=r"has two columns 'prompt'"):
        open_source(path, tokenizer)


def test_categories_and_large_text(write_table: WriteTable, tokenizer: Any) -> None:
    path = write_table(
        prompt=pa.array(["a", "b", "a"]).dictionary_encode(),
        label=pa.array(["x", "y", "z"], pa.large_string()),
    )
    assert [(p.text, p.label) for p in open_source(path, tokenizer).all()] == [
        ("a", "x"),
        ("b", "y"),
        ("a", "z"),
    ]


TOOLS = [
    [{"name": "weather", "parameters": {"city": {"type": "string"}}}],
    [{"name": "plot", "parameters": {"x": {"type": "number"}, "y": {"enum": [1, None]}}}],
    [{"name": "now", "parameters": {}}],
    None,
]


def tool_rows() -> list[dict[str, Any]]:
    return [
        {"prompt": [{"role": "user", "content": "Hi"}], "tools": tools, "extra": {"level": number}}
        for number, tools in enumerate(TOOLS)
    ]


@pytest.mark.parametrize(
    ("as_text", "metadata_key"),
    [((), None), ((), "extra"), (("tools",), None), (("tools", "extra", "prompt"), "extra")],
)
def test_tools_of_different_shapes_are_those_of_a_jsonl_file(
    tmp_path: Path,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    as_text: tuple[str, ...],
    metadata_key: Any,
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools | tojson }}{{ messages[0]['content'] }}")
    rows = tool_rows()
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [
        {key: json.dumps(value) if key in as_text else value for key, value in row.items()} for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(kept), tmp_path / "train.parquet")
    one, other = (
        open_source(
            tmp_path / name,
            tokenizer,
            tools_key="tools",
            metadata_key=metadata_key,
            label_key=None,
            apply_chat_template=True,
        ).all()
        for name in ("train.parquet", "train.jsonl")
    )
    assert [(p.text, p.metadata) for p in one] == [(p.text, p.metadata) for p in other]
    assert '"city": {"type": "string"}' in one[0].text
    assert "null" not in one[0].text


def test_chats(write_table: WriteTable, tokenizer: Any) -> None:
    messages = [[{"role": "user", "content": "Hi", "tool_calls": None}]]
    path = write_table(messages=messages)
    (prompt,) = open_source(
        path, tokenizer, input_key="messages", label_key=None, apply_chat_template=True
    ).all()
    assert prompt.text == "<user>Hi\n<assistant>"
