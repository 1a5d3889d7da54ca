"""Samples per second of asynchronous training against synchronous training, where some responses are long.

The trainer is real. The engines are fake: a token costs time and nothing else, by a declared model of
latency, so that the figure is that of the schedule. The runs alternate; the figure is the ratio of medians,
without the first steps of each run.

    python bench/async_rollout.py
    python bench/async_rollout.py --evaluate                          # what evaluations cost training
    python bench/async_rollout.py --engines sglang                    # two real servers beside the trainer
    python bench/async_rollout.py --engines sglang --backend cuda     # on three GPUs

Real servers get a random model and stop at one token in 64, so that lengths have a geometric tail; on a CPU
they and the trainer take the processors from each other. They need the Python of an environment with SGLang.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.trainer.run import train
from anygauge_tests.fake_engine.installed import install_fake_engine
from anygauge_tests.recipe import tiny_recipe

WARM_UP = 3
"""Steps at the start of a run that count for nothing: workers warm up, and the pipeline fills."""
ENGINE = {
    "vocab_size": 18,
    "slots": 16,
    "start_s": 0.02,
    "token_s": 0.01,
    "lengths": "longtail:16:128:0.1",
}
"""Options of each of two engines: 10 ms a token, and one response in ten is eight times as long as the
others."""
FAKE: dict[str, Any] = {
    "rollout__engine": "fake",
    "weight_sync__verify": "none",
    "health__logprob_abs_diff_error": "none",  # their log-probs are made up
}
VOCABULARY, STOP_EVERY = 32_768, 64
REAL: dict[str, Any] = {
    "rollout__engine": "sglang",
    "rollout__stop_token_ids": list(range(0, VOCABULARY, STOP_EVERY)),
    "rollout__max_new_tokens": 512,
    "rollout__max_batch_tokens": 65_536,
    "rollout__sglang.context_length": 1024,
    "rollout__sglang.max_running_requests": 64,
    "rollout__sglang.skip_server_warmup": True,
    "placement__start_timeout_s": 600,
}
MODELS: dict[str, dict[str, Any]] = {
    "cpu": {"vocab_size": VOCABULARY},
    "cuda": {
        "vocab_size": VOCABULARY,
        "hidden": 1024,
        "layers": 8,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 128,
    }
    | {"mlp": 3072, "dtype": "bfloat16"},
}
"""Models of the real servers, which have kernels only for usual sizes on a GPU."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "one_step_off": {"rollout__schedule": "one_step_off"},
    "async": {"rollout__schedule": "async", "rollout__max_staleness": 2},
}
EVALUATION = {"eval__interval": 4, "eval__samples_per_prompt": 16}
"""Evaluation of twelve prompts: in four steps as many samples as training has in two."""
EVALUATIONS: dict[str, dict[str, Any]] = {
    "no evaluation": SCHEDULES["async"],
    "beside training": {**SCHEDULES["async"], **EVALUATION},
    "training waits": {**SCHEDULES["async"], **EVALUATION, "eval__wait": True},
}


def measure(
    keys: dict[str, Any],
    folder: Path,
    steps: int,
    engines: dict[str, Any],
    model: dict[str, Any],
    backend: str,
) -> tuple[float, float]:
    """Return the samples per second of training, by the wall clock, and the greatest staleness of a run."""
    config = tiny_recipe(
        folder,
        model=model,
        **{
            "run__steps": steps,
            "run__report": False,
            "run__progress": False,
            "rollout__prompts_per_step": 12,
            "rollout__samples_per_prompt": 8,
            "rollout__max_new_tokens": 128,
            "placement__rollout_workers": 2,
            **engines,
            "eval__data": [folder / "data.jsonl"] if "eval__interval" in keys else [],
            **keys,
        },
    )
    plugins = load_plugins()
    train(load_config(config, backend=backend, plugins=plugins), plugins)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "perf/step_time" in row][WARM_UP:]
    seconds = rows[-1]["time"] - rows[0]["time"]
    return 96 * (len(rows) - 1) / seconds, max(row.get("rollout/lag/max", 0.0) for row in rows)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--evaluate", action="store_true", help="compare evaluations, not schedules")
    parser.add_argument("--engines", choices=("fake", "sglang"), default="fake")
    parser.add_argument("--backend", choices=tuple(MODELS), default="cpu")
    options = parser.parse_args()
    compared = EVALUATIONS if options.evaluate else SCHEDULES
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in compared}
    with tempfile.TemporaryDirectory() as temporary:
        engines, model = (REAL, MODELS[options.backend]) if options.engines == "sglang" else (FAKE, {})
        if engines is FAKE:
            sys.path.insert(0, str(install_fake_engine(Path(temporary) / "engine", ["", ""], ENGINE)))
        for number in range(options.rounds):
            for name, keys in compared.items():
                folder = Path(temporary) / f"{name.replace(' ', '-')}-{number}"
                found[name].append(measure(keys, folder, options.steps, engines, model, options.backend))
    first = next(iter(compared))
    base = statistics.median(speed for speed, _ in found[first])
    for name, runs in found.items():
        speed = statistics.median(speed for speed, _ in runs)
        bound = compared[name].get("rollout__max_staleness", 0 if name == "sync" else 1)
        staleness = max(age for _, age in runs)
        print(
            f"{name:<15} {speed:7.1f} samples/s  {speed / base:5.2f} of {first}  "
            f"staleness at most {staleness:g} (bound {bound})"
        )


if __name__ == "__main__":
    main()
