"""Short runs with a fault each, and the health rules that fire in them.

    python bench/health_faults.py                     # a tiny model on the CPU, a few minutes in all
    python bench/health_faults.py wrong_rope leak     # some of them
    python bench/health_faults.py --healthy           # ten runs without a fault

A line per run: the rule that is expected, the step at which it fired, the other rules that fired, and the
mean reward of the first and the last five steps. Ends with status 1 if an expected rule stayed silent, if one
fired in a run without a fault, or if a run that must learn did not. Faults that need servers, stale weights
or answers that are cut are in tests/integration; an idle device and a full host are not tried.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from anygauge import Run
from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.types import NamedFunction
from anygauge_tests.recipe import tiny_recipe

DEMO = Path(__file__).parents[1] / "examples" / "arithmetic_grpo.toml"
WRONG_ROPE = """
import transformers.models.qwen3.modeling_qwen3 as qwen3
forward = qwen3.Qwen3RotaryEmbedding.forward
qwen3.Qwen3RotaryEmbedding.forward = lambda self, x, position_ids: forward(self, x, 2 * position_ids)
"""
"""Run by each process as it starts: the rollout engine takes other angles, the trainer has its own code."""
SAMPLES = 16
"""Samples of a step."""
LEAKED: list[bytearray] = []


class Rewards:
    """Rewards that the driver computes."""

    calls = 0

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        """Register each by its name."""
        names = ("digits", "different", "ones", "alike", "noise", "jumping", "failing", "leaking")
        return [NamedFunction(name=name, fn=getattr(self, name), inline=True) for name in names]

    def digits(self, response: str) -> float:
        """Reward what a random policy does now and then."""
        return sum(character.isdigit() for character in response) / 8

    def different(self, response: str) -> float:
        """Reward each digit once, and punish all further characters."""
        different = len({character for character in response if character.isdigit()})
        return different / 10 - (len(response) - different) / 40

    def ones(self, response: str) -> float:
        """Reward one token, which is never a right answer."""
        return 0.9 * response.count("1") / 4

    def alike(self, response: str) -> float:
        """Reward a response of one character."""
        return 0.9 * max(Counter(response).values(), default=0) / 80

    def noise(self, response: str) -> float:
        """Reward nothing in particular."""
        return random.Random(response).random()

    def jumping(self, response: str) -> float:
        """Reward digits, after 16 steps a hundred times as much, as a reward that turns into percent."""
        self.calls += 1
        return self.digits(response) * (100 if self.calls > 16 * SAMPLES else 1)

    def failing(self, response: str) -> float:
        """Fail for some responses."""
        if response.startswith(("1", "2", "3")):
            raise ValueError("no reward")
        return self.digits(response)

    def leaking(self, response: str) -> float:
        """Keep 3 MiB for each response."""
        LEAKED.append(bytearray(os.urandom(3 << 20)))
        return self.digits(response)


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of a run, and the rule that must see it."""

    rule: str | None
    """The rule that must fire; ``None`` for a run without a fault."""
    keys: Mapping[str, Any]
    site: str = ""
    """Code of each process."""
    reward: str = "digits"
    is_demo: bool = False
    """The recipe of the demo, instead of an untrained model."""
    gain: float | None = None
    """How far the reward must rise."""


def healthy(**keys: Any) -> Fault:
    """Return a run without a fault, and without anything to learn."""
    common = {"rollout__max_new_tokens": 80, "train__lr": 1e-6, "run__steps": 20}
    return Fault(None, {**common, **keys}, reward="noise")


def learning(**keys: Any) -> Fault:
    """Return a run without a fault, in which an untrained model learns to answer with different digits."""
    common = {"rollout__max_new_tokens": 80, "train__lr": 1e-3, "run__steps": 40}
    return Fault(None, {**common, **keys}, reward="different", gain=0.2)


HEALTHY = {
    "none": healthy(),
    "seed 1": healthy(run__seed=1),
    "demo": Fault(None, {"run__steps": 80}, reward="exact_match", is_demo=True, gain=0.2),
    "two optimizer steps": learning(train__optimizer_steps=2),
    "against a reference": healthy(algorithm__kl_coef=0.01),
    "RLOO": learning(algorithm__advantage="rloo"),
    "bfloat16": learning(train__dtype="bfloat16"),
    "adapters": healthy(**{"train__lora.rank": 4, "train__lr": 1e-4}),
    "FSDP": learning(train__engine="fsdp"),
    "critic": healthy(algorithm__advantage="gae", critic__lr=1e-5),
}
LONG = {"rollout__max_new_tokens": 80, "run__steps": 40}
FAULTS = {
    "none": HEALTHY["none"],
    "wrong_rope": Fault(
        "logprob_abs_diff", {"run__steps": 2, "health__logprob_abs_diff_error": "none"}, WRONG_ROPE
    ),
    "large_rate": Fault(
        "policy_kl", {"train__lr": 0.05, "train__optimizer_steps": 4, "run__steps": 12}, reward="noise"
    ),
    "one_token": Fault("entropy_collapse", {"train__lr": 0.01, "run__steps": 40}, reward="ones"),
    "far_from_reference": Fault(
        "reference_kl", {"train__lr": 0.01, "run__steps": 40, "algorithm__kl_coef": 1e-4}, reward="ones"
    ),
    "one_character": Fault("repetition", {**LONG, "train__lr": 0.01}, reward="alike"),
    "reward_jump": Fault(
        "gradient_spike",
        {"algorithm__advantage": "rloo", "train__lr": 1e-4, "run__steps": 20},
        reward="jumping",
    ),
    "failing_reward": Fault(
        "failed_samples", {"run__steps": 8, "reward__max_failed_ratio": 1.0}, reward="failing"
    ),
    "leak": Fault("memory_growth", {"run__steps": 64}, reward="leaking"),
}


def main() -> int:
    """Run the faults and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--healthy", action="store_true", help="the runs without a fault")
    asked = parser.parse_args()
    runs = HEALTHY if asked.healthy else FAULTS
    names = asked.faults or list(runs)
    if unknown := [name for name in names if name not in runs]:
        parser.error(f"there is no {unknown[0]!r}; choose from: {', '.join(runs)}")
    return 0 if all([judge(name, runs[name]) for name in names]) else 1


def judge(name: str, fault: Fault) -> bool:
    """Run a fault, print what fired, and return whether that is right."""
    with tempfile.TemporaryDirectory() as directory:
        run = run_of(fault, Path(directory))
        fired, (before, after) = rules_fired(run), rewards(run)
    others = ", ".join(f"{rule} at {step}" for rule, step in fired.items() if rule != fault.rule)
    expected = f"{fault.rule} at {fired.get(fault.rule, 'no step')}" if fault.rule else "nothing"
    also = f"; also {others}" if others else ""
    print(f"{name}: {expected}{also}; reward {before:.2f} to {after:.2f}", flush=True)
    learned = fault.gain is None or after - before >= fault.gain
    return learned and (fault.rule in fired if fault.rule else not fired)


def run_of(fault: Fault, directory: Path) -> Run:
    """Train with a fault."""
    (directory / "sitecustomize.py").write_text(fault.site, encoding="utf-8")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(directory), *PATHS])
    recipe, keys = demo(directory) if fault.is_demo else (tiny_recipe(directory), {})
    quiet = {"run__progress": False, "save__every": "none", "save__hf_at_end": False}
    keys |= {"reward__function": fault.reward, **quiet, **fault.keys}
    LEAKED.clear()
    plugins = load_plugins()
    plugins.register(Rewards(), "rewards")
    given = [(name.replace("__", "."), value) for name, value in keys.items()]
    with redirect_stdout(io.StringIO()):
        info = train(load_config(recipe, given, backend="cpu", plugins=plugins), plugins)
    return Run.load(info.directory)


def demo(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Make the inputs of the demo, and return its recipe and the keys that name them."""
    command = [sys.executable, "-m", "anygauge.cli.demo.inputs", "--out", str(directory / "inputs")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return DEMO, {
        "run__directory": str(directory),
        "model__path": str(directory / "inputs" / "model"),
        "data__train": [str(directory / "inputs" / "train.jsonl")],
        "data__cache": str(directory / "cache"),
        "eval__data": [],
    }


def rules_fired(run: Run) -> dict[str, int]:
    """Return the rules that fired in a run, with the first step of each."""
    assert run.health is not None
    changes = [change for change in run.health.changes if change.kind == "fires"]
    return {change.rule: change.step for change in reversed(changes)}


def rewards(run: Run) -> tuple[float, float]:
    """Return the mean reward of the first and of the last five steps."""
    values = [row["rollout/raw_reward"] for row in run.metrics_list if "rollout/raw_reward" in row]
    return fmean(values[:5]), fmean(values[-5:])


PATHS = os.environ.get("PYTHONPATH", "").split(os.pathsep)

if __name__ == "__main__":
    sys.exit(main())
