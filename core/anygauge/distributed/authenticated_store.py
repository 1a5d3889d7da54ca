"""Torch client of the rendezvous store, which proves that it knows the run's secret."""

from __future__ import annotations

import math
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # not listed

from anygauge.distributed.addresses import in_url
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
from anygauge.distributed.store_server import ACCEPTED, LATE, REFUSED, StoreServer
from anygauge.failures import on_failure
from anygauge_hooks.errors import PlacementError

__all__ = ["AuthenticatedStore"]

RETRY_S = 0.05
"""Seconds between two attempts to connect."""


class AuthenticatedStore(Store):
    """A torch store whose server requires the secret.

    Torch calls it from threads of its own, so each request has a connection for itself while it is under way.

    :param host: Address of the server.
    :param timeout_s: Longest wait for the first connection and for a key, in seconds.
    :param server: Where this process serves the store, so that both live equally long.
    :raises PlacementError: The server does not know the secret, or cannot be reached in time.
    """

    def __init__(
        self, host: str, port: int, secret: bytes, *, timeout_s: float, server: StoreServer | None = None
    ) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self.host, self.port = host, port
        self._secret = secret
        self._server = server
        self._idle = [self._connected()]

    def close(self) -> None:
        """Close the connections, and end the server where this process has it."""
        while self._idle:
            self._idle.pop().close()
        if self._server is not None:
            self._server.close()

    # Torch calls most by the names of its Python class, and two by those of its C++ class.

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._request(b"set", key, value)

    def get(self, key: str) -> bytes:
        """Return a value, once there is one."""
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its value."""
        return int(self._request(b"add", key, b"%d" % amount)[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value if it is the expected one, and return the value there is then."""
        return self._request(b"compare_set", key, expected, desired)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys have values."""
        return bool(int(self._request(b"check", *keys)[0]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys have values.

        :raises DistStoreError: They have none in time.
        """
        self._await(b"wait", keys, timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it had a value."""
        return bool(int(self._request(b"delete", key)[0]))

    deleteKey = delete_key

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._request(b"count")[0])

    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        """Return that the next three methods work."""
        return True

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._request(b"append", key, value)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values, once all keys have them."""
        return self._await(b"get", keys, None)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        self._request(b"set", *(each for pair in zip(keys, values, strict=True) for each in pair))

    def clone(self) -> AuthenticatedStore:
        """Return this store: several threads may use it."""
        return self

    def _timeout_s(self) -> float:
        timeout: timedelta = self.timeout  # type: ignore[attr-defined]  # a property that its stub lacks
        return timeout.total_seconds()

    def _await(self, operation: bytes, keys: Sequence[str], timeout: timedelta | None) -> list[bytes]:
        limit_s = self._timeout_s() if timeout is None else timeout.total_seconds()
        # The server keeps the time; it has as long again to reply, should its process be busy.
        patience_s = limit_s + self._timeout_s() if limit_s else None  # 0 sets no limit, as in torch
        limit_ms = b"%d" % math.ceil(1000 * limit_s)
        status, *values = self._exchange([operation, limit_ms, *map(_bytes, keys)], patience_s)
        if status == LATE:
            raise DistStoreError(f"wait timeout after {limit_s:g} s, keys: {', '.join(keys)}")
        return values

    def _request(self, operation: bytes, *arguments: str | bytes) -> list[bytes]:
        request = [operation, *map(_bytes, arguments)]
        return self._exchange(request, self._timeout_s() or None)[1:]

    def _exchange(self, request: Sequence[bytes], timeout_s: float | None) -> list[bytes]:
        """Return the status and the values of the reply to a request."""
        with self._connection() as connection:
            connection.set_timeout(timeout_s)
            try:
                reply = connection.request(request)
            except (OSError, EOFError, ForgedMessageError) as error:
                raise ConnectionError(
                    f"The connection to the store of rank 0 was closed: {error!r}."
                ) from error
        if reply[0] == REFUSED:
            raise DistStoreError(f"The store of rank 0 refused {request[0]!r}: {reply[1].decode()}.")
        return reply

    @contextmanager
    def _connection(self) -> Iterator[_Connection]:
        """Yield a connection that nothing else uses; it is kept unless an exchange breaks off."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connected()
        with on_failure(connection.close):
            yield connection
        self._idle.append(connection)

    def _connected(self) -> _Connection:
        ends = time.monotonic() + self._timeout_s()
        where = f"{in_url(self.host)}:{self.port}"
        while True:
            try:
                return _Connection(self.host, self.port, self._secret, max(RETRY_S, ends - time.monotonic()))
            except ForgedMessageError as error:
                raise PlacementError(
                    f"The store at {where} is not that of this group of workers.",
                    hint="Something else has taken its place on that host; start the run again.",
                ) from error
            except (OSError, EOFError) as error:
                if time.monotonic() > ends:
                    raise PlacementError(
                        f"The store of the ranks at {where} cannot be reached: {error!r}.",
                        hint="Every node must reach that address; cluster.interface chooses another.",
                    ) from error
            time.sleep(RETRY_S)


class _Connection:
    """An authenticated connection to the server."""

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        self._socket = socket.create_connection((host, port), timeout_s)
        with on_failure(self.close):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._socket.sendall(nonce)
            keys = Keys(secret, nonce, self._read(NONCE_BYTES))
            check_proof(self._read(PROOF_BYTES), keys.server_proof)
            self._socket.sendall(keys.client_proof)
            self._outgoing, self._incoming = keys.to_server(), keys.to_client()
            # A server that is flooded may close the connection before it reads the proof. Known here, the
            # caller connects again; a request that is under way cannot be sent twice.
            if self._receive() != ACCEPTED:
                raise ForgedMessageError("the server does not confirm the connection")

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the time that each read may wait."""
        self._socket.settimeout(seconds)

    def request(self, request: Sequence[bytes]) -> list[bytes]:
        """Return the reply to a request."""
        self._socket.sendall(self._outgoing.seal(pack(request)))
        return unpack(self._receive())

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _receive(self) -> bytes:
        header = self._read(HEADER_BYTES)
        return self._incoming.open(header, self._read(self._incoming.length(header)))

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(count - len(data))
            if not piece:
                raise EOFError("it was closed")
            data += piece
        return bytes(data)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
