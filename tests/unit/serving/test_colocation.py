"""The order in which trainers and engines give memory up and take it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from anygauge.config.roles import run_components
from anygauge.config.schema import Config
from anygauge.serving.colocation import PHASE_OF_CALL, ColocationPhase, ColocationScheduler
from anygauge.serving.memory_fit import MemoryFit
from anygauge.trainer.actors import ActorWorker
from anygauge.trainer.run import open_colocation
from anygauge_hooks.serving import MemoryState

GIB = 1 << 30
AMOUNT = {"nothing": 0, "weights": 1, "everything": 2}


class Recorder:
    """Trainers and engines on one device, which write down what they are told and refuse what cannot be."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.held: dict[str, MemoryState] = {"trainers": "everything", "engines": "nothing"}
        self.has_weights = True
        self.scheduler = ColocationScheduler(lambda state: self.hold("trainers", state))

    def hold(self, who: str, state: MemoryState) -> None:
        other = self.held["engines" if who == "trainers" else "trainers"]
        grows = AMOUNT[state] > AMOUNT[self.held[who]]
        assert not (grows and state == "everything" and other == "everything"), "there is no room"
        if who == "engines" and state == "nothing":
            self.has_weights = False
        assert self.has_weights or (who, state) != ("engines", "everything"), "garbage would be generated"
        self.held[who] = state
        self.said.append(f"{who}: {state}")

    def push(self) -> None:
        assert self.held == {"trainers": "weights", "engines": "weights"}
        self.has_weights = True
        self.said.append("push")

    def start(self) -> None:
        """Start the servers, once there is room."""
        self.scheduler.enter("start")
        assert self.held["trainers"] == "nothing"
        self.held["engines"] = "everything"
        self.scheduler.join(lambda state: self.hold("engines", state), self.push)

    def sync(self) -> None:
        self.scheduler.enter("sync")
        self.push()
        self.scheduler.synced()

    def entered(self, *scheduler: ColocationPhase) -> list[str]:
        self.said.clear()
        for phase in scheduler:
            self.scheduler.enter(phase)
        return list(self.said)


@pytest.fixture
def recorder() -> Recorder:
    found = Recorder()
    found.start()
    return found


def test_a_step_of_training_and_the_sync_after_it(recorder: Recorder) -> None:
    recorder.said.clear()
    recorder.scheduler.enter("generate")
    assert recorder.said == [], "the servers start awake, with the weights of the model's directory"
    recorder.scheduler.enter("train")
    recorder.sync()
    recorder.scheduler.enter("generate")
    assert recorder.said == [
        "engines: nothing",
        "trainers: everything",
        "trainers: weights",
        "engines: weights",
        "push",
        "trainers: nothing",
        "engines: everything",
    ]


def test_a_turn_that_goes_on_moves_nothing(recorder: Recorder) -> None:
    assert recorder.entered("train", "train") == ["engines: nothing", "trainers: everything"]


def test_a_checkpoint_costs_the_engines_their_caches_alone(recorder: Recorder) -> None:
    recorder.scheduler.enter("train")
    recorder.sync()
    assert recorder.entered("save", "generate") == [
        "trainers: everything",
        "trainers: nothing",
        "engines: everything",
    ]
    assert recorder.entered("save") == ["engines: weights", "trainers: everything"]


def test_engines_that_lost_their_weights_are_sent_them_before_they_generate(recorder: Recorder) -> None:
    """As after a step that trained the critic alone, which no sync follows."""
    told = ["trainers: weights", "engines: weights", "push", "trainers: nothing", "engines: everything"]
    recorder.scheduler.enter("train")
    assert recorder.entered("save") == [], "there is nothing of the engines to keep"
    assert recorder.entered("generate") == told


def test_a_server_that_was_started_again_waits_for_the_weights(recorder: Recorder) -> None:
    recorder.said.clear()
    recorder.scheduler.enter("start")
    assert recorder.said == []
    recorder.scheduler.outdated()
    assert recorder.entered("generate") == [
        "engines: weights",
        "trainers: weights",
        "push",
        "trainers: nothing",
        "engines: everything",
    ]


@pytest.mark.parametrize(
    "scheduler",
    [("train", "generate", "save", "train"), ("save", "sync", "train", "save"), ("sync", "start")],
)
def test_any_order_has_room_and_no_garbage(recorder: Recorder, scheduler: Sequence[ColocationPhase]) -> None:
    recorder.entered(*scheduler, "generate", *scheduler, "generate")
    assert recorder.held == {"trainers": "nothing", "engines": "everything"}


def test_a_failed_order_leaves_what_is_known_true(recorder: Recorder) -> None:
    recorder.scheduler.enter("train")
    hold, recorder.hold = recorder.hold, None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        recorder.scheduler.enter("sync")
    recorder.hold = hold  # type: ignore[method-assign]
    recorder.sync()
    assert recorder.held == {"trainers": "weights", "engines": "weights"}


def test_without_shared_devices_nothing_moves() -> None:
    scheduler = ColocationScheduler()
    for phase in ("generate", "train", "sync", "save", "start"):
        scheduler.enter(phase)
    assert not scheduler.shared
    assert scheduler.seconds() == {}


def test_a_call_of_the_trainers_enters_its_phase_before_they_are_asked(recorder: Recorder) -> None:
    recorder.start()
    for method in ("report", "train", "checkpoint_written", "save_checkpoint"):
        recorder.said.append(method)
        recorder.scheduler.before_call(method)
    assert recorder.said == [
        "trainers: nothing",
        "report",
        "train",
        "engines: nothing",
        "trainers: everything",
        "checkpoint_written",
        "save_checkpoint",
    ]


def test_every_call_with_a_phase_is_one_of_the_workers_that_train() -> None:
    assert [method for method in PHASE_OF_CALL if not callable(getattr(ActorWorker, method, None))] == []


class Devices:
    """Two devices of 100 GiB, on which trainers and engines have what they are given."""

    def __init__(self, trainers: int, engines: int, *, allocator: bool = True) -> None:
        self.needs = {"trainers": trainers, "engines": engines}
        self.used = {"trainers": trainers, "engines": 0}
        self.allocator = {"reserved": 0} if allocator else {}
        self.lines: list[str] = []
        self.whole = True
        self.scheduler = ColocationScheduler(
            lambda state: self.hold("trainers", state), MemoryFit(self.memory, GIB), self.lines.append
        )
        self.moves: list[str] = []

    def memory(self) -> list[dict[str, int]]:
        free = 95 * GIB - sum(self.used.values()) * GIB
        return [{**self.allocator, "free": free + each * GIB, "total": 100 * GIB} for each in (0, 3)]

    def hold(self, who: str, state: MemoryState) -> None:
        amount = {"nothing": 0, "weights": 1, "everything": self.needs[who]}[state]
        self.used[who] = amount
        self.moves.append(f"{who}: {state}")

    def start(self) -> None:
        self.scheduler.enter("start")
        self.used["engines"] = self.needs["engines"]
        self.scheduler.join(lambda state: self.hold("engines", state), lambda: None, lambda: self.whole)

    def step(self, *, grown: int = 0, syncs: bool = True) -> list[str]:
        """Take one step, in which the trainers grow, and return which states were set."""
        self.moves.clear()
        self.scheduler.enter("generate")
        self.scheduler.enter("train")
        self.needs["trainers"] += grown
        self.used["trainers"] += grown
        if syncs:
            self.scheduler.enter("sync")
            self.scheduler.synced()
        return list(self.moves)


STEP: Sequence[ColocationPhase] = ("generate", "train", "sync")
IN_TURNS = [
    *("trainers: nothing", "engines: everything"),
    *("engines: nothing", "trainers: everything"),
    *("trainers: weights", "engines: weights"),
]


def test_both_stay_awake_where_the_first_step_has_shown_that_both_fit() -> None:
    devices = Devices(trainers=20, engines=50)
    devices.start()
    assert devices.step(grown=4) == IN_TURNS[2:], (
        "what the trainers need is known at the end of the first step"
    )
    assert devices.step() == ["engines: everything", "trainers: everything"]
    assert devices.step() == []
    (line,) = devices.lines
    assert line == "trainers and engines both stay awake: 10.0 GiB more than they need"
    devices.scheduler.enter("save")
    devices.scheduler.outdated()
    devices.scheduler.enter("generate")
    assert devices.moves == []


@pytest.mark.parametrize(
    ("devices", "line"),
    [
        (Devices(20, 65), "trainers and engines sleep in turns: 1.0 GiB too little for both at once"),
        (Devices(2, 2, allocator=False), None),
    ],
    ids=["too little", "the host"],
)
def test_both_sleep_in_turns_where_they_do_not_fit_or_nobody_knows(
    devices: Devices, line: str | None
) -> None:
    devices.start()
    assert devices.step() == IN_TURNS[2:]
    for _ in range(2):
        assert devices.step() == IN_TURNS
    assert devices.lines == ([line] if line else [])


def test_a_step_that_trains_the_critic_alone_decides_nothing() -> None:
    devices = Devices(trainers=20, engines=50)
    devices.start()
    for _ in range(2):
        devices.step(syncs=False)
    assert devices.lines == []
    devices.step(grown=30)
    devices.step()
    assert devices.lines == ["trainers and engines sleep in turns: 16.0 GiB too little for both at once"]


def test_a_step_with_a_lost_engine_decides_nothing() -> None:
    devices = Devices(trainers=20, engines=65)
    devices.start()
    devices.whole, devices.used["engines"] = False, 30
    devices.step()
    devices.whole = True
    devices.step()
    assert devices.lines == [], "the engines are measured once none is lost"
    devices.step()
    assert devices.lines == ["trainers and engines sleep in turns: 1.0 GiB too little for both at once"]


def test_they_sleep_in_turns_again_once_the_trainers_have_grown() -> None:
    devices = Devices(trainers=20, engines=50)
    devices.start()
    devices.step()
    devices.step()
    assert devices.step(grown=21) == [], "4 GiB are left"
    assert devices.step(grown=1) == ["engines: weights", "trainers: weights"]
    assert devices.step() == IN_TURNS
    assert devices.lines[1:] == [
        "little device memory is left: trainers and engines sleep in turns from now on"
    ]


class Workers:
    """A group on one device, which keeps which calls it gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, method: str, **_: object) -> list[dict[str, int]]:
        self.calls.append(method)
        return [{"reserved": 0, "free": 50 * GIB, "total": 100 * GIB}]

    def before_calls(self, tell: object) -> None: ...


@pytest.mark.parametrize(
    ("offload", "bucket_gib", "line"),
    [
        ("auto", 1, "trainers and engines both stay awake: 38.0 GiB more than they need"),
        ("auto", 30, "trainers and engines sleep in turns: 20.0 GiB too little for both at once"),
        ("always", 1, None),
    ],
)
def test_the_config_decides_whether_both_may_stay_awake(
    offload: str, bucket_gib: int, line: str | None
) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "model"},
            "data": {"train": ["t.jsonl"]},
            "placement": {"colocated": True, "rollout_workers": 1, "offload": offload},
            "weight_sync": {"bucket_bytes": bucket_gib * GIB},
        }
    )
    workers: Any = Workers()
    lines: list[str] = []
    colocation = open_colocation(config, run_components(config), workers, lines.append)
    colocation.join(lambda _: None, lambda: None)
    for phase in STEP:
        colocation.enter(phase)
    colocation.synced()
    colocation.enter("generate")
    assert lines == ([line] if line else [])
    assert ("device_memory" in workers.calls) == bool(line)
