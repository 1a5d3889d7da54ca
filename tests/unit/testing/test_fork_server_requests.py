"""Requests for forked processes: whoever asks for one may be killed at any moment."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import pytest

from anygauge_tests import fork_server_requests


class Ended:
    """A worker that has ended by itself."""

    returncode = 0

    def poll(self) -> int:
        return 0


class Processes:
    def start(self, **asked: Any) -> Ended:
        return Ended()


@pytest.mark.parametrize("asks", [True, False], ids=["once its worker has ended", "before it asks"])
def test_one_that_leaves_is_not_answered(asks: bool) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if asks:
            socket.send_fds(theirs, [json.dumps({"module": "m"}).encode()], [0, 1, 2])
    processes: Any = Processes()
    before = len(os.listdir("/proc/self/fd"))
    fork_server_requests._start(ours, processes)
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the connection is closed, and what came over it"


class Gone:
    """Processes that cannot be forked: the warm process has ended."""

    def start(self, **asked: Any) -> Ended:
        raise RuntimeError("The process that others are forked from has ended; what it said is above.")


def test_one_that_cannot_be_forked_leaves_nothing_open() -> None:
    """Who waits for its output, as xdist does, would wait for ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    processes: Any = Gone()
    before = len(os.listdir("/proc/self/fd"))
    with theirs:
        socket.send_fds(theirs, [json.dumps({"module": "m"}).encode()], [0, 1, 2])
        with pytest.raises(RuntimeError, match="has ended"):
            fork_server_requests._start(ours, processes)
    assert len(os.listdir("/proc/self/fd")) == before - 2
