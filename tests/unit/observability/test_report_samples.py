"""Which samples are recorded, of which steps, and how much of them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from anygauge.config import Config
from anygauge.observability.report import plugin
from anygauge.observability.samples import (
    MOST_TOKENS,
    SAMPLES_FILE,
    SampleRecorder,
    is_recorded,
    shorten,
    token_texts,
)
from anygauge_hooks.rl import Group, Prompt
from anygauge_hooks.types import RunInfo
from anygauge_tests.scoring import sample as make_sample

Read = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> RunInfo:
    return RunInfo(name="r", directory=str(tmp_path), backend="cpu", total_steps=100, config=None)


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return a function that reads what was recorded."""
    return lambda: [json.loads(line) for line in (tmp_path / SAMPLES_FILE).read_text().split("\n")[:-1]]


def make_groups(rewards: Sequence[Sequence[float | None]], **fields: Any) -> list[Group]:
    """Return a group of samples for each list of rewards; the text of a sample says which it is."""
    return [
        Group(
            prompt=Prompt(index=row, tokens=(1,), text=f"prompt {row}", label=str(row), dataset="math"),
            samples=tuple(
                make_sample(
                    2, weight_versions=(3, 4), text=f"response {row}.{column}", reward=reward
                )._replace(**fields)
                for column, reward in enumerate(each)
            ),
        )
        for row, each in enumerate(rewards)
    ]


def test_best_worst_random_and_unscored_samples_are_recorded(run: RunInfo, read: Read) -> None:
    rewards: list[list[float | None]] = [[0.5, 0.5, 0.25], [0.5, 1.0, None], [0.5] * 3, [0.5] * 3]
    plugin.after_rollout(run=run, groups=make_groups(rewards, raw_reward=0.75))
    (row,) = read()
    assert row["step"] == 1
    chosen = {each["chosen"]: each for each in row["samples"]}
    assert list(chosen) == ["best", "worst", "failed", "random"]
    assert len(row["samples"]) == 5
    assert len({each["response"] for each in row["samples"]}) == 5
    assert chosen["best"] == {
        "chosen": "best",
        "prompt": "prompt 1",
        "response": "response 1.1",
        "reward": 1.0,
        "raw_reward": 0.75,
        "error": None,
        "length": 2,
        "finish_reason": "stop",
        "dataset": "math",
        "label": "1",
        "weight_version": 4,
    }
    assert chosen["worst"]["response"] == "response 0.2"
    assert chosen["failed"]["reward"] is None


def test_tokens_are_recorded_with_their_log_probs(run: RunInfo, read: Read, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    Tokenizer(WordLevel({"?": 0, "x": 1, "7": 2, "<eos>": 3}, unk_token="?")).save(
        str(model / "tokenizer.json")
    )
    config = Config.model_validate(
        {"run": {"name": "r"}, "model": {"path": str(model)}, "data": {"train": []}}
    )
    fields: dict[str, Any] = {
        "response_tokens": (2, 3, 2, 2),
        "log_probs": (-0.0004321, 0.0, math.nan, -12.34567),
    }
    groups = make_groups([[0.5]], **fields, loss_mask=(1, 0, 1, 1))
    SampleRecorder().after_rollout(run=replace(run, config=config), groups=groups)
    (sample,) = read()[0]["samples"]
    assert (sample["tokens"], sample["log_probs"]) == (
        ["7", " <eos>", " 7", " 7"],
        [-0.0004321, None, "nan", -12.35],
    )
    fields = {"response_tokens": (1,) * 500, "log_probs": (-0.5,) * 500, "loss_mask": (1,) * 500}
    SampleRecorder().after_rollout(run=replace(run, config=config), groups=make_groups([[0.5]], **fields))
    assert [len(read()[1]["samples"][0][key]) for key in ("tokens", "log_probs")] == [MOST_TOKENS] * 2


def test_the_text_of_a_token_is_what_it_adds() -> None:
    tokens = list("aé\U0001f600 b".encode())
    texts = token_texts(tokens, lambda own: bytes(own).decode(errors="replace"))
    assert texts == ["a", "", "é", "", "", "", "\U0001f600", " ", "b"]
    words = ["\u2581one", "\u2581two"]  # sentencepiece drops the first space of a text
    texts = token_texts([0, 1, 1], lambda own: "".join(words[i] for i in own).replace("\u2581", " ").lstrip())
    assert texts == ["one", " two", " two"]


def test_a_step_gives_the_same_samples_again(run: RunInfo, read: Read) -> None:
    groups = make_groups([[float(column % 2) for column in range(8)] for _ in range(16)])
    for _ in range(2):
        SampleRecorder().after_rollout(run=run, groups=groups)
    first, second = read()
    assert first == second
    SampleRecorder().after_rollout(run=replace(run, step=1), groups=groups)
    assert read()[2]["samples"] != first["samples"]


def test_one_sample_is_enough(run: RunInfo, read: Read) -> None:
    SampleRecorder().after_rollout(run=run, groups=make_groups([[None]], error="no"))
    assert [(each["chosen"], each["error"]) for each in read()[0]["samples"]] == [("failed", "no")]


def test_first_last_and_evenly_spaced_steps_are_recorded() -> None:
    steps = [step for step in range(1, 10_001) if is_recorded(step, 10_000)]
    assert steps[:8] == [1, 2, 5, 10, 20, 50, 100, 150]
    assert steps[-1] == 10_000
    assert len(steps) < 220
    assert [step for step in range(1, 61) if is_recorded(step, 60)] == list(range(1, 61))
    assert is_recorded(9_999, 9_999)


def test_a_long_run_makes_a_small_file(run: RunInfo, tmp_path: Path) -> None:
    recorder, groups = SampleRecorder(), make_groups([[0.0, 1.0] * 2], text="\u00e4" * 100_000)
    for step in range(10_000):
        recorder.after_rollout(run=replace(run, step=step, total_steps=10_000), groups=groups)
    assert 1e6 < (tmp_path / SAMPLES_FILE).stat().st_size < 6e6


def test_texts_of_any_kind_survive(run: RunInfo, read: Read) -> None:
    text = 'quote " newline \n separator \u2028 nul \0 \U0001f600'
    label = {"answer": [1, 2], "score": math.inf, "set": {1}}
    groups = make_groups([[0.5]], text=text, raw_reward={"a": math.nan, "b": 1})
    groups = [replace(groups[0], prompt=replace(groups[0].prompt, label=label, text="lone \ud800"))]
    SampleRecorder().after_rollout(run=run, groups=groups)
    (sample,) = read()[0]["samples"]
    assert sample["response"] == text
    assert sample["prompt"] == "lone ?"
    assert sample["raw_reward"] == {"a": "nan", "b": 1}
    assert sample["label"] == {"answer": "[1, 2]", "score": "inf", "set": "{1}"}


def test_a_long_text_loses_its_middle_and_says_so() -> None:
    short = shorten("a" * 5000 + "z" * 5000, 100)
    assert short == f"{'a' * 50}\n[... 9,900 characters ...]\n{'z' * 50}"
    assert shorten("a" * 100, 100) == "a" * 100
    assert shorten(None, 1) is None
    assert shorten({"a": 1.0}, 100) == {"a": 1.0}
    assert shorten({"a": "b" * 100}, 20).startswith('{"a": "bbb\n[... ')


def test_a_file_that_cannot_be_written_is_said_once(
    run: RunInfo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / SAMPLES_FILE).mkdir()
    recorder = SampleRecorder()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            recorder.after_rollout(run=run, groups=make_groups([[1.0]]))
    (record,) = caplog.records
    assert "samples are not recorded any more" in record.getMessage()
