"""Every tracker for real, without a network; and what becomes of a run whose tracker fails."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from anygauge.config import Config
from anygauge.observability import plugin
from anygauge.observability.trackers import GuardedTracker, open_tracker, tracker_names
from anygauge.plugins import load_plugins
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.types import ConfigProblem, RunInfo, Tracker

STEPS: list[dict[str, float]] = [
    {"train/loss": 0.5, "rollout/raw_reward": 0.25},
    {"train/loss": 0.25, "rollout/raw_reward": 0.5},
    {"train/loss": math.nan, "rollout/raw_reward": 0.75},
]
EVALUATION = {"eval/gsm8k": 0.125}
BLOCK, WHOLE, LAST = 1 << 15, 1, 4


def make_config(*trackers: str, **options: Mapping[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "demo", "trackers": trackers, "tracker_options": options},
            "model": {"path": "m"},
            "data": {"train": ["t.jsonl"]},
            "reward": {"function": "math"},
        }
    )


def make_run(directory: Path, *trackers: str, **options: Mapping[str, Any]) -> RunInfo:
    config = make_config(*trackers, **options)
    return RunInfo(name="demo", directory=str(directory), backend="cpu", total_steps=3, config=config)


def make(run: RunInfo, name: str) -> Tracker:
    specs = {spec.name: spec for spec in plugin.register_trackers()}
    return specs[name].make(run)


def record(tracker: Tracker, first: int = 1, last: int = 3) -> None:
    """Give a tracker an evaluation before the first step, and steps."""
    if first == 1:
        tracker.log(EVALUATION, step=0)
    for step in range(first, last + 1):
        tracker.log(STEPS[step - 1], step=step)
    tracker.log({}, step=last)
    tracker.close()


# -------------------------------------------------------------------------
# Which, and what becomes of one that fails
# -------------------------------------------------------------------------


class Failing:
    """A tracker that fails while it is told to."""

    def __init__(self) -> None:
        self.fails = False
        self.recorded: list[int] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self.fails:
            raise ConnectionError("no route to host")
        self.recorded.append(step)

    def close(self) -> None:
        if self.fails:
            raise TimeoutError("it took too long")


def test_metrics_always_go_to_the_file() -> None:
    assert tracker_names(make_config("wandb", "jsonl", "wandb")) == ("jsonl", "wandb")
    assert tracker_names(make_config()) == ("jsonl",)


def test_a_tracker_is_opened_by_name(tmp_path: Path) -> None:
    tracker = open_tracker("jsonl", load_plugins(only=["cpu"]), make_run(tmp_path))
    record(tracker)
    assert tracker.name == "jsonl"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_tracker_that_fails_is_warned_of_once_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    inner = Failing()
    tracker = GuardedTracker("faraway", inner)
    tracker.log({"train/loss": 0.5}, step=1)
    inner.fails = True
    for step in (2, 3):
        tracker.log({"train/loss": 0.5}, step=step)
    inner.fails = False
    tracker.log({"train/loss": 0.5}, step=4)
    tracker.close()
    assert inner.recorded == [1, 4]
    assert [each.getMessage() for each in caplog.records] == [
        "Tracker 'faraway' failed at step 2, and the run goes on without what it lost: "
        "ConnectionError('no route to host')",
        "Tracker 'faraway' lost 2 records of this run.",
    ]
    assert {each.levelno for each in caplog.records} == {logging.WARNING}


def test_a_tracker_that_fails_to_close_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    inner = Failing()
    inner.fails = True
    GuardedTracker("faraway", inner).close()
    assert "Tracker 'faraway' failed to close: TimeoutError('it took too long')" in caplog.text


def test_a_signal_is_no_failure_of_a_tracker() -> None:
    class Interrupted(Failing):
        def log(self, metrics: Mapping[str, float], *, step: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GuardedTracker("faraway", Interrupted()).log({}, step=1)


# -------------------------------------------------------------------------
# TensorBoard
# -------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard itself would draw."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard(tmp_path: Path) -> None:
    record(make(make_run(tmp_path, "tensorboard"), "tensorboard"))
    assert scalars(tmp_path / "tensorboard") == {
        "eval/gsm8k": [(0, 0.125)],
        "train/loss": [(1, 0.5), (2, 0.25), (3, pytest.approx(math.nan, nan_ok=True))],
        "rollout/raw_reward": [(1, 0.25), (2, 0.5), (3, 0.75)],
    }


def test_tensorboard_hides_what_a_resumed_run_takes_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tensorboard", tensorboard={"dir": str(tmp_path / "elsewhere")})
    record(make(run, "tensorboard"))
    again = make(replace(run, step=1), "tensorboard")
    again.log({"train/loss": 0.125}, step=2)
    again.close()
    assert scalars(tmp_path / "elsewhere")["train/loss"] == [(1, 0.5), (2, 0.125)]


def test_tensorboard_hides_what_a_run_from_its_beginning_takes_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tensorboard")
    for _ in range(2):
        record(make(run, "tensorboard"))
    found = scalars(tmp_path / "tensorboard")
    assert found["eval/gsm8k"] == [(0, 0.125)]
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3]


def test_tensorboard_takes_a_groups_own_step(tmp_path: Path) -> None:
    tracker = make(make_run(tmp_path, "tensorboard"), "tensorboard")
    tracker.log({"train/loss": 0.5, "train/step": 28, "perf/step_time": 1.0}, step=7)
    tracker.close()
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(28, 0.5)], "perf/step_time": [(7, 1.0)]}


# -------------------------------------------------------------------------
# Weights & Biases
# -------------------------------------------------------------------------


@pytest.fixture
def wandb_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep wandb from the settings and keys of whoever runs the tests, and from leaving a process behind."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    import wandb

    wandb.teardown()
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def wandb_records(file: Path) -> list[Any]:
    """Return the records of an offline run: a LevelDB log of blocks of 32 KiB behind a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    assert data.startswith(b":W&B")
    records, part, at = [], b"", 7
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (WHOLE, LAST):
            records.append(Record.FromString(part))
            part = b""
    return records


def history(records: list[Any]) -> list[dict[str, Any]]:
    """Return the rows of a run without wandb's own columns."""
    rows = [
        {
            item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
            for item in each.history.item
        }
        for each in records
        if each.HasField("history")
    ]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]


def test_wandb_offline(tmp_path: Path, wandb_alone: None) -> None:
    run = make_run(tmp_path, "wandb", wandb={"mode": "offline", "project": "p", "group": "g", "tags": ["t"]})
    record(make(run, "wandb"), last=2)
    record(make(replace(run, step=2), "wandb"), first=3)
    first, second = sorted(
        (tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda f: f.stat().st_mtime_ns
    )
    records = wandb_records(first)
    assert history(records) == [
        {"eval/step": 0, "eval/gsm8k": 0.125},
        {"train/step": 1, "rollout/step": 1, **STEPS[0]},
        {"train/step": 2, "rollout/step": 2, **STEPS[1]},
    ]
    (started,) = [each.run for each in records if each.HasField("run")]
    assert (started.project, started.run_group, started.display_name) == ("p", "g", "demo")
    assert list(started.tags) == ["t"]
    logged = {each.key: json.loads(each.value_json) for each in started.config.update}
    assert logged["model"]["path"] == "m"
    axes = {each.metric.glob_name: each.metric.step_metric for each in records if each.metric.glob_name}
    assert axes == {f"{group}/*": f"{group}/step" for group in ("eval", "train", "rollout")}
    (resumed,) = [each.run for each in wandb_records(second) if each.HasField("run")]
    assert resumed.run_id == started.run_id == (tmp_path / "wandb" / "run-id").read_text().strip()


def test_wandb_asks_for_no_key(tmp_path: Path, wandb_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(ConfigError, match="no API key") as caught:
        make(make_run(tmp_path, "wandb", wandb={"mode": "online"}), "wandb")
    assert "WANDB_API_KEY" in str(caught.value)
    with pytest.raises(ConfigError, match="no API key"):
        make(make_run(tmp_path, "wandb"), "wandb")
    assert not (tmp_path / "wandb").exists()


def test_wandb_takes_the_mode_of_the_environment(
    tmp_path: Path, wandb_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    record(make(make_run(tmp_path, "wandb", wandb={"dir": str(tmp_path / "elsewhere")}), "wandb"))
    (file,) = (tmp_path / "elsewhere" / "wandb").glob("offline-run-*/*.wandb")
    assert len(history(wandb_records(file))) == 4


# -------------------------------------------------------------------------
# Trackio
# -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Let trackio, which reads it once, keep its data in a folder of the tests."""
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("TRACKIO_", "HF_TOKEN"))]:
            patch.delenv(name)
        patch.setenv("TRACKIO_DIR", str(folder))
        patch.setenv("HF_TOKEN_PATH", str(folder / "token"))
        import trackio.utils

        assert folder == trackio.utils.TRACKIO_DIR, "nothing else in this process may import trackio"
        yield folder


def test_trackio(
    tmp_path: Path,
    trackio_folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    caplog.set_level(logging.INFO)
    run = make_run(tmp_path, "trackio", trackio={"project": "p", "name": "n"})
    record(make(run, "trackio"), last=2)
    record(make(replace(run, step=2), "trackio"), first=3)
    rows = SQLiteStorage.get_logs("p", "n")
    for row in rows:
        del row["timestamp"]
    assert rows[:3] == [
        {"step": 0, "eval/step": 0, **EVALUATION},
        {"step": 1, "train/step": 1, "rollout/step": 1, **STEPS[0]},
        {"step": 2, "train/step": 2, "rollout/step": 2, **STEPS[1]},
    ]
    assert (rows[3]["step"], rows[3]["rollout/raw_reward"]) == (3, 0.75)
    assert len(SQLiteStorage.get_runs("p")) == 1
    assert (trackio_folder / "p.db").is_file()
    assert capsys.readouterr().out == ""
    assert "trackio show --project p" in caplog.text


# -------------------------------------------------------------------------
# Config
# -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trackers", "options", "problem"),
    [
        (["jsonl"], {"wand": {}}, ("run.tracker_options.wand", "add 'wand' to run.trackers")),
        ([], {"wandb": {"projct": "p"}}, ("run.tracker_options.wandb.projct", "no such option; it has dir,")),
        (
            ["wandb"],
            {"wandb": {"projct": "p"}},
            ("run.tracker_options.wandb.projct", "no such option; it has dir,"),
        ),
        (["wandb"], {"wandb": {"project": 3}}, ("run.tracker_options.wandb.project", "write a string")),
        (["wandb"], {"wandb": {"tags": "t"}}, ("run.tracker_options.wandb.tags", "write a list of strings")),
        (["wandb"], {"wandb": {"mode": "on"}}, ("run.tracker_options.wandb.mode", "one of online, offline")),
        (["tensorboard"], {"tensorboard": {"d": ""}}, ("run.tracker_options.tensorboard.d", "it has dir")),
        (["trackio"], {"trackio": {"dir": ""}}, ("run.tracker_options.trackio.dir", "it has group, name,")),
        ([], {"jsonl": {"x": 1}}, ("run.tracker_options.jsonl.x", "it has none")),
    ],
)
def test_wrong_options_are_problems(
    trackers: list[str], options: dict[str, dict[str, Any]], problem: tuple[str, str]
) -> None:
    (found,) = plugin.check_config(make_config(*trackers, **options))
    assert found.path == problem[0]
    assert problem[1] in found.hint


def test_right_options_are_none() -> None:
    config = make_config(
        *("jsonl", "tensorboard", "wandb", "trackio", "a_plugins_own"),
        wandb={"project": "p", "mode": "offline", "tags": ["a", "b"]},
        tensorboard={"dir": "tb"},
        trackio={"project": "p"},
        a_plugins_own={"anything": 3},
    )
    assert plugin.check_config(config) == []


def test_a_tracker_that_is_turned_off_keeps_its_options() -> None:
    assert plugin.check_config(make_config(wandb={"project": "p"}, tensorboard={"dir": "tb"})) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_without_its_package_is_a_problem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda package: None)
    assert plugin.check_config(make_config("jsonl", name)) == [
        ConfigProblem(
            path="run.trackers[1]",
            found=name,
            hint=f"the package {name} is not installed: pip install 'anygauge[{name}]', or in a clone of "
            f"anygauge: pip install -e '.[{name}]'",
        )
    ]


def test_a_folder_of_the_name_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "find_spec", lambda package: importlib.util.spec_from_loader(package, None))
    assert [each.path for each in plugin.check_config(make_config("wandb"))] == ["run.trackers[0]"]
