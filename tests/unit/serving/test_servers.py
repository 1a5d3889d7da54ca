"""Servers that are lost start again while the driver's thread is busy, and get weights when it is not."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.config.schema import Lora, RolloutGroup
from anygauge.runtime.event_loop import EventLoop
from anygauge.serving.served_engines import ServedEngines
from anygauge.serving.server_sources import StartedServers
from anygauge.serving.server_workers import ServerWorker
from anygauge.serving.servers import RESTARTS, Servers
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.weight_sync.report import PeerOutcome, SyncReport
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.sglang import WeightApi
from anygauge_tests.fake_engine import FakeServer, Options

CONFIG = Config.model_validate(
    {
        "run": {"name": "x", "timeout_s": 60},
        "model": {"path": "model"},
        "data": {"train": ["t.jsonl"]},
        "rollout": {
            "engine": "fake",
            "client": {"probe_every_s": 0.05, "probe_timeout_s": 0.3, "pause_s": 0.01, "attempts": 20},
        },
        "placement": {"rollout_workers": 2},
        "weight_sync": {"transport": "tensor"},
    }
)
OPTIONS = Options(weight_version="0", token_s=0.01, slots=8, lengths="uniform:20:40")


class Workers:
    """Those of a group, in this process; one call at a time, as a group has it."""

    def __init__(self, servers: Sequence[Any]) -> None:
        self._pending = threading.Lock()
        self.workers = [
            ServerWorker(
                CONFIG,
                SimpleNamespace(  # type: ignore[arg-type]
                    rank=rank,
                    device=SimpleNamespace(type="cpu"),
                    backend=SimpleNamespace(visible_devices_env=None),
                    plugins=SimpleNamespace(
                        get=lambda *_, own=server: RolloutEngineSpec(name="fake", serve=lambda *_: own)
                    ),
                ),
            )
            for rank, server in enumerate(servers)
        ]

    def call(self, method: str, *, timeout_s: float | None = None, **given: Any) -> list[Any]:
        assert self._pending.acquire(blocking=False), "one call at a time"
        try:
            return [getattr(worker, method)(**given) for worker in self.workers]
        finally:
            self._pending.release()


class Trainers:
    """Keeps which servers were given which version."""

    def __init__(self) -> None:
        self.pushes: list[tuple[int, list[tuple[str, int]]]] = []
        self.refusing: str | None = None
        """Address of a server that takes nothing, so that none does in an update that needs it."""

    def call(self, method: str, *, version: int, peers: Sequence[Any], senders: Sequence[int]) -> list[Any]:
        assert (method, set(senders)) == ("push_weights", {0})
        self.pushes.append((version, [(peer.address, peer.incarnation) for peer in peers]))
        fails = self.refusing in [peer.address for peer in peers]
        said = {"version": None, "error": "refused"} if fails else {"version": version, "error": None}
        outcomes = tuple(PeerOutcome(address=peer.address, state="serving", **said) for peer in peers)
        figures = {"transport": "tensor", "bytes": 0, "wire_bytes": 0, "buckets": 0, "tensors": 0}
        return [SyncReport(version=version, peers=outcomes, unverified=("a", "b", "c", "d"), **figures)]


class Opened:
    """A run's engines, and what stands for its workers."""

    def __init__(self, fakes: Sequence[Any], loop: EventLoop, config: Config = CONFIG) -> None:
        self.fakes = fakes
        self.workers, self.trainers = Workers(fakes), Trainers()
        self.servers = Servers(config, StartedServers(config, self.workers), loop)  # type: ignore[arg-type]
        self.engines = ServedEngines(config, self.servers, self.trainers, loop)  # type: ignore[arg-type]
        self.loop = loop

    def starts(self) -> list[int]:
        return [worker._starts for worker in self.workers.workers]

    def ask(self, count: int = 8) -> Any:
        """Start to ask for responses, and return what is to have them."""

        async def one(number: int) -> Generation:
            params = SamplingParams(max_new_tokens=50)
            return await self.servers.pool.generate(GenerateRequest(str(number), (5, number), params, number))

        async def all_of_them() -> list[Generation]:
            return await asyncio.gather(*map(one, range(count)))

        return all_of_them()


@pytest.fixture
def opened() -> Iterator[Opened]:
    fakes = [FakeServer(OPTIONS) for _ in range(2)]
    with EventLoop() as loop:
        made = Opened(fakes, loop)
        yield made
        made.servers.close()
        made.workers.call("close")


def test_servers_get_their_first_weights_where_training_starts_from_an_adapter() -> None:
    """They load ``model.path``, and the trainers have the adapter too."""
    train = CONFIG.train.model_copy(update={"lora": Lora(path=Path("adapter"))})
    fakes = [FakeServer(OPTIONS) for _ in range(2)]
    with EventLoop() as loop:
        opened = Opened(fakes, loop, CONFIG.model_copy(update={"train": train}))
        opened.engines.sync(0)
        assert opened.trainers.pushes == [(0, [(server.address, 0) for server in fakes])]
        opened.servers.close()
        opened.workers.call("close")


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize("strike", [FakeServer.kill, lambda server: server.signal(signal.SIGSTOP)])
def test_a_lost_server_starts_while_the_driver_trains_and_gets_weights_when_it_waits(
    strike: Callable[[FakeServer], None], opened: Opened
) -> None:
    opened.engines.sync(1)
    answers = opened.loop.start(opened.ask())
    strike(opened.fakes[1])
    # This thread asks for nothing, as if training were under way.
    until(lambda: opened.starts() == [1, 2])
    assert len(answers.result(30)) == 8, "the other server answers"
    assert len(opened.trainers.pushes) == 1
    opened.engines.trained(2)
    until(lambda: bool(opened.workers.workers[1]._starting) and opened.workers.workers[1]._starting.done())
    opened.engines.wait(opened.ask(), "responses")
    fresh = (opened.servers.serving[1].address, 1)
    assert opened.trainers.pushes[1:] == [(2, [fresh])], "the weights that the trainers have by then"
    clients = [opened.servers.pool.client(f"engine {rank}") for rank in (0, 1)]
    assert [client.weight_version for client in clients] == [1, 2]
    assert opened.servers.lost() == {}
    opened.servers.distrust({0: "wrong weights"})
    opened.servers.mark([0, 1], "serving")
    assert opened.servers.lost() == {0: "wrong weights"}, "it stays lost"


def test_a_server_that_takes_no_weights_does_not_cost_the_others_theirs(
    opened: Opened, caplog: pytest.LogCaptureFixture
) -> None:
    addresses = [server.address for server in opened.fakes]
    opened.trainers.refusing = addresses[0]
    opened.engines.sync(1)
    assert [[address for address, _ in peers] for _, peers in opened.trainers.pushes] == [
        addresses,
        addresses[:1],
        addresses[1:],
    ]
    until(lambda: opened.starts() == [2, 1])
    assert set(opened.servers.lost()) <= {0}
    assert caplog.text.count("4 parameters of engines were not verified: a, b, c\n") == 1


def test_a_server_that_comes_back_during_an_update_gets_no_request_without_the_weights(
    opened: Opened,
) -> None:
    call = opened.trainers.call

    def call_late(method: str, **given: Any) -> list[Any]:
        sent = call(method, **given)
        if len(opened.trainers.pushes) == 1:
            opened.servers.distrust({1: "it is lost once it has the weights"})
            opened.servers.look()
            until(lambda: opened.starts() == [1, 2])
            until(lambda: not (opened.servers.look() or opened.servers.lost()))
        return sent

    opened.trainers.call = call_late  # type: ignore[method-assign]
    opened.engines.sync(1)
    states = [each.state for each in opened.servers._reports().values()]
    assert states == ["serving", "paused"]
    opened.engines.wait(opened.ask(), "responses")
    assert opened.trainers.pushes[1:] == [(1, [(opened.servers.serving[1].address, 1)])]


def test_a_sync_does_not_wait_for_a_server_that_starts(opened: Opened) -> None:
    release = threading.Event()
    start = opened.fakes[1].start

    def late(encoders: Sequence[str] = ()) -> str:
        assert release.wait(30)
        return start()

    opened.fakes[1].start = late  # type: ignore[method-assign]
    answers = opened.loop.start(opened.ask())
    opened.fakes[1].kill()
    answers.result(30)
    opened.engines.sync(1)
    assert [len(peers) for _, peers in opened.trainers.pushes] == [1]
    release.set()
    until(lambda: opened.starts() == [1, 2])
    opened.engines.sync(2)
    assert [[version for version, _ in opened.trainers.pushes], len(opened.trainers.pushes[1][1])] == [
        [1, 2],
        2,
    ]


class Stub:
    """A server that nobody reaches; each start after the first takes until it is closed, if it is slow."""

    def __init__(self, *, slow: bool = False) -> None:
        self.starts, self._slow = 0, slow
        self.closed = threading.Event()

    def start(self, encoders: Sequence[str] = ()) -> str:
        self.starts += 1
        if self._slow and self.starts > 1:
            self.closed.clear()
            assert self.closed.wait(30)
            raise RolloutError("it was ended while it started")
        return "http://127.0.0.1:9"

    def peer(self) -> Any:
        return SGLangPeer(address="http://127.0.0.1:9", api=WeightApi())

    def is_alive(self) -> bool:
        return True

    def facts(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        self.closed.set()


def test_a_server_that_is_lost_again_and_again_ends_the_run() -> None:
    with EventLoop() as loop:
        opened = Opened([Stub(), Stub()], loop)
        with pytest.raises(RolloutError, match=f"was lost again after {RESTARTS} restarts: it shows no sign"):
            opened.engines.wait(opened.ask(), "responses")
        opened.servers.close()
    assert max(stub.starts for stub in opened.fakes) == 1 + RESTARTS


def test_a_run_that_ends_does_not_wait_for_a_start() -> None:
    slow = Stub(slow=True)
    workers = Workers([slow])
    workers.call("serve", wave=0, encoders={})
    assert workers.call("look", lost={0: 0}) == [None]
    until(lambda: slow.starts == 2 and not slow.closed.is_set())
    workers.call("close")
    assert workers.workers[0]._starting is not None
    with pytest.raises(RolloutError, match="while it started"):
        workers.workers[0]._starting.result(0)


class Begins:
    """A server that only begins."""

    def __init__(self, begun: list[tuple[int, bool]], rank: int) -> None:
        self._begun, self._rank = begun, rank

    def begin(self, *, hold: bool) -> None:
        self._begun.append((self._rank, hold))


def begin_servers(config: Config, *, starts_early: Sequence[bool]) -> list[tuple[int, bool]]:
    """Make the workers of servers, and return which servers began, and whether they hold."""
    begun: list[tuple[int, bool]] = []
    for rank, early in enumerate(starts_early):
        server: Any = Begins(begun, rank)
        spec = RolloutEngineSpec(name="x", serve=lambda *_, own=server: own, starts_early=early)
        plugins = SimpleNamespace(get=lambda *_, own=spec: own)
        ServerWorker(config, SimpleNamespace(rank=rank, device=None, plugins=plugins))  # type: ignore[arg-type]
    return begun


@pytest.mark.parametrize("colocated", [False, True])
def test_servers_that_can_do_so_begin_before_they_are_asked_for(colocated: bool) -> None:
    placement = CONFIG.placement.model_copy(update={"rollout_workers": 2, "colocated": colocated})
    config = CONFIG.model_copy(update={"placement": placement})
    assert begin_servers(config, starts_early=[True, False]) == [(0, colocated)]
    groups = (RolloutGroup(kind="encoder"), RolloutGroup())
    later = config.model_copy(update={"rollout": config.rollout.model_copy(update={"groups": groups})})
    assert begin_servers(later, starts_early=[True, True]) == [(0, colocated)], (
        "1 needs the encoder's address"
    )
