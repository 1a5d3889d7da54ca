"""Objects that garbage collections leave out, in a process of its own, so that other tests keep theirs."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from anygauge.distributed.garbage import freeze_living_objects

class Cycle:
    def __init__(self):
        self.me = self

living, garbage = Cycle(), Cycle()
freed = weakref.ref(garbage)
del garbage
freeze_living_objects()
assert freed() is None
assert not any(each is living for each in gc.get_objects())
assert gc.get_threshold()[0] >= 100_000
"""


def test_living_objects_are_left_out_and_garbage_is_not() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
