"""The demo with several seeds: does the policy learn, how long does it take, what does it cost.

    python bench/demo.py                # seeds 0, 1 and 2, as `make soak` does
    python bench/demo.py --seeds 7
    python bench/demo.py --backend cuda --seeds 0 --train.dtype bfloat16

Each seed has a warm-up and a policy of its own. Before and after are the mean reward of one sample at
temperature 1 on the same 512 held-out problems. Memory is the peak of the summed proportional set size (PSS)
of the driver and its workers, read twice a second. Overhead is the median, over steps, of the wall time that
is in none of the engines' phases. Other arguments are keys of the run's config. Below the table are the
phases of a step, in the median, and how far the trainer's log-probs are from the engine's, in the mean.
Ends with status 1 if a seed misses the goal: from under 0.3 to over 0.8 within 5 minutes of training, and on
the CPU in 4 GiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "arithmetic_grpo.toml"
MAKE_INPUTS = ROOT / "examples" / "arithmetic" / "make_inputs.py"
BEFORE, AFTER = 0.3, 0.8
TRAIN_S, PEAK_PSS = 300.0, 4 * 2**30
DIFFERENCE = "train/train_rollout_logprob_abs_diff"


@dataclass(frozen=True)
class Outcome:
    """Result of one seed."""

    seed: int
    before: float
    after: float
    inputs_s: float
    train_s: float
    step_ms: float
    overhead_ms: float
    peak_pss: int
    is_small: bool
    phases: str
    difference: float
    """Between the log-probs of trainer and engine."""

    @property
    def reached(self) -> bool:
        """Return whether the goal was reached."""
        learned = self.before < BEFORE and self.after > AFTER
        return learned and self.train_s < TRAIN_S and self.is_small

    def row(self) -> str:
        """Return one line of the table."""
        share = self.overhead_ms / self.step_ms
        return (
            f"{self.seed:>4}  {self.before:6.3f}  {self.after:6.3f}  {self.inputs_s:7.0f} s"
            f"  {self.train_s:7.0f} s  {self.step_ms:6.0f} ms"
            f"  {self.overhead_ms:5.1f} ms ({share:5.1%})  {self.peak_pss / 2**30:5.2f} GiB"
        )


HEADER = "seed  before   after     warm-up    training    a step          overhead   peak memory"


def tree_pss(pid: int) -> int:
    """Return the summed proportional set size of a process and its descendants, in bytes."""
    total = 0
    for process in _tree(pid):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue  # it has just ended
    return total


def _tree(pid: int) -> Iterator[psutil.Process]:
    try:
        root = psutil.Process(pid)
        yield from [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return


def run_measured(command: Sequence[str]) -> tuple[float, int]:
    """Run a command and return its seconds and the peak of its tree's memory, in bytes."""
    start, peak = time.perf_counter(), 0
    with subprocess.Popen(command, cwd=ROOT) as process:
        while process.poll() is None:
            peak = max(peak, tree_pss(process.pid))
            time.sleep(0.5)
    if process.returncode:
        raise SystemExit(process.returncode)
    return time.perf_counter() - start, peak


def run_seed(seed: int, backend: str, extra: Sequence[str]) -> Outcome:
    """Make the inputs of a seed, train, and read what came out."""
    inputs, name = f"runs/arithmetic-inputs-{seed}", f"arithmetic-soak-{seed}"
    inputs_s, _ = run_measured([sys.executable, str(MAKE_INPUTS), "--seed", str(seed), "--out", inputs])
    train_s, peak = run_measured(
        [
            *(sys.executable, "-m", "anygauge", "train", str(RECIPE), "--backend", backend),
            *("--run.seed", str(seed), "--run.name", name, "--model.path", f"{inputs}/model"),
            *(
                "--data.train",
                f'["{inputs}/train.jsonl"]',
                "--eval.data",
                f'[{{path = "{inputs}/eval.jsonl", name = "held-out"}}]',
            ),
            *extra,
        ]
    )
    rows = read_metrics(ROOT / "runs" / name / "metrics.jsonl")
    scores = [row["eval/held-out"] for row in rows if "eval/held-out" in row]
    steps = [row for row in rows if "perf/step_time" in row]
    return Outcome(
        seed=seed,
        before=scores[0],
        after=scores[-1],
        inputs_s=inputs_s,
        train_s=train_s,
        step_ms=1e3 * statistics.median(row["perf/step_time"] for row in steps),
        overhead_ms=1e3 * statistics.median(map(outside_engines, steps)),
        peak_pss=peak,
        is_small=peak < PEAK_PSS or backend != "cpu",
        phases=phases(steps),
        difference=statistics.fmean(row[DIFFERENCE] for row in rows if DIFFERENCE in row),
    )


def phases(steps: Sequence[Mapping[str, float]]) -> str:
    """Return the median milliseconds of what a step consists of, as a phrase."""
    names = [name for name in steps[-1] if name.startswith("perf/") and name.endswith("_time")]
    middle = {name: statistics.median(row.get(name, 0.0) for row in steps) for name in names}
    return ", ".join(
        f"{name.removeprefix('perf/').removesuffix('_time')} {1e3 * value:.0f} ms"
        for name, value in middle.items()
    )


def outside_engines(row: Mapping[str, float]) -> float:
    """Return the seconds of a step in which nothing was generated and the train engine had nothing to do."""
    engines = ("perf/rollout_time", "perf/log_probs_time", "perf/train_time")
    return row["perf/step_time"] - sum(row.get(name, 0.0) for name in engines)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def main(description: str, header: str, run_seed: Callable[[int, str, Sequence[str]], Any]) -> None:
    """Run every seed and print the table."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--backend", default="cpu")
    arguments, extra = parser.parse_known_args()
    outcomes = [run_seed(seed, arguments.backend, extra) for seed in arguments.seeds]
    print(header)
    for outcome in outcomes:
        print(outcome.row())
    for outcome in outcomes:
        print(f"seed {outcome.seed}: {outcome.phases}; log-probs differ by {outcome.difference:.1e}")
    sys.exit(not all(outcome.reached for outcome in outcomes))


if __name__ == "__main__":
    main("the arithmetic demo with several seeds", HEADER, run_seed)
