"""The order in which trainers and engines give memory up and take it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from anygauge.trainer.turns import Turn, Turns
from anygauge_hooks.engines import Residency

AMOUNT = {"nothing": 0, "weights": 1, "everything": 2}


class Recorder:
    """Trainers and engines on one device, which write down what they are told and refuse what cannot be."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.held: dict[str, Residency] = {"trainers": "everything", "engines": "nothing"}
        self.has_weights = True
        self.turns = Turns(lambda what: self.hold("trainers", what))

    def hold(self, who: str, what: Residency) -> None:
        other = self.held["engines" if who == "trainers" else "trainers"]
        grows = AMOUNT[what] > AMOUNT[self.held[who]]
        assert not (grows and what == "everything" and other == "everything"), "there is no room"
        if who == "engines" and what == "nothing":
            self.has_weights = False
        assert self.has_weights or (who, what) != ("engines", "everything"), "garbage would be generated"
        self.held[who] = what
        self.said.append(f"{who}: {what}")

    def push(self) -> None:
        assert self.held == {"trainers": "weights", "engines": "weights"}
        self.has_weights = True
        self.said.append("push")

    def start(self) -> None:
        """Start the servers, once there is room."""
        self.turns.take("start")
        assert self.held["trainers"] == "nothing"
        self.held["engines"] = "everything"
        self.turns.join(lambda what: self.hold("engines", what), self.push)

    def sync(self) -> None:
        self.turns.take("sync")
        self.push()
        self.turns.synced()

    def taken(self, *turns: Turn) -> list[str]:
        self.said.clear()
        for turn in turns:
            self.turns.take(turn)
        return list(self.said)


@pytest.fixture
def recorder() -> Recorder:
    found = Recorder()
    found.start()
    return found


def test_a_step_of_training_and_the_sync_after_it(recorder: Recorder) -> None:
    recorder.said.clear()
    recorder.turns.take("generate")
    assert recorder.said == [], "the servers start awake, with the weights of the model's directory"
    recorder.turns.take("train")
    recorder.sync()
    recorder.turns.take("generate")
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
    assert recorder.taken("train", "train") == ["engines: nothing", "trainers: everything"]


def test_a_checkpoint_costs_the_engines_their_caches_alone(recorder: Recorder) -> None:
    recorder.turns.take("train")
    recorder.sync()
    assert recorder.taken("save", "generate") == [
        "trainers: everything",
        "trainers: nothing",
        "engines: everything",
    ]
    assert recorder.taken("save") == ["engines: weights", "trainers: everything"]


def test_engines_that_lost_their_weights_are_sent_them_before_they_generate(recorder: Recorder) -> None:
    """As after a step that trained the critic alone, which no sync follows."""
    told = ["trainers: weights", "engines: weights", "push", "trainers: nothing", "engines: everything"]
    recorder.turns.take("train")
    assert recorder.taken("save") == [], "there is nothing of the engines to keep"
    assert recorder.taken("generate") == told


def test_a_server_that_was_started_again_waits_for_the_weights(recorder: Recorder) -> None:
    recorder.said.clear()
    recorder.turns.take("start")
    assert recorder.said == []
    recorder.turns.outdated()
    assert recorder.taken("generate") == [
        "engines: weights",
        "trainers: weights",
        "push",
        "trainers: nothing",
        "engines: everything",
    ]


@pytest.mark.parametrize(
    "turns", [("train", "generate", "save", "train"), ("save", "sync", "train", "save"), ("sync", "start")]
)
def test_any_order_has_room_and_no_garbage(recorder: Recorder, turns: Sequence[Turn]) -> None:
    recorder.taken(*turns, "generate", *turns, "generate")
    assert recorder.held == {"trainers": "nothing", "engines": "everything"}


def test_a_failed_order_leaves_what_is_known_true(recorder: Recorder) -> None:
    recorder.turns.take("train")
    hold, recorder.hold = recorder.hold, None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        recorder.turns.take("sync")
    recorder.hold = hold  # type: ignore[method-assign]
    recorder.sync()
    assert recorder.held == {"trainers": "weights", "engines": "weights"}


def test_without_shared_devices_nothing_moves() -> None:
    turns = Turns()
    for turn in ("generate", "train", "sync", "save", "start"):
        turns.take(turn)
    assert not turns.shared
    assert turns.seconds() == {}
