"""Functions on the road from a prompt to the loss: those of ours that one training step enters.

    python bench/road.py                       # with a server: the fake engine
    python bench/road.py --list > functions.txt
    python bench/road.py --base 91e6e94        # of the tree of a commit
    python bench/road.py --rollout.engine transformers --placement.rollout_workers 0

A tiny policy is trained on the CPU, with one worker and one server. ``sys.setprofile`` records every thread
of the driver, of the worker that trains, of the one that looks after the server and of the processes of
rewards, from the end of a step to the end of the next. A function counts once, whatever enters it and however
often. Methods, nested functions and lambdas count; comprehensions, bodies of classes and modules, generated
methods of dataclasses and the server itself do not.

Steps may differ by a few functions, such as a look at the health of a server. So the figure is the number of
functions that every recorded step enters, and the spread is that of single steps. Other arguments are keys of
the run's config.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import tomli_w
from checkout import (
    ROOT,
    check_packages,
    environment,
    extract,
    install_fake_engine,
    nested,
    packages,
    write_metadata,
)

RECORDER = Path(__file__).parent / "recorder"
STEPS = 8
"""Steps of the run; the first two are not recorded."""
SERVER = "fake_engine"
"""Names the module of the server's process, and the folder whose functions do not count."""
KEYS = {
    "run.name": "road",
    "run.steps": STEPS,
    "run.report": False,
    "run.progress": False,
    "run.timeout_s": 120,
    "reward.function": "exact_match",
    "rollout.engine": "fake",
    "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 8,
    "train.dtype": "float32",
    "placement.launcher": "local",
    "placement.train_workers": 1,
    "placement.rollout_workers": 1,
    "placement.threads_per_worker": 1,
    "weight_sync.transport": "tensor",
    "weight_sync.bucket_bytes": 1 << 20,
    "health.logprob_abs_diff_error": "none",  # the fake engine makes its log-probs up
    "save.every": "none",
    "save.hf_at_end": False,
}


class Function(NamedTuple):
    """A function of ours."""

    module: str
    name: str

    @property
    def package(self) -> str:
        """Top-level package of the function."""
        return ".".join(self.module.split(".")[:2])


Recording = Mapping[int, frozenset[Function]]
"""Functions that were entered, by step."""


def record(tree: Path, work: Path, extra: Sequence[str]) -> dict[str, Recording]:
    """Train with the packages of a tree, and return what its processes recorded, by their main modules.

    :param extra: Further arguments of ``anygauge train``.
    """
    plugin, output, step_file = work / "plugin", work / "output", work / "step"
    variables = environment(tree, work / "metadata", first=[RECORDER, plugin])
    check_packages(tree, variables)
    install_fake_engine(plugin, variables, servers=1)
    entry = {"anygauge.plugins": {"step_windows": "step_windows"}}
    write_metadata({"name": "anygauge-road", "version": "1.0", "entry-points": entry}, plugin)
    output.mkdir()
    step_file.write_bytes(b"\0")
    variables |= {
        "RECORDER_STEP_FILE": str(step_file),
        "RECORDER_OUTPUT": str(output),
        "RECORDER_ROOTS": os.pathsep.join(f"{package}/" for package in packages(tree)),
        "ANYGAUGE_CACHE": str(work / "cache"),
    }
    config = make_inputs(work)
    command = [sys.executable, "-P", "-m", "anygauge", "train", str(config), "--backend", "cpu", *extra]
    done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nthe run ended with {done.returncode}")
    return read_recordings(output, [package.parent for package in packages(tree)])


def make_inputs(work: Path) -> Path:
    """Write the model, the data and the config, and return its path."""
    from anygauge.testing.tiny import tiny_qwen3

    tiny_qwen3(work / "model", init_std=0.3)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(8) for b in range(8)]
    (work / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    inputs = {"model.path": str(work / "model"), "data.train": [str(work / "data.jsonl")]}
    config = work / "road.toml"
    config.write_text(tomli_w.dumps(nested({**KEYS, **inputs, "run.directory": str(work)})), encoding="utf-8")
    return config


def read_recordings(output: Path, roots: Sequence[Path]) -> dict[str, Recording]:
    """Return what the processes of each main module recorded, without the server."""
    entered: dict[str, dict[int, set[Function]]] = defaultdict(lambda: defaultdict(set))
    for path in output.iterdir():
        module, *lines = path.read_text(encoding="utf-8").splitlines()
        if SERVER in module:
            continue
        for line in lines:
            step, file, name = line.split("\t")
            if f"/{SERVER}/" not in file:
                entered[module][int(step)].add(Function(module_name(Path(file), roots), name))
    return {
        module: {step: frozenset(functions) for step, functions in steps.items()}
        for module, steps in entered.items()
    }


def module_name(file: Path, roots: Sequence[Path]) -> str:
    """Return the name of the module in a file."""
    (root,) = {root for root in roots if file.is_relative_to(root)}
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def in_every_step(recording: Recording) -> frozenset[Function]:
    """Return the functions that each step entered."""
    return frozenset.intersection(*recording.values())


def joined(recordings: Iterable[Recording]) -> Recording:
    """Return the functions that any of the processes entered, by step."""
    steps: dict[int, frozenset[Function]] = {}
    for recording in recordings:
        for step, functions in recording.items():
            steps[step] = steps.get(step, frozenset()) | functions
    return steps


def report(recordings: Mapping[str, Recording], *, lists: bool) -> str:
    """Return the table of a run.

    :param lists: Whether the names follow.
    """
    whole = joined(recordings.values())
    road, single = in_every_step(whole), sorted(map(len, whole.values()))
    by_package = Counter(function.package for function in road)
    lines = [f"{count:>6}  {package}" for package, count in sorted(by_package.items())]
    lines += [
        "",
        *(f"{len(in_every_step(each)):>6}  entered by {name}" for name, each in sorted(recordings.items())),
    ]
    lines += [
        "",
        f"{len(road):>6}  functions of {len({function.module for function in road})} modules in every step",
        f"        single steps: {single[0]} to {single[-1]}; in any of {len(whole)}: {len(union(whole))}",
    ]
    names = [f"{function.module}:{function.name}" for function in sorted(road)]
    rest = [f"not in every step: {each.module}:{each.name}" for each in sorted(union(whole) - road)]
    return "\n".join([*lines, *(["", *names, "", *rest] if lists else [])])


def union(recording: Recording) -> frozenset[Function]:
    """Return the functions that any step entered."""
    return frozenset().union(*recording.values())


def main() -> None:
    """Record a run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="print the names of the functions")
    parser.add_argument("--base", metavar="COMMIT", help="take the tree of this commit; default: this one")
    arguments, extra = parser.parse_known_args()
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        tree = ROOT if arguments.base is None else extract(arguments.base, work / "tree")
        print(report(record(tree, work, extra), lists=arguments.list))


if __name__ == "__main__":
    main()
