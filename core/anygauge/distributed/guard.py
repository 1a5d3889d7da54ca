"""Guard process: parent of a process that runs untrusted code; it outlives that and its children.

Reward functions and agents may start processes that detach themselves, crash, hang or print without end. The
guard runs nothing but its own few lines: it adopts processes that detach themselves, bounds the output, and
ends everything with its child or with the driver, whichever ends first.
"""

from __future__ import annotations

import os
import resource
import select
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from anygauge.distributed.lifetime import adopt_orphans, die_with, end_children

__all__ = ["KEPT_BYTES", "Log", "Output", "Tail", "fork_guarded"]

KEPT_BYTES = 4 << 20
"""Bytes of a log that are kept, from its beginning and from its end."""
LARGEST_LOG = 4 * KEPT_BYTES
"""In bytes; what is in the middle is left out then."""
_LEFT_OUT = b"\n[output was left out here]\n"
_LIFELINE = 0
"""Standard input ends with the driver."""
_READ_BYTES = 1 << 16


class Log:
    """Append to a file, and leave out its middle where it becomes too large.

    :param descriptor: Open for reading and appending.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def take(self, data: bytes) -> None:
        """Append some more."""
        _write(self._descriptor, data)
        with suppress(OSError):
            _shorten_log(self._descriptor)

    def end(self) -> None:
        """Do nothing."""


class Tail:
    """Keep the last lines, and write them at the end.

    :param size: In bytes; an older line is dropped, and so is the last one if it alone is longer.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._size = size
        self._kept = bytearray()
        self._cut = False

    def take(self, data: bytes) -> None:
        """Keep some more."""
        self._kept += data
        if len(self._kept) > 2 * self._size:  # not at each piece: what stays is moved
            self._shorten()

    def end(self) -> None:
        """Write what was kept, in whole lines."""
        if len(self._kept) > self._size:
            self._shorten()
        kept = bytes(self._kept)
        _write(self._descriptor, _LEFT_OUT + kept.partition(b"\n")[2] if self._cut else kept)

    def _shorten(self) -> None:
        self._cut = True
        del self._kept[: -self._size]


Output = Log | Tail
"""Takes the output of a child, bounded."""


def fork_guarded(
    descriptors: Sequence[int],
    outputs: Sequence[tuple[Sequence[int], Output]],
    *,
    handed_on: Sequence[int] = (),
) -> None:
    """Go on in a child of this process, which becomes its guard.

    :param descriptors: Descriptors that the child alone needs.
    :param outputs: Descriptors of the child, and who takes what it writes to them.
    :param handed_on: Signals to the guard that the child is to get.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    guard, wake = os.getpid(), _wake_on_children()
    pipes = [os.pipe() for _ in outputs]
    child = os.fork()
    if child:
        for descriptor in [*descriptors, *(sink for _, sink in pipes)]:
            os.close(descriptor)
        for number in handed_on:
            signal.signal(number, lambda number, _: _hand_on(number, child))
        takers = zip(pipes, outputs, strict=True)
        _exit_as(_watch(child, wake, {source: output for (source, _), (_, output) in takers}))
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with(guard)
    os.dup2(os.open(os.devnull, os.O_RDONLY), _LIFELINE)
    for (source, sink), (replaced, _) in zip(pipes, outputs, strict=True):
        for descriptor in replaced:
            os.dup2(sink, descriptor)
        os.close(sink)
        os.close(source)


def _wake_on_children() -> int:
    """Return a descriptor that can be read once a child has ended."""
    source, sink = os.pipe()
    for descriptor in (source, sink):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return source


def _watch(child: int, wake: int, outputs: Mapping[int, Output]) -> int:
    """Return the wait status of the child, once nothing that it started is left.

    :param wake: Can be read once a child has ended.
    :param outputs: Reader of each descriptor's output.
    """
    watched = [_LIFELINE, wake, *outputs]
    status = None
    while status is None:
        ready, _, _ = select.select(watched, [], [])
        for source in outputs.keys() & ready:
            if not _pass_on(source, outputs[source]):
                watched.remove(source)
        if wake in ready:
            os.read(wake, _READ_BYTES)
            status = _reap(child)
        if _LIFELINE in ready and status is None:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
    end_children()
    for source, output in outputs.items():
        os.set_blocking(source, False)  # nobody is left who writes; if somebody is, he is not waited for
        with suppress(BlockingIOError):
            while _pass_on(source, output):
                pass
        output.end()
    return status


def _hand_on(number: int, child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)


def _reap(child: int) -> int | None:
    """Take note of every child that has ended, also adopted ones; return the status of the given one."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            status = ended[1] if ended[0] == child else status
    return status


def _pass_on(source: int, output: Output) -> bool:
    """Hand some output on; return whether there may be more."""
    data = os.read(source, _READ_BYTES)
    output.take(data)
    return bool(data)


def _write(descriptor: int, data: bytes) -> None:
    with suppress(OSError):  # a full disk loses output, not the run
        while data:
            data = data[os.write(descriptor, data) :]


def _shorten_log(descriptor: int) -> None:
    """Leave out the middle of a log that has become too large."""
    size = os.fstat(descriptor).st_size
    if size > LARGEST_LOG:
        latest = os.pread(descriptor, KEPT_BYTES, size - KEPT_BYTES)
        os.ftruncate(descriptor, KEPT_BYTES)
        os.write(descriptor, _LEFT_OUT + latest)


def _exit_as(status: int) -> NoReturn:
    """End this process in the way in which another one did."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # nothing can be set for SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))
