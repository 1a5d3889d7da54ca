"""Colocation scheduler: sleep and wake-up of trainers and engines on the same devices.

Where both do not fit at once, each phase first puts to sleep whoever has more memory than the phase allows,
and only then wakes the others up:

========  ==========  ==========================  =====================================================
phase     trainers    engines                     purpose
========  ==========  ==========================  =====================================================
start     nothing     what they have              start servers, which see how much memory is free
generate  nothing     everything                  make samples; the engines' caches come back last
train     everything  nothing                     train
sync      weights     weights                     move the weights from one to the other
save      everything  weights, if they have any   write a checkpoint; what the engines have stays current
========  ==========  ==========================  =====================================================

Where the first step that trains the policy has shown that both fit (:mod:`anygauge.serving.memory_fit`), both
stay awake after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

from anygauge.observability.phases import record_phase
from anygauge.serving.memory_fit import Awake, MemoryFit
from anygauge_hooks.serving import MemoryState

__all__ = ["PHASE_OF_CALL", "ColocationPhase", "ColocationScheduler", "SetMemoryState"]

SetMemoryState = Callable[[MemoryState], object]
"""Sets the memory state of a group of engines, and returns when all have it."""
ColocationPhase = Literal["start", "generate", "train", "sync", "save"]
PHASE_OF_CALL: Mapping[str, ColocationPhase] = {
    "train": "train",
    "negative_log_likelihood": "save",
    "save_checkpoint": "save",
    "save_hf": "save",
}
"""Phase that a call of the training workers needs. The others need no memory, or are a part of a phase."""
_AMOUNT: Mapping[MemoryState, int] = {"nothing": 0, "weights": 1, "everything": 2}
_AWAKE: Mapping[tuple[MemoryState, MemoryState], Awake] = {
    ("nothing", "everything"): "engines",
    ("nothing", "nothing"): "nobody",
    ("everything", "nothing"): "trainers",
}
"""Who is awake in the states of trainers and engines that are measured."""
GIB = float(1 << 30)


class ColocationScheduler:
    """Colocation phases of one run. Without trainers nothing is shared: a phase is entered at once.

    :param trainers: Sets the trainers' memory state, which is ``"everything"`` until the first phase.
    :param fit: Decides whether both may stay awake; ``None`` lets them alternate.
    :param tell: Called with a line about what was decided.
    """

    def __init__(
        self,
        trainers: SetMemoryState | None = None,
        fit: MemoryFit | None = None,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._trainers = trainers
        self._fit = fit
        self._tell = tell
        self._both_awake = False
        self._has_trained = False
        """Whether the policy took an optimizer step since the last phase that trains began."""
        self._are_whole: Callable[[], bool] = lambda: True
        self._engines: SetMemoryState | None = None
        self._refresh: Callable[[], None] | None = None
        self._trainers_state: MemoryState = "everything"
        self._engines_state: MemoryState = "nothing"
        self._current = True
        self._seconds = {"sleep": 0.0, "wake_up": 0.0}

    @property
    def shared(self) -> bool:
        """Whether there are devices to share."""
        return self._trainers is not None

    def join(
        self,
        engines: SetMemoryState,
        refresh: Callable[[], None],
        are_whole: Callable[[], bool] = lambda: True,
    ) -> None:
        """Add the engines, which have started and are awake.

        :param refresh: Sends the engines their current weights, which they have given up.
        :param are_whole: Whether none of them is lost: those that are take no memory.
        """
        self._are_whole = are_whole
        self._engines, self._refresh = engines, refresh
        self._engines_state = "everything"

    def enter(self, phase: ColocationPhase) -> None:
        """Put trainers and engines into the memory states of a phase; return when they have them."""
        if self._trainers is not None:
            self._enter(phase)

    def before_call(self, method: str) -> None:
        """Enter the phase that a call of the training workers needs, if it needs one."""
        if (phase := PHASE_OF_CALL.get(method)) is not None:
            self.enter(phase)

    def seconds(self) -> Mapping[str, float]:
        """Return and reset the seconds spent on sleep and on wake-up; nothing if no devices are shared."""
        seconds, self._seconds = self._seconds, {"sleep": 0.0, "wake_up": 0.0}
        return {} if self._trainers is None else seconds

    def synced(self) -> None:
        """Learn that the engines have been sent the trainers' weights."""
        self._current = self._has_trained = True

    def outdated(self) -> None:
        """Learn that an engine has other weights than the trainers': the next generation waits for a sync."""
        self._current = False

    def _enter(self, phase: ColocationPhase) -> None:
        if phase == "generate" and not self._current:
            assert self._refresh is not None, "engines that have lost their weights have joined"
            self._enter("sync")
            self._refresh()
            self._current = True
        if phase == "train":
            self._has_trained = False
        self._measure()
        if self._stays_awake(phase):
            self._set_engines("everything")
            self._set_trainers("everything")
            return
        has = self._engines_state
        wanted: dict[ColocationPhase, tuple[MemoryState, MemoryState]] = {
            "start": ("nothing", has),
            "generate": ("nothing", "everything"),
            "train": ("everything", "nothing"),
            "sync": ("weights", "weights"),
            "save": ("everything", "nothing" if has == "nothing" else "weights"),
        }
        trainers, engines = wanted[phase]
        if _AMOUNT[engines] < _AMOUNT[has]:
            self._set_engines(engines)
            self._measure()
        self._set_trainers(trainers)
        self._set_engines(engines)

    def _measure(self) -> None:
        """Measure the devices for the decision of ``fit``, where one side or nobody is awake."""
        states = (self._trainers_state, self._engines_state)
        awake = _AWAKE.get(states)
        if self._fit is None or self._both_awake or awake is None:
            return
        if awake == "engines" and not self._are_whole():
            self._fit.forget()
            return
        self._fit.note(awake)

    def _stays_awake(self, phase: ColocationPhase) -> bool:
        """Return whether both are awake from this phase on."""
        if self._fit is None or phase == "start":
            return False
        if self._both_awake and phase == "sync" and self._fit.is_short():
            self._tell("little device memory is left: trainers and engines sleep in turns from now on")
            self._fit, self._both_awake = None, False
        elif not self._both_awake and phase == "generate" and self._has_trained:
            self._decide(self._fit.spare_bytes())
        return self._both_awake

    def _decide(self, spare_bytes: int | None) -> None:
        if spare_bytes is None:
            return
        if spare_bytes < 0:
            self._fit = None
            missing = f"{-spare_bytes / GIB:.1f} GiB"
            self._tell(f"trainers and engines sleep in turns: {missing} too little for both at once")
            return
        self._both_awake = True
        self._tell(f"trainers and engines both stay awake: {spare_bytes / GIB:.1f} GiB more than they need")

    def _set_trainers(self, state: MemoryState) -> None:
        if self._trainers is not None and state != self._trainers_state:
            with self._timed(self._trainers_state, state):
                self._trainers(state)
            self._trainers_state = state

    def _set_engines(self, state: MemoryState) -> None:
        if self._engines is not None and state != self._engines_state:
            with self._timed(self._engines_state, state):
                self._engines(state)
            self._engines_state = state
            self._current = self._current and state != "nothing"

    @contextmanager
    def _timed(self, before: MemoryState, after: MemoryState) -> Iterator[None]:
        started = time.perf_counter()
        name = "sleep" if _AMOUNT[after] < _AMOUNT[before] else "wake_up"
        try:
            with record_phase(name):
                yield
        finally:
            self._seconds[name] += time.perf_counter() - started
