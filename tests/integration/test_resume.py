"""A run that is killed at any instant and resumed ends as the run that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.types import NamedFunction, RunInfo
from anygauge_tests.fork_server import ForkServers
from anygauge_tests.observer import Digits, digits
from anygauge_tests.recipe import tiny_recipe

DRIVER = Path(__file__).with_name("resume_driver.py")
SHARD = "model-00001-of-00001.safetensors"
STEPS, EVERY = 6, 2
SEED = 3
KILLED = -signal.SIGKILL
WITHIN_S = 60.0
Rows = list[dict[str, Any]]
Run = Callable[..., str]


@pytest.fixture(scope="module", params=["megatron", pytest.param("fsdp", marks=pytest.mark.fsdp)])
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resume")
    return tiny_recipe(
        root,
        run__directory=root / "runs",
        run__steps=STEPS,
        run__report=False,
        run__progress=False,
        reward__function="digits",
        algorithm__kl_coef=0.01,
        algorithm__entropy_coef=0.01,
        algorithm__advantage_options__scale=False,
        train__engine=request.param,
        train__lr_schedule="cosine",
        train__optimizer_steps=2,
        eval__data=[root / "data.jsonl"],
        eval__interval=3,
        save__every=EVERY,
        save__keep=1,
    ).parent


@pytest.fixture(scope="module")
def run(inputs: Path, fork_servers: ForkServers) -> Run:
    """Return a function that runs the driver and returns its output.

    With ``kill``, until it has come to a point so many times.
    """

    def run(name: str, *options: str, kill: tuple[str, int] | None = None) -> str:
        env = {key: value for key, value in os.environ.items() if not key.startswith("RESUME_TEST")}
        if kill:
            env |= {"RESUME_TEST_POINT": kill[0], "RESUME_TEST_COUNT": str(kill[1])}
        arguments = [str(inputs / "run.toml"), "--run.name", name, *options]
        with TemporaryFile() as output:
            driver = fork_servers.start(str(DRIVER), arguments, output=output.fileno(), env=env, has_own=True)
            code = driver.wait(200)
            output.seek(0)
            text = output.read().decode()
        assert code == (KILLED if kill else 0), text
        return text

    return run


def metrics(root: Path, name: str) -> Rows:
    """Return the lines of a run without what is measured with a clock."""
    lines = (root / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [
        {
            key: value
            for key, value in json.loads(line).items()
            if key != "time" and not key.startswith("perf/")
        }
        for line in lines
    ]
    return [row for row in rows if row]


def weights(root: Path, name: str) -> Mapping[str, torch.Tensor]:
    return load_file(root / "runs" / name / "hf" / SHARD)


def assert_same(root: Path, name: str, other: str) -> None:
    found, expected = metrics(root, name), metrics(root, other)
    assert [row["train/step"] for row in found if "train/step" in row] == [*range(1, STEPS + 1)]
    assert len({row["train/loss"] for row in found if "train/step" in row}) == STEPS
    assert found == expected
    one, two = weights(root, name), weights(root, other)
    assert [key for key in two if not torch.equal(one[key], two[key])] == []
    left = sorted(os.listdir(root / "runs" / name / "checkpoints"))
    assert left == [f"step-{STEPS:08d}"]


def train_here(root: Path, name: str, plugin: Digits, *, resume: bool = False, every: int = EVERY) -> None:
    """Run the recipe in this process."""
    plugins = load_plugins(only=["cpu", "models"])
    plugins.register(plugin, "digits")
    given = {"run.name": name, "run.resume": resume, "save.every": every}.items()
    train(load_config(root / "run.toml", list(given), backend="cpu", plugins=plugins), plugins)


def undisturbed(root: Path) -> str:
    """Return the name of a run that nobody disturbs."""
    if not (root / "runs/whole").exists():
        train_here(root, "whole", Digits())
    return "whole"


@pytest.mark.usefixtures("forked_actors")
def test_killed_inside_a_save(inputs: Path, run: Run) -> None:
    whole = undisturbed(inputs)
    # By then the checkpoint of step 2 is there, and half of that of step 4.
    run("torn", kill=("between files", 2))
    left = os.listdir(inputs / "runs/torn/checkpoints")
    assert sorted(left) == [".step-00000004.partial", "step-00000002"]
    output = run("torn", "--run.resume", "true")
    assert "nothing to resume" not in output
    assert (inputs / "runs/torn/metrics.superseded.jsonl").is_file()
    assert_same(inputs, "torn", whole)


class Interrupts(Digits):
    """Interrupts the run before a step, while it generates one, or while it trains one."""

    def __init__(
        self, *, before: int | None = None, generating: int | None = None, training: int | None = None
    ) -> None:
        self.before, self.generating, self.training = before, generating, training
        self.step, self.said, self.saved = 0, list[str](), list[str]()
        self.told = threading.Event()

    @hookimpl
    def before_train_step(self, run: RunInfo) -> None:
        self.step = run.step + 1
        if self.step == self.before:
            os.kill(os.getpid(), signal.SIGINT)

    @hookimpl
    def after_rollout(self) -> None:
        if self.step == self.training:
            os.kill(os.getpid(), signal.SIGINT)

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        return [NamedFunction(name="digits", fn=self.reward, inline=True)]

    def reward(self, response: str) -> float:
        if self.step == self.generating:
            self.generating = None
            os.kill(os.getpid(), signal.SIGINT)
            self.told.wait(WITHIN_S)  # else the step may be trained before the main thread sees the signal
        return digits(response)

    @hookimpl
    def on_wait(self, message: str) -> None:
        self.said.append(message)
        if message.startswith("saving"):
            self.told.set()

    @hookimpl
    def after_save_checkpoint(self, path: str) -> None:
        self.saved.append(Path(path).name)


@pytest.mark.usefixtures("forked_actors")
def test_interrupted_and_resumed(inputs: Path) -> None:
    whole, name = undisturbed(inputs), "interrupted"
    points = [
        (Interrupts(before=1), 100, None),
        (Interrupts(training=2), 2, 2),  # which is due, and saved once
        (Interrupts(before=3), 100, None),
        (Interrupts(generating=5), 100, 4),
    ]
    for plugin, every, step in points:
        with pytest.raises(KeyboardInterrupt):
            train_here(inputs, name, plugin, resume=True, every=every)
        assert plugin.saved == ([] if step is None else [f"step-{step:08d}"])
        text = f"saving step {step} when it is done; Ctrl-C again to stop at once"
        assert (text in plugin.said) == (step is not None)
    train_here(inputs, name, Digits(), resume=True)
    assert_same(inputs, name, whole)


OCCURRENCES = {
    "generation": range(2, STEPS + 3),
    "training": range(1, 2 * STEPS + 1),
    "boundary": range(1, STEPS + 1),
    "retention": range(1, 4),
    "removal": range(1, 3),
}
"""How often a run comes to a point; 3 for what it does in each save."""


@pytest.fixture(scope="module")
def whole(run: Run) -> Mapping[int, str]:
    """Return runs that nobody disturbs, with one worker and with two."""
    for count in (1, 2):
        run(f"whole-{count}", "--placement.train_workers", str(count))
    return {count: f"whole-{count}" for count in (1, 2)}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "point",
    [
        *("generation", "training", "copied", "between files", "written"),
        *("renaming", "retention", "removal", "boundary"),
    ],
)
def test_killed_at_a_point(
    inputs: Path, run: Run, whole: Mapping[int, str], point: str, workers: int
) -> None:
    draw = random.Random(f"{SEED}/{point}/{workers}")
    count = draw.choice(OCCURRENCES.get(point, range(1, 4)))
    name = f"{point}-{workers}".replace(" ", "-")
    options = ("--placement.train_workers", str(workers))
    run(name, *options, kill=(point, count))
    run(name, *options, "--run.resume", "true")
    assert_same(inputs, name, whole[workers])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_killed_again_and_again(inputs: Path, run: Run, whole: Mapping[int, str]) -> None:
    for kill in (("training", 6), ("removal", 1), ("between files", 1), ("generation", 3)):
        run("again", "--run.resume", "true", kill=kill)
    run("again", "--run.resume", "true")
    assert_same(inputs, "again", whole[1])


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_killed_on_ray(inputs: Path, run: Run, whole: Mapping[int, str]) -> None:
    options = ("--placement.launcher", "ray", "--placement.train_workers", "2")
    run("ray", *options, kill=("boundary", 5))
    run("ray", *options, "--run.resume", "true")
    assert_same(inputs, "ray", whole[2])
