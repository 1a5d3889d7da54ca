"""Print the first export of the warm-up that is right often enough to learn from its own answers.

python examples/shapes/choose.py runs/shapes-sft
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

SCORE = "eval/validation"


def choose(run: Path, least: float) -> tuple[Path, float]:
    """Return the first export of a run whose validation score reaches ``least``, and the score."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    scores = {line["eval/step"]: line[SCORE] for line in lines if SCORE in line}
    for step, score in sorted(scores.items()):
        if score >= least and (run / f"hf-step-{step}").is_dir():
            return run / f"hf-step-{step}", score
    raise SystemExit(f"The warm-up in {run} did not reach {least}: its best score is {max(scores.values())}.")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the directory."""
    parser = argparse.ArgumentParser(description="Choose an export of the warm-up.")
    parser.add_argument("run", type=Path, help="directory of the warm-up")
    parser.add_argument("--least", type=float, default=0.25, help="validation score to reach")
    args = parser.parse_args(argv)
    print(choose(args.run, args.least)[0])


if __name__ == "__main__":
    main()
