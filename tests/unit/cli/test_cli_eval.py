"""Where ``anygauge eval`` writes its result, and what it says where it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from anygauge.cli import main
from anygauge.distributed.garbage import freeze_living_objects
from anygauge.trainer import evaluation_run


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Replace the work by a result; return what was asked for."""
    asked: list[object] = []

    def evaluate_checkpoint(
        loaded: object, *others: object, when_built: Callable[[], None]
    ) -> dict[str, float]:
        assert when_built is freeze_living_objects
        asked.append(loaded)
        return {"eval/e": 0.5}

    loaded = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(path=Path("m"))))
    monkeypatch.setattr(evaluation_run, "evaluate_checkpoint", evaluate_checkpoint)
    monkeypatch.setattr("anygauge.config.load_config", lambda *args, **keys: loaded)
    return asked


def evaluate(out: Path) -> int:
    return main(["eval", "a.toml", "--backend", "cpu", "--out", str(out)])


def test_the_result_is_printed_and_written(
    done: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path / "e.json") == 0
    assert "model: m\n" in capsys.readouterr().err
    assert json.loads((tmp_path / "e.json").read_text()) == {"model": "m", "eval/e": 0.5}


@pytest.mark.parametrize(
    ("out", "problem"), [("no/e.json", "there is no directory"), (".", "it is a directory")]
)
def test_a_file_that_cannot_be_is_refused_before_the_work(
    done: list[object], tmp_path: Path, out: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(tmp_path / out) == 1
    assert problem in capsys.readouterr().err
    assert not done


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_the_table_is_there_where_the_disk_is_full(
    done: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(Path("/dev/full")) == 1
    said = capsys.readouterr()
    assert said.out == "eval/e  0.5\n"
    assert "The metrics cannot be written to /dev/full: [Errno 28]" in said.err
