"""The state of a source: the next prompts are those that would have come, or it refuses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anygauge.config.schema import Data, DataFile
from anygauge.data.source import FileSource
from anygauge_hooks.errors import ConfigError, DataError

WriteRows = Callable[..., Path]
Open = Callable[..., FileSource]


@pytest.fixture
def files(write_rows: WriteRows) -> tuple[Path, Path]:
    """Return a file of 6 rows and one of 4."""
    return (
        write_rows(*({"prompt": f"a{n}", "label": ""} for n in range(6)), name="a.jsonl"),
        write_rows(*({"prompt": f"b{n}", "label": ""} for n in range(4)), name="b.jsonl"),
    )


@pytest.fixture
def open_source(files: tuple[Path, Path], tokenizer: Any) -> Open:
    def open_(
        *, weights: tuple[float | None, ...] = (None, None), seed: int = 1, **settings: Any
    ) -> FileSource:
        train = tuple(DataFile(path=str(p), weight=w) for p, w in zip(files, weights, strict=False))
        return FileSource(Data(train=train, **settings), tokenizer, seed)

    return open_


def saved(source: FileSource) -> Any:
    return json.loads(json.dumps(source.state_dict()))


@pytest.mark.parametrize("weights", [(None, None), (3.0, 1.0)])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(before=st.integers(0, 25), after=st.integers(0, 25))
def test_a_resumed_source_draws_what_would_have_come(
    open_source: Open, weights: tuple[float | None, ...], before: int, after: int
) -> None:
    source, resumed = open_source(weights=weights), open_source(weights=weights)
    source.next(before)
    resumed.load_state_dict(saved(source))
    assert resumed.next(after) == source.next(after)
    assert resumed.state_dict() == source.state_dict()


def test_files_that_moved_are_the_same(
    files: tuple[Path, Path], open_source: Open, tokenizer: Any, tmp_path: Path
) -> None:
    source = open_source()
    source.next(7)
    state, expected = saved(source), [prompt.text for prompt in source.next(9)]
    (tmp_path / "elsewhere").mkdir()
    train = tuple(DataFile(path=str(path.rename(tmp_path / "elsewhere" / path.name))) for path in files)
    resumed = FileSource(Data(train=train), tokenizer, 1)
    resumed.load_state_dict(state)
    assert [prompt.text for prompt in resumed.next(9)] == expected


def test_weights_may_change(open_source: Open) -> None:
    source = open_source(weights=(3.0, 1.0))
    source.next(5)
    resumed = open_source(weights=(1.0, 100.0))
    resumed.load_state_dict(saved(source))
    assert Counter(prompt.dataset for prompt in resumed.next(50))["b"] > 40


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"seed": 2}, "seed was 1, and is 2"),
        ({"shuffle": False}, "shuffle was True, and is False"),
        ({"weights": (1.0, 1.0)}, "weighted was False, and is True"),
        ({"weights": (None,)}, "there were 2 files, and there are 1"),
    ],
)
def test_other_settings_are_refused(open_source: Open, change: dict[str, Any], problem: str) -> None:
    source = open_source()
    source.next(3)
    other = open_source(**change)
    before = other.state_dict()
    with pytest.raises(DataError, match=f"changed since the run was saved: {problem}"):
        other.load_state_dict(saved(source))
    assert other.state_dict() == before


def test_other_rows_are_refused(open_source: Open, files: tuple[Path, Path]) -> None:
    state = saved(open_source())
    content = files[1].read_bytes()
    files[1].write_bytes(content.replace(b"b1", b"b9"))
    with pytest.raises(DataError, match="rows of b have changed"):
        open_source().load_state_dict(state)
    files[1].write_bytes(content + content)
    with pytest.raises(DataError, match="b had 4 usable rows, and has 8"):
        open_source().load_state_dict(state)
    files[1].write_bytes(content)
    open_source().load_state_dict(state)


@pytest.mark.parametrize(
    "state", [{}, {"of": {}, "at": {}}, {"of": None, "at": None}, [], {"of": {"seed": 1}}]
)
def test_what_is_no_state_is_refused(open_source: Open, state: Any) -> None:
    with pytest.raises(DataError, match="its state cannot be read"):
        open_source().load_state_dict(state)


def test_a_position_that_cannot_be_is_refused(open_source: Open) -> None:
    source = open_source()
    state = {**saved(source), "at": {"epoch": 0, "cursor": 11}}
    with pytest.raises(DataError, match=r"its state cannot be read \(ValueError\('row 11 of 10'\)\)"):
        source.load_state_dict(state)


def test_prompts_know_their_data_set(open_source: Open) -> None:
    prompts = open_source().all()
    assert Counter(prompt.dataset for prompt in prompts) == {"a": 6, "b": 4}
    assert [prompt.index for prompt in prompts] == list(range(10))


def test_weighted_files_have_epochs_of_their_own(open_source: Open) -> None:
    prompts = open_source(weights=(1.0, 3.0)).next(400)
    for name, size in (("a", 6), ("b", 4)):
        own = [prompt.text for prompt in prompts if prompt.dataset == name]
        epochs = [own[start : start + size] for start in range(0, len(own) - size, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
    assert 260 < sum(prompt.dataset == "b" for prompt in prompts) < 340


def test_weights_of_some_files_alone(open_source: Open) -> None:
    with pytest.raises(ConfigError, match="1 of 2 data files have a weight"):
        open_source(weights=(1.0, None))


def test_a_weight_on_nothing(write_rows: WriteRows, files: tuple[Path, Path], tokenizer: Any) -> None:
    long = write_rows({"prompt": "a" * 9, "label": ""}, name="long.jsonl")
    train = tuple(DataFile(path=str(path), weight=1.0) for path in (files[0], long))
    with pytest.raises(DataError, match=r"All 1 prompts of .*long\.jsonl are longer"):
        FileSource(Data(train=train, max_prompt_tokens=5), tokenizer)
    without = tuple(DataFile(path=str(path)) for path in (files[0], long))
    assert len(FileSource(Data(train=without, max_prompt_tokens=5), tokenizer)) == 6
