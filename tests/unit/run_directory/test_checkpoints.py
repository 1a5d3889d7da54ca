"""Checkpoint directories: whole or absent, however a save ends; and what a resume makes of damaged ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge.run_directory import checkpoints, write_progress
from anygauge.run_directory.checkpoint_reader import latest_checkpoint
from anygauge.run_directory.checkpoints import CheckpointWriter, export_hf
from anygauge.trainer.run import salvaged
from anygauge.trainer.saving import finish_saving
from anygauge_hooks.errors import CheckpointError


class Workers:
    """Two ranks that write at once, later, or not at all."""

    def __init__(self) -> None:
        self.writes = True
        self.failure: str | None = None
        self.calls: list[str] = []
        self.while_exporting: Callable[[Path], object] = lambda path: None

    def call(self, method: str, **arguments: Any) -> Sequence[Any]:
        self.calls.append(method)
        path = Path(arguments.get("path", "."))
        if method == "save_checkpoint":
            for rank in range(2):
                (path / f"rank-{rank:05d}.json").write_text(json.dumps({"rank": rank}))
                (path / f"rank-{rank:05d}.safetensors").write_bytes(bytes([rank]) * 1000)
        if method == "save_hf":
            self.while_exporting(path)
            path.mkdir()
            (path / "model").write_text(str(len(self.calls)))
        return [self.writes, self.failure or True] if method == "checkpoint_written" else [None, None]


def make_config(**save: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "run", "timeout_s": 5},
            "model": "model",
            "data": {"train": ["data.jsonl"]},
            "save": save,
            "placement": {"train_workers": 2},
        }
    )


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def make_writer(tmp_path: Path, workers: Workers) -> Callable[..., CheckpointWriter]:
    return lambda **save: CheckpointWriter(tmp_path, make_config(**save), workers)  # type: ignore[arg-type]


def write(writer: CheckpointWriter, step: int) -> Path | None:
    writer.start(step, {"step": step, "version": step, "source": {"cursor": 4 * step}})
    path = writer.finish()
    writer.close()
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_a_checkpoint_appears_when_every_rank_has_written(
    tmp_path: Path, workers: Workers, make_writer: Callable[..., CheckpointWriter]
) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "samples.superseded.jsonl").write_text("{}\n")
    writer = make_writer()
    workers.writes = False
    odd = {"label": np.array([1, 2]), "path": Path("x")}
    assert writer.start(20, {"step": 20, "version": 20, "source": {"cursor": 7}, "rollout": odd}) is None
    assert writer.poll() is None
    assert (writer.writing, writer.complete) == (20, 0)
    assert names(tmp_path) == [".step-00000020.partial"]
    assert latest_checkpoint(tmp_path) is None
    workers.writes = True
    path = writer.finish()
    assert (writer.writing, writer.complete) == (None, 20)
    assert path == tmp_path / "checkpoints" / "step-00000020"
    assert names(tmp_path) == ["step-00000020"]
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert (found.path, found.step) == (path, 20)
    rollout = {"label": [1, 2], "path": "x"}
    assert found.state == {"step": 20, "version": 20, "source": {"cursor": 7}, "rollout": rollout}
    assert found.files == {"metrics.jsonl": 3}
    assert "torch" in found.packages
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.keys() == {"format", "world_size", "roles", "files"}
    assert manifest["world_size"] == 2
    assert manifest["files"].keys() == {each.name for each in path.iterdir()} - {"manifest.json"}


def test_polling_completes_a_checkpoint_without_waiting(
    tmp_path: Path, workers: Workers, make_writer: Callable[..., CheckpointWriter], monkeypatch: Any
) -> None:
    go_on, inner = threading.Event(), checkpoints._complete

    def slow(*arguments: Any) -> Path:
        assert go_on.wait(10)
        return inner(*arguments)

    monkeypatch.setattr(checkpoints, "_complete", slow)
    writer = make_writer()
    writer.start(1, {})
    assert writer.poll() is None
    assert writer.poll() is None
    assert workers.calls == ["save_checkpoint", "checkpoint_written"]
    go_on.set()
    writer._pending.completing.result(10)  # type: ignore[union-attr]
    assert writer.poll() == tmp_path / "checkpoints" / "step-00000001"
    assert writer.poll() is None
    assert writer.finish() is None


def test_a_run_that_waits_for_a_checkpoint_says_so(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []

    def on_wait(line: str) -> None:
        lines.append(line)
        workers.writes = True

    monkeypatch.setattr(write_progress, "QUIET_S", 0.0)
    workers.writes = False
    writer = CheckpointWriter(tmp_path, make_config(), workers, on_wait)  # type: ignore[arg-type]
    writer.start(7, {})
    assert writer.finish() is not None
    assert lines[0].startswith("waiting for the checkpoint step-00000007: ")


def test_a_run_that_waits_for_an_export_says_how_much_is_written(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, is_told = list[str](), threading.Event()

    def on_wait(line: str) -> None:
        if re.search(r"3\.0( of about 12\.0)? GiB written, [0-9.]+ GiB/s", line):
            told.append(line)
            is_told.set()

    def wait(path: Path) -> None:
        partial = path.with_name(f".{path.name}.partial-7-abc")
        partial.mkdir()
        with (partial / "shard-0").open("wb") as stream:
            stream.truncate(3 * 2**30)  # takes no room
        is_told.clear()
        assert is_told.wait(60)
        shutil.rmtree(partial)

    monkeypatch.setattr(write_progress, "QUIET_S", 0.0)
    monkeypatch.setattr(write_progress, "EVERY_S", 0.0)
    monkeypatch.setattr(write_progress, "LOOK_S", 0.001)
    workers.while_exporting = wait
    for name, size in (("hf", 0), (".hf.new", 12 * 2**30)):  # the second takes the place of the first
        export_hf(workers, tmp_path / "hf", on_wait, size)  # type: ignore[arg-type]
        assert told[-1].startswith(f"waiting for the export {name}: ")
        assert told[-1].endswith(" s left") == bool(size)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_the_last_checkpoint_is_written_while_the_model_is_exported(
    tmp_path: Path, make_writer: Callable[..., CheckpointWriter], workers: Workers
) -> None:
    """The ranks have written it when the export is done: waiting for it before would take forever."""
    workers.writes = False
    workers.while_exporting = lambda path: setattr(workers, "writes", True)
    writer, told = make_writer(), list[str]()
    writer.start(7, {})
    info = SimpleNamespace(directory=str(tmp_path))
    plugins = SimpleNamespace(notify=lambda hook, **_: told.append(hook), find=load_plugins().find)
    components = SimpleNamespace(trains=True)
    loop: Any = SimpleNamespace(
        config=make_config(),
        checkpoints=writer,
        info=info,
        session=SimpleNamespace(
            workers=workers,
            components=components,
            plugins=plugins,
            info=info,
            state=SimpleNamespace(info=info),
        ),
        directory=SimpleNamespace(check=lambda: None),
    )
    finish_saving(loop)
    assert names(tmp_path) == ["step-00000007"]
    assert (tmp_path / "hf" / "model").exists()
    assert told == ["after_save_checkpoint"]


def test_the_latest_are_kept(tmp_path: Path, make_writer: Callable[..., CheckpointWriter]) -> None:
    writer = make_writer(keep=2)
    for step in (9, 10, 11):
        assert write(writer, step)
    assert names(tmp_path) == ["step-00000010", "step-00000011"]
    writer.start(12, {})
    assert writer.start(13, {}) == tmp_path / "checkpoints" / "step-00000012"
    writer.finish()
    writer.close()
    assert names(tmp_path) == ["step-00000012", "step-00000013"]


def test_one_that_replaces_none_is_beside_the_latest(
    tmp_path: Path, make_writer: Callable[..., CheckpointWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where older ones are removed so late that it is there by then."""
    goes_on, remove_old = threading.Event(), checkpoints._remove_old

    def late(*arguments: Any) -> None:
        goes_on.wait(10)
        remove_old(*arguments)

    monkeypatch.setattr(checkpoints, "_remove_old", late)
    writer = make_writer(keep=1)
    for step in (1, 2):
        writer.start(step, {})
    writer.start(3, {}, replaces=False)
    assert writer.finish() == tmp_path / "checkpoints" / "step-00000003"
    goes_on.set()
    writer.close()
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    write(make_writer(keep=1), 4)
    assert names(tmp_path) == ["step-00000004"]


def test_what_became_old_while_a_slow_disk_removed_others_is_removed_too(
    tmp_path: Path, make_writer: Callable[..., CheckpointWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, remove = threading.Event(), checkpoints.remove

    def slowly(path: Path) -> None:
        goes_on.wait(10)
        remove(path)

    monkeypatch.setattr(checkpoints, "remove", slowly)
    writer = make_writer(keep=1)
    for step in (1, 2, 3):
        writer.start(step, {})
        writer.finish()
    assert len(names(tmp_path)) == 3
    goes_on.set()
    writer.close()
    assert names(tmp_path) == ["step-00000003"]


def test_what_a_killed_run_left_is_removed(
    tmp_path: Path, make_writer: Callable[..., CheckpointWriter]
) -> None:
    write(make_writer(), 1)
    for name in (".step-00000002.partial", ".step-00000000.removed"):
        shutil.copytree(tmp_path / "checkpoints" / "step-00000001", tmp_path / "checkpoints" / name)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    make_writer()
    assert names(tmp_path) == ["step-00000001"]


@pytest.mark.parametrize("where", ["rank", "manifest", "directory"])
def test_a_save_that_fails_is_a_warning(
    tmp_path: Path,
    workers: Workers,
    make_writer: Callable[..., CheckpointWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    writer = make_writer()
    write(writer, 1)
    workers.failure = "No space left on device" if where == "rank" else None
    if where == "manifest":
        monkeypatch.setattr(checkpoints, "write_file", full)
    if where == "directory":
        monkeypatch.setattr(Path, "mkdir", full)
    assert write(writer, 2) is None
    monkeypatch.undo()
    workers.failure = None
    (message,) = caplog.messages
    assert message.startswith("no checkpoint of step 2: ")
    assert "No space left on device" in message
    assert ("rank 1" in message) == (where == "rank")
    assert names(tmp_path) == ["step-00000001"]
    assert write(writer, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_write_that_hangs_is_given_up(
    tmp_path: Path,
    workers: Workers,
    make_writer: Callable[..., CheckpointWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    workers.writes = False
    writer = make_writer()
    writer.start(1, {})
    clock = iter(range(0, 100, 3))
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: next(clock))
    assert writer.finish() is None
    assert "longer than run.timeout_s" in caplog.text
    assert names(tmp_path) == []


def test_a_disk_that_is_stuck_is_given_up_and_holds_up_nothing(
    tmp_path: Path,
    make_writer: Callable[..., CheckpointWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    go_on, left, inner = threading.Event(), threading.Event(), checkpoints._complete

    def stuck(*arguments: Any) -> Path:
        assert go_on.wait(30)
        try:
            return inner(*arguments)
        finally:
            left.set()

    monkeypatch.setattr(checkpoints, "_complete", stuck)
    monkeypatch.setattr(checkpoints, "CLOSE_S", 0.01)
    writer = make_writer()
    writer._config = make_config().model_copy(
        update={"run": make_config().run.model_copy(update={"timeout_s": 0.05})}
    )
    writer.start(1, {})
    assert writer.finish() is None
    (message,) = caplog.messages
    assert message.startswith("no checkpoint of step 1: it took longer than run.timeout_s")
    writer.start(2, {})
    writer.poll()
    writer.close()
    assert [t.daemon for t in threading.enumerate() if t.name == "checkpoint"] == [True, True]
    go_on.set()
    assert writer._pending is not None
    assert writer._pending.completing is not None
    writer._pending.completing.result(30)
    assert writer.poll() == tmp_path / "checkpoints" / "step-00000002"
    assert left.wait(30)
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(30)
    assert names(tmp_path) == ["step-00000002"]


def test_a_run_that_breaks_off_keeps_what_every_rank_has_written(
    tmp_path: Path, workers: Workers, make_writer: Callable[..., CheckpointWriter]
) -> None:
    writer = make_writer()
    writer.start(3, {"step": 3, "version": 3, "source": {}})
    workers.calls.clear()
    assert writer.salvage(are_writing=False) == tmp_path / "checkpoints" / "step-00000003"
    assert workers.calls == []
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 3
    assert writer.salvage(are_writing=True) is None


@pytest.mark.parametrize("are_writing", [False, True])
def test_a_run_that_breaks_off_waits_for_ranks_that_write_and_not_for_long(
    tmp_path: Path,
    make_writer: Callable[..., CheckpointWriter],
    monkeypatch: pytest.MonkeyPatch,
    are_writing: bool,
) -> None:
    last = tmp_path / "checkpoints" / ".step-00000001.partial" / "rank-00001.json"
    slept: list[float] = []
    writer = make_writer()
    writer.start(1, {})
    last.write_text('{"ra')
    monkeypatch.setattr(checkpoints, "SALVAGE_S", 0.05)
    monkeypatch.setattr(checkpoints.time, "sleep", slept.append)
    assert writer.salvage(are_writing=are_writing) is None
    assert bool(slept) == are_writing
    assert latest_checkpoint(tmp_path) is None
    last.write_text("{}")
    monkeypatch.undo()
    assert writer.salvage(are_writing=are_writing) == tmp_path / "checkpoints" / "step-00000001"


@pytest.mark.parametrize("lost", [False, True])
def test_the_error_that_breaks_a_run_off_is_raised_whatever_becomes_of_the_checkpoint(
    lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kept, told = Path("step-00000001"), []

    def salvage(*, are_writing: bool) -> Path:
        assert not are_writing
        if lost:
            raise OSError("gone")
        return kept

    plugins = SimpleNamespace(notify=lambda hook, **arguments: told.append((hook, arguments["path"])))
    loop = SimpleNamespace(
        checkpoints=SimpleNamespace(salvage=salvage),
        session=SimpleNamespace(workers=SimpleNamespace(is_ended=True), plugins=plugins),
        info=None,
    )
    with pytest.raises(KeyboardInterrupt), salvaged(loop):  # type: ignore[arg-type]
        raise KeyboardInterrupt
    assert told == ([] if lost else [("after_save_checkpoint", str(kept))])
    assert ("is lost: OSError('gone')" in caplog.text) == lost


def test_a_run_that_lost_its_last_checkpoint_says_what_there_is(
    tmp_path: Path, workers: Workers, make_writer: Callable[..., CheckpointWriter]
) -> None:
    writer = make_writer()
    writer.require_last()
    workers.failure = "the disk is full."
    write(writer, 1)
    with pytest.raises(CheckpointError, match="of step 1, could not be written: the run has none") as caught:
        writer.require_last()
    assert "driver.log" in str(caught.value.hint)
    workers.failure = None
    assert write(writer, 2)
    writer.require_last()
    workers.failure = "the disk is full."
    write(writer, 3)
    with pytest.raises(CheckpointError, match=r"of step 3\D+the last good one is \S+step-00000002\."):
        writer.require_last()


def test_a_reason_that_is_a_sentence_ends_once(
    workers: Workers, make_writer: Callable[..., CheckpointWriter], caplog: pytest.LogCaptureFixture
) -> None:
    workers.failure = "the disk is full."
    write(make_writer(), 1)
    assert "the disk is full. The run goes on" in caplog.text


def test_a_run_directory_that_is_gone_is_not_made_again(
    tmp_path: Path, workers: Workers, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CheckpointWriter(tmp_path / "gone", make_config(), workers)  # type: ignore[arg-type]
    write(writer, 1)
    assert caplog.text.count("no checkpoint of step 1") == 1
    assert not (tmp_path / "gone").exists()


def lose_a_rank(path: Path) -> None:
    (path / "rank-00001.json").unlink()


def tear_a_description(path: Path) -> None:
    (path / "rank-00001.json").write_text('{"rank": 1, "tens')


def describe_half(path: Path) -> None:
    (path / "rank-00001.json").write_text('{"tensors": {"file": "rank-00001.safetensors"}}')


def lose_tensors(path: Path) -> None:
    tensors = {"file": "rank-00001.safetensors", "bytes": 1000, "sha256": ""}
    (path / "rank-00001.json").write_text(json.dumps({"tensors": tensors}))
    (path / "rank-00001.safetensors").unlink()


@pytest.mark.parametrize("damage", [tear_a_description, describe_half, lose_tensors, lose_a_rank])
def test_what_the_ranks_did_not_write_whole_is_no_checkpoint(
    tmp_path: Path,
    make_writer: Callable[..., CheckpointWriter],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = make_writer()
    writer.start(1, {})
    damage(tmp_path / "checkpoints" / ".step-00000001.partial")
    assert writer.finish() is None
    (message,) = caplog.messages
    assert message.startswith("no checkpoint of step 1: ")
    assert "rank-00001" in message
    assert write(writer, 2)
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("error", [KeyError("dtype"), MemoryError(), RuntimeError("odd")])
def test_whatever_keeps_a_checkpoint_from_being_completed_is_a_warning(
    make_writer: Callable[..., CheckpointWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def failing(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoints, "_describe", failing)
    assert write(make_writer(), 1) is None
    (message,) = caplog.messages
    assert message.startswith(f"no checkpoint of step 1: {error!r}. The run goes on")


def test_an_old_checkpoint_that_stays_is_a_warning_of_its_own(
    tmp_path: Path,
    make_writer: Callable[..., CheckpointWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def busy(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    writer = make_writer(keep=1)
    write(writer, 1)
    monkeypatch.setattr(checkpoints, "remove", busy)
    assert write(writer, 2) == tmp_path / "checkpoints" / "step-00000002"
    (message,) = caplog.messages
    assert message.startswith(
        f"the old checkpoint {tmp_path / 'checkpoints' / 'step-00000001'} cannot be removed"
    )
    monkeypatch.undo()
    assert write(writer, 3)
    assert names(tmp_path) == ["step-00000003"]


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / "rank-00001.safetensors").read_bytes())
    data[500] ^= 1
    (path / "rank-00001.safetensors").write_bytes(data)


def truncate(path: Path) -> None:
    (path / "rank-00000.safetensors").write_bytes(b"")


def forget_a_rank(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["rank-00001.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def lose_the_driver(path: Path) -> None:
    (path / "driver.json").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def tear_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 1, "fil')


def from_the_future(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 2}')


def empty_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('["format"]')


def halve_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 1, "world_size": 0, "files": {"driver.json": {}}}')


def empty_the_driver(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["driver.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "driver.json").write_text("{}")


def nest_the_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("[" * 100_000)


def claim_ranks_without_end(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "world_size": 2**70}))


def list_a_pipe(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    os.mkfifo(path / "pipe")
    manifest["files"]["pipe"] = {"bytes": 0, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))


def change_the_driver(*keys: str, value: Any) -> Callable[[Path], None]:
    """Return what gives a key of ``driver.json`` another value, and the manifest the hash of that."""

    def change(path: Path) -> None:
        driver = json.loads((path / "driver.json").read_text())
        table = driver
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] = value
        (path / "driver.json").write_text(json.dumps(driver))
        manifest = json.loads((path / "manifest.json").read_text())
        raw = (path / "driver.json").read_bytes()
        manifest["files"]["driver.json"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        (path / "manifest.json").write_text(json.dumps(manifest))

    return change


DAMAGES = (
    nest_the_manifest,
    claim_ranks_without_end,
    list_a_pipe,
    change_the_driver("step", value="2"),
    change_the_driver("step", value=-1),
    change_the_driver("state", value=[]),
    change_the_driver("state", "step", value=2.0),
    change_the_driver("state", "version", value=None),
    change_the_driver("state", "source", value="text"),
    change_the_driver("state", "rollout", value=[1]),
    change_the_driver("files", value={"metrics.jsonl": "7"}),
    change_the_driver("packages", value=["torch"]),
    halve_the_manifest,
    empty_the_driver,
    flip_a_bit,
    truncate,
    lose_a_rank,
    forget_a_rank,
    lose_the_driver,
    lose_the_manifest,
    tear_the_manifest,
    from_the_future,
    empty_the_manifest,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    tmp_path: Path,
    make_writer: Callable[..., CheckpointWriter],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    writer = make_writer()
    write(writer, 1)
    newest = write(writer, 2)
    assert newest is not None
    damage(newest)
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert "skipped a damaged checkpoint" in caplog.text
    assert str(newest) in caplog.text


def test_if_all_are_damaged_the_run_does_not_start_anew(
    tmp_path: Path, make_writer: Callable[..., CheckpointWriter]
) -> None:
    writer = make_writer()
    for step in (1, 2):
        path = write(writer, step)
        assert path is not None
        flip_a_bit(path)
    with pytest.raises(CheckpointError, match="No checkpoint of the run can be used") as caught:
        latest_checkpoint(tmp_path)
    assert "step-00000001" in str(caught.value)
    assert "step-00000002" in str(caught.value)


class Killed(BaseException):
    """Stands for SIGKILL: nothing is caught or cleaned up after it."""


def die(*arguments: Any, **options: Any) -> None:
    raise Killed


def half_removed(path: Path, **options: Any) -> None:
    if path.exists():
        next(path.iterdir()).unlink()
        die()


@pytest.mark.parametrize(
    ("name", "replacement", "latest"),
    [
        ("_describe", die, 1),
        ("write_file", die, 1),
        ("publish", die, 1),
        ("checkpoint_paths", die, 2),
        ("remove", die, 2),
        ("shutil.rmtree", half_removed, 2),
    ],
)
def test_whenever_the_driver_is_killed_a_whole_checkpoint_is_left(
    tmp_path: Path,
    make_writer: Callable[..., CheckpointWriter],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    replacement: Callable[..., Any],
    latest: int,
) -> None:
    write(make_writer(), 1)
    monkeypatch.setattr(f"anygauge.run_directory.checkpoints.{name}", replacement)
    with pytest.raises(Killed):
        write(make_writer(keep=1), 2)
    monkeypatch.undo()
    found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == latest
    writer = make_writer(keep=1)
    assert write(writer, 3)
    assert names(tmp_path) == ["step-00000003"]


def test_an_export_takes_the_place_of_an_earlier_one(tmp_path: Path, workers: Workers) -> None:
    for content in ("1", "2"):
        export_hf(workers, tmp_path / "hf-step-5")  # type: ignore[arg-type]
        assert (tmp_path / "hf-step-5" / "model").read_text() == content
        assert [path.name for path in tmp_path.iterdir()] == ["hf-step-5"]


@pytest.mark.parametrize(
    ("best_is", "kept"), [("highest", [2, 5, 6]), ("lowest", [3, 5, 6])], ids=["highest", "lowest"]
)
def test_the_best_checkpoint_is_kept_beside_the_latest(
    tmp_path: Path, workers: Workers, best_is: str, kept: list[int]
) -> None:
    scores: dict[int, float] = {9: 1.0, 10: -1.0}  # no checkpoint of these steps
    config = make_config(keep=2, best="eval/held-out", best_is=best_is)
    writer = CheckpointWriter(tmp_path, config, workers, scores=scores)  # type: ignore[arg-type]
    for step, score in enumerate([0.5, 0.9, 0.1, 0.9 - 1e-9, None, 0.4], 1):
        scores |= {} if score is None else {step: score}
        write(writer, step)
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]


def test_without_scores_the_latest_are_kept(
    tmp_path: Path, make_writer: Callable[..., CheckpointWriter]
) -> None:
    writer = make_writer(keep=1, best="eval/held-out")
    for step in (1, 2):
        write(writer, step)
    assert names(tmp_path) == ["step-00000002"]
