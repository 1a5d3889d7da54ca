"""Cost of checkpoints in the demo: pairs of runs, with a save in every step and with none, alternated.

    python bench/checkpoint.py                       # 2 pairs of 60 steps
    python bench/checkpoint.py --pairs 5 --steps 100

Two runs of the demo differ by more than a save in 20 steps costs, so the cost of one is taken where each
step has it: a step is its wall time and what the driver spent in saving after it, so that it has both what
a save blocks and what writing in the background takes away from the step beside it. A resume is a whole
command that goes on for one step, less one that starts anew and takes one, in turns. Ends with status 1 if
one save in 20 steps and one resume would add more than the goal of 2 % to the demo's 400 steps.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from demo import MAKE_INPUTS, RECIPE, ROOT, read_metrics

from anygauge.run_directory.checkpoint_reader import latest_checkpoint

INPUTS = ROOT / "runs" / "arithmetic-inputs-checkpoint"
EVERY, GOAL = 20, 0.02
DEMO_STEPS = 400
RESUME = ("--run.resume", "true", "--run.overwrite", "false")
SKIPPED = 3
"""First steps, which are slower in any run."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    steps_s: tuple[float, ...]
    save_s: tuple[float, ...]
    """Seconds that each save blocked."""

    @property
    def step_s(self) -> float:
        """Return the time of a step, with the save after it."""
        blocked = statistics.median(self.save_s) if self.save_s else 0.0
        return statistics.median(self.steps_s) + blocked


def run(name: str, steps: int, *arguments: str) -> float:
    """Run the demo and return how many seconds the command took."""
    command = [
        *(sys.executable, "-m", "anygauge", "train", str(RECIPE), "--backend", "cpu", "--run.name", name),
        *("--run.directory", str(ROOT / "runs"), "--run.steps", str(steps)),
        *("--model.path", f"{INPUTS}/model", "--data.train", f'["{INPUTS}/train.jsonl"]'),
        *("--eval.data", "[]", "--save.hf_at_end", "false", "--run.report", "false", *arguments),
    ]
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def train(name: str, steps: int, every: str, extra: Sequence[str]) -> Outcome:
    """Run the demo and read how long its steps took."""
    run(name, steps, "--save.every", every, *extra)
    rows = read_metrics(ROOT / "runs" / name / "metrics.jsonl")
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


def describe_resume(name: str, steps: int, pairs: int, step_s: float, extra: Sequence[str]) -> float:
    """Print what a resume costs beside a start and return its share in the demo.

    :param name: Of a run that has taken so many steps and has a checkpoint of the last.
    :param step_s: Of a step of the demo.
    """
    costs = []
    for number in range(1, pairs + 1):
        fresh = run(f"{name}-anew", 1, "--save.every", "none", *extra)
        costs.append(run(name, steps + number, "--save.every", "1", *RESUME, *extra) - fresh)
    checkpoint = latest_checkpoint(ROOT / "runs" / name)
    assert checkpoint is not None
    size = sum(path.stat().st_size for path in checkpoint.path.iterdir())
    cost = statistics.median(costs)
    share = cost / (DEMO_STEPS * step_s)
    each = ", ".join(f"{1e3 * value:.0f}" for value in costs)
    print(
        f"a resume from {size / 1e6:.1f} MB takes {1e3 * cost:.0f} ms more than a start ({each}): "
        f"{share:+.2%} of {DEMO_STEPS} steps"
    )
    return share


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
        # Each of a pair goes first in turn: a host that warms up or cools down favors neither.
        order = ("none", "1") if number % 2 == 0 else ("1", "none")
        found = {every: train(f"bench-save-{every}", arguments.steps, every, extra) for every in order}
        pairs.append((found["none"], found["1"]))
    share = describe(pairs)
    step_s = statistics.median(without.step_s for without, _ in pairs)
    share += describe_resume("bench-save-1", arguments.steps, max(3, arguments.pairs), step_s, extra)
    sys.exit(share > GOAL)


if __name__ == "__main__":
    main()
