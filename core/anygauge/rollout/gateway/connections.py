"""Limits on connections to the gateway, which anybody who reaches its port can open."""

from __future__ import annotations

import asyncio
import resource

from aiohttp import web

__all__ = ["Connections", "most_connections"]


class Connections:
    """Make the protocol of each connection to a server.

    A connection is closed if a whole header has not come in time, and at once if there are too many.

    :param most: Connections at once.
    """

    def __init__(self, server: web.Server, *, most: int, header_timeout_s: float) -> None:
        self._server = server
        self._most = most
        self._header_timeout_s = header_timeout_s
        self._silent: dict[asyncio.Protocol, asyncio.TimerHandle] = {}
        """Connections without a header yet, and when they close."""

    def __call__(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        if len(self._server.connections) >= self._most:
            return _Refused()
        protocol = self._server()
        clock = asyncio.get_running_loop()
        self._silent[protocol] = clock.call_later(self._header_timeout_s, self._expire, protocol)
        return protocol

    def heard(self, protocol: asyncio.Protocol) -> None:
        """Take note that a header has come; aiohttp's keep-alive timeout bounds the wait for the next one."""
        if (timer := self._silent.pop(protocol, None)) is not None:
            timer.cancel()

    def _expire(self, protocol: web.RequestHandler) -> None:
        del self._silent[protocol]
        protocol.force_close()


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
