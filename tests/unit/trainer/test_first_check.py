"""Checks of rewards and of the first rows before the processes of a run start."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.api.data import Inputs
from anygauge.config.schema import Config
from anygauge.rollout.rewards.limited import Limited
from anygauge.trainer.first_check import check_first
from anygauge_hooks.errors import DataError, RewardError
from anygauge_hooks.types import NamedFunction
from anygauge_tests.scoring import plugins_with

ROW = {"prompt": "1+2=", "label": "3", "level": 1}


def never(response: str) -> float:
    raise AssertionError("a check calls no function")


def check(
    path: Path,
    reward: Callable[..., Any] = never,
    *,
    on: Path | None = None,
    task: str = "rl",
    **data: Any,
) -> None:
    """Check a reward as a program gives it, and rows for training, or for evaluation beside good ones."""
    good = path.parent / "good.jsonl"
    good.write_text(json.dumps(ROW))
    tree = {
        "run": {"name": "a", "task": task},
        "model": "m",
        "data": {"train": [str(path if on is None else good)], **data},
        "eval": {"data": [] if on is None else [str(on)]},
        "reward": {"function": "python.f"},
    }
    wrapped = Limited(1.0).wrap(reward)  # as a program's functions are
    plugins = plugins_with(NamedFunction(name="python.f", fn=wrapped, inline=True))
    check_first(Config.model_validate(tree), plugins)


def given(folder: Path, *rows: dict[str, Any]) -> Path:
    """Return the file of rows that a program gave."""
    return Inputs(folder / "inputs").write(rows, "train").path


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "1+2=", "label": "3"}, "field 'prompt' is missing (the row has 'question', 'label')"),
        ({"prompt": "1+2="}, "field 'label' is missing (the row has 'prompt')"),
        ({**ROW, "prompt": " "}, "field 'prompt' is empty"),
        ({**ROW, "prompt": 5}, "field 'prompt' is a number, not a string or a list of messages"),
        (
            {**ROW, "prompt": [{"role": "user", "content": "a"}]},
            "field 'prompt' is a list of messages; set data.apply_chat_template = true",
        ),
    ],
)
def test_a_bad_row_of_a_program_is_named_by_its_place_in_the_list(
    tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    path = given(tmp_path, ROW, row)
    with pytest.raises(DataError, match="1 of 2 rows cannot be used:") as caught:
        check(path)
    assert f"\n  train: row 1: {problem}" in str(caught.value)
    with pytest.raises(DataError, match=r"\n  train: row 1: "):
        check(path, on=path)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl"])
def test_a_file_of_each_format_is_looked_at(tmp_path: Path, name: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path = tmp_path / name
    write = {
        "a.csv": lambda: path.write_text("question,label\n1+2=,3\n"),
        "a.parquet": lambda: parquet.write_table(pa.table({"question": ["1"], "label": ["2"]}), path),
        "a.jsonl": lambda: path.write_text('{"question": "1", "label": "2"}\n'),
    }
    write[name]()
    with pytest.raises(DataError, match=r"field 'prompt' is missing \(the row has 'question', 'label'\)"):
        check(path)
    check(path, input_key="question")
    check(path, source="my_source")  # whose files may be of any kind


def test_only_the_first_rows_are_read(tmp_path: Path) -> None:
    path = given(tmp_path, *[ROW] * 100, {"prompt": ""})
    check(path)
    path = given(tmp_path, {"prompt": ""}, *[ROW] * 100)
    with pytest.raises(DataError, match="1 of the first 100 rows cannot be used"):
        check(path)


def test_a_file_of_somebody_else_keeps_its_path(tmp_path: Path) -> None:
    path = tmp_path / "train-0123456789ab.jsonl"
    path.write_text("{}")
    with pytest.raises(
        DataError, match=re.escape(f"  {path}:1: field 'prompt' is missing (the row has none)")
    ):
        check(path)


def test_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(DataError, match="has no rows"):
        check(tmp_path / "a.jsonl")


class Judge:
    """A reward that needs an object."""

    def __init__(self, response: str) -> None:
        raise AssertionError("a check calls no function")


def of_column(completions: list[str], answer: list[str]) -> list[float]:
    raise AssertionError("a check calls no function")


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (lambda: 1.0, r"does not take 'response'\. Its signature is \(\); it is given response, label, "),
        (lambda text: 1.0, r"needs 'text'; does not take 'response'\. Its signature is \(text\); "),
        (Judge, "'python.f' is a class, .*\n  Give an object of it, with a method __call__"),
        (of_column, "python.f: the data has no column answer; it has level, label"),
    ],
)
def test_a_reward_that_cannot_be_called(tmp_path: Path, reward: Callable[..., Any], problem: str) -> None:
    with pytest.raises(RewardError, match=problem):
        check(given(tmp_path, ROW), reward)
    if reward is not of_column:  # whose rows are unknown
        with pytest.raises(RewardError, match=problem):
            check(tmp_path / "none.jsonl", reward, source="my_source")


def test_a_column_of_trl_may_be_the_label(tmp_path: Path) -> None:
    row = {"prompt": "1+2=", "answer": "3"}
    check(given(tmp_path, row), of_column, label_key="answer")
    check(given(tmp_path, row), of_column, label_key=None)
    with pytest.raises(RewardError, match="has no column answer; it has none"):
        check(given(tmp_path, {"prompt": "1+2="}), of_column, label_key=None)


def test_conversations_need_no_label_and_media_may_be_parts(tmp_path: Path) -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    check(
        given(tmp_path, {"prompt": [user, {"role": "assistant", "content": "b"}]}),
        task="sft",
        apply_chat_template=True,
        multimodal_keys={"image": "images"},
    )


def test_the_rows_of_sft_need_no_column_of_the_reward_of_an_evaluation(tmp_path: Path) -> None:
    answered = given(tmp_path, {**ROW, "answer": "3"})
    check(given(tmp_path, ROW), of_column, on=answered, task="sft")
    with pytest.raises(RewardError, match="has no column answer"):
        check(given(tmp_path, ROW), of_column, on=given(tmp_path, ROW), task="sft")
