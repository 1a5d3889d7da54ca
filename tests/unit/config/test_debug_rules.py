"""Settings of ``[debug]`` that do not go together, and directories that cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from anygauge.config import LoadedConfig
from anygauge_hooks.errors import ConfigError

Load = Callable[..., LoadedConfig]


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    """Return a directory with one dump of each kind."""
    path = tmp_path / "runs/first/dumps"
    path.mkdir(parents=True)
    (path / "rollout-00000001.jsonl.gz").touch()
    (path / "batch-00000001-dp-0.safetensors").touch()
    return path


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["mode=train_only"], "debug.mode: found 'train_only' on the command line; needs what it trains on"),
        (["replay_batches={}"], 'on the command line; needs debug.mode = "train_only"'),
        (
            ["mode=train_only", "replay_batches={}", "replay_rollouts={}"],
            "a run replays rollouts or batches, not both",
        ),
        (["mode=rollout_only", "replay_rollouts={}"], "nothing would be generated; leave it out"),
        (["mode=rollout_only", "dump_batches=true"], "there are no batches without training"),
        (["mode=train_only", "replay_batches={}", "dump_rollouts=true"], "no rollouts where batches are"),
    ],
)
def test_settings_that_do_not_go_together(load: Load, dumped: Path, keys: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=[f"--debug.{key.format(dumped)}" for key in keys])
    assert text.format(dumped) in str(caught.value)
    assert "1 problem" in str(caught.value)


@pytest.mark.parametrize("key", ["mode=rollout_only", "dump_rollouts=true", "replay_rollouts={}"])
def test_sft_has_no_rollouts(load: Load, dumped: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="SFT has no rollouts; leave it out"):
        load(overrides=["--run.task=sft", f"--debug.{key.format(dumped)}"])


def test_rollouts_alone_are_not_resumed(load: Load) -> None:
    with pytest.raises(ConfigError, match="has nothing to resume"):
        load(overrides=["--run.resume=true", "--debug.mode=rollout_only"])


@pytest.mark.parametrize(
    "keys",
    [
        ["mode=rollout_only", "dump_rollouts=true"],
        ["mode=train_only", "replay_rollouts={}", "dump_batches=true"],
        ["mode=train_only", "replay_batches={}"],
        ["replay_rollouts={}"],
        ["dump_rollouts=true", "dump_batches=true"],
    ],
)
def test_settings_that_go_together(load: Load, dumped: Path, keys: list[str]) -> None:
    load(overrides=[f"--debug.{key.format(dumped)}" for key in keys])


def test_a_replay_needs_dumps_of_its_kind(load: Load, tmp_path: Path, dumped: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"no such directory; name the dumps/ of a run that had debug.dump_r"
    ):
        load(overrides=[f"--debug.replay_rollouts={tmp_path}/none"])
    (dumped / "rollout-00000001.jsonl.gz").unlink()
    with pytest.raises(ConfigError, match="no dump of a rollout is there"):
        load(overrides=[f"--debug.replay_rollouts={dumped}"])


@pytest.mark.parametrize(
    ("key", "text"),
    [("--run.overwrite=true", "would delete it"), ("--debug.dump_rollouts=true", "dumps over it")],
)
def test_a_replay_of_the_runs_own_dumps(
    load: Load, tmp_path: Path, dumped: Path, key: str, text: str
) -> None:
    own = [f"--run.directory={tmp_path}/runs", "--run.name=first", f"--debug.replay_rollouts={dumped}"]
    load(overrides=own)
    with pytest.raises(ConfigError, match=text):
        load(overrides=[*own, key])
