"""Held-out accuracy and reward of synchronous and asynchronous runs, several seeds each, side by side.

    python bench/seeds.py --model DIR --backend cuda --seeds 0 1 2
    python bench/seeds.py --model DIR --backend cuda --schedules sync async:4 --steps 200 --train.lr 5e-6
    .venv-sglang/bin/python bench/seeds.py --task demo --schedules sync async:1 --seeds 0 --steps 20

The task is that of ``bench/end_to_end.py``; ``async:N`` is the asynchronous schedule with
``max_staleness = N``.
All runs go at the same time on the same devices, each with a server of its own: a slow step changes what no
schedule learns. Their seconds compare schedules among themselves, not with other figures. A run that fails is
named, and the others are shown; the script ends with status 1 then.

The caches of all servers must fit on one device: for larger models lower ``--rollout.max_batch_tokens``.

Other arguments are keys of the runs' configs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from checkout import nested
from end_to_end_inputs import make_inputs
from end_to_end_rows import APART, COMMON, TASKS

LAST = 10
"""Steps whose mean reward is shown."""
PAUSE_S = 1.0
"""Between the starts of two runs."""


def keys_of(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the config of a run by dotted keys."""
    schedule, _, bound = name.partition(":")
    hook = {key: value for key, value in COMMON.items() if key != "rollout.after_sample"}
    return {
        **{key: value for key, value in hook.items() if not key.startswith("eval.datasets.first")},
        **{key: value for key, value in TASKS[arguments.task].items() if not key.startswith("critic.")},
        **APART,
        "rollout.schedule": schedule,
        **({"rollout.max_staleness": int(bound)} if bound else {}),
        # A bound in tokens, no share of the memory: SGLang compares what is free before and after it loads,
        # and servers that start together would count each other's memory as their own.
        "rollout.max_batch_tokens": 131_072,
        "run.name": f"{schedule}{bound}-{seed}",
        "run.seed": seed,
        "run.steps": arguments.steps,
        "run.directory": str(arguments.directory),
        "eval.interval": max(1, arguments.steps // 3),
    }


def start(keys: Mapping[str, Any], arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a run, whose output goes to a file beside its directory."""
    stem = arguments.directory / keys["run.name"]
    config = stem.with_suffix(".toml")
    config.write_text(tomli_w.dumps(nested(dict(keys))), encoding="utf-8")
    command = [sys.executable, "-m", "anygauge", "train", str(config), "--backend", arguments.backend]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with stem.with_suffix(".txt").open("wb") as output:
        return subprocess.Popen(
            [*command, *arguments.extra],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )


def figures(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], float, float]:
    """Return the held-out accuracies of a run, the mean reward of its last steps, and its seconds a step."""
    steps = [row for row in rows if "perf/step_time" in row]
    rewards = [row["rollout/raw_reward"] for row in steps]
    seconds = statistics.fmean(row["perf/step_time"] for row in steps)
    return (
        [row["eval/eval"] for row in rows if "eval/eval" in row],
        statistics.fmean(rewards[-LAST:]),
        seconds,
    )


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; those that it does not know are keys of the configs."""
    parser = argparse.ArgumentParser(description="rewards of schedules over seeds", allow_abbrev=False)
    parser.add_argument("--model", type=Path, help="Hugging Face directory; the demo's model without")
    parser.add_argument("--task", choices=sorted(TASKS), default="sums")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--schedules", nargs="+", default=["sync", "async:1", "async:2"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--directory", type=Path, default=Path("runs/seeds"))
    arguments, arguments.extra = parser.parse_known_args(given)
    return arguments


def main() -> None:
    """Run all, and print a line for each."""
    arguments = parse()
    arguments.directory = arguments.directory.resolve()
    inputs = make_inputs(arguments.directory / "inputs", arguments.task, arguments.model)
    inputs.pop("eval.datasets.first.files", None)
    runs = {}
    for seed in arguments.seeds:
        for name in arguments.schedules:
            runs[name, seed] = start({**keys_of(name, seed, arguments), **inputs}, arguments)
            time.sleep(PAUSE_S)
    print(f"{'schedule':>10} {'seed':>4}  held-out accuracy, reward of the last {LAST} steps, seconds a step")
    statuses = {run: process.wait() for run, process in runs.items()}
    for (name, seed), status in statuses.items():
        run = arguments.directory / f"{name.replace(':', '')}-{seed}"
        if status:
            print(f"{name:>10} {seed:>4}  failed with status {status}: {run}.txt")
            continue
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        scores, reward, seconds = figures([json.loads(line) for line in lines])
        accuracy = " ".join(f"{score:.3f}" for score in scores)
        print(f"{name:>10} {seed:>4}  {accuracy}, {reward:.3f}, {seconds:.2f}")
    sys.exit(any(statuses.values()))


if __name__ == "__main__":
    main()
