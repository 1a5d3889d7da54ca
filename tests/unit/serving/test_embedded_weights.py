"""New weights of embedded engines: nothing is copied or lost on the way, and errors come through."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.config import Config
from anygauge.serving import engines
from anygauge.serving.engines import SeparateEngines, SharedEngines
from anygauge.serving.rollout_workers import RolloutWorker
from anygauge.serving.weight_inbox import packed
from anygauge.trainer.actors import ActorWorker
from anygauge.weight_sync.buckets import Buffers, cut
from anygauge_hooks.engines import RolloutEngineSpec, WeightStream
from anygauge_hooks.errors import DeadlineError, RolloutError, WeightMappingError
from anygauge_tests.http_requests import ask
from anygauge_tests.processes import until

CONFIG = Config.model_validate(
    {
        "run": {"name": "x"},
        "model": {"path": "model"},
        "data": {"train": ["t.jsonl"]},
        "weight_sync": {"bucket_bytes": 4096, "deadline_s": 20},
    }
)
WIDE = torch.arange(3000.0).reshape(2, 1500)
TENSORS = {
    **{f"w{i}": torch.full((7, i + 1), float(i)) for i in range(40)},
    "large": WIDE,
    "transposed": WIDE[:, :9].t(),
    "half": torch.tensor([1.5, 2.5, 3.5]).bfloat16(),
    "one": torch.tensor(7),
}


class Engine:
    """Keeps what it is given, and fails at a name."""

    def __init__(self, fail_at: str = "") -> None:
        self.taken: dict[str, Tensor] = {}
        self.version = 0
        self.fail_at = fail_at
        self.thread = -1

    def update_weights(self, stream: WeightStream, version: int) -> None:
        self.thread = threading.get_ident()
        self.taken = {}
        for name, tensor in stream:
            if name == self.fail_at:
                raise WeightMappingError(f"unknown {name}", hint="none")
            self.taken[name] = tensor
        self.version = version

    def close(self) -> None:
        pass


class Trainer:
    """Has weights, and may fail while it gathers them."""

    def __init__(self) -> None:
        self.gathered: list[str] = []
        self.fail_at = ""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.gathered.clear()
        for name, tensor in TENSORS.items():
            if name == self.fail_at:
                raise ZeroDivisionError("gathering failed")
            self.gathered.append(name)
            yield name, tensor


def context(rank: int, engine: Engine | None) -> Any:
    spec = RolloutEngineSpec(name="test", make=lambda config, context: engine)  # type: ignore[arg-type,return-value]
    return SimpleNamespace(
        rank=rank,
        address="127.0.0.1",
        device=SimpleNamespace(type="cpu", peak_memory=lambda reset=False: None, memory=dict),
        plugins=SimpleNamespace(get=lambda hook, name: spec),
    )


def training_worker(rank: int, engine: Engine | None) -> tuple[Any, Trainer]:
    """Return a worker without the parts that do not send weights."""
    worker, trainer = ActorWorker.__new__(ActorWorker), Trainer()
    super(ActorWorker, worker).__init__(context(rank, engine))
    worker.config, worker._context = CONFIG, context(rank, engine)
    worker._engine, worker._trainer, worker._pusher = engine, trainer, None  # type: ignore[assignment]
    return worker, trainer


class Group:
    """Workers in threads of this process; one call at a time."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers = workers
        self._threads = ThreadPoolExecutor(len(workers))

    def call_async(self, method: str, **given: Any) -> Any:
        futures = [self._threads.submit(getattr(worker, method), **given) for worker in self.workers]
        return SimpleNamespace(result=partial(self._results, futures))

    def _results(self, futures: Sequence[Future[Any]], timeout_s: float = 20) -> list[Any]:
        done, pending = wait(futures, timeout_s, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if pending:
            raise DeadlineError(f"{len(pending)} workers have not answered.")
        return [future.result() for future in futures]

    def call(self, method: str, **given: Any) -> list[Any]:
        results: list[Any] = self.call_async(method, **given).result()
        return results


class Opened:
    """Two training workers, and two engines in them or elsewhere."""

    def __init__(self, *, is_apart: bool, fail_at: str) -> None:
        self.engines = [Engine(), Engine(fail_at)]
        own = [None, None] if is_apart else self.engines
        self.actors, self.trainers = zip(*(training_worker(*each) for each in enumerate(own)), strict=True)
        self.rollouts = [
            RolloutWorker(CONFIG, context(rank, engine))
            for rank, engine in enumerate(self.engines)
            if is_apart
        ]
        make: Callable[..., SharedEngines] = SeparateEngines if is_apart else SharedEngines
        workers = Group(tuple(self.rollouts) or self.actors)
        self.run: SharedEngines = make(workers, Group(self.actors))


@contextmanager
def opened(*, is_apart: bool, fail_at: str = "") -> Iterator[Opened]:
    made = Opened(is_apart=is_apart, fail_at=fail_at)
    try:
        yield made
    finally:
        for rollout in made.rollouts:
            rollout._inbox._answer("/", b"")  # one that waits for weights ends
        for worker in (*made.rollouts, *made.actors):
            worker.close()


@pytest.mark.parametrize("is_apart", [False, True])
def test_every_engine_has_the_tensors_in_order_and_the_version(is_apart: bool) -> None:
    with opened(is_apart=is_apart) as run:
        for version in (3, 4):
            run.run.sync(version)
            for engine in run.engines:
                assert engine.version == version
                assert list(engine.taken) == list(TENSORS)
                for name, tensor in engine.taken.items():
                    assert torch.equal(tensor, TENSORS[name])
                    assert tensor.dtype == TENSORS[name].dtype
        assert all(trainer.gathered == list(TENSORS) for trainer in run.trainers), "it is a collective"


def test_an_engine_in_the_training_worker_gets_the_tensors_themselves_in_its_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Buffers, "take", lambda *_: pytest.fail("a bucket was filled"))
    worker, _ = training_worker(0, engine := Engine())
    report = worker.push_weights(1)
    assert all(engine.taken[name] is tensor for name, tensor in TENSORS.items())
    assert engine.thread == threading.get_ident()
    assert (report.tensors, report.buckets, report.failed) == (len(TENSORS), 0, ())
    assert report.bytes == sum(tensor.nbytes for tensor in TENSORS.values())


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("fail_at", ["w0", "one"])
def test_what_an_engine_raises_comes_out_whole_and_keeps_nobody_waiting(is_apart: bool, fail_at: str) -> None:
    with opened(is_apart=is_apart, fail_at=fail_at) as run:
        with pytest.raises(WeightMappingError, match=f"unknown {fail_at}"):
            run.run.sync(1)
        # the error comes out while the other worker goes on
        asyncio.run(until(lambda: all(trainer.gathered == list(TENSORS) for trainer in run.trainers)))
        asyncio.run(until(lambda: [engine.version for engine in run.engines] == [1, 0]))


def test_an_update_that_the_trainer_gives_up_ends_and_the_next_is_whole() -> None:
    with opened(is_apart=True) as run:
        run.trainers[0].fail_at = "large"
        taking = run.run._workers.call_async("take_weights", version=1)
        with pytest.raises(ZeroDivisionError):
            run.actors[0].push_weights(1, run.run._peers, [0, 0])  # type: ignore[attr-defined]
        taking.result()
        assert [engine.version for engine in run.engines] == [0, 0]
        run.trainers[0].fail_at = ""
        run.run.sync(2)
        assert [engine.version for engine in run.engines] == [2, 2]


def test_what_an_engine_raises_comes_out_though_the_trainer_gives_the_update_up_later() -> None:
    with opened(is_apart=True, fail_at="w0") as run:
        run.trainers[0].fail_at = "large"  # some buckets after w0
        taking = run.run._workers.call_async("take_weights", version=1)
        with pytest.raises(ZeroDivisionError):
            run.actors[0].push_weights(1, run.run._peers, [0, 0])  # type: ignore[attr-defined]
        with pytest.raises(WeightMappingError, match="unknown w0"):
            taking.result()


@contextmanager
def unreachable(worker: RolloutWorker) -> Iterator[None]:
    """Have a worker wait for weights that cannot get to it."""
    worker._inbox.close()
    try:
        yield
    finally:
        worker._inbox._answer("/", b"")


def test_an_engine_that_cannot_be_reached_is_named_though_it_is_stuck_and_the_other_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "GRACE_S", 0)
    with opened(is_apart=True) as run, unreachable(run.rollouts.pop()):
        with pytest.raises(RolloutError, match=r"(?s)got no weights: .* cannot be asked about bucket 0"):
            run.run.sync(1)
        assert run.engines[0].version == 1, "the other has them"


def test_what_an_engine_raises_comes_out_though_another_cannot_be_reached() -> None:
    with (
        opened(is_apart=True, fail_at="w0") as run,
        unreachable(run.rollouts.pop(0)),
        pytest.raises(WeightMappingError, match="unknown w0"),
    ):
        run.run.sync(1)


def test_a_sender_is_answered_once_the_engine_has_the_bucket() -> None:
    worker = RolloutWorker(CONFIG, context(0, Engine()))
    (bucket,) = cut([("a", WIDE), ("b", WIDE)], 1 << 20, Buffers(partial(torch.empty, dtype=torch.uint8)))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(worker._inbox._answer, "/weights", b"".join(packed(bucket)))
        stream = iter(worker._inbox.stream())
        assert [next(stream)[0], next(stream)[0], answer.done()] == ["a", "b", False]
        assert next(stream, None) is None
        assert answer.result(20) == {}
    worker.close()


def test_who_does_not_show_the_secret_sends_no_weights() -> None:
    worker = RolloutWorker(CONFIG, context(0, Engine()))
    peer: Any = worker.peer()
    assert ask(peer.address + "/weights", b'{"tensors": [], "last": true}\n').status == 403
    assert worker._inbox._bodies.empty()
    worker.close()


def test_a_run_that_does_not_train_sends_nothing() -> None:
    nobody: Any = SimpleNamespace(call=lambda method: [])
    SharedEngines(nobody, None).sync(1)
    SeparateEngines(nobody, None).sync(1)
