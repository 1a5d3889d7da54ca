"""Memory that colocated trainers and servers leave free on a device, and seconds for each switch.

    python bench/colocation.py --backend cuda                            # Qwen3 of 0.6 B, SGLang, one GPU
    python bench/colocation.py --backend cuda --size 4b --server mem_fraction_static=0.8
    python bench/colocation.py --backend cpu --engine fake --size tiny   # the order alone

A random model, the real train engine in a worker and a real server in another process. Two rounds of
generate, train, sync; then a checkpoint's turn, and the way back. Each line is one order: who was to hold
what, the seconds until it did, and then the memory of the device as its driver sees it, which counts every
process, and as the trainer's allocator does. On the host these are its memory and the trainer's own.

The trainer's log-probs are compared with the server's in each round: weights that were lost, or sent too
early, would show. Ends with status 1 if they differ by more than is usual of one kind of number.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from anygauge.config.load import LoadedConfig, load_config
from anygauge.config.roles import Components
from anygauge.plugins import Plugins, load_plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.serving.colocated_engines import ColocatedEngines
from anygauge.serving.colocation import ColocationPhase, ColocationScheduler, SetMemoryState
from anygauge.serving.engines import launch_engines, open_engines
from anygauge.trainer.actors import ActorWorker
from anygauge.trainer.generation import SampleMaker, open_maker
from anygauge.trainer.plan import plan_steps, rollout_batch
from anygauge_hooks.rl import Group, Prompt, SamplingParams
from anygauge_hooks.serving import MemoryState
from anygauge_tests.fake_engine.installed import install_fake_engine

GIB = 2**30
ROUNDS = 2
PARTS = Components(trains=True, generates=True, learns=True)
QWEN3 = {"vocab_size": 151_936, "kv_heads": 8, "head_dim": 128, "tied": True, "init_std": 0.02}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"init_std": 0.1},
    "0.6b": {**QWEN3, "hidden": 1024, "layers": 28, "heads": 16, "mlp": 3072},
    "1.7b": {**QWEN3, "hidden": 2048, "layers": 28, "heads": 16, "mlp": 6144},
    "4b": {**QWEN3, "hidden": 2560, "layers": 36, "heads": 32, "mlp": 9728},
    "8b": {**QWEN3, "hidden": 4096, "layers": 36, "heads": 32, "mlp": 12_288, "tied": False},
}
DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Between the log-probs of a token, on average, that no fault has made."""


class Actor(ActorWorker):
    """A trainer that tells how full its device is."""

    def memory(self) -> dict[str, int]:
        """Return byte counts, as its device object has them."""
        self._device.synchronize()
        return dict(self._device.memory())


class Ledger(ColocationScheduler):
    """Turns that write down what each order has cost and given."""

    def __init__(self, workers: WorkerGroup, *, began: float) -> None:
        self._workers = workers
        self._phase: ColocationPhase = "start"
        super().__init__(self._noted("trainers", lambda state: workers.call("set_memory_state", state=state)))
        self.note("trainers", "started", time.perf_counter() - began)

    def join(self, engines: SetMemoryState, *others: Any) -> None:
        """Let the engines take part, and note what they hold from their start on."""
        self.note("servers", "started", 0.0)
        super().join(self._noted("servers", engines), *others)

    def enter(self, phase: ColocationPhase) -> None:
        """Enter a phase, whose name goes before each of its orders."""
        self._phase = phase
        super().enter(phase)

    def _noted(self, who: str, hold: SetMemoryState) -> SetMemoryState:
        def noted(what: MemoryState) -> None:
            started = time.perf_counter()
            hold(what)
            self.note(who, what, time.perf_counter() - started)

        return noted

    def note(self, who: str, what: str, seconds: float) -> None:
        """Print how full the device is."""
        memory = self._workers.call("memory")[0]
        used = (memory["total"] - memory["free"]) / GIB
        own = memory.get("reserved", memory["allocated"]) / GIB
        print(f"{self._phase:<9} {who:<9} {what:<11} {seconds:7.2f} s {used:9.2f} {own:9.2f}", flush=True)


class Colocated(NamedTuple):
    """Trainers and servers that share devices."""

    loaded: LoadedConfig
    workers: WorkerGroup
    colocation: ColocationScheduler
    engines: ColocatedEngines
    maker: SampleMaker


def load(arguments: argparse.Namespace, directory: Path) -> tuple[LoadedConfig, Plugins]:
    """Write a recipe, and read it for the backend."""
    keys: dict[str, Any] = {
        "placement__colocated": True,
        "placement__rollout_workers": 1,
        "placement__start_timeout_s": 900,
        "rollout__engine": arguments.engine,
        "rollout__prompts_per_step": arguments.prompts,
        "rollout__samples_per_prompt": 4,
        "rollout__max_new_tokens": arguments.tokens,
        "train__micro_batch_tokens": 4096,
        "run__timeout_s": 900,
    }
    if arguments.backend == "cpu":
        keys["rollout__max_batch_tokens"] = 65_536  # elsewhere a server takes what is free of the device
    if arguments.engine == "sglang":
        server = {"context_length": 2048, "max_running_requests": 64, "skip_server_warmup": True}
        keys |= {f"rollout__sglang.{name}": value for name, value in server.items()}
    plugins = load_plugins()
    backend = plugins.named("register_backends")[arguments.backend]
    plugins.prepare_worker(backend, "driver", "before_vendor_import")
    from anygauge_tests.recipe import tiny_recipe  # transformers, once it can be imported

    dtype = "float32" if arguments.backend == "cpu" else "bfloat16"
    path = tiny_recipe(directory, model={**SIZES[arguments.size], "dtype": dtype}, **keys)
    if arguments.engine == "fake":
        options = {"vocab_size": 18, "lengths": "uniform:2:4"}
        sys.path.insert(0, str(install_fake_engine(directory / "plugin", [""], options)))
        plugins = load_plugins()
    given = [f"rollout.sglang.{each}" for each in arguments.server]
    return load_config(path, given, backend=arguments.backend, plugins=plugins), plugins


def prompts_of(loaded: LoadedConfig) -> list[Prompt]:
    """Return prompts of eight tokens."""
    count = loaded.config.rollout.prompts_per_step
    return [
        Prompt(
            index=n, tokens=tuple(3 + (n * 5 + i) % 12 for i in range(8)), text="", label=None, metadata={}
        )
        for n in range(count)
    ]


def train(workers: WorkerGroup, loaded: LoadedConfig, groups: Sequence[Group]) -> float:
    """Take an optimizer step, and return how far the trainer's log-probs are from the server's."""
    rewarded = [
        replace(group, samples=tuple(each._replace(reward=n % 2.0) for n, each in enumerate(group.samples)))
        for group in groups
    ]
    aggregation = loaded.config.algorithm.loss_aggregation
    batches = plan_steps(rollout_batch(rewarded), 1, len(workers.workers), aggregation)
    metrics = workers.call("train", per_rank=[((own,), {}) for own in batches])[0][0]
    return float(metrics["current_rollout_logprob_abs_diff"])


def start(
    arguments: argparse.Namespace,
    directory: Path,
    stack: ExitStack,
    schedule: Callable[[WorkerGroup], ColocationScheduler],
) -> Colocated:
    """Start trainers and servers, which end with the stack."""
    loaded, plugins = load(arguments, directory)
    config = loaded.config
    workers = stack.enter_context(
        launch_workers(
            config,
            loaded.backend,
            plugins,
            worker_class="colocation:Actor",
            role="actor",
            run_directory=directory,
            options={"components": PARTS},
        )
    )
    colocation = schedule(workers)
    colocation.enter("start")
    rollouts = launch_engines(config, loaded.backend, plugins, PARTS, workers, directory)
    assert rollouts is not None
    stack.enter_context(rollouts)
    engines = stack.enter_context(
        open_engines(config, plugins, PARTS, workers, rollouts, directory, colocation)
    )
    assert isinstance(engines, ColocatedEngines)
    maker = open_maker(config, plugins, stack.enter_context(engines.generation_client()))
    return Colocated(loaded, workers, colocation, engines, maker)


def run(arguments: argparse.Namespace, directory: Path, stack: ExitStack) -> float:
    """Go through the turns, and return the largest difference between log-probs."""
    print(f"{'turn':<9} {'who':<9} {'holds':<11} {'':>7}   {'device':>9} {'trainer':>9}  GiB")
    colocated = start(arguments, directory, stack, partial(Ledger, began=time.perf_counter()))
    worst = max(one_round(version, colocated) for version in range(1, ROUNDS + 1))
    colocated.colocation.enter("save")
    colocated.colocation.enter("generate")
    return worst


def one_round(version: int, colocated: Colocated) -> float:
    """Generate, train and sync; return the difference between log-probs."""
    loaded, workers, ledger, engines, maker = colocated
    assert isinstance(ledger, Ledger)
    prompts, params = prompts_of(loaded), SamplingParams(max_new_tokens=loaded.config.rollout.max_new_tokens)
    seeds = [[1000 * version + 4 * n + i for i in range(4)] for n in range(len(prompts))]
    groups = timed(ledger, "servers", "generated", lambda: maker.sample(prompts, params, seeds))
    made_by = {each for group in groups for sample in group.samples for each in sample.weight_versions}
    assert made_by == {version - 1}, f"round {version} has tokens of versions {made_by}"
    ledger.enter("train")
    difference = timed(ledger, "trainers", "trained", lambda: train(workers, loaded, groups))
    timed(ledger, "both", "synced", lambda: engines.sync(version))
    print(f"          log-probs differ by {difference:.2e} on average")
    return difference


def timed(ledger: Ledger, who: str, what: str, work: Any) -> Any:
    """Do something, and note what is in memory afterwards."""
    started = time.perf_counter()
    found = work()
    ledger.note(who, what, time.perf_counter() - started)
    return found


def main() -> int:
    """Run it and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--engine", default="sglang", choices=["sglang", "fake"])
    parser.add_argument("--size", default="0.6b", choices=SIZES)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--server", action="append", default=[], help="an argument of SGLang's server: NAME=VALUE"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="anygauge-bench-") as directory, ExitStack() as stack:
        worst = run(arguments, Path(directory), stack)
    if arguments.engine == "fake":
        return 0  # its log-probs are of no model
    limit = DIFFERENCE["float32" if arguments.backend == "cpu" else "bfloat16"]
    print(f"largest difference {worst:.2e}; at most {limit:g} is usual")
    return int(not worst <= limit)


if __name__ == "__main__":
    sys.exit(main())
