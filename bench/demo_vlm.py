"""The demo that sees, with several seeds: does the policy learn to look, and how long does it take.

    python bench/demo_vlm.py                # seeds 0, 1 and 2
    python bench/demo_vlm.py --seeds 7
    python bench/demo_vlm.py --backend cuda --seeds 0

Each seed has weights, a warm-up and RL of its own, as `make demo-vlm` has. Before and after are the mean
reward of one sample at temperature 1 on the same 512 held-out pictures; swapped is the score after it where
every question has its neighbor's picture, which is 0.08 by guessing. Other arguments are keys of both runs.
Below the table are the phases of a step, in the median, and how far the trainer's log-probs are from the
engine's, in the mean. Ends with status 1 if a seed misses the goal: from under 0.45 to over 0.7 and under 0.2
with swapped pictures, all within 8 minutes.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from demo import DIFFERENCE, ROOT, main, phases, read_metrics, run_measured

EXAMPLES = ROOT / "examples"
BEFORE, AFTER, SWAPPED, WHOLE_S = 0.45, 0.7, 0.2, 480.0
HEADER = "seed  before   after  swapped    inputs   warm-up        RL     whole    a step   peak memory"


@dataclass(frozen=True)
class Outcome:
    """Result of one seed."""

    seed: int
    before: float
    after: float
    swapped: float
    seconds: tuple[float, float, float]
    """Seconds of input creation, warm-up and RL."""
    step_ms: float
    peak_pss: int
    phases: str
    difference: float

    @property
    def reached(self) -> bool:
        """Return whether the goal was reached."""
        learned = self.before < BEFORE and self.after > AFTER and self.swapped < SWAPPED
        return learned and sum(self.seconds) < WHOLE_S

    def row(self) -> str:
        """Return one line of the table."""
        times = "".join(f"{each:8.0f} s" for each in (*self.seconds, sum(self.seconds)))
        return (
            f"{self.seed:>4}  {self.before:6.3f}  {self.after:6.3f}   {self.swapped:6.3f}{times}"
            f"{self.step_ms:7.0f} ms  {self.peak_pss / 2**30:8.2f} GiB"
        )


def run_seed(seed: int, backend: str, extra: Sequence[str]) -> Outcome:
    """Make the inputs of a seed, warm up, train, and read what came out."""
    inputs, warm, name = f"runs/shapes-inputs-{seed}", f"shapes-sft-{seed}", f"shapes-vlm-{seed}"
    train = [sys.executable, "-m", "anygauge", "train"]
    common = ["--backend", backend, "--run.seed", str(seed)]
    inputs_s, _ = run_measured(
        [sys.executable, str(EXAMPLES / "shapes/make_inputs.py"), "--seed", str(seed), "--out", inputs]
    )
    warm_s, warm_peak = run_measured(
        [
            *(*train, str(EXAMPLES / "shapes_vlm_sft.toml"), *common, "--run.name", warm),
            *("--model.path", f"{inputs}/model", "--data.train", f'["{inputs}/warm_up.parquet"]'),
            *("--eval.data", f'["{inputs}/validation.parquet"]', *extra),
        ]
    )
    chosen = subprocess.run(
        [sys.executable, str(EXAMPLES / "shapes/choose.py"), f"runs/{warm}"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    files = ", ".join(
        f'{{path = "{inputs}/{file}.parquet", name = "{data}"}}'
        for data, file in (("held-out", "held_out"), ("swapped", "swapped"))
    )
    train_s, peak = run_measured(
        [
            *(*train, str(EXAMPLES / "shapes_vlm.toml"), *common, "--run.name", name),
            *("--model.path", chosen, "--data.train", f'["{inputs}/train.parquet"]'),
            *("--eval.data", f"[{files}]", *extra),
        ]
    )
    rows = read_metrics(ROOT / "runs" / name / "metrics.jsonl")
    scores = [row for row in rows if "eval/held-out" in row]
    steps = [row for row in rows if "perf/step_time" in row]
    return Outcome(
        seed=seed,
        before=scores[0]["eval/held-out"],
        after=scores[-1]["eval/held-out"],
        swapped=scores[-1]["eval/swapped"],
        seconds=(inputs_s, warm_s, train_s),
        step_ms=1e3 * statistics.median(row["perf/step_time"] for row in steps),
        peak_pss=max(peak, warm_peak),
        phases=phases(steps),
        difference=statistics.fmean(row[DIFFERENCE] for row in rows if DIFFERENCE in row),
    )


if __name__ == "__main__":
    main("the demo that sees with several seeds", HEADER, run_seed)
