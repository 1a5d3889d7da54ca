"""Whole runs with a real model in five layouts: seconds a step, what it consists of, and whether it learns.

    python bench/end_to_end.py --model DIR --backend cuda --store rows.jsonl
    python bench/end_to_end.py --model DIR --backend cuda --store rows.jsonl --rows apart-sync apart-async
    .venv-sglang/bin/python bench/end_to_end.py --backend cpu --store rows.jsonl    # the demo's model

GRPO with sums and differences in words; the reward is 1 if the last number of the response is right. Any
chat model does; without ``--model`` it is the demo's tiny Qwen3 and its own task, for a host without a GPU.
A row is stored as soon as its run has ended, and a row that is stored is not run again: a call that is cut
off is repeated with the same ``--store``. A row of another model, backend, number of steps or config is run
again, and added. ``--label`` names what is measured, such as a commit, so that rows of two trees can stand in
one file. Other arguments are keys of the run's config.

Seconds are medians over the steps after the first three. Held-out accuracy is greedy, before and after. Ends
with status 1 if a run failed or its reward did not rise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from anygauge.config.tree import Tree, put

ROOT = Path(__file__).parents[1]
MAKE_INPUTS = ROOT / "examples" / "arithmetic" / "make_inputs.py"
WARM_UP = 3
"""Steps in which kernels are compiled and caches are filled."""
EDGE = 5
"""Steps at the beginning and at the end whose mean rewards are compared; fewer in a short run."""
HELD_OUT = 512
DIFFERENCE = "train/train_rollout_logprob_abs_diff"

SERVED = {"rollout.engine": "sglang", "placement.rollout_workers": 1}
APART = {**SERVED, "placement.colocated": False}
ROWS: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "embedded": (1, {"rollout.engine": "transformers"}),
    "colocated": (1, {**SERVED, "placement.colocated": True}),
    "apart-sync": (2, APART),
    "apart-async": (2, {**APART, "rollout.schedule": "async", "rollout.max_staleness": 1}),
    "colocated-dp2": (
        2,
        {
            **SERVED,
            "placement.colocated": True,
            "placement.train_workers": 2,
            "placement.rollout_workers": 2,
        },
    ),
}
"""Devices and keys of each layout."""
COMMON = {
    "run.overwrite": True,
    "placement.launcher": "local",
    "placement.train_workers": 1,
    "algorithm.clip_high": 0.28,
    "train.optimizer_steps": 2,
    "eval.temperature": 0.0,
    "save.every": "none",
    "save.hf_at_end": False,
}
REAL = {
    "data.input_key": "question",
    "data.label_key": "answer",
    "data.apply_chat_template": True,
    "data.max_prompt_tokens": 128,
    "reward.function": "end_to_end:last_number",
    "rollout.prompts_per_step": 64,
    "rollout.samples_per_prompt": 16,
    "rollout.max_new_tokens": 64,
    "rollout.max_batch_tokens": 262_144,
    "rollout.client.concurrency": 1024,
    "train.lr": 5e-6,
    "train.micro_batch_tokens": 65_536,
}
TINY = {
    "reward.function": "exact_match",
    "rollout.prompts_per_step": 64,
    "rollout.samples_per_prompt": 8,
    "rollout.max_new_tokens": 4,
    "rollout.client.concurrency": 512,
    "train.dtype": "float32",
    "train.lr": 2e-4,
    "train.micro_batch_tokens": 8192,
}
GPU_SERVER = {"max_running_requests": 1024, "cuda_graph_max_bs_decode": 1024, "grammar_backend": "none"}
SHARED_MEMORY, OWN_MEMORY = 0.4, 0.7
"""Share of a device's memory that a server has beside a trainer, and alone."""


def last_number(response: str, label: str) -> float:
    """Return 1 if the last number of a response is the label."""
    numbers = re.findall(r"-?\d+", response.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == str(label).strip())


def questions(count: int) -> list[dict[str, str]]:
    """Return sums and differences of two numbers below 200 in words, no pair twice."""
    draw = random.Random(0)
    pairs = draw.sample([(a, b) for a in range(10, 200) for b in range(10, 200)], count)
    return [_question(draw.randrange(3), a, b) for a, b in pairs]


def _question(kind: int, a: int, b: int) -> dict[str, str]:
    more, less = max(a, b), min(a, b)
    text, answer = [
        (f"What is {a} + {b}?", a + b),
        (f"Ann had {a} stamps and was given {b}. How many stamps does she have?", a + b),
        (f"What is {more} - {less}?", more - less),
    ][kind]
    return {"question": text, "answer": str(answer)}


def make_inputs(directory: Path, model: Path | None) -> dict[str, Any]:
    """Write what the runs read, and return the keys that name it."""
    if model is None:
        subprocess.run([sys.executable, str(MAKE_INPUTS), "--out", str(directory)], check=True)
        model = directory / "model"
    else:
        directory.mkdir(parents=True, exist_ok=True)
        rows = questions(6000 + HELD_OUT)
        for name, part in (("eval", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
            text = "".join(f"{json.dumps(row)}\n" for row in part)
            (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return {
        "model.path": str(model),
        "data.train": [str(directory / "train.jsonl")],
        "eval.data": [str(directory / "eval.jsonl")],
    }


def keys_of(row: str, arguments: argparse.Namespace, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a row by dotted keys."""
    _, layout = ROWS[row]
    keys = {**COMMON, **(TINY if arguments.model is None else REAL), **inputs, **layout}
    if arguments.backend != "cpu":
        share = SHARED_MEMORY if keys.get("placement.colocated") else OWN_MEMORY
        if keys["rollout.engine"] == "sglang":
            keys |= {f"rollout.sglang.{name}": value for name, value in GPU_SERVER.items()}
            keys["rollout.sglang.mem_fraction_static"] = share
    steps = arguments.steps
    name, directory = f"end-to-end-{row}", str(arguments.directory)
    return {**keys, "run.name": name, "run.directory": directory, "run.steps": steps, "eval.interval": steps}


def run_row(row: str, arguments: argparse.Namespace, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a layout and return what was measured.

    :raises SystemExit: The run failed; what it printed says why.
    """
    keys = keys_of(row, arguments, inputs)
    directory = arguments.directory / keys["run.name"]
    config = arguments.directory / f"{row}.toml"
    tables: Tree = {}
    for path, value in keys.items():
        put(tables, path, value)
    config.write_text(tomli_w.dumps(tables), encoding="utf-8")
    command = [sys.executable, "-m", "anygauge", "train", str(config), "--backend", arguments.backend]
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    started = time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": paths}
    status = subprocess.run([*command, *arguments.extra], env=environment, check=False).returncode
    if status:
        raise SystemExit(f"{row}: the run ended with status {status}; look into {directory}/logs")
    whole_s = time.perf_counter() - started
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    facts = {
        "label": arguments.label,
        "row": row,
        "devices": ROWS[row][0],
        "settings": settings(row, arguments),
    }
    return {**facts, "run_s": round(whole_s, 1), **measured([json.loads(line) for line in lines])}


def settings(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what decides the figures of a row; the directory that it runs in does not."""
    keys = keys_of(row, arguments, {})
    model = "made" if arguments.model is None else str(arguments.model.resolve())
    chosen = {"backend": arguments.backend, "model": model, "extra": arguments.extra}
    return {**chosen, "keys": {key: value for key, value in keys.items() if key != "run.directory"}}


def measured(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the figures of a run from its metrics."""
    steps = [row for row in rows if "perf/step_time" in row]
    warm = steps[WARM_UP:] or steps
    edge = max(1, min(EDGE, len(steps) // 2))
    rewards = [row["rollout/reward"] for row in steps if "rollout/reward" in row]
    scores = [row["eval/eval"] for row in rows if "eval/eval" in row]
    names = sorted(
        {name for row in warm for name in row if name.startswith("perf/") and name.endswith("_time")}
    )
    return {
        "steps": len(steps),
        "step_s": round(statistics.median(row["perf/step_time"] for row in warm), 4),
        "phases_s": {name: round(statistics.median(row.get(name, 0.0) for row in warm), 4) for name in names},
        "reward": [round(statistics.fmean(part), 4) for part in (rewards[:edge], rewards[-edge:])],
        "held_out": [round(scores[0], 4), round(scores[-1], 4)],
        "log_prob_difference": round(
            statistics.fmean(row[DIFFERENCE] for row in steps if DIFFERENCE in row), 9
        ),
    }


def rises(row: Mapping[str, Any]) -> bool:
    """Return whether the reward of a row has risen."""
    first, last = row["reward"]
    return bool(last > first)


def read_store(store: Path) -> list[dict[str, Any]]:
    """Return the rows that are stored.

    A last line that breaks off, since its call was killed while it wrote, is removed from the file: the row
    is run again.
    """
    if not store.exists():
        return []
    content = store.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        store.write_bytes(whole)
    return [json.loads(line) for line in whole.splitlines()]


def reusable(
    rows: Iterable[Mapping[str, Any]], arguments: argparse.Namespace
) -> dict[str, Mapping[str, Any]]:
    """Return the rows of a label that were measured as the arguments ask, by name; the last of each."""
    return {
        row["row"]: row
        for row in rows
        if row["label"] == arguments.label
        and row["row"] in ROWS
        and row.get("settings") == settings(row["row"], arguments)
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as lines of a table."""
    head = f"{'row':<14} {'devices':>7} {'s a step':>9} {'reward':>15} {'held out':>15} {'log-probs':>10}"
    lines = [
        f"{row['row']:<14} {row['devices']:>7} {row['step_s']:>9.3f} "
        f"{row['reward'][0]:>6.3f} -> {row['reward'][1]:.3f} "
        f"{row['held_out'][0]:>6.3f} -> {row['held_out'][1]:.3f} {row['log_prob_difference']:>10.1e}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; those that it does not know are keys of the config."""
    parser = argparse.ArgumentParser(description="whole runs in five layouts")
    parser.add_argument("--model", type=Path, help="a Hugging Face directory of a chat model")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--store", type=Path, default=Path("runs/end_to_end.jsonl"))
    parser.add_argument("--label", default="here")
    parser.add_argument("--directory", type=Path, default=Path("runs/end-to-end"))
    arguments, arguments.extra = parser.parse_known_args(given)
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    """Run the rows that are not stored yet, store each, and print the table."""
    arguments = parse(given)
    arguments.store.parent.mkdir(parents=True, exist_ok=True)
    stored = reusable(read_store(arguments.store), arguments)
    missing = [row for row in arguments.rows if row not in stored]
    inputs = make_inputs(arguments.directory / "inputs", arguments.model) if missing else {}
    failed = []
    for row in missing:
        try:
            stored[row] = run_row(row, arguments, inputs)
        except SystemExit as error:
            failed.append(str(error))
            continue
        with arguments.store.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(stored[row])}\n")
    rows = [stored[row] for row in arguments.rows if row in stored]
    print("\n".join([table(rows), *failed]))
    sys.exit(bool(failed) or not all(map(rises, rows)))


if __name__ == "__main__":
    main()
