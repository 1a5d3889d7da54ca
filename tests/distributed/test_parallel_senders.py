"""Each pipeline stage and expert group sends its own weights: all or nothing, gathered on no other rank."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from anygauge.config import Config
from anygauge.config.schema import WeightSync
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.trainer.actors import ActorWorker
from anygauge.weight_sync.checksum import checksum
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.sglang import WeightApi
from anygauge_tests.fake_engine import FakeServer, Options
from anygauge_tests.http_requests import ask

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

LAYERS = 4


class Gathered(TorchDispatchMode):
    """Counts bytes of weights that this thread's collectives exchange. Outcomes of steps are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d.") and not name.startswith("c10d.send"):
            tensors = {
                each.data_ptr(): each
                for each in tree_flatten((args, kwargs))[0]
                if isinstance(each, Tensor) and each.is_floating_point()
            }
            self.bytes += sum(each.nbytes for each in tensors.values())
        return func(*args, **(kwargs or {}))


class Update(NamedTuple):
    """One update of a case."""

    servers: Sequence[int] = (0, 1)
    fails: int | None = None
    """Training rank whose second bucket fails with an error that is none of the project."""
    loses: int | None = None
    """Training rank that loses the first server at its last bucket, without an error of the transport."""
    order: Sequence[int] = ()
    """Order of the senders, if it is not that of the engine."""
    refuses: Sequence[tuple[str, int]] = ()
    """Requests that the first server refuses: the event, and which of it; 0 is the last bucket."""


class Came(NamedTuple):
    """How an update came out on a rank."""

    report: Any
    states: Sequence[tuple[bool, str]]
    """On rank 0, whether each server is paused, and its version."""


def push(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Send the weights several times, and return how each update came out on this rank."""
    name = case.get("transport", "distributed")
    sync = WeightSync(
        transport=name,
        bucket_bytes=1 << 14,
        verify="always",
        deadline_s=20,
        senders=case.get("senders", "stages"),
    )
    actor = ActorWorker(config.model_copy(update={"weight_sync": sync}), context)
    engine: Any = actor.trainer
    sizes: dict[str, int] = {}
    by_sender = engine.weights_by_sender

    def noted(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            sizes[name] = tensor.nbytes
            yield name, tensor

    orders = [Update(*update).order for update in case["updates"]]

    def ordered() -> dict[int, Iterator[tuple[str, Tensor]]]:
        parts = by_sender()
        return {rank: noted(parts[rank]) for rank in orders.pop(0) or parts}

    engine.weights_by_sender = ordered
    with Gathered() as whole:
        weights = {name: (checksum(tensor), tensor.nbytes) for name, tensor in engine.weights()}
    outcomes: list[Came] = []
    buckets = 0
    with Gathered() as gathered:
        for version, update in enumerate(case["updates"], start=1):
            came = push_once(actor, context.rank, version, Update(*update), case["servers"], buckets)
            outcomes.append(came)
            buckets = buckets or getattr(came.report, "buckets", 0)
    actor.close()
    return {
        "weights": {name: value for name, (value, _) in weights.items()},
        "bytes": sum(size for _, size in weights.values()),
        "gathered": gathered.bytes / len(outcomes),
        "whole": whole.bytes,
        "names": list(sizes),
        "outcomes": [tuple(came) for came in outcomes],
        "stored": list(engine.policy.tensors),
        "sent": sum(sizes.values()),
    }


def push_once(
    actor: ActorWorker,
    rank: int,
    version: int,
    update: Update,
    servers: Sequence[tuple[str, int]],
    buckets: int,
) -> Came:
    api = WeightApi(checksums="sha256")
    every = [SGLangPeer(address=address, tensor_parallel=size, api=api) for address, size in servers]
    peers = [every[number] for number in update.servers]
    transport: Any = actor._pusher_to(peers)._transport
    send = type(transport).send.__get__(transport)

    def failing(bucket: Any, running: Any) -> None:
        if bucket.index == 1:
            raise ArithmeticError("an error of a transport")
        send(bucket, running)

    def losing(bucket: Any, running: Any) -> None:
        def lose(peer: Any) -> None:
            if peer == peers[0]:
                raise RolloutError("lost")

        send(bucket, running)
        if bucket.last:
            running.each(lose, loads=True)

    transport.send = failing if update.fails == rank else losing if update.loses == rank else send
    for event, count in update.refuses if rank == 0 else ():
        fault = {"kind": "refuse", "event": event, "count": count or buckets, "argument": 0.0}
        ask(f"{peers[0].address}/fake/fault", json.dumps(fault).encode())
    report: Any = None
    try:
        report = actor.push_weights(version, peers, [0] * len(peers))
    except ArithmeticError as error:
        report = str(error)
    states = [] if rank else [server_state(peer.address) for peer in every]
    return Came(report, states)


def server_state(address: str) -> tuple[bool, str]:
    state, info = ask(f"{address}/fake/state").json(), ask(f"{address}/model_info").json()
    return state["paused"], info["weight_version"]


class Case(NamedTuple):
    world: int
    parallel: dict[str, int]
    senders: list[int]


CASES = {
    "ep2-pp2": Case(4, {"expert": 2, "pipeline": 2}, [0, 1, 2, 3]),
    "ep2-dp2": Case(4, {"expert": 2}, [0, 1]),
    "tp2-ep2-pp2": Case(4, {"tensor": 2, "expert": 2, "pipeline": 2}, [0, 1, 2, 3]),
}


@pytest.fixture(scope="module")
def model(make_model: Any) -> Path:
    """Return a model with experts, whose output layer is the embedding: the last stage has a copy of it."""
    directory: Path = make_model("qwen3_moe", num_hidden_layers=LAYERS, tie_word_embeddings=True)
    return directory


@pytest.fixture(scope="module")
def servers() -> Iterator[list[FakeServer]]:
    with FakeServer() as first, FakeServer(Options(tp_size=2)) as second:
        yield [first, second]


def run(crew: Any, model: Path, case: Case, updates: Sequence[Update], servers: Any, **more: Any) -> Any:
    return crew.run(
        world=case.world,
        action=f"{Path(__file__)}:push",
        model=str(model),
        parallel=case.parallel,
        updates=[tuple(each) for each in updates],
        servers=[(each.address, each.options.tp_size) for each in servers],
        **more,
    )


@pytest.mark.parametrize("name", CASES)
def test_each_rank_sends_what_it_holds_and_gathers_no_other_layer_or_expert(
    crew: Any, model: Path, servers: list[FakeServer], name: str
) -> None:
    case = CASES[name]
    before = servers[0].state()["events"]
    results = run(crew, model, case, [Update(), Update()], servers)
    events = servers[0].state()["events"]
    assert [events[each] - before.get(each, 0) for each in ("pause", "begin", "end", "continue")] == [2] * 4
    first = results[0]
    for came in map(Came._make, first["outcomes"]):
        assert not came.report.failed, came.report
        assert came.report.checksums == first["weights"]
        assert (came.report.tensors, came.report.senders) == (len(first["weights"]), len(case.senders))
    assert came.states == [(False, "2")] * 2
    sent = [name for result in results for name in result["names"]]
    assert sorted(sent) == sorted(first["weights"]), "each tensor by one rank"
    assert [rank for rank, result in enumerate(results) if result["names"]] == case.senders
    for result in results:
        assert set(map(part_of, result["names"])) <= set(map(part_of, result["stored"]))
        assert result["whole"] >= result["bytes"], "the same count sees what a whole gathering moves"
        assert result["gathered"] <= (result["sent"] / 2 if "tensor" in case.parallel else 0)


def part_of(name: str) -> tuple[str, str]:
    """Return the layer and the expert of a tensor, by its canonical name or its name in a checkpoint."""
    layer = re.search(r"layers\.(\d+)\.", name)
    expert = re.search(r"experts\.(?:\w+\.weight)?(\d+)", name)
    return layer[1] if layer else "", expert[1] if expert else ""


def test_an_update_is_all_or_nothing_whoever_fails(crew: Any, model: Path, servers: list[FakeServer]) -> None:
    updates = [
        Update(),
        Update(refuses=[("update", 0)]),  # of the last sender
        Update(),
        Update(fails=2, order=[1, 2, 0, 3]),  # the first rank has sent nothing, but another has
        Update(),
        Update(refuses=[("begin", 1), ("begin", 2)]),  # it is asked again
        Update(servers=(1,)),
        Update(loses=3),
    ]
    results = run(crew, model, CASES["tp2-ep2-pp2"], updates, servers)
    whole, refused, repaired, failed, again, unopened, alone, lost = map(Came._make, results[0]["outcomes"])
    for came, version in ((whole, "1"), (repaired, "3"), (again, "5")):
        assert not came.report.failed, came.report
        assert came.states == [(False, version)] * 2
    for came, before in ((refused, "1"), (failed, "3")):
        assert [(peer.state, peer.version) for peer in came.report.failed] == [("unusable", None)] * 2
        assert came.states == [(True, before)] * 2, "mixed weights generate nothing, and have no label"
    for peer in refused.report.failed:
        assert f"{peer.address}/update_weights_from_distributed refused bucket" in peer.error
    assert "This update was to be refused" in refused.report.failed[0].error
    assert "Training rank 2 failed: ArithmeticError: an error of a transport" in failed.report.failed[0].error
    assert [result["outcomes"][3][0] for result in results[1:]] == [None, "an error of a transport", None]
    assert [(peer.state, peer.version) for peer in unopened.report.failed] == [("serving", 5)] * 2
    assert unopened.states == [(False, "5")] * 2
    assert not alone.report.failed, alone.report
    assert alone.states == [(False, "5"), (False, "7")]
    assert [(peer.state, peer.version) for peer in lost.report.peers] == [("unusable", None), ("serving", 8)]
    assert lost.report.failed[0].error.startswith("lost")


@pytest.mark.parametrize("case", [{"transport": "tensor"}, {"senders": "one"}], ids=["transport", "key"])
def test_one_sender_gets_all_weights_on_the_first_rank(
    crew: Any, model: Path, servers: list[FakeServer], case: dict[str, str]
) -> None:
    results = run(crew, model, CASES["ep2-pp2"], [Update()], servers, **case)
    came = Came._make(results[0]["outcomes"][0])
    assert not came.report.failed, came.report
    assert (came.report.senders, came.report.checksums) == (1, results[0]["weights"])
    assert [result["outcomes"][0][0] for result in results[1:]] == [None] * 3
    assert [result["names"] for result in results] == [[]] * 4, "nobody asks for parts"
