"""Config changes that a resume refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.config import Config
from anygauge.config.load import write_resolved
from anygauge.run_directory.resume import check_changes, is_changed, log_changes
from anygauge_hooks.errors import CheckpointError


def config(**rollout: object) -> Config:
    tree = {"run": {"name": "r"}, "model": "m", "data": {"train": ["d.jsonl"]}, "rollout": rollout}
    return Config.model_validate(tree)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Return the config of a run that an earlier version wrote, which had no schedules and no servers."""
    path = tmp_path / "config.toml"
    write_resolved(config(), path)
    lines = path.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line == "[weight_sync]")
    kept = [line for line in lines[:start] if not line.startswith("schedule = ")]
    path.write_text("\n".join(kept))
    return path


def test_a_key_that_a_run_does_not_know_had_its_default(earlier: Path) -> None:
    assert not is_changed(earlier, config())
    check_changes(earlier, config())


def test_another_value_of_such_a_key_is_a_change(earlier: Path) -> None:
    assert is_changed(earlier, config(schedule="async"))
    with pytest.raises(CheckpointError, match=r"rollout\.schedule: 'sync' -> 'async'"):
        check_changes(earlier, config(schedule="async"))


def test_a_key_without_a_default_is_missed(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(CheckpointError, match=r"model\.path: 'not set' -> 'm'"):
        check_changes(tmp_path / "config.toml", config())


def test_how_servers_are_talked_to_may_change(earlier: Path) -> None:
    check_changes(earlier, config(client={"concurrency": 8}))


def test_who_sleeps_may_change(earlier: Path) -> None:
    """As after an out-of-memory error of a run in which nobody did."""
    tree = config().model_dump() | {"placement": {"colocated": True, "offload": "never"}}
    check_changes(earlier, Config.model_validate(tree))


def changed(**accepted: object) -> Config:
    tree = {"run": {"name": "r", **accepted}, "model": "m", "train": {"lr": 1e-3}}
    return Config.model_validate({**tree, "data": {"train": ["d.jsonl"], "input_key": "question"}})


def test_a_change_is_accepted_by_saying_so(earlier: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CheckpointError, match=r"""--run.accept_changes '\["data", "train.lr"\]'\."""):
        check_changes(earlier, changed())
    with pytest.raises(CheckpointError, match=r"run in [^:]*:\n  train\.lr: 1e-06 -> 0\.001\n  Restore"):
        check_changes(earlier, changed(accept_changes=["data"]))
    check_changes(earlier, changed(accept_changes=["data", "train.lr"]))
    log_changes(earlier, changed(accept_changes=["data", "train.lr"]))
    assert "changed with the resume: train.lr: 1e-06 -> 0.001" in caplog.text


def test_what_no_resume_can_change_is_not_offered(earlier: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_changes(earlier, config(schedule="async"))
    assert "accept_changes" not in str(caught.value)
