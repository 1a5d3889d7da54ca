"""One half of a run alone, and a run that is done again from its dumps, to the bit.

The worker is an object of this process, so that a run takes no start; ``test_deterministic.py`` replays the
batches of two processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anygauge.config import Config
from anygauge.config.load import load_config
from anygauge.device import peak_memory_by_phase
from anygauge.distributed.process_groups import destroy_process_group, init_process_group
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import Plugins, load_plugins
from anygauge.run_directory import dumps
from anygauge.runtime.rpc import WorkerId, decode, encode
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge.trainer import start as start_module
from anygauge.trainer.actors import ActorWorker
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import DataError, OutOfMemoryError
from anygauge_hooks.types import BackendSpec, NamedFunction, RunInfo
from anygauge_tests.observer import Tracking
from anygauge_tests.recipe import tiny_recipe

STEPS = 2


class Observer(Tracking):
    """Keeps every metric and what happened."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.events: list[str] = []

    @hookimpl
    def register_policy_losses(self) -> list[NamedFunction]:
        return [NamedFunction(name="hungry", fn=lambda *inputs, **options: torch.empty(1 << 50))]

    @hookimpl
    def after_rollout(self, run: RunInfo) -> None:
        self.events.append("after_rollout")

    @hookimpl
    def after_weight_sync(self, run: RunInfo) -> None:
        self.events.append("after_weight_sync")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.metrics.append({"step": step, **metrics})

    def of(self, *groups: str) -> list[dict[str, float]]:
        """Return the metrics of some groups, of each step that has any."""
        wanted = tuple(f"{group}/" for group in groups)
        rows = [
            {name: value for name, value in row.items() if name.startswith(wanted)} for row in self.metrics
        ]
        return [row for row in rows if row]


class Here:
    """Stands for a group of one worker: the object itself, with arguments and results that are pickled."""

    cluster = ""

    def __init__(self, config: Config, backend: BackendSpec, plugins: Plugins, **launch: Any) -> None:
        device = plugins.make_device(backend, 0)
        context = WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
        self.worker = ActorWorker(config, context, **launch["options"])
        self.workers = [WorkerId(role=launch["role"], rank=0)]

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.close()

    def call(self, method: str, *, per_rank: Sequence[Any] | None = None, **same_for_all: Any) -> list[Any]:
        [(args, kwargs)] = decode(encode(per_rank or [((), {})]))
        return [decode(encode(getattr(self.worker, method)(*args, **kwargs, **same_for_all)))]

    def call_async(self, method: str, **arguments: Any) -> Here:
        self.pending = self.call(method, **arguments)
        return self

    def result(self) -> list[Any]:
        return self.pending

    def begin(self) -> None:
        pass

    def watched(self, watch: object) -> AbstractContextManager[None]:
        return nullcontext()

    def ready(self) -> None:
        pass


Finished = tuple[Path, Observer]
Train = Callable[..., Finished]


@pytest.fixture(scope="module", autouse=True)
def worker_here() -> Iterator[None]:
    """Let this process be the worker of every run."""
    plugins = load_plugins()
    backend = plugins.get("register_backends", "cpu")
    prepare_megatron(plugins, backend)
    init_process_group(
        plugins, backend, dist.HashStore(), rank=0, world_size=1, timeout_s=60.0, single_host=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_module, "launch_workers", Here)
        yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    destroy_process_group()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains under a name, with some keys set otherwise."""
    root = tmp_path_factory.mktemp("debug")
    config = tiny_recipe(
        root,
        model={"hidden": 16, "layers": 1, "heads": 2, "head_dim": 8, "mlp": 16},
        run__steps=STEPS,
        run__trackers=["memory"],
        run__report=False,
        reward__function="even",
        algorithm__kl_coef=0.01,
        train__lr=1e-2,
        train__optimizer_steps=2,
        train__micro_batch_tokens=32,
        eval__data=[root / "data.jsonl"],
        eval__interval=2,
        eval__max_prompts=4,
        save__every="none",
        save__hf_at_end=False,
    )

    def start(name: str, **keys: Any) -> Finished:
        plugins, observer = load_plugins(), Observer()
        plugins.register(observer, "observer")
        given = [("run.name", name), *((key.replace("__", "."), value) for key, value in keys.items())]
        loaded = load_config(config, given, backend="cpu", plugins=plugins)
        return Path(train(loaded, plugins).directory), observer

    return start


@pytest.fixture(scope="module")
def original(run: Train) -> Finished:
    """Return a run that wrote all dumps, and a checkpoint after each step."""
    return run("original", debug__dump_rollouts=True, debug__dump_batches=True, save__every=1)


def test_a_run_dumps_every_step(original: Finished) -> None:
    directory, observer = original
    expected = {dumps.rollout_path(directory / "dumps", step) for step in (1, 2)}
    expected |= {dumps.batch_path(directory / "dumps", step, 0) for step in (1, 2)}
    assert set((directory / "dumps").iterdir()) == expected
    groups = dumps.read_groups(dumps.rollout_path(directory / "dumps", 1))
    rewards = [sample.reward for group in groups for sample in group.samples]
    assert len(set(rewards)) > 2
    assert sum(rewards) / len(rewards) == pytest.approx(observer.of("rollout")[0]["rollout/reward"])


def test_the_log_probs_of_every_pass_are_in_a_batch(original: Finished) -> None:
    path = dumps.batch_path(original[0] / "dumps", 1, 0)
    passes = dumps.read_log_probs(path)
    assert passes.keys() == {"old", "reference", "current"}
    batch = dumps.read_batch(path, dp_size=1)
    first = batch.steps[0]
    old, current = (torch.cat(passes[name][:first]) for name in ("old", "current"))
    assert torch.equal(old, current)  # before the first optimizer step
    assert not torch.equal(torch.cat(passes["old"][first:]), torch.cat(passes["current"][first:]))
    assert torch.equal(torch.cat(passes["old"]), torch.cat(passes["reference"]))
    assert torch.allclose(torch.cat(passes["old"]), batch.rollout_log_probs, atol=1e-4)


def without_ages(metrics: Mapping[str, float]) -> dict[str, float]:
    """Leave out counts of the producer, and what compares the versions of tokens with the run's own."""
    counts = ("filtered_ratio", "unfinished_groups", "dropped_prompts", "continued_tokens", "failed_rollouts")
    left_out = tuple(f"rollout/{name}" for name in ("lag/", "mixed_ratio", *counts))
    return {name: value for name, value in metrics.items() if not name.startswith(left_out)}


def test_replayed_rollouts_give_the_same_bits(run: Train, original: Finished) -> None:
    directory, observer = run(
        "rollouts", debug__mode="train_only", debug__replay_rollouts=str(original[0] / "dumps")
    )
    assert observer.of("train") == original[1].of("train")
    assert observer.of("rollout") == [without_ages(step) for step in original[1].of("rollout")]
    assert not observer.of("eval")
    assert "after_weight_sync" not in observer.events
    assert not (directory / "dumps").exists()


def test_replayed_batches_give_the_same_bits(run: Train, original: Finished) -> None:
    directory, observer = run(
        "batches",
        debug__mode="train_only",
        debug__replay_batches=str(original[0] / "dumps"),
        debug__dump_batches=True,
    )
    assert observer.of("train") == original[1].of("train")
    assert not observer.of("rollout", "eval")
    for path in sorted((directory / "dumps").iterdir()):
        assert path.read_bytes() == (original[0] / "dumps" / path.name).read_bytes()


@pytest.mark.parametrize("kind", ["rollouts", "batches"])
def test_a_replay_can_start_at_a_checkpoint(run: Train, original: Finished, kind: str) -> None:
    directory = original[0]
    copy = shutil.copytree(directory, directory.with_name(f"from-step-1-{kind}"))
    shutil.rmtree(copy / "checkpoints/step-00000002")
    replay = {f"debug__replay_{kind}": str(directory / "dumps")}
    nothing = {"debug__dump_rollouts": False, "debug__dump_batches": False, "save__every": "none"}
    _, observer = run(copy.name, run__resume=True, debug__mode="train_only", **replay, **nothing)
    assert observer.of("train") == original[1].of("train")[1:]


@pytest.mark.parametrize("kind", ["rollouts", "batches"])
def test_a_replay_on_another_model_is_refused(
    run: Train, original: Finished, tmp_path: Path, kind: str
) -> None:
    tiny_qwen3(tmp_path, tokenizer=tiny_tokenizer(tmp_path, texts=["4+5=9"]), hidden=16, layers=1, heads=2)
    replay = {f"debug__replay_{kind}": str(original[0] / "dumps")}
    with pytest.raises(DataError, match="was written by a run of another model: vocab_size"):
        run(f"other-{kind}", model__path=str(tmp_path), debug__mode="train_only", **replay)


def test_replayed_rollouts_with_the_engines_alive(run: Train, original: Finished, tmp_path: Path) -> None:
    first = dumps.rollout_path(tmp_path, 1)
    first.write_bytes(dumps.rollout_path(original[0] / "dumps", 1).read_bytes())
    with pytest.raises(DataError, match=r"rollout-00000002\S+ does not exist"):
        run("alive", debug__replay_rollouts=str(tmp_path))


def test_rollouts_alone_train_nothing(run: Train, original: Finished) -> None:
    directory, observer = run("half", debug__mode="rollout_only", save__hf_at_end=True, save__every=1)
    assert observer.of("rollout")[0] == original[1].of("rollout")[0]  # the same weights until the first step
    assert observer.of("eval")[0] == original[1].of("eval")[0] == observer.of("eval")[1]
    assert not observer.of("train")
    assert observer.events == ["after_rollout"] * STEPS
    assert not (directory / "hf").exists()
    assert not (directory / "checkpoints").exists()


def test_too_little_memory_is_told_with_its_phase(run: Train) -> None:
    with pytest.raises(OutOfMemoryError, match="phase forward_backward") as caught:
        run("hungry", algorithm__policy_loss="hungry")
    assert {"generate", "log_probs", "forward_backward"} <= peak_memory_by_phase().keys()
    assert "you tried to allocate" in str(caught.value)


def test_the_driver_log_tells_of_the_run(original: Finished) -> None:
    lines = (original[0] / "logs/driver.log").read_text().splitlines()
    assert "backend cpu" in lines[0]
    assert sum(" step " in line for line in lines) >= STEPS
    assert "done after" in lines[-1]
