"""Two Ray nodes on one machine: the trainer on one, the engine on the other, and one of them is lost."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util import placement_group, remove_placement_group

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.trainer.run import train
from anygauge_cpu.env import WORKER_SLOT
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import WorkerDiedError
from anygauge_hooks.types import RunInfo
from anygauge_tests.fork_server import ForkServers
from anygauge_tests.observer import Digits
from anygauge_tests.recipe import tiny_recipe

Launch = Callable[..., WorkerGroup]
NODE = Path(__file__).with_name("node_driver.py")
STEPS = 2
DEADLINE_S = 120.0
SLOTS = 8
"""Slots of the session's cluster; all but one are taken, so that each node has room for one worker."""


@pytest.fixture(scope="module")
def second_node(
    ray_cluster: str, fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[psutil.Process]:
    """Add a node with room for one worker, as a user does, and leave as much on the first."""
    reserved = placement_group([{WORKER_SLOT: SLOTS - 1}])
    assert reserved.wait(DEADLINE_S)
    command = ["launch", "--nodes=2", "--devices=1", "--backend=cpu", "--run=worker", f"--head={ray_cluster}"]
    log = tmp_path_factory.mktemp("node") / "log"
    with log.open("wb") as output:
        node = fork_servers.start(str(NODE), command, output=output.fileno())
    try:
        wait_until(lambda: len(free_slots()) == 2 or node.poll() is not None)
        assert node.poll() is None, log.read_text()
        yield psutil.Process(node.pid)
    finally:
        end_tree(psutil.Process(node.pid))
        node.wait()
        remove_placement_group(reserved)
        wait_until(lambda: len(free_slots()) == 1)


def free_slots() -> list[float]:
    """Return how many workers each living node has room for."""
    from ray._private.state import available_resources_per_node

    left: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return [resources.get(WORKER_SLOT, 0.0) for resources in left.values()]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def end_tree(process: psutil.Process) -> None:
    for each in [*process.children(recursive=True), process]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(
        tmp_path_factory.mktemp("two_nodes"),
        run__steps=STEPS,
        run__report=False,
        reward__function="digits",
        save__hf_at_end=False,
        placement__launcher="ray",
        placement__start_timeout_s=120,
    ).parent


class Watcher(Digits):
    """Brings a reward, keeps the metrics, and does something after some steps."""

    def __init__(self, at_the_end: Callable[[], None] = lambda: None) -> None:
        self.metrics: list[Mapping[str, float]] = []
        self.at_the_end = at_the_end

    @hookimpl
    def after_train_step(self, run: RunInfo, metrics: Mapping[str, float]) -> None:
        self.metrics.append(metrics)
        if run.step == STEPS:
            self.at_the_end()


def run(inputs: Path, observer: Watcher, **overrides: Any) -> None:
    plugins = load_plugins()
    plugins.register(observer, "observer")
    given = [(key.replace("__", "."), value) for key, value in overrides.items()]
    train(load_config(inputs / "run.toml", given, backend="cpu", plugins=plugins), plugins)


@dataclass(frozen=True)
class Lost:
    """A run whose second node was killed after some steps."""

    observer: Watcher
    used: Sequence[float]
    """Slots left on each node while it ran."""
    error: BaseException
    seconds: float
    """From the kill to the error."""


@pytest.fixture(scope="module")
def lost(inputs: Path, second_node: psutil.Process) -> Lost:
    used: list[float] = []
    killed: list[float] = []

    def kill() -> None:
        used.extend(free_slots())
        raylets = [each for each in second_node.children(recursive=True) if each.name() == "raylet"]
        os.kill(raylets[0].pid, signal.SIGKILL)
        killed.append(time.monotonic())

    observer = Watcher(kill)
    with pytest.raises(WorkerDiedError) as caught:
        run(inputs, observer, run__name="two", run__steps=100_000, placement__rollout_workers=1)
    return Lost(observer, used, caught.value, time.monotonic() - killed[0])


@pytest.mark.soak
def test_ranks_on_two_nodes_share_a_process_group(launch: Launch, second_node: psutil.Process) -> None:
    with launch("ray", 2) as group:
        assert free_slots() == [0.0, 0.0]
        assert group.call("sum_ranks") == [3.0, 3.0]


@pytest.mark.soak
@pytest.mark.usefixtures("second_node")
def test_trainers_on_two_nodes_give_what_two_processes_give(inputs: Path) -> None:
    two, alone = Watcher(), Watcher()
    workers = {"placement__train_workers": 2, "save__hf_at_end": True}
    run(inputs, two, run__name="spread", **workers)
    run(inputs, alone, run__name="together", placement__launcher="local", **workers)
    assert training(two) == training(alone)
    assert (inputs / "spread" / "hf" / "config.json").is_file()
    assert not list((inputs / "spread").glob(".shared-*"))


def training(observer: Watcher) -> list[dict[str, float]]:
    """Return what was sampled and trained in each step."""
    return [
        {name: value for name, value in row.items() if name.startswith(("train/", "rollout/"))}
        for row in observer.metrics
    ]


@pytest.mark.usefixtures("forked_actors")  # not those of the nodes, which have a wider scope
def test_trainer_and_engine_on_two_nodes_give_what_one_process_gives(inputs: Path, lost: Lost) -> None:
    assert lost.used == [0.0, 0.0]
    alone = Watcher()
    run(inputs, alone, run__name="one", placement__launcher="local")
    assert training(lost.observer)[:STEPS] == training(alone)


def test_a_lost_node_ends_the_run_and_names_the_worker(lost: Lost) -> None:
    assert re.match(r"Rank 0 \((actor|rollout), pid \d+, .*\) died \(Ray: ", str(lost.error))
    assert lost.seconds < DEADLINE_S


def test_a_lost_node_leaves_no_actor(lost: Lost) -> None:
    names = ray.util.list_named_actors(all_namespaces=True)
    assert not [name for name in names if name["name"].startswith("two-")]
    assert free_slots() == [1.0]
