"""Whole runs in every layout: seconds a step, what it consists of, and whether it learns.

    python bench/end_to_end.py --model DIR --backend cuda --store rows.jsonl
    python bench/end_to_end.py --model DIR --backend cuda --store rows.jsonl --rows apart-sync apart-async
    python bench/end_to_end.py --model DIR --backend cuda --store rows.jsonl --against main --rounds 3
    .venv-sglang/bin/python bench/end_to_end.py --backend cpu --store rows.jsonl    # the demo's model

A row is stored as soon as its run has ended, and a row that is stored is not run again: a call that is cut
off is repeated with the same ``--store``. A row of another model, backend, number of steps or config is run
again, and added. ``--label`` names what is measured, such as a commit; by default it is ``here-`` and a
checksum of this tree's packages, so that rows of the tree before an edit are not taken for it. Rows that need
more than ``--devices`` (by default those that torch sees; 2 processes with the CPU backend) are named and
skipped. Other arguments are keys of the run's config; ``--embedded`` runs the layouts without servers, with
an engine in each trainer.

``--task sums`` (the default with ``--model``) is GRPO with sums and differences in words; the reward is 1 if
the last number of the response is right. ``--task demo`` is the demo's, with its own tiny Qwen3 unless there
is ``--model``. Any other is a TOML file of config keys, with ``data.train``, ``[eval.datasets.first]`` (its
first row is the first prompt of a run), ``[eval.datasets.eval]`` and a reward.

A row falls short, and the script ends with status 1, where its run failed, a loss, a reward or a log-prob
difference is not finite, trainer and engine differ by more than ``LIMITS`` in their log-probs (of ``sync``
schedules: others train on older weights), or the reward did not rise. Runs under ten steps need not learn,
and neither do random models: a mixture of experts stands for the model in rows of experts, and a dense one in
rows of tensor parallelism that cannot divide its heads. Their reward is the share of characters with an even
code.

Seconds, tokens a second and their parts are medians over the steps after the first three; seconds a step have
their mean beside it, since some asynchronous steps wait for samples and others do not. *Start* is from the
command to the first generated token. *GiB* is the peak of a trainer's allocated memory (on the CPU its
resident memory). Held-out accuracy is greedy, before and after.

A second table has the parts of the start, as the logs tell them: seconds to the end of each. The driver's
are counted from its command, a worker's from its process: ``device`` imports torch, ``imports`` the engines,
``waited`` is the wait for the driver, ``object`` loads the models. ``server`` is from SGLang's process to its
first answer.

``--against COMMIT`` runs each row with that commit's packages too, in turns, ``--rounds`` times, and prints
the ratio of the seconds a step: medians, and means in asynchronous rows. ``--compare LABEL`` does so with the
rows of that label that the store has. A row that takes more than 1.03 times as long is a failure.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from checkout import ROOT, check_packages, environment, extract, nested, short_id, tree_label
from end_to_end_inputs import FIRST_TOKEN, make_inputs, make_model
from end_to_end_rows import (
    COMMON,
    GPU_SERVER,
    OF_SERVERS,
    RANDOM,
    ROWS,
    TASKS,
)

from anygauge.config.deprecated_keys import RENAMED
from anygauge.config.tree import flatten

WARM_UP = 3
"""Steps in which kernels are compiled and caches are filled."""
EDGE = 5
"""Steps at the beginning and at the end whose mean rewards are compared; fewer in a short run."""
LEARNS = 10
"""Steps of a run that has to learn."""
LIMITS = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest mean difference of log-probs, by the precision of training."""
SLOWER = 1.03
"""Largest ratio of seconds a step, new tree over old."""
DIFFERENCE = "train/train_rollout_logprob_abs_diff"
LOSSES = ("train/loss", "train/value_loss")
FINITE = (*LOSSES, DIFFERENCE, "rollout/reward")
"""Beginnings of metrics that must be finite; null in JSON is a value that is not."""
PARTS = ("rollout", "train", "log_probs", "update_weights", "sleep", "wake_up")
HEAD = ("row", "devices", "model", "s a step, mean", *PARTS, "tokens/s", "generated/s", "reward", "held out")
HEAD = (*HEAD, "log-probs", "GiB", "start", "falls short")
STAGES = {
    "driver.log": ("config", "processes", "checks", "data", "workers", "engines"),
    "actor-0.log": ("device", "imports", "waited", "object"),
    "rollout-0.log": ("server",),
}
"""Stages of a start, by the log that tells when each ended."""

Stored = dict[tuple[str, str, int], Mapping[str, Any]]
"""Rows by label, name and round."""


class Side(NamedTuple):
    """A tree whose packages run."""

    label: str
    environment: Mapping[str, str]
    old_names: Mapping[str, str] = {}
    """Names that config keys have in this tree, where they differ, by today's name."""


def model_of(row: str, arguments: argparse.Namespace) -> str:
    """Return which model a row trains: ``given``, or the kind of a random one."""
    tensor = ROWS[row].keys.get("train.parallel.tensor", 1)
    if ROWS[row].model != "given" or arguments.model is None or tensor == 1:
        return ROWS[row].model
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"], config.get("num_key_value_heads", tensor)
    return "dense" if any(count % tensor for count in heads) else "given"


def task_keys(task: str) -> Mapping[str, Any]:
    """Return the keys of a task by dotted names."""
    return TASKS[task] if task in TASKS else flatten(tomllib.loads(Path(task).read_text(encoding="utf-8")))


def keys_of(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the config of a row by dotted keys, but for the paths of its model and of made data."""
    keys = {**COMMON, **task_keys(arguments.task), **ROWS[row].keys}
    if "algorithm.advantage" not in keys:
        keys = {name: value for name, value in keys.items() if not name.startswith("critic.")}
    if model_of(row, arguments) != "given":
        keys = {name: value for name, value in keys.items() if not name.startswith("reward.")} | RANDOM
    if arguments.embedded:
        keys = {name: value for name, value in keys.items() if not name.startswith(OF_SERVERS)}
        keys["rollout.engine"] = "transformers"
    elif arguments.backend != "cpu" and keys["rollout.engine"] == "sglang":
        keys = {**GPU_SERVER, **keys}
    steps = arguments.steps
    return {**keys, "run.name": f"end-to-end-{row}", "run.steps": steps, "eval.interval": steps}


def settings(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what decides the figures of a row; the directory that it runs in does not."""
    model = "made" if arguments.model is None else str(arguments.model.resolve())
    chosen = {"backend": arguments.backend, "model": model, "task": arguments.task, "extra": arguments.extra}
    return {**chosen, "trained": model_of(row, arguments), "keys": keys_of(row, arguments)}


def old_names(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the names of renamed config keys in a tree that does not have the new ones yet."""
    command = [sys.executable, "-m", "anygauge", "train", "--keys"]
    listed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    known = set(re.findall(r"^  --(\S+)", listed, re.MULTILINE))
    names = {f"{old.rpartition('.')[0]}.{new}": old for old, new in RENAMED.items()}
    return {new: old for new, old in names.items() if new not in known and old in known}


def write_config(row: str, side: Side, arguments: argparse.Namespace, inputs: Mapping[str, Any]) -> Path:
    """Write the config of a row, and the random model that it may need, and return its path."""
    paths = {**inputs, "run.directory": str(arguments.directory)}
    kind = model_of(row, arguments)
    if kind != "given":
        made, like = arguments.directory / "inputs" / kind, Path(inputs["model.path"])
        if not (made / "config.json").exists():
            make_model(made, kind, like, is_small=arguments.model is None)
        paths["model.path"] = str(made)
    keys = {side.old_names.get(name, name): value for name, value in keys_of(row, arguments).items()}
    config = arguments.directory / f"{row}.toml"
    # data sets are evaluated in their order here
    config.write_text(tomli_w.dumps(nested({**keys, **paths})), encoding="utf-8")
    return Path(config)


def run_row(row: str, side: Side, arguments: argparse.Namespace, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Run a layout and return what was measured.

    :raises SystemExit: The run failed; what it printed says why.
    """
    config, directory = write_config(row, side, arguments, inputs), arguments.directory / f"end-to-end-{row}"
    command = [sys.executable, "-m", "anygauge", "train", str(config), "--backend", arguments.backend]
    first = arguments.directory / "first-token"
    first.unlink(missing_ok=True)
    environment = {**side.environment, FIRST_TOKEN: str(first), **server_cores(row, arguments.backend)}
    started = time.time()
    status = subprocess.run([*command, *arguments.extra], env=environment, check=False).returncode
    if status:
        raise SystemExit(f"{row}: the run ended with status {status}; look into {directory}/logs")
    run_s = round(time.time() - started, 1)
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    start_s = round(float(first.read_text()) - started, 1) if first.exists() else None
    parts = start_parts(directory / "logs")
    facts = {"label": side.label, "row": row, "devices": ROWS[row].devices, "run_s": run_s}
    figures = measured([json.loads(line) for line in lines])
    return {
        **facts,
        "start_s": start_s,
        "start_parts_s": parts,
        **figures,
        "settings": settings(row, arguments),
    }


def start_parts(logs: Path) -> dict[str, float]:
    """Return when the stages of a run's start ended, by log and stage, in seconds; older trees tell none."""
    parts: dict[str, float] = {}
    for name in STAGES:
        text = (logs / name).read_text(encoding="utf-8") if (logs / name).exists() else ""
        for line in re.findall(r": start: (.+)$", text, re.MULTILINE):
            parts |= {
                f"{Path(name).stem} {stage}": float(s) for stage, s in re.findall(r"(\w+) ([\d.]+) s", line)
            }
    return parts


def start_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the parts of the start of each row as a table in Markdown."""
    keys = [f"{Path(name).stem} {stage}" for name, stages in STAGES.items() for stage in stages]
    lines = [["row", *keys, "first token"], ["---"] * (len(keys) + 2)]
    for row in rows:
        values = [*(row.get("start_parts_s", {}).get(key) for key in keys), row["start_s"]]
        lines.append([row["row"], *("-" if value is None else f"{value:.1f} s" for value in values)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def server_cores(row: str, backend: str) -> dict[str, str]:
    """Return SGLang's variable for the core of each process of a server, which it asks for on a CPU."""
    processes = ROWS[row].keys.get("rollout.sglang.tp_size", 1)
    if backend != "cpu" or processes == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[i % len(cores)]) for i in range(processes))}


def measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a run from its metrics."""
    steps = [row for row in rows if "perf/step_time" in row]
    warm = steps[WARM_UP:] or steps
    edge = max(1, min(EDGE, len(steps) // 2))
    rewards = [row["rollout/reward"] for row in steps if row.get("rollout/reward") is not None]
    scores = [row["eval/eval"] for row in rows if "eval/eval" in row]
    differences = [row[DIFFERENCE] for row in steps if row.get(DIFFERENCE) is not None]
    has_loss = any(name.startswith(LOSSES) for row in steps for name in row)
    numbers = [row[name] for row in steps for name in row if name.startswith(FINITE)]
    return {
        "steps": len(steps),
        "step_s": median(warm, "perf/step_time"),
        "mean_step_s": round(statistics.fmean(row["perf/step_time"] for row in warm), 4),
        "phases_s": {name: median(warm, name) for name in times(warm)},
        "tokens_per_s": median(warm, "perf/tokens_per_s"),
        "rollout_tokens_per_s": median(warm, "perf/rollout_tokens_per_s"),
        "device_memory_gib": max((row.get("perf/device_memory_gib") or 0.0 for row in steps), default=0.0),
        "reward": [round(statistics.fmean(part or [0.0]), 4) for part in (rewards[:edge], rewards[-edge:])],
        "held_out": [round(score, 4) for score in (scores[:1] + scores[-1:])],
        "is_finite": has_loss and all(value is not None and math.isfinite(value) for value in numbers),
        "log_prob_difference": round(statistics.fmean(differences), 9) if differences else None,
    }


def median(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the median of a metric; a step without it counts as 0."""
    return round(statistics.median(row.get(name) or 0.0 for row in rows), 4)


def times(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the phases of a step."""
    names = {name for row in rows for name in row}
    return sorted(name for name in names if name.startswith("perf/") and name.endswith("_time"))


def shortcomings(row: Mapping[str, Any]) -> list[str]:
    """Return in what a row falls short."""
    keys, (first, last) = row["settings"]["keys"], row["reward"]
    given = dict(pairwise(row["settings"]["extra"]))
    limit = LIMITS[given.get("--train.dtype", keys.get("train.dtype", "bfloat16"))]
    difference = row["log_prob_difference"]
    is_random = row["settings"]["trained"] != "given"
    problems = [] if row["is_finite"] else ["a loss, a reward or a log-prob difference is not finite"]
    if "rollout.schedule" not in keys and not (difference is not None and difference <= limit):
        problems.append(f"log-probs differ by more than {limit:g}")
    if row["steps"] >= LEARNS and not is_random and last <= first:
        problems.append("the reward did not rise")
    return problems


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


def reusable(rows: Iterable[Mapping[str, Any]], arguments: argparse.Namespace) -> Stored:
    """Return the rows that were measured as the arguments ask; the last of each."""
    return {
        (row["label"], row["row"], row.get("round", 0)): row
        for row in rows
        if row["row"] in ROWS and row.get("settings") == settings(row["row"], arguments)
    }


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row of the table."""
    phases = [row["phases_s"].get(f"perf/{name}_time") for name in PARTS]
    reward, held_out = (" to ".join(f"{value:.3f}" for value in row[name]) for name in ("reward", "held_out"))
    difference, start = row["log_prob_difference"], row["start_s"]
    return [
        row["row"],
        str(row["devices"]),
        row["settings"]["trained"],
        f"{row['step_s']:.3f}, {row.get('mean_step_s', math.nan):.3f}",
        *("-" if seconds is None else f"{seconds:.3f}" for seconds in phases),
        f"{row['tokens_per_s']:,.0f}",
        f"{row['rollout_tokens_per_s']:,.0f}",
        reward,
        held_out,
        "-" if difference is None else f"{difference:.1e}",
        f"{row['device_memory_gib']:.1f}",
        "-" if start is None else f"{start:.1f} s",
        "; ".join(shortcomings(row)) or "-",
    ]


def step_seconds(row: Mapping[str, Any]) -> float:
    """Return the median of a row's steps; their mean where some steps wait for samples and others do not."""
    is_async = row["settings"]["keys"].get("rollout.schedule") == "async"
    return float(row["mean_step_s" if is_async else "step_s"])


def ratios(stored: Stored, rows: Iterable[str], new: str, old: str) -> dict[str, float]:
    """Return the seconds of a step of one label over those of another, by row; medians over the rounds."""
    seconds = {
        label: {
            row: [step_seconds(each) for key, each in stored.items() if key[:2] == (label, row)]
            for row in rows
        }
        for label in (new, old)
    }
    both = [row for row in seconds[new] if seconds[new][row] and seconds[old][row]]
    return {row: statistics.median(seconds[new][row]) / statistics.median(seconds[old][row]) for row in both}


def device_count(backend: str) -> int:
    """Return how many devices a backend has here; with the CPU, processes that a small host can bear."""
    if backend == "cpu":
        return 2
    import torch

    return torch.accelerator.device_count()


@contextmanager
def open_sides(arguments: argparse.Namespace) -> Iterator[list[Side]]:
    """Yield this tree and the old one."""
    own = {**os.environ, "PYTHONPATH": joined(os.environ.get("PYTHONPATH"))}
    sides = [Side(arguments.label, own)]
    with tempfile.TemporaryDirectory() as work:
        if arguments.against is not None:
            tree = extract(arguments.against, Path(work) / "tree")
            other = environment(tree, Path(work) / "metadata", first=[Path(__file__).parent])
            check_packages(tree, other)
            sides.append(Side(arguments.compare, other, old_names(other)))
        yield sides


def joined(path: str | None) -> str:
    """Return a search path that begins with the directory of this file, whose functions the runs call."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parent), path)))


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; those that it does not know are keys of the config."""
    parser = argparse.ArgumentParser(description="whole runs in every layout", allow_abbrev=False)
    parser.add_argument("--model", type=Path, help="a Hugging Face directory of a chat model")
    parser.add_argument("--task", help="sums, demo, or a TOML file")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--devices", type=int)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--embedded", action="store_true", help="no servers")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--store", type=Path, default=Path("runs/end_to_end.jsonl"))
    parser.add_argument("--label", help="default: the state of this tree's packages, which edits change")
    parser.add_argument("--directory", type=Path, default=Path("runs/end-to-end"))
    parser.add_argument("--against", metavar="COMMIT", help="run its packages too, and compare")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--compare", metavar="LABEL", help="compare with stored rows")
    arguments, arguments.extra = parser.parse_known_args(given)
    arguments.label = arguments.label or tree_label(ROOT)
    arguments.task = arguments.task or ("demo" if arguments.model is None else "sums")
    arguments.devices = arguments.devices or device_count(arguments.backend)
    if arguments.against is not None:
        arguments.compare = short_id(arguments.against)
    return arguments


def run_missing(arguments: argparse.Namespace, rows: Sequence[str], stored: Stored) -> list[str]:
    """Run the rows that are not stored yet, in turns where there are two trees; return what failed."""
    failed, inputs = [], {}
    with open_sides(arguments) as sides:
        wanted = [(side, row, turn) for turn in range(arguments.rounds) for row in rows for side in sides]
        for side, row, turn in wanted:
            key = (side.label, row, turn)
            if key in stored:
                continue
            inputs = inputs or make_inputs(arguments.directory / "inputs", arguments.task, arguments.model)
            try:
                stored[key] = {**run_row(row, side, arguments, inputs), "round": turn}
            except SystemExit as error:
                failed.append(str(error))
                continue
            with arguments.store.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(stored[key])}\n")
    return failed


def main(given: Sequence[str] | None = None) -> None:
    """Run the rows that are not stored yet, store each, and print the table."""
    arguments = parse(given)
    arguments.store.parent.mkdir(parents=True, exist_ok=True)
    stored = reusable(read_store(arguments.store), arguments)
    rows = [row for row in arguments.rows if ROWS[row].devices <= arguments.devices]
    failed = run_missing(arguments, rows, stored)
    own = [
        row for key, row in sorted(stored.items(), key=lambda item: item[0][2]) if key[0] == arguments.label
    ]
    shown = [each for row in rows for each in own if each["row"] == row]
    print("\n".join([table(shown), "", start_table(shown), *failed]))
    for row in arguments.rows:
        if row not in rows:
            print(f"skipped {row}: it needs {ROWS[row].devices} devices, and there are {arguments.devices}")
    slow = False
    if arguments.compare is not None:
        compared = ratios(stored, rows, arguments.label, arguments.compare)
        slow = print_ratios(compared, arguments.compare)
    sys.exit(bool(failed) or slow or not shown or any(map(shortcomings, shown)))


def print_ratios(compared: Mapping[str, float], old: str) -> bool:
    """Print the seconds of a step over those of another tree, and return whether one is slower."""
    for row, ratio in compared.items():
        verdict = "slower" if ratio > SLOWER else "-"
        print(f"{row}: {ratio:.3f} of the seconds a step of {old}; at most {SLOWER}: {verdict}")
    return any(ratio > SLOWER for ratio in compared.values())


if __name__ == "__main__":
    main()
