"""The rules of the ``[debug]`` table."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from anygauge.config.schema import Config
from anygauge_hooks.types import ConfigProblem

__all__ = ["debug_rule", "replay_rule"]

REPLAYS = ("replay_rollouts", "replay_batches")
DUMPS = ("dump_rollouts", "dump_batches")
WITHOUT_EFFECT = {
    "rollout_only": {
        "replay_rollouts": "nothing would be generated",
        "dump_batches": "there are no batches without training",
    },
    "sft": {
        "mode": "SFT has no rollouts",
        "dump_rollouts": "SFT has no rollouts",
        "replay_rollouts": "SFT has no rollouts",
    },
    "replay_batches": {"dump_rollouts": "there are no rollouts where batches are replayed"},
}
"""Why a key is refused, by what else is set."""


def debug_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield settings of ``[debug]`` that do not go together."""
    debug = config.debug
    replays = [name for name in REPLAYS if getattr(debug, name) is not None]
    if len(replays) > 1:
        yield _problem(config, "replay_batches", "a run replays rollouts or batches, not both; give one")
    if debug.mode == "train_only" and not replays:
        hint = "needs what it trains on: debug.replay_rollouts or debug.replay_batches"
        yield _problem(config, "mode", hint)
    if debug.replay_batches is not None and debug.mode != "train_only":
        yield _problem(config, "replay_batches", 'needs debug.mode = "train_only"')
    if debug.mode == "rollout_only" and config.run.resume:
        yield _problem(config, "mode", "has nothing to resume: it trains nothing; leave run.resume out")
    for case in _cases(config):
        for name, why in WITHOUT_EFFECT[case].items():
            if getattr(debug, name) not in (None, False, "none", "train_only"):
                yield _problem(config, name, f"{why}; leave it out")


def _cases(config: Config) -> Iterator[str]:
    if config.debug.mode == "rollout_only":
        yield "rollout_only"
    if config.run.task == "sft":
        yield "sft"
    if config.debug.replay_batches is not None:
        yield "replay_batches"


def replay_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield problems of a dump directory to replay."""
    for name in REPLAYS:
        directory: Path | None = getattr(config.debug, name)
        hint = None if directory is None else _replay_hint(config, directory, name)
        if hint:
            yield _problem(config, name, hint)


def _replay_hint(config: Config, directory: Path, name: str) -> str | None:
    run_directory = (config.run.directory / config.run.name).resolve()
    kind = "rollout" if name == "replay_rollouts" else "batch"
    if not directory.is_dir():
        dump = DUMPS[REPLAYS.index(name)]
        return f"no such directory; name the dumps/ of a run that had debug.{dump} = true"
    if not any(directory.glob(f"{kind}-*")):
        return f"no dump of a {kind} is there; name the dumps/ of a run"
    inside = directory.resolve().is_relative_to(run_directory)
    if inside and config.run.overwrite:
        return "run.overwrite would delete it with the run directory; choose another run.name"
    if inside and any(getattr(config.debug, dump) for dump in DUMPS):
        return "this run would write its own dumps over it; choose another run.name"
    return None


def _problem(config: Config, name: str, hint: str) -> ConfigProblem:
    value = getattr(config.debug, name)
    return ConfigProblem(
        path=f"debug.{name}", found=str(value) if isinstance(value, Path) else value, hint=hint
    )
