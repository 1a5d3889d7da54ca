"""Config changes that a resume refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.config import Config
from anygauge.config.load import write_resolved
from anygauge.run_directory.resume import apply_changes, is_changed
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
    apply_changes(earlier, config())


def test_another_value_of_such_a_key_is_a_change(earlier: Path) -> None:
    assert is_changed(earlier, config(schedule="async"))
    with pytest.raises(CheckpointError, match=r"rollout\.schedule: 'sync' -> 'async'"):
        apply_changes(earlier, config(schedule="async"))


def test_a_key_without_a_default_is_missed(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(CheckpointError, match=r"model\.path: 'not set' -> 'm'"):
        apply_changes(tmp_path / "config.toml", config())


def test_how_servers_are_talked_to_may_change(earlier: Path) -> None:
    apply_changes(earlier, config(client={"concurrency": 8}))
