"""Server of the rendezvous store, for clients that know the run's secret."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from asyncio import IncompleteReadError, StreamReader, StreamWriter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from anygauge.distributed.secure_channel import (
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ForgedMessageError,
    Keys,
    check_proof,
    pack,
    unpack,
)

__all__ = ["ACCEPTED", "LATE", "REFUSED", "StoreServer"]

HANDSHAKE_S = 10.0
"""Longest time until a connection has proved that it knows the secret."""
MOST_STRANGERS = 128
"""Connections that have proved nothing yet; one more closes the oldest of them."""
ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before others are read from. Far fewer than the strangers that are kept: in a
flood, a member's proof is read before its connection becomes the oldest."""
BACKLOG = 4096
"""Connections that may wait to be accepted: all ranks connect at once."""
MOST_WARNINGS = 10
"""Strangers can connect without end, and the log takes disk."""
DONE, LATE, REFUSED = b"done", b"late", b"refused"
"""First field of a reply."""
ACCEPTED = b"accepted"
"""The message to a client that has proved itself."""

_log = logging.getLogger(__name__)


class StoreServer:
    """A key-value store, served by a thread of this process.

    :param listener: A listening socket, which the server closes.
    :param secret: Whoever connects must prove to know it before a request is read.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener = listener
        self._secret = secret
        self._table = _Table()
        self._strangers: dict[StreamWriter, None] = {}
        """Oldest first."""
        self._num_warnings = 0
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="store-server", daemon=True
        )
        self._thread.start()
        self._started.wait()

    def close(self) -> None:
        """Close every connection and end the thread."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._attend, sock=self._listener, backlog=ACCEPTED_AT_ONCE)
        self._listener.listen(BACKLOG)  # asyncio takes one number for both
        self._started.set()
        await self._stop.wait()
        server.close()

    async def _attend(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            keys = await self._authenticated(reader, writer)
            incoming, outgoing = keys.to_server(), keys.to_client()
            writer.write(outgoing.seal(ACCEPTED))
            while True:
                header = await reader.readexactly(HEADER_BYTES)
                message = incoming.open(header, await reader.readexactly(incoming.length(header)))
                writer.write(outgoing.seal(pack(await self._table.answer(unpack(message)))))
                await writer.drain()
        except ForgedMessageError as error:
            self._warn(error)
        except (OSError, IncompleteReadError, asyncio.CancelledError):
            pass  # it has gone, was too slow to authenticate, or the server ends
        finally:
            writer.close()

    def _warn(self, error: ForgedMessageError) -> None:
        if self._num_warnings < MOST_WARNINGS:
            self._num_warnings += 1
            last = "; further ones are not reported" if self._num_warnings == MOST_WARNINGS else ""
            _log.warning("a connection to the rendezvous store was closed: %s%s", error, last)

    async def _authenticated(self, reader: StreamReader, writer: StreamWriter) -> Keys:
        self._strangers[writer] = None
        if len(self._strangers) > MOST_STRANGERS:
            # Not the newest: a member proves itself at once, so idle strangers cannot keep it out.
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]  # it ends later, and the next one must close another
            oldest.transport.abort()
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                nonce = secrets.token_bytes(NONCE_BYTES)
                keys = Keys(self._secret, await reader.readexactly(NONCE_BYTES), nonce)
                writer.write(nonce + keys.server_proof)
                check_proof(await reader.readexactly(PROOF_BYTES), keys.client_proof)
                return keys
        finally:
            self._strangers.pop(writer, None)


class _Table:
    """Keys and values, and the requests that wait for a key."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._awaited: dict[bytes, asyncio.Event] = {}

    async def answer(self, request: Sequence[bytes]) -> list[bytes]:
        """Carry out a request: the name of an operation and its arguments."""
        operation = _OPERATIONS.get(request[0]) if request else None
        try:
            if operation is None:
                raise ValueError("no such operation")
            return [DONE, *await operation(self, *request[1:])]
        except TimeoutError:
            return [LATE]
        except (TypeError, ValueError) as error:
            return [REFUSED, repr(error).encode()]

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        if event := self._awaited.pop(key, None):
            event.set()

    async def set(self, *keys_and_values: bytes) -> Sequence[bytes]:
        for key, value in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
            self._put(key, value)
        return ()

    async def append(self, key: bytes, value: bytes) -> Sequence[bytes]:
        self._put(key, self._values.get(key, b"") + value)
        return ()

    async def get(self, timeout_ms: bytes, *keys: bytes) -> Sequence[bytes]:
        await self.wait(timeout_ms, *keys)
        return [self._values[key] for key in keys]

    async def wait(self, timeout_ms: bytes, *keys: bytes) -> Sequence[bytes]:
        async with asyncio.timeout(int(timeout_ms) / 1000 or None):  # as in torch, 0 sets no limit
            while absent := [key for key in keys if key not in self._values]:
                await self._awaited.setdefault(absent[0], asyncio.Event()).wait()
        return ()

    async def add(self, key: bytes, amount: bytes) -> Sequence[bytes]:
        total = b"%d" % (int(self._values.get(key, b"0")) + int(amount))
        self._put(key, total)
        return [total]

    async def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Sequence[bytes]:
        # As the stores of torch do it: an absent key is set where nothing is expected.
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
        return [self._values.get(key, expected)]

    async def check(self, *keys: bytes) -> Sequence[bytes]:
        return [b"%d" % all(key in self._values for key in keys)]

    async def delete(self, key: bytes) -> Sequence[bytes]:
        return [b"%d" % (self._values.pop(key, None) is not None)]

    async def count(self) -> Sequence[bytes]:
        return [b"%d" % len(self._values)]


_Operation = Callable[..., Awaitable[Sequence[bytes]]]
_OPERATIONS: dict[bytes, _Operation] = {
    name.encode(): getattr(_Table, name)
    for name in ("set", "append", "get", "wait", "add", "compare_set", "check", "delete", "count")
}
