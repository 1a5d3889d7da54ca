"""What checkpoints cost the demo: pairs of runs, with a save every 20 steps and with none, in turns.

    python bench/checkpoint.py                       # 5 pairs of 100 steps
    python bench/checkpoint.py --pairs 9 --steps 60

Training time is the sum of the steps' wall times and of what the driver spent in saving between them, so that
it has both what a save blocks and what writing in the background takes away from the steps beside it. The
blocked time alone is that of the driver in a save. A resume is timed apart: checking and loading the last
checkpoint, from the driver's side. Ends with status 1 if the median over pairs is above the goal of 2 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.trainer.saved import latest_checkpoint

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "arithmetic_grpo.toml"
MAKE_INPUTS = ROOT / "examples" / "arithmetic" / "make_inputs.py"
INPUTS = ROOT / "runs" / "arithmetic-inputs-checkpoint"
EVERY, GOAL = 20, 0.02
SKIPPED = 3
"""First steps, which are slower in any run."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    steps_s: float
    save_s: tuple[float, ...]
    """What each save blocked."""

    @property
    def train_s(self) -> float:
        """Return the training time."""
        return self.steps_s + sum(self.save_s)


def train(name: str, steps: int, every: str, extra: Sequence[str]) -> Outcome:
    """Run the demo and read how long its steps took."""
    command = [
        *(sys.executable, "-m", "anygauge", "train", str(RECIPE), "--backend", "cpu", "--run.name", name),
        *("--run.directory", str(ROOT / "runs"), "--run.steps", str(steps), "--save.every", every),
        *("--model.path", f"{INPUTS}/model", "--data.train", f'["{INPUTS}/train.jsonl"]'),
        *("--eval.data", "[]", "--save.hf_at_end", "false", "--run.report", "false", *extra),
    ]
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]
    times = [row["perf/step_time"] for row in rows if "perf/step_time" in row]
    saves = [row["perf/save_time"] for row in rows if "perf/save_time" in row]
    return Outcome(sum(times[SKIPPED:]), tuple(saves))


def describe(pairs: Sequence[tuple[Outcome, Outcome]]) -> float:
    """Print the table of the pairs and return the median share that saving adds."""
    print("pair   without      with     added   a save blocks")
    shares = []
    for number, (without, with_saves) in enumerate(pairs, 1):
        shares.append(with_saves.train_s / without.train_s - 1)
        blocked = 1e3 * statistics.median(with_saves.save_s)
        print(
            f"{number:>4}  {without.train_s:6.1f} s  {with_saves.train_s:6.1f} s  {shares[-1]:+7.2%}"
            f"  {blocked:10.1f} ms"
        )
    blocked_share = statistics.median(sum(each.save_s) / each.train_s for _, each in pairs)
    print(f"median {statistics.median(shares):+.2%}; blocked alone {blocked_share:.2%}; goal {GOAL:.0%}")
    return statistics.median(shares)


def describe_resume(name: str) -> None:
    """Print how large a checkpoint is and how long it takes to check."""
    start = time.perf_counter()
    checkpoint = latest_checkpoint(ROOT / "runs" / name)
    seconds = time.perf_counter() - start
    assert checkpoint is not None
    size = sum(path.stat().st_size for path in checkpoint.path.iterdir())
    print(f"checkpoint of {size / 1e6:.1f} MB, checked in {1e3 * seconds:.0f} ms")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what checkpoints cost the demo")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    arguments, extra = parser.parse_known_args()
    if not INPUTS.is_dir():
        subprocess.run([sys.executable, str(MAKE_INPUTS), "--out", str(INPUTS)], cwd=ROOT, check=True)
    pairs = []
    for number in range(arguments.pairs):
        # Each of a pair goes first in turn: a host that warms up or cools down favours neither.
        order = ("none", str(EVERY)) if number % 2 == 0 else (str(EVERY), "none")
        found = {every: train(f"bench-save-{every}", arguments.steps, every, extra) for every in order}
        pairs.append((found["none"], found[str(EVERY)]))
    share = describe(pairs)
    describe_resume(f"bench-save-{EVERY}")
    sys.exit(share > GOAL)


if __name__ == "__main__":
    main()
