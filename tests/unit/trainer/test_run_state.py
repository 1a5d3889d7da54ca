"""State of a run: the scores of its checkpoints, and data that a resume accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.observability.reward_parts import PartNames
from anygauge.trainer.run import _restore_source
from anygauge.trainer.session import Session
from anygauge.trainer.state import TRAINING, RunState
from anygauge_hooks.errors import DataError
from anygauge_hooks.types import RunInfo

BEST = "eval/held-out"


def info() -> RunInfo:
    return RunInfo(name="r", directory="r", backend="cpu", total_steps=9, config=config())


def config(*, best: str = BEST, **run: Any) -> Config:
    tree = {"run": {"name": "r", **run}, "model": "m", "data": {"train": ["d.jsonl"]}}
    return Config.model_validate({**tree, "save": {"best": best}})


class Source:
    """Takes the state of its own rows alone."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["of"] != "new":
            raise DataError("The data has changed.", hint="Restore it.")


def untracked(best: str) -> Any:
    session: Any = Session.__new__(Session)
    session.config, session.state, session.trackers = config(best=best), RunState(info(), best=best), ()
    session.has_told_of_best = False
    return session


@pytest.mark.parametrize("best", ["reward", "rollout/rewards", "eval/held_out"])
def test_a_metric_that_never_comes_is_said_once(best: str, caplog: pytest.LogCaptureFixture) -> None:
    session = untracked(best)
    for step in range(3):
        session.track({"eval/held-out": 0.25, "passrate/held-out-pass@1": 0.25}, step=step)
        session.track({"rollout/reward": 1.0, "train/loss": 1.0}, step=step)
    (warning,) = caplog.messages
    meant = "eval/held-out" if best.startswith("eval/") else "rollout/reward"
    assert warning == f"save.best = {best!r} is not among the metrics of step 0; did you mean {meant}?"


def test_nothing_is_said_of_a_metric_that_comes(caplog: pytest.LogCaptureFixture) -> None:
    for best in ("rollout/reward", "eval/held-out"):
        session = untracked(best)
        session.track({"rollout/reward": 1.0}, step=1)
        session.track({"eval/held-out": float("nan")}, step=2)
        session.track({"rollout/loss": 1.0}, step=3)
    assert not caplog.messages


def test_a_score_is_that_of_the_metric_and_survives_a_resume() -> None:
    session = untracked(BEST)
    session.track({"eval/held-out": 0.25, "eval/other": 1.0}, step=0)
    session.track({"train/loss": 1.0}, step=1)
    session.track({"eval/held-out": 0.5}, step=2)
    session.track({"eval/held-out": float("nan")}, step=3)
    assert session.state.scores == {0: 0.25, 2: 0.5}
    again = RunState(info(), best=BEST)
    scores = again.scores
    again.restore(session.state.state_dict())
    assert scores == {0: 0.25, 2: 0.5}  # what the writer of checkpoints holds
    other = RunState(info(), best="train/loss")
    other.restore(session.state.state_dict())
    assert other.scores == {}, "a resume may name another metric"


def test_the_parts_of_rewards_keep_their_metrics_over_a_resume() -> None:
    first, second = ("format", "has box"), ("format", "has_box")
    state = RunState(info(), part_names={TRAINING: PartNames(), "held-out": PartNames()})
    assert [state.part_names[TRAINING].of(keys) for keys in (first, second)] == [
        "format/has_box",
        "format/has_box_2",
    ]
    again = RunState(info())
    again.restore(json.loads(json.dumps(state.state_dict())))
    assert again.part_names[TRAINING].of(second) == "format/has_box_2"


def test_other_data_begin_where_the_resume_accepts_them(caplog: pytest.LogCaptureFixture) -> None:
    source: Any = Source()
    state = RunState(info(), source={"of": "old"}, rollout={"groups": []})
    with pytest.raises(DataError):
        _restore_source(source, state, {"of": "new"}, config())
    _restore_source(source, state, {"of": "new"}, config(accept_changes=["data"]))
    assert (state.source, state.rollout) == ({"of": "new"}, {})
    assert "The data has changed. The new data start from their beginning." in caplog.text


def test_the_same_data_go_on() -> None:
    source: Any = Source()
    state = RunState(info(), source={"of": "new", "at": 3}, rollout={"groups": []})
    _restore_source(source, state, {"of": "new"}, config(accept_changes=["data"]))
    assert (state.source, state.rollout) == ({"of": "new", "at": 3}, {"groups": []})
