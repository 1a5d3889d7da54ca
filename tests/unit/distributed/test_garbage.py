"""Objects that garbage collections leave out, in a forked process: those of other tests stay as they are."""

from __future__ import annotations

import gc
import os
import weakref

from anygauge.distributed.garbage import freeze_living_objects


class Cycle:
    """An object that only a garbage collection frees."""

    def __init__(self) -> None:
        self.me = self


def test_living_objects_are_left_out_and_garbage_is_not() -> None:
    if pid := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    os._exit(0 if is_frozen() else 1)


def is_frozen() -> bool:
    living, garbage = Cycle(), Cycle()
    freed = weakref.ref(garbage)
    del garbage
    freeze_living_objects()
    left_out = not any(each is living for each in gc.get_objects())
    return freed() is None and left_out and gc.get_threshold()[0] >= 100_000
