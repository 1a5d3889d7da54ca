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
            socket.send_fds(theirs, [json.dumps({"module": "m"}).encode()], [1, 2])
    processes: Any = Processes()
    before = len(os.listdir("/proc/self/fd"))
    fork_server_requests._start(ours, processes)
    assert len(os.listdir("/proc/self/fd")) == before - 1, "the connection is closed, and what came over it"
