"""Drawing prompts from files: order, epochs, filters, and errors that name file, line and field."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.schema import Data, DataFile
from anygauge.data import rows as row_module
from anygauge.data.source import FileSource
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.errors import ConfigError, DataError

WriteRows = Callable[..., Path]


def data(*files: Path, **settings: Any) -> Data:
    return Data(train=tuple(DataFile(path=str(file)) for file in files), **settings)


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{number}+1=", "label": str(number + 1)} for number in range(count)]


def test_a_prompt_has_tokens_label_source_and_metadata(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows({"prompt": "1+1=", "label": "2", "level": 3})
    (prompt,) = FileSource(data(path), tokenizer).next(1)
    assert (prompt.index, prompt.text, prompt.label) == (0, "1+1=", "2")
    assert list(prompt.tokens) == tokenizer("1+1=")["input_ids"]
    assert prompt.source == f"{path}:1"
    assert prompt.metadata == {"level": 3}


def test_keys_can_be_named(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows({"question": "1+1=", "answer": 2})
    source = FileSource(data(path, input_key="question", label_key="answer"), tokenizer)
    assert [(prompt.text, prompt.label) for prompt in source.all()] == [("1+1=", 2)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'[{"prompt": "1"},\n{"prompt": "2"}]', "is one JSON array, .*\n.*jq -c"),
        (b' \n [\n{"prompt": "1"}]', "is one JSON array"),
        (gzip.compress(b'{"prompt": "1"}', mtime=0), "is compressed with gzip, .*\n.*gunzip"),
        (b"PK\x03\x04", "is a ZIP archive"),
        (b"PAR1\x15", "is a Parquet file, .*\n.*suffix"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS, .*\n.*git lfs pull"),
    ],
)
def test_a_file_of_another_format_is_one_problem(
    tmp_path: Path, tokenizer: Any, content: bytes, text: str
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=text):
        FileSource(data(path), tokenizer)


def test_a_label_is_optional(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows({"prompt": "Sing."})
    (prompt,) = FileSource(data(path, label_key=None), tokenizer).all()
    assert prompt.label is None


def test_all_is_in_file_order_over_files(write_rows: WriteRows, tokenizer: Any) -> None:
    files = (write_rows(*rows(3), name="a.jsonl"), write_rows(*rows(2), name="b.jsonl"))
    source = FileSource(data(*files), tokenizer, seed=3)
    assert len(source) == 5
    assert [prompt.source for prompt in source.all()] == [
        *(f"{files[0]}:{line}" for line in (1, 2, 3)),
        *(f"{files[1]}:{line}" for line in (1, 2)),
    ]
    assert [prompt.index for prompt in source.all(2)] == [0, 1]


def test_each_epoch_is_a_permutation_in_a_new_order(write_rows: WriteRows, tokenizer: Any) -> None:
    source = FileSource(data(write_rows(*rows(20))), tokenizer, seed=1)
    epochs = [[prompt.index for prompt in source.next(20)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_same_seed_draws_the_same_however_it_is_asked(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows(*rows(7))
    one, other, different = (FileSource(data(path), tokenizer, seed=s) for s in (5, 5, 6))
    at_once = one.next(20)
    assert [prompt for count in (1, 6, 8, 5) for prompt in other.next(count)] == at_once
    assert different.next(20) != at_once


def test_a_small_data_set_wraps(write_rows: WriteRows, tokenizer: Any) -> None:
    source = FileSource(data(write_rows(*rows(3))), tokenizer)
    assert sorted(prompt.index for prompt in source.next(9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_order_is_kept_without_shuffle(write_rows: WriteRows, tokenizer: Any) -> None:
    source = FileSource(data(write_rows(*rows(3)), shuffle=False), tokenizer)
    assert [prompt.index for prompt in source.next(5)] == [0, 1, 2, 0, 1]


def test_long_prompts_are_dropped_and_counted(
    write_rows: WriteRows, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(*({"prompt": "a" * length, "label": ""} for length in (3, 9, 4, 8, 5)))
    source = FileSource(data(path, max_prompt_tokens=6), tokenizer)
    assert [(prompt.index, prompt.text) for prompt in source.all()] == [(0, "aaa"), (1, "aaaa"), (2, "aaaaa")]
    assert source.num_dropped == 2
    assert caplog.messages == ["dropped 2 of 5 prompts of train for their length"]


def test_nothing_left_is_an_error(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows(*rows(4))
    with pytest.raises(DataError, match=r"All 4 prompts are longer than data.max_prompt_tokens = 2"):
        FileSource(data(path, max_prompt_tokens=2), tokenizer)


def test_a_prompt_that_the_model_cannot_take_is_an_error_at_once(
    write_rows: WriteRows, tokenizer: Any
) -> None:
    path = write_rows(*({"prompt": "a" * length, "label": ""} for length in (3, 9, 5)))
    with pytest.raises(DataError) as error:
        FileSource(data(path), tokenizer, max_tokens=6)
    assert f"1 of 3 rows cannot be used:\n  {path}:2: field 'prompt' has 10 tokens; " in str(error.value)
    assert "the model has room for 6" in str(error.value)
    assert "data.max_prompt_tokens" in str(error.value)


def test_a_prompt_as_long_as_the_model_can_take(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows({"prompt": "a" * 5, "label": ""})
    assert len(FileSource(data(path), tokenizer, max_tokens=6)) == 1


def test_what_is_dropped_need_not_fit(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows(*({"prompt": "a" * length, "label": ""} for length in (3, 9)))
    source = FileSource(data(path, max_prompt_tokens=5), tokenizer, max_tokens=6)
    assert (len(source), source.num_dropped) == (1, 1)


@pytest.mark.parametrize("drops", [False, True])
def test_a_row_beyond_any_context_is_not_tokenized(
    write_rows: WriteRows, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, drops: bool
) -> None:
    """One of 60 MiB would take 9 GB."""
    seen: list[int] = []

    def watched(texts: list[str], **options: Any) -> Any:
        seen.extend(map(len, texts))
        return tokenizer(texts, **options)

    monkeypatch.setattr(row_module, "_TOKENIZED_CHARACTERS", 100)
    monkeypatch.setattr(row_module, "tokenizer_fingerprint", lambda _: None)
    path = write_rows(*({"prompt": "a" * length, "label": ""} for length in (5, 112, 113, 100)))
    if drops:
        source = FileSource(data(path, max_prompt_tokens=7), watched)
        assert (len(source), source.num_dropped) == (1, 3)
    else:
        with pytest.raises(DataError) as error:
            FileSource(data(path), watched, max_tokens=7)
        text = "field 'prompt' has 113 characters; the model has room for 7 tokens\n"
        assert f"{path}:3: {text}" in str(error.value)
        assert "max_prompt_tokens" in str(error.value)
    assert set(seen) == {5, 112, 100}


def test_rows_are_tokenized_in_batches(write_rows: WriteRows, tokenizer: Any) -> None:
    sizes: list[int] = []

    def counting(texts: list[str], **options: Any) -> Any:
        sizes.append(len(texts))
        return tokenizer(texts, **options)

    FileSource(data(write_rows(*rows(2500))), counting)
    assert sizes == [1000, 1000, 500]


def test_characters_that_the_tokenizer_does_not_know(write_rows: WriteRows, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "model", alphabet="0123456789+=")
    path = write_rows(*rows(2), {"prompt": "hello", "label": ""}, "{", {"prompt": "1-1=", "label": ""})
    with pytest.raises(DataError) as error:
        FileSource(data(path), tokenizer)
    text = str(error.value)
    assert "3 of 5 rows" in text
    assert "a tokenizer that knows" in text
    assert f"{path}:3: field 'prompt': the tokenizer refuses 'hello': WordLevel error" in text
    assert f"{path}:5: field 'prompt': the tokenizer refuses '1-1=': WordLevel error" in text
    assert text.index(":3:") < text.index(":4:") < text.index(":5:")


def test_a_prompt_without_tokens(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows({"prompt": "1+1=", "label": ""})
    with pytest.raises(DataError, match=r"train\.jsonl:1: field 'prompt': the tokenizer makes no token of"):
        FileSource(data(path), lambda texts, **options: {"input_ids": [[] for _ in texts]})


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "\xc3\xa9", "label": ""}\r\n\n  \n{"prompt": "b", "label": ""}')
    prompts = FileSource(data(path), tokenizer).all()
    assert [(prompt.text, prompt.source[-2:]) for prompt in prompts] == [("\u00e9", ":1"), ("b", ":4")]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (
            "{not json}",
            "is not JSON: Expecting property name enclosed in double quotes (column 2)\n",
        ),
        (
            '{"prompt": "1+1=", ',
            "is not JSON: Expecting property name enclosed in double quotes (column 19)\n",
        ),
        ('{"prompt": "1+1=", "label": NaN}', "is not JSON, which has no NaN\n"),
        ('{"prompt": "1+1=", "label": [-Infinity]}', "is not JSON, which has no -Infinity\n"),
        ('{"prompt": "1+1=", "prompt": "2+2=", "label": "2"}', "has the key 'prompt' twice\n"),
        ('{"prompt": "1+1=", "label": ' + "[" * 100_000, "is nested too deeply\n"),
        ("[1, 2]", "is not a JSON object"),
        ({"label": "2"}, "field 'prompt' is missing (the row has 'label')"),
        ({}, "field 'prompt' is missing (the row has none)"),
        ({"prompt": "1+1="}, "field 'label' is missing (the row has 'prompt')"),
        ({"prompt": "1+1=", "label": None}, "field 'label' is null"),
        ({"prompt": " \n", "label": "2"}, "field 'prompt' is empty"),
        ({"prompt": 7, "label": "2"}, "field 'prompt' is a number, not a string or a list of messages"),
        ({"prompt": None, "label": "2"}, "field 'prompt' is null, not a string or a list of messages"),
        ({"prompt": [], "label": "2"}, "field 'prompt' is a list of messages; set data.apply_chat_template"),
        (
            {"prompt": "1\ud800+1=", "label": "2"},
            "field 'prompt' holds '\\ud800', which is half a character\n",
        ),
        (
            {"prompt": "1+1=", "label": ["\udfff"]},
            "field 'label' holds '\\udfff', which is half a character\n",
        ),
    ],
)
def test_a_bad_row_names_file_line_and_field(
    write_rows: WriteRows, tokenizer: Any, row: Any, problem: str
) -> None:
    path = write_rows(*rows(2), row)
    with pytest.raises(DataError) as error:
        FileSource(data(path), tokenizer)
    assert "1 of 3 rows cannot be used" in str(error.value)
    assert f"{path}:3: {problem}" in str(error.value)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "is an empty list"),
        (["hello"], "message 0: is a string, not an object"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "message 1: has no 'content'"),
        ([{"content": "a"}], "message 0: has no 'role'"),
        ([{"role": "", "content": "a"}], "message 0: 'role' is empty"),
        ([{"role": "user", "content": ["a"]}], "message 0: 'content' is a list, not a string"),
        ([{"role": "user", "content": "\ud83d"}], "holds '\\ud83d', which is half a character"),
    ],
)
def test_a_bad_message_is_named(write_rows: WriteRows, tokenizer: Any, messages: Any, problem: str) -> None:
    path = write_rows({"prompt": messages, "label": "2"})
    with pytest.raises(DataError) as error:
        FileSource(data(path, apply_chat_template=True), tokenizer)
    assert f"{path}:1: field 'prompt' {problem}" in str(error.value)


def test_the_first_problems_are_reported_together(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows(*({"prompt": number} for number in range(2)), *(["{"] * 5), *rows(1))
    path.write_text(path.read_text() + "".join(f'{{"{name}": 1}}\n' for name in "abcd"))
    with pytest.raises(DataError) as error:
        FileSource(data(path), tokenizer)
    text = str(error.value)
    assert "11 of 12 rows" in text
    assert f"{path}:1: field 'prompt' is a number" in text
    assert text.count("(and 1 more rows like it)") == 1
    assert f"{path}:3: is a list" in text or f"{path}:3: is not" in text
    assert text.count("(and 4 more rows like it)") == 1
    assert "... and 1 more" in text


def test_bytes_that_are_no_text(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"prompt": "\xff\xfe", "label": ""}\n')
    with pytest.raises(DataError, match=r"train\.jsonl:1: is not UTF-8: byte 0xff at position 12\n.*iconv"):
        FileSource(data(path), tokenizer)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("missing.jsonl", "No such file"),
        ("folder", "is a directory without data files"),
        ("empty.jsonl", "has no rows"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, tokenizer: Any, name: str, problem: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError) as error:
        FileSource(data(tmp_path / name), tokenizer)
    assert str(tmp_path / name) in str(error.value)
    assert problem in str(error.value)


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path, tokenizer: Any) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.jsonl").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name, problem in (
        ("pipe.jsonl", "is a pipe, which can be read only once"),
        ("folder", "is a directory with a.jsonl"),
        ("link", "is a link to nowhere, which does not exist"),
        ("/dev/zero", "is a device"),
        ("x" * 300, "cannot be looked at: File name too long"),
    ):
        with pytest.raises(DataError, match=f"{name} {problem}"):
            FileSource(data(tmp_path / name), tokenizer)


def test_no_file_at_all(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="No data file"):
        FileSource(Data(train=()), tokenizer)


def test_a_file_that_changes_under_the_run(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows(*rows(3))
    source = FileSource(data(path, shuffle=False), tokenizer, max_tokens=8)
    for changed in ('{"prompt": "x"', '{"prompt": "longer than before", "label": ""}'):
        path.write_text(changed)
        with pytest.raises(DataError, match="changed while the run was reading it"):
            source.next(1)


def test_a_string_becomes_a_user_message(write_rows: WriteRows, tokenizer: Any) -> None:
    config = data(
        write_rows({"prompt": "Hi", "label": ""}),
        apply_chat_template=True,
        system_prompt="Be brief.",
    )
    (prompt,) = FileSource(config, tokenizer).all()
    assert prompt.text == "<system>Be brief.\n<user>Hi\n<assistant>"
    assert list(prompt.tokens) == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert prompt.tokens[0] != tokenizer.bos_token_id


def test_messages_and_template_arguments(write_rows: WriteRows, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    config = data(
        write_rows({"prompt": messages, "label": ""}),
        apply_chat_template=True,
        chat_template_kwargs={"thinking": True},
        system_prompt="only before strings",
    )
    (prompt,) = FileSource(config, tokenizer).all()
    assert prompt.text == "<user>a\n<assistant>b\n<assistant><think>"


def test_a_row_that_the_template_refuses(write_rows: WriteRows, tokenizer: Any) -> None:
    path = write_rows({"prompt": [{"role": "tool", "content": "a"}], "label": ""})
    with pytest.raises(DataError, match=r"train\.jsonl:1: field 'prompt': .* a chat begins with a user"):
        FileSource(data(path, apply_chat_template=True), tokenizer)


def test_a_tokenizer_without_a_template(
    write_rows: WriteRows, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ConfigError, match="has no chat template"):
        FileSource(data(write_rows(*rows(1)), apply_chat_template=True), tokenizer)


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_gsm8k(tokenizer: Any, gsm8k: Path, name: str) -> None:
    config = data(
        gsm8k / name,
        input_key="question",
        label_key="answer",
        apply_chat_template=True,
        max_prompt_tokens=100_000,
    )
    source = FileSource(config, tokenizer)
    assert len(source) == len((gsm8k / name).read_text(encoding="utf-8").splitlines())
    prompts = source.all(100)
    assert all("####" in prompt.label for prompt in prompts)
    assert all(tokenizer.decode(prompt.tokens) == prompt.text for prompt in prompts)


@pytest.mark.parametrize(
    ("field", "text", "problem"),
    [
        ("tools", "[{", "is a string that is not JSON: Expecting property name"),
        ("tools", '{"a": 1}', "is an object, not a list of objects"),
        ("tools", '[{"a": 1, "a": 2}]', "is a string that has the key 'a' twice"),
        ("tools", '[{"a": "\\ud800"}]', "holds '\\ud800', which is half a character"),
        ("extra", "[]", "is a list, not an object"),
    ],
)
def test_a_string_that_is_not_the_json_it_should_be(
    write_rows: WriteRows, tokenizer: Any, field: str, text: str, problem: str
) -> None:
    path = write_rows({"prompt": "a", "tools": "[]", "extra": "{}"} | {field: text})
    config = data(path, label_key=None, apply_chat_template=True, tools_key="tools", metadata_key="extra")
    with pytest.raises(DataError) as error:
        FileSource(config, tokenizer)
    assert f"{path}:1: field {field!r} {problem}" in str(error.value)


@pytest.mark.parametrize("text", ["[{x}]", '[{"a": 1}]', '["user"]', ' [{"role": "user", "content": "a"}]'])
def test_a_string_that_is_no_list_of_messages_is_what_the_user_says(
    write_rows: WriteRows, tokenizer: Any, text: str
) -> None:
    config = data(write_rows({"prompt": text}), label_key=None, apply_chat_template=True)
    (prompt,) = FileSource(config, tokenizer).all()
    assert prompt.text == f"<user>{text}\n<assistant>"


def test_messages_in_a_string_without_a_template_are_text(write_rows: WriteRows, tokenizer: Any) -> None:
    text = '[{"role": "user", "content": "a"}]'
    (prompt,) = FileSource(data(write_rows({"prompt": text}), label_key=None), tokenizer).all()
    assert prompt.text == text
