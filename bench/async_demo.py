"""The demo with real SGLang servers: asynchronous training ends with the reward of synchronous training.

    .venv-sglang/bin/python bench/async_demo.py           # about a quarter of an hour on two quiet processors

The task, the policy and the algorithm are those of ``make demo``, with smaller steps: a server on a CPU that
it shares with the trainer makes some hundred of these short responses a second. Both runs have the same seed
and number of steps, and differ in ``rollout.schedule`` alone. What is compared is the mean reward of a sample
at temperature 1 on the same 512 held-out problems. Ends with status 1 if the rewards differ by more than the
demo's seeds do, or the policy has not learned.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

from demo import MAKE_INPUTS, RECIPE, ROOT, read_metrics

PREPARED = """
import runpy, sys
from anygauge_cpu.env import declare_missing_operators
declare_missing_operators()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script where torchvision is a build for another torch, as it is beside SGLang on a CPU."""
APART = 0.08
"""Largest difference between the rewards of the demo's seeds: ``bench/demo.py``."""
GAIN = 0.1
"""Least gain in reward of a run."""
HELD_OUT = "eval/held-out"


class Outcome(NamedTuple):
    """Result of one schedule."""

    before: float
    after: float
    seconds: float
    step_s: float
    mean_lag: float
    most_lag: float


def main() -> int:
    """Run both schedules and print the table; the exit status tells whether they agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=32, help="of a step, with eight samples each")
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    inputs = f"runs/arithmetic-inputs-{options.seed}"
    _run(["-c", PREPARED, str(MAKE_INPUTS), "--seed", str(options.seed), "--out", inputs])
    schedules = {
        "sync": [],
        "async": ["--rollout.schedule=async", f"--rollout.max_staleness={options.staleness}"],
    }
    found = {name: run(name, keys, inputs, options) for name, keys in schedules.items()}
    print("schedule  before   after    training     a step   staleness: mean  most")
    for name, each in found.items():
        print(
            f"{name:<8}  {each.before:6.3f}  {each.after:6.3f}  {each.seconds:8.0f} s"
            f"  {1e3 * each.step_s:6.0f} ms  {each.mean_lag:15.2f}  {each.most_lag:4.0f}"
        )
    apart = abs(found["sync"].after - found["async"].after)
    learned = all(each.after - each.before >= GAIN for each in found.values())
    print(f"the rewards are {apart:.3f} apart (at most {APART})")
    return 0 if learned and apart <= APART else 1


def run(name: str, keys: list[str], inputs: str, options: argparse.Namespace) -> Outcome:
    """Train with a schedule."""
    run_name = f"demo-sglang-{name}"
    started = time.perf_counter()
    _run(
        [
            *("-m", "anygauge", "train", str(RECIPE), "--backend", "cpu", f"--run.name={run_name}"),
            *(f"--run.seed={options.seed}", f"--run.steps={options.steps}"),
            *(f"--model.path={inputs}/model", f'--data.train=["{inputs}/train.jsonl"]'),
            f'--eval.data=[{{path = "{inputs}/eval.jsonl", name = "held-out"}}]',
            f"--eval.interval={max(1, options.steps // 3)}",
            *("--rollout.engine=sglang", "--placement.rollout_workers=1", "--placement.train_workers=1"),
            f"--rollout.prompts_per_step={options.prompts}",
            "--rollout.sglang={context_length = 64, max_running_requests = 256, skip_server_warmup = true}",
            *("--placement.start_timeout_s=600", "--train.optimizer_steps=2", "--save.every=none"),
            *keys,
        ]
    )
    seconds = time.perf_counter() - started
    rows = read_metrics(ROOT / "runs" / run_name / "metrics.jsonl")
    scores = {row["eval/step"]: row[HELD_OUT] for row in rows if HELD_OUT in row}
    steps = [row for row in rows if "perf/step_time" in row]
    return Outcome(
        before=scores[0],
        after=scores[options.steps],
        seconds=seconds,
        step_s=statistics.median(row["perf/step_time"] for row in steps),
        mean_lag=statistics.fmean(row["rollout/lag/mean"] for row in steps),
        most_lag=max(row["rollout/lag/max"] for row in steps),
    )


def _run(words: list[str]) -> None:
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


if __name__ == "__main__":
    sys.exit(main())
