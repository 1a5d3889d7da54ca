"""The start of a run: its processes come up while the driver checks; a failed check leaves nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from anygauge.cli import main
from anygauge.config.load import LoadedConfig, load_config
from anygauge.plugins import Plugins, load_plugins
from anygauge.runtime.launch_local import LocalTransport
from anygauge.trainer import run as run_module
from anygauge.trainer import start as start_module
from anygauge.trainer.run import train
from anygauge.trainer.start import StartedRun, start_run
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import BackendUnavailableError, ConfigError, DataError, PlacementError
from anygauge_hooks.types import Availability, RunInfo
from anygauge_tests.processes import wait_until_ended
from anygauge_tests.recipe import tiny_recipe

END_S = 20.0


def load(directory: Path, **keys: Any) -> tuple[LoadedConfig, Plugins]:
    plugins = load_plugins()
    path = tiny_recipe(directory, placement__train_workers=2, **keys)
    return load_config(path, backend="cpu", plugins=plugins, defers_models=True), plugins


def snapshot(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def workers_of(started: StartedRun) -> list[psutil.Process]:
    return [psutil.Process(worker.pid) for worker in started.processes.workers.workers]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[psutil.Process]:
    """Return a list that gets the workers of a run once it starts to read its data."""
    processes: list[psutil.Process] = []
    run_started = run_module.train_started

    def note(loaded: LoadedConfig, plugins: Plugins, run: StartedRun, **options: Any) -> RunInfo:
        processes.extend(workers_of(run))
        assert all(each.is_running() for each in processes), "the workers come up before the data are read"
        return run_started(loaded, plugins, run, **options)

    monkeypatch.setattr(run_module, "train_started", note)
    return processes


NO_ROW = "no row"
TOO_LONG = json.dumps({"prompt": "1+" * 5000, "label": "2"})
"""A row that is good as far as no tokenizer is needed."""


def bad_row(directory: Path, line: str = TOO_LONG) -> None:
    with (directory / "data.jsonl").open("a") as file:
        file.write(f"\n{line}\n")


@pytest.mark.parametrize(
    ("is_there", "line", "count"), [(False, TOO_LONG, 2), (True, TOO_LONG, 2), (True, NO_ROW, 0)]
)
def test_data_that_cannot_be_read_leave_no_process_and_no_trace(
    tmp_path: Path, started: list[psutil.Process], is_there: bool, line: str, count: int
) -> None:
    loaded, plugins = load(tmp_path / "in", run__directory=tmp_path / "a" / "b", run__overwrite=is_there)
    if is_there:
        run = tmp_path / "a" / "b" / "run"
        (run / "logs").mkdir(parents=True)
        for name in ("config.toml", "environment.json", "metrics.jsonl", "logs/actor-0.log"):
            (run / name).write_text(f"the earlier {name}")
    bad_row(tmp_path / "in", line)
    before = snapshot(tmp_path / "a")
    with pytest.raises(DataError, match=r"data\.jsonl"):
        train(loaded, plugins)
    assert len(started) == count
    assert wait_until_ended(started, END_S) == []
    assert snapshot(tmp_path / "a") == before
    assert (tmp_path / "a").exists() == is_there


def test_an_interrupt_during_a_check_leaves_no_process(
    tmp_path: Path, started: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    loaded, plugins = load(tmp_path / "in", run__directory=tmp_path / "runs")
    monkeypatch.setattr(run_module, "read_inputs", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(loaded, plugins)
    assert len(started) == 2
    assert wait_until_ended(started, END_S) == []
    assert not (tmp_path / "runs").exists()


def test_a_check_that_fails_ends_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []
    launch = start_module.launch_workers

    def launched(*arguments: Any, **options: Any) -> Any:
        groups.append(launch(*arguments, **options))
        return groups[-1]

    def check() -> None:
        groups.extend(psutil.Process(worker.pid) for worker in groups[0].workers)
        raise ConfigError("a model that does not fit")

    loaded, plugins = load(tmp_path / "in", run__directory=tmp_path / "runs")
    monkeypatch.setattr(start_module, "launch_workers", launched)
    with pytest.raises(ConfigError, match="does not fit"), start_run(loaded, plugins, check=check):
        raise AssertionError("the check failed")
    group, *processes = groups
    assert group.is_ended
    assert len(processes) == 2
    assert wait_until_ended(processes, END_S) == []
    assert not (tmp_path / "runs").exists()


def test_a_check_explains_processes_that_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PlacementError("there is no room")

    def check() -> None:
        raise BackendUnavailableError("there is no device")

    loaded, plugins = load(tmp_path / "in", run__directory=tmp_path / "runs")
    monkeypatch.setattr(start_module, "launch_workers", refuse)
    with pytest.raises(BackendUnavailableError, match="no device"), start_run(loaded, plugins, check=check):
        raise AssertionError("nothing was started")
    with pytest.raises(PlacementError, match="no room"), start_run(loaded, plugins):
        raise AssertionError("nothing was started")
    assert not (tmp_path / "runs").exists()


def test_the_terminal_says_what_starts_before_the_data_are_read(
    tmp_path: Path, started: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalTransport, "cluster", "Ray cluster at 10.0.0.1:6379 with 2 nodes (GPU: 16)")
    lines: list[str] = []

    class Waits:
        @hookimpl
        def on_wait(self, run: RunInfo, message: str) -> None:
            lines.append(f"{message} ({len(started)} known)")

    loaded, plugins = load(tmp_path / "in")
    plugins.register(Waits(), "waits")
    train(loaded, plugins)
    assert lines[:3] == [
        "starting 2 training workers (0 known)",
        "on the Ray cluster at 10.0.0.1:6379 with 2 nodes (GPU: 16) (0 known)",
        "the data are read; waiting for the training workers (logs/actor-*) (2 known)",
    ]


def test_a_backend_that_cannot_run_is_told_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was asked for is probed while the processes come up; the error is the same."""
    unavailable = Availability(ok=False, reason="it is broken", hint="Mend it.")
    monkeypatch.setattr("anygauge.plugins.probe_backend", lambda spec: unavailable)
    path = tiny_recipe(tmp_path / "in", run__directory=tmp_path / "runs")
    assert main(["train", str(path), "--backend", "cpu"]) == 1
    printed = capsys.readouterr()
    assert "error: Backend 'cpu' cannot run on this host: it is broken." in printed.err
    assert "Mend it." in printed.err
    assert not (tmp_path / "runs").exists()


def test_nothing_imports_torch_before_the_processes_start(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path)
    script = """
import sys
from anygauge.config import load_config
from anygauge.plugins import load_plugins
from anygauge.runtime.launch_local import LocalTransport
from anygauge.serving import server_workers
from anygauge.serving.sglang import server
from anygauge.trainer.start import start_run
load_config(sys.argv[1], backend="cpu", plugins=load_plugins(), defers_models=True)
print([name for name in ("torch", "transformers", "ray", "megatron") if name in sys.modules])
"""
    command = [sys.executable, "-c", script, str(path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert printed == "[]\n"
