"""A run directory belongs to one run, and to one process at a time."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from anygauge import Run
from anygauge.config import Config
from anygauge.run_directory.checkpoints import CheckpointWriter
from anygauge.run_directory.directory import RunDirectory, reserve_run_directory
from anygauge_hooks.errors import CheckpointError

STEP_0, STEP_1 = '{"eval/step": 0}\n', '{"perf/step": 1}\n'


class Workers:
    """One rank that has nothing to save."""

    def call(self, method: str, **arguments: Any) -> list[Any]:
        if method == "save_checkpoint":
            (Path(arguments["path"]) / "rank-00000.json").write_text("{}")
        return [True]


MADE = (
    *("metrics.jsonl", "samples.jsonl", "metrics.superseded.jsonl", "config.until-step-4-2.toml"),
    *("capabilities.json", "run.json", "report.html", ".run.json.123", ".config.toml.new", "health.jsonl"),
    *("health.json", ".health.json.7", "superseded-hf-step-4-2"),
)


def make_config(directory: Path, **changes: Any) -> Config:
    tree: dict[str, Any] = {
        "run": {"name": "run", "directory": directory},
        "model": {"path": "model"},
        "data": {"train": ["data.jsonl"]},
        "train": {},
        "eval": {},
        "save": {},
        "placement": {},
        "reward": {},
        "debug": {},
        "algorithm": {},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree[section] = {**tree[section], name: value}
    return Config.model_validate(tree)


def opened(config: Config) -> RunDirectory:
    """Open and close a run directory as a run does that has nothing to do."""
    with reserve_run_directory(config) as reserved:
        directory = reserved.open({"host": "here"})
        if directory.continues:
            directory.begin()
        return directory


def stepped(config: Config) -> RunDirectory:
    """Open and close a run directory as a run does that takes a step."""
    directory = opened(config)
    with (directory.path / "metrics.jsonl").open("a") as metrics:
        metrics.write(STEP_1)
    return directory


def save(directory: Path, config: Config, step: int) -> None:
    writer = CheckpointWriter(directory, config, Workers())  # type: ignore[arg-type]
    writer.start(step, {"step": step, "version": step, "source": {}})
    assert writer.finish()
    writer.close()


def snapshot(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def test_a_new_directory_is_filled(tmp_path: Path) -> None:
    found = opened(make_config(tmp_path / "runs"))
    assert found.path == tmp_path / "runs" / "run"
    assert (found.continues, found.checkpoint) == (False, None)
    assert sorted(path.name for path in found.path.iterdir()) == [
        ".lock",
        "config.toml",
        "environment.json",
        "logs",
    ]
    assert json.loads((found.path / "environment.json").read_text()) == {"host": "here"}


def test_an_earlier_run_is_left_alone(tmp_path: Path) -> None:
    stepped(make_config(tmp_path))
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match="not empty") as caught:
        opened(make_config(tmp_path))
    assert caught.value.hint is not None
    assert "--resume" in caught.value.hint
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("option", ["run__overwrite", "run__resume"])
def test_what_no_run_made_is_left_alone(tmp_path: Path, option: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("chapter 1")
    with pytest.raises(CheckpointError, match="was not created by a run") as caught:
        opened(make_config(tmp_path, **{option: True}))
    assert ("cannot be resumed" in str(caught.value)) == (option == "run__resume")
    with pytest.raises(CheckpointError, match=r"no run made it: it has no config\.toml") as caught:
        opened(make_config(tmp_path))
    assert "--resume" not in str(caught.value), "that is refused, too"
    assert os.listdir(tmp_path / "run") == ["thesis.tex"]


def test_overwriting_removes_the_earlier_run(tmp_path: Path) -> None:
    directory = opened(make_config(tmp_path)).path
    for name in MADE:
        (directory / name).write_text("{}\n")
    for name in ("checkpoints", "dumps", "hf", "hf-step-20", "wandb", ".hf.partial-1"):
        (directory / name).mkdir()
        (directory / name / "file").write_text("")
    (tmp_path / "board").mkdir()
    (directory / "tensorboard").symlink_to(tmp_path / "board")
    opened(make_config(tmp_path, run__overwrite=True))
    assert sorted(os.listdir(directory)) == [".lock", "config.toml", "environment.json", "logs"]
    assert (tmp_path / "board").is_dir()


def test_nothing_is_overwritten_where_something_is_not_a_runs(tmp_path: Path) -> None:
    directory = opened(make_config(tmp_path)).path
    (directory / "metrics.jsonl").write_text("{}\n")
    for name in ("thesis.txt", "elsewhere", "hf-best", "data.csv", "a", "b", "c"):
        (directory / name).symlink_to(tmp_path)
    before = snapshot(directory)
    with pytest.raises(CheckpointError, match="contains files that no run wrote") as caught:
        opened(make_config(tmp_path, run__overwrite=True))
    assert "not deleted: a, b, c, data.csv, elsewhere and 2 more." in str(caught.value)
    assert snapshot(directory) == before
    assert opened(make_config(tmp_path, run__resume=True)).continues


@pytest.mark.parametrize("option", ["run__overwrite", "run__resume"])
def test_a_config_that_somebody_wrote_makes_no_run(tmp_path: Path, option: str) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.toml", "thesis.txt"):
        (tmp_path / "run" / name).write_text("# mine")
    with pytest.raises(CheckpointError, match=r"was not created by a run, .* no environment\.json"):
        opened(make_config(tmp_path, **{option: True}))
    assert sorted(os.listdir(tmp_path / "run")) == ["config.toml", "thesis.txt"]


def test_a_run_cannot_go_on_to_a_step_before_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(tmp_path)
    directory = opened(config).path
    save(directory, config, 5)
    before = snapshot(directory)
    with pytest.raises(CheckpointError, match=r"The run is at step 5; run\.steps = 2\."):
        opened(make_config(tmp_path, run__resume=True, run__steps=2))
    assert snapshot(directory) == before
    assert "changed with the resume" not in caplog.text
    assert opened(make_config(tmp_path, run__resume=True, run__steps=5)).continues


@pytest.mark.parametrize("option", ["run__overwrite", "run__resume"])
def test_a_directory_in_use_is_refused(tmp_path: Path, option: str) -> None:
    with reserve_run_directory(make_config(tmp_path)) as reserved:
        directory = reserved.open({})
        before = snapshot(directory.path)
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on "):
            opened(make_config(tmp_path, **{option: True}))
        assert snapshot(directory.path) == before
    opened(make_config(tmp_path, **{option: True}))


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "earlier run"])
def test_a_directory_that_was_only_reserved_is_left_as_it_was(tmp_path: Path, is_there: bool) -> None:
    config = make_config(tmp_path / "a" / "b", run__overwrite=is_there)
    if is_there:
        (opened(make_config(tmp_path / "a" / "b")).path / "logs" / "actor-0.log").write_text("earlier")
    before = snapshot(tmp_path)
    with reserve_run_directory(config) as reserved:
        assert sorted(os.listdir(reserved.path / "logs")) == [], "the earlier logs are elsewhere"
        (reserved.path / "logs" / "actor-0.log").write_text("new")
        assert {**before, **snapshot(tmp_path)}.keys() > before.keys()
    assert snapshot(tmp_path) == before
    assert (tmp_path / "a").exists() == is_there


def test_what_was_logged_before_the_directory_was_opened_stays(tmp_path: Path) -> None:
    directory = opened(make_config(tmp_path)).path
    (directory / "logs" / "actor-1.log").write_text("earlier")
    (directory / "metrics.jsonl").write_text("earlier")
    with reserve_run_directory(make_config(tmp_path, run__overwrite=True)) as reserved:
        (directory / "logs" / "actor-0.log").write_text("new")
        assert (directory / "metrics.jsonl").exists(), "nothing is deleted before it is opened"
        reserved.open({})
    assert sorted(os.listdir(directory)) == [".lock", "config.toml", "environment.json", "logs"]
    assert {path.name: path.read_text() for path in (directory / "logs").iterdir()} == {"actor-0.log": "new"}


def test_what_a_killed_start_leaves_is_no_run(tmp_path: Path) -> None:
    logs = tmp_path / "run" / "logs"
    logs.mkdir(parents=True)
    (logs / "actor-0.log").write_text("killed")
    with pytest.raises(CheckpointError, match="not empty"):
        opened(make_config(tmp_path))  # somebody's own: no run has locked it
    (tmp_path / "run" / ".lock").write_text("process 1 on here")
    assert not opened(make_config(tmp_path)).continues
    assert (logs / "actor-0.log").read_text() == "killed"


def test_the_logs_of_an_earlier_run_that_a_killed_start_set_aside_are_deleted_with_it(tmp_path: Path) -> None:
    directory = opened(make_config(tmp_path)).path
    (directory / "logs").rename(directory / "logs.before")
    opened(make_config(tmp_path, run__overwrite=True))
    assert sorted(os.listdir(directory)) == [".lock", "config.toml", "environment.json", "logs"]


def test_resuming_nothing_starts_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = opened(make_config(tmp_path, run__resume=True))
    assert (found.continues, found.checkpoint) == (False, None)
    assert "nothing to resume" in caplog.text


def test_a_run_without_a_checkpoint_starts_again_and_loses_nothing(tmp_path: Path) -> None:
    directory = opened(make_config(tmp_path)).path
    (directory / "metrics.jsonl").write_text('{"train/step": 1}\n')
    (directory / "health.json").write_text('{"step": 1}')
    found = opened(make_config(tmp_path, run__resume=True))
    assert (found.continues, found.checkpoint) == (True, None)
    assert not (directory / "health.json").exists(), "it would be taken for the health of the new steps"
    assert (directory / "metrics.jsonl").read_text() == ""
    assert (directory / "metrics.superseded.jsonl").read_text() == '{"train/step": 1}\n'


def test_the_exports_of_an_earlier_part_are_not_taken_for_those_of_a_run_that_starts_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = opened(make_config(tmp_path)).path
    for part in ("1", "2"):
        for name in ("hf", "hf-step-4"):
            (directory / name).mkdir()
            (directory / name / "config.json").write_text(part)
        assert Run(directory).model.name in ("hf", "hf-step-4")
        opened(make_config(tmp_path, run__resume=True))
        with pytest.raises(CheckpointError, match="has no export of its model"):
            _ = Run(directory).model
    kept = {path.parent.name: path.read_text() for path in directory.glob("*/config.json")}
    first, second = ("superseded-hf", "superseded-hf-step-4"), ("superseded-hf-2", "superseded-hf-step-4-2")
    assert kept == {**dict.fromkeys(first, "1"), **dict.fromkeys(second, "2")}
    assert f"exported to {directory / 'hf'} is now in {directory / 'superseded-hf'}" in caplog.text


def test_what_was_written_after_the_checkpoint_is_set_aside(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    directory = opened(config).path
    (directory / "metrics.jsonl").write_text("1\n2\n")
    save(directory, config, 2)
    (directory / "hf-step-2").mkdir()
    (directory / "metrics.jsonl").write_text("1\n2\n3\nhalf a li")
    (directory / "samples.jsonl").write_text("3\n")
    resumed = make_config(tmp_path, run__resume=True)
    for _ in range(2):
        found = opened(resumed)
        assert found.checkpoint is not None
        assert found.checkpoint.state == {"step": 2, "version": 2, "source": {}}
        assert (directory / "metrics.jsonl").read_text() == "1\n2\n"
        assert (directory / "samples.jsonl").read_text() == ""
        assert (directory / "metrics.superseded.jsonl").read_text() == "3\nhalf a li"
        assert (directory / "samples.superseded.jsonl").read_text() == "3\n"
        assert (directory / "hf-step-2").is_dir(), "a model of the steps that stay"


def test_a_line_that_was_half_written_at_the_checkpoint_is_set_aside_whole(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    directory = opened(config).path
    (directory / "samples.jsonl").write_text("1\n22")
    save(directory, config, 2)
    (directory / "samples.jsonl").write_text("1\n2222\n")
    opened(make_config(tmp_path, run__resume=True))
    assert (directory / "samples.jsonl").read_text() == "1\n"
    assert (directory / "samples.superseded.jsonl").read_text() == "2222\n"


def test_later_damaged_checkpoints_make_room(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    directory = opened(config).path
    for step in (1, 2):
        save(directory, config, step)
    (directory / "checkpoints" / "step-00000002" / "driver.json").write_text("")
    found = opened(make_config(tmp_path, run__resume=True))
    assert found.checkpoint is not None
    assert found.checkpoint.step == 1
    assert sorted(os.listdir(directory / "checkpoints")) == ["step-00000001", "step-00000002.damaged"]
    save(directory, make_config(tmp_path, save__keep=1), 2)
    assert sorted(os.listdir(directory / "checkpoints")) == ["step-00000002", "step-00000002.damaged"]


def test_a_step_may_be_damaged_again_and_again(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    directory = opened(config).path
    save(directory, config, 1)
    for _ in range(3):
        save(directory, config, 2)
        (directory / "checkpoints" / "step-00000002" / "driver.json").write_text("")
        found = opened(make_config(tmp_path, run__resume=True))
        assert found.checkpoint is not None
        assert found.checkpoint.step == 1
    assert sorted(os.listdir(directory / "checkpoints")) == [
        "step-00000001",
        "step-00000002-2.damaged",
        "step-00000002-3.damaged",
        "step-00000002.damaged",
    ]


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    directory = opened(make_config(tmp_path)).path
    for name in (".hf.partial-123", "..hf.new.partial-9", ".hf.new", ".hf-step-5.removed", "hf"):
        (directory / name).mkdir()
        (directory / name / "model.safetensors").write_text("")
    opened(make_config(tmp_path, run__resume=True))
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["logs", "superseded-hf"]


def test_every_old_config_stays(tmp_path: Path) -> None:
    directory = opened(make_config(tmp_path, run__steps=10)).path
    for steps in (10, 20, 20, 30):
        opened(make_config(tmp_path, run__resume=True, run__steps=steps))
    kept = [(directory / f"config.until-step-{name}.toml").read_text() for name in ("0", "0-2")]
    assert ["steps = 10" in kept[0], "steps = 20" in kept[1]] == [True, True]
    assert "steps = 30" in (directory / "config.toml").read_text()
    assert len(list(directory.glob("*.toml"))) == 3


def test_a_resume_killed_while_it_writes_the_config_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def half(config: Config, path: Path) -> None:
        path.write_text("[run\nname")
        raise Killed

    opened(make_config(tmp_path))
    monkeypatch.setattr("anygauge.run_directory.directory.write_resolved", half)
    with pytest.raises(Killed):
        opened(make_config(tmp_path, run__resume=True, run__steps=20))
    monkeypatch.undo()
    assert opened(make_config(tmp_path, run__resume=True, run__steps=20)).continues


def test_keys_that_make_another_run_are_refused_together(tmp_path: Path) -> None:
    directory = stepped(make_config(tmp_path)).path
    before = snapshot(directory)
    changed = make_config(
        tmp_path,
        run__resume=True,
        train__lr=1e-4,
        run__seed=7,
        data__train=["data.jsonl", "b.jsonl"],
        eval__interval=3,
    )
    with pytest.raises(CheckpointError, match="not that of the run") as caught:
        opened(changed)
    message = str(caught.value)
    assert "train.lr: 1e-06 -> 0.0001" in message
    assert "run.seed: 0 -> 7" in message
    assert "data.train: [" in message
    assert "eval.interval" not in message
    assert snapshot(directory) == before


def test_keys_that_may_change_are_applied_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(tmp_path)
    directory = opened(config).path
    save(directory, config, 4)
    old = (directory / "config.toml").read_text()
    changed = make_config(
        tmp_path,
        run__resume=True,
        run__steps=500,
        save__keep=5,
        placement__train_workers=2,
        eval__data=["e.jsonl"],
    )
    opened(changed)
    assert "changed with the resume: run.steps: 100 -> 500" in caplog.messages
    assert "changed with the resume: save.keep: 2 -> 5" in caplog.messages
    assert (
        "changed with the resume: placement.train_workers: 1 -> 2; the bits may differ from here on"
        in caplog.messages
    )
    assert "run.resume" not in caplog.text
    assert (directory / "config.until-step-4.toml").read_text() == old
    assert "steps = 500" in (directory / "config.toml").read_text()


def test_longer_cosines_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stepped(make_config(tmp_path, train__lr_schedule="cosine"))
    opened(make_config(tmp_path, run__resume=True, run__steps=500, train__lr_schedule="cosine"))
    said = next(each for each in caplog.messages if "run.steps" in each)
    assert said.endswith("100 -> 500; the learning rate goes on along the cosine of a run of 500 steps")


def test_data_files_may_move(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stepped(make_config(tmp_path))
    stepped(
        make_config(tmp_path, run__resume=True, data__train=["/elsewhere/data.jsonl"], reward__concurrency=7)
    )
    moved = next(each for each in caplog.messages if "data.train" in each)
    assert moved.endswith("; the rows must be those of the checkpoint, which is checked")
    assert "changed with the resume: reward.concurrency: 64 -> 7" in caplog.messages
    weighted = [{"path": "/elsewhere/data.jsonl", "weight": 2.0}]
    with pytest.raises(CheckpointError, match=r"data\.train: "):
        opened(make_config(tmp_path, run__resume=True, data__train=weighted))
    with pytest.raises(CheckpointError, match=r"data\.train: "):
        opened(make_config(tmp_path, run__resume=True, data__train=["b.jsonl"], data__source="other"))


def test_an_edited_config_may_name_its_data_files_in_short(tmp_path: Path) -> None:
    directory = stepped(make_config(tmp_path)).path
    edit_train(directory, '["elsewhere.jsonl"]')
    assert stepped(make_config(tmp_path, run__resume=True)).continues
    for odd in ("[7]", '["a", {path = "b", weight = 2.0}]', "[[]]", '"data.jsonl"', "{}"):
        edit_train(directory, odd)
        with pytest.raises(CheckpointError, match=r"data\.train"):
            opened(make_config(tmp_path, run__resume=True))


def edit_train(directory: Path, train: str) -> None:
    """Replace what a run's config says of its training data."""
    tree = tomllib.loads((directory / "config.toml").read_text())
    tree["data"]["train"] = tomllib.loads(f"train = {train}")["train"]
    (directory / "config.toml").write_text(tomli_w.dumps(tree))


@pytest.mark.parametrize(
    ("key", "value"), [("dump_batches", True), ("mode", "rollout_only"), ("replay_batches", "dumps")]
)
def test_a_run_may_go_on_to_be_looked_at(tmp_path: Path, key: str, value: Any) -> None:
    opened(make_config(tmp_path))
    assert opened(make_config(tmp_path, run__resume=True, **{f"debug__{key}": value})).continues


def test_a_run_whose_config_is_lost_or_torn(tmp_path: Path) -> None:
    directory = opened(make_config(tmp_path)).path
    (directory / "config.toml").write_text("[run\nname")
    with pytest.raises(CheckpointError, match="cannot be read"):
        opened(make_config(tmp_path, run__resume=True))


def test_a_file_that_cannot_be_read_at_a_resume_is_named_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    run = opened(config).path

    def refuse(*arguments: Any) -> None:
        raise PermissionError(13, "Permission denied", str(run / "metrics.jsonl"))

    monkeypatch.setattr("anygauge.run_directory.directory.set_aside", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be used: .*Permission denied") as caught:
        opened(make_config(tmp_path, run__resume=True))
    assert "--resume" in str(caught.value.hint)
    assert "cannot be made" not in str(caught.value)


def test_a_directory_knows_whether_it_is_still_there(tmp_path: Path) -> None:
    with reserve_run_directory(make_config(tmp_path)) as reserved:
        directory = reserved.open({})
        directory.check()
        directory.path.rename(tmp_path / "elsewhere")
        with pytest.raises(CheckpointError, match="was moved or deleted"):
            directory.check()
        directory.path.mkdir()
        with pytest.raises(CheckpointError, match="was moved or deleted"):
            directory.check()
        directory.path.rmdir()
        (tmp_path / "elsewhere").rename(directory.path)
        directory.check()


def test_a_run_that_took_no_step_starts_again_with_any_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for resume in (False, True):
        opened(make_config(tmp_path, run__overwrite=True))
        (tmp_path / "run/metrics.jsonl").write_text(STEP_0)
        again = opened(make_config(tmp_path, run__resume=resume, algorithm__advantage="rloo"))
        assert (again.continues, again.checkpoint) == (True, None)
        assert "ended before its first step: it starts again" in caplog.text
        assert "changed with the resume" not in caplog.text
        assert (tmp_path / "run/metrics.jsonl").read_text() == ""
        assert (tmp_path / "run/metrics.superseded.jsonl").read_text() == STEP_0
        assert tomllib.loads((tmp_path / "run/config.toml").read_text())["algorithm"]["advantage"] == "rloo"


@pytest.mark.parametrize("name", ["health.json", "hf", "hf-step-8", "dumps"])
def test_a_run_without_metrics_has_taken_a_step_if_it_wrote_what_follows_one(
    tmp_path: Path, name: str
) -> None:
    opened(make_config(tmp_path, run__trackers=[]))
    (tmp_path / "run" / name).mkdir()
    with pytest.raises(CheckpointError, match="is not empty"):
        opened(make_config(tmp_path, run__trackers=[]))


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_run_that_took_a_step_does_not(tmp_path: Path, has_checkpoint: bool) -> None:
    config = make_config(tmp_path)
    opened(config)
    if has_checkpoint:
        save(tmp_path / "run", config, 1)
    else:
        (tmp_path / "run/metrics.jsonl").write_text(STEP_0 + STEP_1)
    with pytest.raises(CheckpointError, match="not empty"):
        opened(config)


def test_a_run_that_goes_on_is_in_use_and_not_to_be_deleted(tmp_path: Path) -> None:
    with reserve_run_directory(make_config(tmp_path)) as reserved:
        directory = reserved.open({})
        (directory.path / "metrics.jsonl").write_text(STEP_1)
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"):
            opened(make_config(tmp_path))
