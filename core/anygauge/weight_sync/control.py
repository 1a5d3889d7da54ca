"""Blocking HTTP requests for weight updates to one server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import aiohttp

from anygauge_hooks.errors import DeadlineError, RolloutError

__all__ = ["EngineControl", "RefusedError"]

EXCERPT = 300
_PIECE = 1 << 20
"""Bytes that are sent at once."""
_BAD = 300
"""Statuses from here on are no success; a server of the run redirects nobody."""

Body = Sequence[bytes | memoryview]


class RefusedError(RolloutError):
    """A server refused a request."""


class EngineControl:
    """Requests to one server, each with a deadline. Engines build their ``WeightTarget`` on it.

    Not for a thread that runs an event loop. Each request has a connection of its own, so that one thread may
    wait for an answer while another gives up.

    :param headers: Function from a path to the headers that a request for it needs.
    :param deadline_s: Longest wait for one answer, in seconds.
    """

    def __init__(
        self, address: str, headers: Callable[[str], Mapping[str, str]], *, deadline_s: float
    ) -> None:
        self.address = address
        self._headers = headers
        self._deadline_s = deadline_s

    def post(self, path: str, body: Mapping[str, Any] | Body, *, what: str) -> Mapping[str, Any]:
        """Post and return the answer.

        :param body: JSON, or bytes in parts that are sent one after the other.
        :param what: Name of the request in errors: ``"bucket 3 of version 7"``.
        :raises RefusedError: Status 4xx or 5xx.
        :raises DeadlineError: No answer in time.
        :raises RolloutError: No connection, or it broke.
        """
        return self._send("POST", path, body, what)

    def get(self, path: str, *, what: str) -> Mapping[str, Any]:
        """Get a path; raises the exceptions of :meth:`post`."""
        return self._send("GET", path, None, what)

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | Body | None, what: str
    ) -> Mapping[str, Any]:
        data = [json.dumps(dict(body)).encode()] if isinstance(body, Mapping) else body
        try:
            # Not asyncio.run, which would wait for a name that is still being looked up.
            with closing(asyncio.new_event_loop()) as loop:
                status, reply = loop.run_until_complete(self._request(method, path, data))
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.address}{path} did not answer about {what} in {self._deadline_s:g} s.",
                hint="See its log, or raise weight_sync.deadline_s.",
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise RolloutError(
                f"{self.address}{path} cannot be asked about {what}: {type(error).__name__}: {error}.",
                hint="It has ended, or never started; see its log.",
            ) from error
        if status >= _BAD:
            message = _object(reply).get("message") or reply.decode(errors="replace")
            raise RefusedError(
                f"{self.address}{path} refused {what}: {status} {str(message)[:EXCERPT]!r}.",
                hint="See its log.",
            )
        return _object(reply)

    async def _request(self, method: str, path: str, data: Body | None) -> tuple[int, bytes]:
        headers = {"content-type": "application/json", **self._headers(path)}
        if data is not None:
            headers["content-length"] = str(sum(map(len, data)))
        content = None if data is None else _pieces(data)
        timeout = aiohttp.ClientTimeout(total=self._deadline_s)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.request(method, self.address + path, data=content, allow_redirects=False) as reply,
        ):
            return reply.status, await reply.read()


async def _pieces(data: Body) -> AsyncIterator[memoryview]:
    # asyncio copies what the socket does not take at once: a bucket in one piece takes four times as long.
    for part in data:
        for start in range(0, len(part), _PIECE):
            yield memoryview(part)[start : start + _PIECE]


def _object(body: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
