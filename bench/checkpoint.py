"""What checkpoints cost the demo: pairs of runs, with a save in every step and with none, in turns.

    python bench/checkpoint.py                       # 2 pairs of 60 steps
    python bench/checkpoint.py --pairs 5 --steps 100

Two runs of the demo differ by more than a save in 20 steps costs, so the cost of one is taken where each
step has it: a step is its wall time and what the driver spent in saving after it, so that it has both what
a save blocks and what writing in the background takes away from the step beside it. A resume is timed
apart: checking the last checkpoint, from the driver's side. Ends with status 1 if one save in 20 steps would
be above the goal of 2 %.
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

    steps_s: tuple[float, ...]
    save_s: tuple[float, ...]
    """What each save blocked."""

    @property
    def step_s(self) -> float:
        """Return the time of a step, with the save after it."""
        blocked = statistics.median(self.save_s) if self.save_s else 0.0
        return statistics.median(self.steps_s) + blocked


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
    return Outcome(tuple(times[SKIPPED:]), tuple(saves))


def describe(pairs: Sequence[tuple[Outcome, Outcome]]) -> float:
    """Print the table of the pairs and return the share that one save in ``EVERY`` steps adds."""
    print("pair  a step without   with a save   a save costs   it blocks")
    shares = []
    for number, (without, with_saves) in enumerate(pairs, 1):
        cost = with_saves.step_s - without.step_s
        shares.append(cost / EVERY / without.step_s)
        blocked = 1e3 * statistics.median(with_saves.save_s)
        print(
            f"{number:>4}  {1e3 * without.step_s:11.1f} ms  {1e3 * with_saves.step_s:9.1f} ms"
            f"  {1e3 * cost:10.1f} ms  {blocked:6.1f} ms"
        )
    share = statistics.median(shares)
    print(f"one save in {EVERY} steps adds {share:+.2%} (median over pairs); goal {GOAL:.0%}")
    return share


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
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    arguments, extra = parser.parse_known_args()
    if not INPUTS.is_dir():
        subprocess.run([sys.executable, str(MAKE_INPUTS), "--out", str(INPUTS)], cwd=ROOT, check=True)
    pairs = []
    for number in range(arguments.pairs):
        # Each of a pair goes first in turn: a host that warms up or cools down favours neither.
        order = ("none", "1") if number % 2 == 0 else ("1", "none")
        found = {every: train(f"bench-save-{every}", arguments.steps, every, extra) for every in order}
        pairs.append((found["none"], found["1"]))
    share = describe(pairs)
    describe_resume("bench-save-1")
    sys.exit(share > GOAL)


if __name__ == "__main__":
    main()
