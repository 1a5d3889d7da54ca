"""Verify that the connections of a new gloo group lead to ranks of this run.

Gloo authenticates nobody: whoever connects to the port of a rank before another rank does, and sends a small
number, takes its place. But the ranks share a store that strangers can neither read nor write. Rank 0 puts a
random key there, and each rank sends every other one a code of that key before anything else goes over the
connection between the two.

Connections that take no rank's place are left alone. Gloo reads eight bytes of them at most, and healthy runs
see them: a client that waits for a server polls a port that was free a moment before, and gloo may listen on
it by now.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # not listed

from anygauge_hooks.errors import AnygaugeError, PlacementError

__all__ = ["connection_errors", "verify_peers"]

KEY = "peer_verification_key"
KEY_BYTES = 32


def verify_peers(group: Any, store: Store, *, rank: int, size: int, contexts: int) -> None:
    """Exchange codes with every other rank of a new gloo group. A collective.

    :param group: Torch's ``ProcessGroupGloo``.
    :param store: Store of this group alone; strangers have no access to it.
    :param contexts: Sets of connections that the group has: one for each of its devices.
    :raises PlacementError: A connection leads to something else than the rank that it should lead to.
    """
    if size == 1:
        return
    if rank == 0:
        store.set(KEY, secrets.token_hex(KEY_BYTES))
    key = store.get(KEY)
    sent = _tensor(b"".join(_code(key, rank, peer) for peer in range(size)))
    expected = _tensor(b"".join(_code(key, peer, rank) for peer in range(size)))
    for _ in range(contexts):  # gloo takes them in turns, one for each collective
        received = torch.empty_like(sent)
        # Sends to each rank directly, where a gather would pass values on along a ring.
        group.alltoall_base(received, sent, [], []).wait()
        strangers = (received != expected).view(size, -1).any(dim=1).nonzero().flatten().tolist()
        if strangers:
            raise PlacementError(
                f"Something else has connected to rank {rank} of a process group instead of rank "
                f"{', '.join(map(str, strangers))}.",
                hint="No data was exchanged with it. Start the run again; if it happens again, find what "
                "scans the ports of this host.",
            )


@contextmanager
def connection_errors() -> Iterator[None]:
    """Give the errors of gloo and of the store a code, while a group is made inside."""
    try:
        yield
    except AnygaugeError:
        raise
    except RuntimeError as error:
        raise PlacementError(
            f"The ranks of a process group could not connect to each other: {error}",
            hint="A rank has ended or cannot be reached, or something else has connected in its place. See "
            "docs/clusters.md for the addresses that ranks use.",
        ) from error


def _code(key: bytes, sender: int, receiver: int) -> bytes:
    # Both ranks enter: a code that a stranger receives convinces nobody else, nor its own sender.
    return hmac.digest(key, f"{sender}>{receiver}".encode(), hashlib.sha256)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
