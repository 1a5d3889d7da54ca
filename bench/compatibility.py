"""Run directories of an earlier commit, resumed and replayed by this tree: the next step must be bit-equal.

    python bench/compatibility.py --base 91e6e94
    python bench/compatibility.py --base main --scenarios partial --directory /tmp/compatibility

The base commit makes the run directories on the CPU, with a tiny Qwen3 and two data-parallel workers:

* ``sync``: a synchronous run that stops at a checkpoint.
* ``partial``: over-sampling and partial rollouts of several turns, killed with SIGKILL in the middle of a
  step. Its last checkpoint has a journal of rollouts that are not done.
* ``served``: a synchronous run with two servers of the fake engine.
* ``dump``: a run that dumps its rollouts and its batches.

Copies of each directory then go on, once with the packages of the base and once with those of this tree:
``sync``, ``partial`` and ``served`` are resumed for a step, ``dump`` is replayed from its rollouts and from
its batches. Both sides read the same config file, which has the base's names of the keys. Every metric but
times and memory, the exported parameters and the tensors of the next checkpoint (weights and optimizer state)
are compared bit for bit. A metric of the base that this tree does not have is a difference, unless
``RENAMED_METRICS`` has its new name. Ends with status 1 on any difference.

An asynchronous run is not among them: time decides which of its groups are done first. The embedded engine
cannot cut a generation short, so the journal has whole generations of rollouts that are not done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from checkout import ROOT, check_packages, environment, extract, install_fake_engine, nested, short_id

NOT_COMPARED = ("perf/", "time")
"""Beginnings of the names of metrics that differ from run to run."""
RENAMED_METRICS: Mapping[str, str] = {}
"""New names of metrics, by the name that they have at the base."""
KILL = "COMPATIBILITY_KILL_AT_VERSION"
MADE_STEPS, NEXT_STEP = 2, 3
MOST_SHOWN = 20
"""Differences of a scenario that are printed."""
TASK = f'''"""Reward and rollout function of bench/compatibility.py."""

import asyncio
import os
import signal

changed = asyncio.Event()
newest = finished = 0


def digits(response):
    return sum(character.isdigit() for character in response) / 8


async def several_turns(rollout, prompt, seed):
    """Answer at once, or, for eight prompts of each step, only when the next step has begun.

    So the samples of a step depend on no timing, and eight groups are under way at the end of each.
    """
    global changed, newest, finished
    draft = rollout.draft()
    version = (await draft.generate(max_new_tokens=4)).weight_versions[0]
    if prompt.index % (3 if prompt.index < 24 else 2) == 0:
        while newest <= version:
            await changed.wait()
        draft.observe(rollout.encode("+"))
        await draft.generate(max_new_tokens=4)
    elif newest < version:
        newest = version
        changed.set()
        changed = asyncio.Event()
    sample = draft.sample()
    finished += max(sample.weight_versions) >= int(os.environ.get("{KILL}", 1 << 30))
    if finished == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample
'''


class Scenario(NamedTuple):
    """A run of the base, and how it goes on."""

    name: str
    keys: Mapping[str, Any]
    """Config keys beyond those of all scenarios."""
    is_killed: bool = False
    is_dump: bool = False


class Result(NamedTuple):
    """A run as it ended."""

    metrics: Mapping[int, Mapping[str, Any]]
    """Metrics of each step that is compared."""
    tensors: Mapping[str, str]
    """Checksums of all that the run exported and saved, by file and name."""


class Side(NamedTuple):
    """A source tree, and how its programs are run."""

    name: str
    python: str
    environment: Mapping[str, str]


COMMON = {
    "run.report": False,
    "run.progress": False,
    "run.trackers": ["jsonl"],
    "run.deterministic": True,
    "run.timeout_s": 120,
    "reward.function": "compatibility_task:digits",
    "rollout.prompts_per_step": 16,
    "rollout.samples_per_prompt": 4,
    "rollout.max_new_tokens": 8,
    "algorithm.kl_coef": 0.01,
    "algorithm.entropy_coef": 0.01,
    "train.dtype": "float32",
    "train.optimizer_steps": 2,
    "train.lr": 1e-3,
    "placement.launcher": "local",
    "placement.num_workers": 2,  # old names of keys, which the base may have instead of the new ones
    "placement.threads_per_worker": 1,
    "save.every": MADE_STEPS,
}
SCENARIOS = (
    Scenario("sync", {}),
    Scenario(
        "partial",
        {
            "rollout.function": "compatibility_task:several_turns",
            "rollout.max_new_tokens": 24,
            "rollout.over_sampling": 8,
            "rollout.partial": True,
            "data.shuffle": False,  # prompts have the numbers that the function goes by
            "save.keep": 1,
        },
        is_killed=True,
    ),
    Scenario(
        "served",
        {
            "rollout.engine": "fake",
            "placement.rollout_workers": 2,
            "weight_sync.transport": "tensor",
            "weight_sync.bucket_bytes": 1 << 20,
            "health.logprob_abs_diff_error": "none",  # the fake engine makes its log-probs up
        },
    ),
    Scenario("dump", {"debug.dump_rollouts": True, "debug.dump_batches": True}, is_dump=True),
)
REPLAYS = ("replay_rollouts", "replay_batches")


def make_inputs(directory: Path) -> None:
    """Write the model, the data, the functions and a config for each scenario."""
    from anygauge.testing.tiny import tiny_qwen3

    directory.mkdir(parents=True)
    tiny_qwen3(directory / "model", init_std=0.3)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10)]
    (directory / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (directory / "compatibility_task.py").write_text(TASK, encoding="utf-8")
    inputs = {"model.path": str(directory / "model"), "data.train": [str(directory / "data.jsonl")]}
    for scenario in SCENARIOS:
        keys = {"run.name": scenario.name, **COMMON, **inputs, **scenario.keys}
        (directory / f"{scenario.name}.toml").write_text(tomli_w.dumps(nested(keys)), encoding="utf-8")


def make_side(name: str, tree: Path, python: str, work: Path) -> Side:
    """Return a tree with its environment, in which the tree's fake engine is installed."""
    plain = environment(tree, work / f"{name}-metadata")
    check_packages(tree, plain, python)
    plugin = work / f"{name}-plugin"
    install_fake_engine(plugin, plain, servers=2, python=python)
    path = os.pathsep.join((plain["PYTHONPATH"], str(plugin)))
    cache = str(work / f"{name}-cache")
    return Side(name, python, {**plain, "PYTHONPATH": path, "ANYGAUGE_CACHE": cache})


def train(
    side: Side, work: Path, scenario: Scenario, runs: Path, *options: str, kill_at: int | None = None
) -> None:
    """Run ``anygauge train``.

    :param runs: Gets the run directory.
    :param kill_at: Version of the weights whose samples end the run with SIGKILL.
    :raises SystemExit: The run did not end as it should have.
    """
    inputs, log = work / "inputs", runs / f"{scenario.name}.log"
    runs.mkdir(exist_ok=True)
    command = [side.python, "-P", "-m", "anygauge", "train", str(inputs / f"{scenario.name}.toml")]
    command += ["--backend", "cpu", "--run.directory", str(runs), *options]
    variables = dict(side.environment) | ({} if kill_at is None else {KILL: str(kill_at)})
    with log.open("ab") as output:
        code = subprocess.run(
            command, cwd=inputs, env=variables, stdout=output, stderr=output, check=False
        ).returncode
    if code != (0 if kill_at is None else -signal.SIGKILL):
        print(log.read_text(encoding="utf-8"), file=sys.stderr)
        raise SystemExit(f"{scenario.name}: the run with the packages of {side.name} ended with {code}")


def make_run(side: Side, work: Path, scenario: Scenario) -> None:
    """Make the run directory of a scenario in ``made/``."""
    # In the step after the next save, which waits for the checkpoint before.
    kill_at = 2 * MADE_STEPS if scenario.is_killed else None
    steps = MADE_STEPS if kill_at is None else kill_at + 1
    train(side, work, scenario, work / "made", f"--run.steps={steps}", kill_at=kill_at)
    if scenario.is_killed:
        check_journal(work / "made" / scenario.name)


def check_journal(run: Path) -> None:
    """Check that a killed run left a checkpoint of the step before, with rollouts that are not done.

    :raises SystemExit: It did not, so nothing would be tested.
    """
    (driver,) = run.glob("checkpoints/step-*/driver.json")
    state = json.loads(driver.read_text(encoding="utf-8"))
    journals = [each for each in find_key(state, "journals") if any(each.values())]
    print(f"{run.name}: step {state['step']}, {len(journals)} open groups with a journal")
    if state["step"] != MADE_STEPS or not journals:
        raise SystemExit(f"{driver} has no journal of rollouts that are not done")


def find_key(state: Any, key: str) -> Iterator[Any]:
    """Yield the values of a key, wherever it is in a tree of JSON."""
    if isinstance(state, dict):
        if key in state:
            yield state[key]
        state = list(state.values())
    if isinstance(state, list):
        for each in state:
            yield from find_key(each, key)


def go_on(side: Side, work: Path, scenario: Scenario) -> Iterator[tuple[str, Result]]:
    """Let a copy of a scenario's run go on, and yield each name and result."""
    runs = work / f"at-{side.name}"
    made, copy = work / "made" / scenario.name, runs / scenario.name
    shutil.copytree(made, copy)
    if not scenario.is_dump:
        train(side, work, scenario, runs, "--resume", f"--run.steps={NEXT_STEP}")
        yield f"{scenario.name}: resume", read_result(copy, [NEXT_STEP])
        return
    for replay in REPLAYS:
        options = ("--debug.mode=train_only", f"--debug.{replay}={copy / 'dumps'}", f"--run.name={replay}")
        off = ("--debug.dump_rollouts=false", "--debug.dump_batches=false", f"--run.steps={MADE_STEPS}")
        train(side, work, scenario, runs, *options, *off)
        yield f"{scenario.name}: {replay}", read_result(runs / replay, range(1, MADE_STEPS + 1))


def read_result(run: Path, steps: Sequence[int]) -> Result:
    """Return metrics of steps and checksums of the tensors that a run left."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = {row["train/step"]: row for row in map(json.loads, lines) if "train/step" in row}
    files = [*run.glob("hf/*.safetensors"), *run.glob(f"checkpoints/step-{steps[-1]:08d}/*.safetensors")]
    tensors = {
        f"{path.relative_to(run)}: {name}": digest for path in files for name, digest in checksums(path)
    }
    return Result({step: compared(rows[step]) for step in steps}, tensors)


def compared(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a row that are the same in each run."""
    return {name: value for name, value in row.items() if not name.startswith(NOT_COMPARED)}


def checksums(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor of a file, with the checksum of its type, shape and bytes."""
    import torch
    from safetensors.torch import load_file

    for name, tensor in load_file(path).items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + content)
        yield name, digest.hexdigest()


def differences(base: Result, head: Result) -> list[str]:
    """Return what differs, a line each; metrics and tensors that only the new side has are no difference."""
    found = []
    for step, row in base.metrics.items():
        for name, value in row.items():
            now = head.metrics[step].get(RENAMED_METRICS.get(name, name), "missing")
            if json.dumps(now) != json.dumps(value):  # every bit of a number is in its text, and NaN is NaN
                found.append(f"step {step}: {name}: {value} -> {now}")
    for name, digest in base.tensors.items():
        if head.tensors.get(name) != digest:
            found.append(f"{name}: {'other bits' if name in head.tensors else 'missing'}")
    return found


def main() -> int:
    """Make the runs, let them go on at both sides and print the table; return 1 if anything differs."""
    arguments = parse()
    with ExitStack() as stack:
        work = arguments.directory or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work = work.resolve()
        work.mkdir(parents=True, exist_ok=True)
        make_inputs(work / "inputs")
        base = make_side("base", extract(arguments.base, work / "base"), arguments.base_python, work)
        head = make_side("head", ROOT, sys.executable, work)
        print(f"base: {short_id(arguments.base)}; head: {ROOT}", flush=True)
        chosen = [scenario for scenario in SCENARIOS if scenario.name in arguments.scenarios]
        return int(any([compare(base, head, work, scenario) for scenario in chosen]))


def compare(base: Side, head: Side, work: Path, scenario: Scenario) -> bool:
    """Make a run, let it go on at both sides, print what was compared and return whether anything differs."""
    make_run(base, work, scenario)
    differs = False
    for (name, before), (_, after) in zip(
        go_on(base, work, scenario), go_on(head, work, scenario), strict=True
    ):
        lines = differences(before, after)
        differs |= bool(lines)
        metrics = sum(map(len, before.metrics.values()))
        outcome = f"{len(lines)} DIFFERENCES" if lines else "bit-equal"
        print(f"{name:<24}{metrics:>5} metrics{len(before.tensors):>5} tensors   {outcome}", flush=True)
        shown = lines[:MOST_SHOWN]
        print("".join(f"    {line}\n" for line in shown), end="", flush=True)
    return differs


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--base", required=True, metavar="COMMIT", help="the commit that makes the directories"
    )
    parser.add_argument(
        "--base-python", default=sys.executable, help="with the libraries that the base needs"
    )
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--directory", type=Path, help="a new directory that is kept; default: a temporary one"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
