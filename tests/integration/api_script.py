"""A script that trains until it is interrupted, and says what is left. Run by test_python_api."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import psutil

from anygauge import Run, train


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def on_step(step: int, metrics: Mapping[str, float]) -> None:
    if step == 2:
        say("ready", len(children() - before))


before = children()  # what the tests fork workers from
try:
    train(
        sys.argv[1],
        [{"prompt": "1+2="}],
        lambda response: len(response) / 4,
        on_step=on_step,
        run={"name": "endless", "steps": 10**6, "directory": sys.argv[2]},
        rollout={"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
    )
except KeyboardInterrupt:
    left = children() - before
    run = Run.load(f"{sys.argv[2]}/endless")
    step = run.metrics_list[-1]["step"]
    say(
        "interrupted",
        run.outcome,
        len(left),
        step >= 2,
        (run.directory / f"checkpoints/step-{step:08d}").is_dir(),
    )
