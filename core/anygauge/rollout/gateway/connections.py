"""Connection limits of the gateway, because anyone who reaches its port can connect."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

__all__ = ["Connections", "most_connections"]

_log = logging.getLogger(__name__)


def _is_no_garbage(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


# Strangers send garbage without end, and aiohttp logs a traceback for each request that is none.
_log.addFilter(_is_no_garbage)


class Connections:
    """Make the protocol of each connection to a server.

    A connection is closed if a whole header has not come in time. If there are too many, the oldest one that
    has not shown the key of a session is closed, and the newest one if all have.

    :param most: Connections at once.
    """

    def __init__(self, server: web.Server, *, most: int, header_timeout_s: float) -> None:
        self._server = server
        self._most = most
        self._header_timeout_s = header_timeout_s
        self._num_open = 0
        self._strangers: dict[_Connection, None] = {}
        """Connections that have not shown a key; oldest first."""
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        """Connections without a header yet, and when they close."""

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        if self._num_open >= self._most and not self._end_oldest():
            return _Refused()
        clock = asyncio.get_running_loop()
        protocol = _Connection(
            self._server,
            self._forget,
            loop=clock,
            logger=_log,
            access_log=None,
            auto_decompress=False,  # it would decompress what strangers send, before their key is looked at
            keepalive_timeout=self._header_timeout_s,
        )
        self._num_open += 1
        self._strangers[protocol] = None
        self._silent[protocol] = clock.call_later(self._header_timeout_s, self._expire, protocol)
        return protocol

    def heard(self, protocol: web.RequestHandler) -> None:
        """Take note that a header has come; aiohttp's keep-alive timeout bounds the wait for the next one."""
        if (timer := self._silent.pop(protocol, None)) is not None:
            timer.cancel()

    def trust(self, protocol: web.RequestHandler) -> None:
        """Take note that a connection has shown the key of a session."""
        assert isinstance(protocol, _Connection)
        self._strangers.pop(protocol, None)

    def _end_oldest(self) -> bool:
        """Close the oldest stranger's connection, and return whether there was one."""
        for protocol in self._strangers:
            del self._strangers[protocol]  # its end comes later, and the next one must close another
            protocol.end()
            return True
        return False

    def _forget(self, protocol: web.RequestHandler) -> None:
        self._num_open -= 1
        self.heard(protocol)
        self.trust(protocol)

    def _expire(self, protocol: web.RequestHandler) -> None:
        del self._silent[protocol]
        protocol.force_close()


class _Connection(web.RequestHandler):
    """A connection that can be closed at once, and whose end is told.

    :param lost: Gets it when it has ended.
    """

    __slots__ = ("_is_ended", "_lost")

    def __init__(
        self, server: web.Server, lost: Callable[[web.RequestHandler], None], **options: object
    ) -> None:
        super().__init__(server, **options)  # type: ignore[arg-type]
        self._lost = lost
        self._is_ended = False

    def end(self) -> None:
        """Close it, at the latest when it has a transport."""
        self._is_ended = True
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        super().connection_made(transport)
        if self._is_ended:
            self.end()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Tell its end."""
        super().connection_lost(exc)
        self._lost(self)


class _Refused(asyncio.Protocol):
    """A connection that is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def most_connections() -> int:
    """Return how many connections leave this process descriptors for its engines, files and pipes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**16 if soft == resource.RLIM_INFINITY else soft * 3 // 4
