"""HTTP connections to one server: request and response bodies, each with a deadline."""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import orjson

from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.serving import EngineAwayError
from anygauge_hooks.sglang import ServerKeys

__all__ = ["Channel", "OpenFilesError"]

_KEPT_S = 4.0
"""SGLang's server closes a connection that was idle for five seconds: a request may not meet that moment."""
_BUFFER = 1 << 20
_EXCERPT = 300
_LARGEST_ANSWER = 256 * 2**20
"""Bytes, unpacked. A million tokens with their log-probs have 40 MB."""
_BAD = 300
"""Statuses from here on are no success; an engine redirects nobody."""
_PASSING = (408, 425, 429)
"""Refusals that another attempt may not meet."""
_KEYS = (401, 403)
_FILES = 2**17
"""Open files that the driver of the largest runs needs, and more."""
_JSON = {"content-type": "application/json"}


class OpenFilesError(RolloutError):
    """This process may open no more connections; the engine is not at fault."""


class Channel:
    """A pool of connections to one address, opened on the running loop when first used.

    :param address: ``http://host:port``.
    :param name: How errors call the engine.
    :param keys: Keys that the server asks for.
    """

    def __init__(self, address: str, name: str, keys: ServerKeys) -> None:
        self.address, self.name = address.rstrip("/"), name
        self._keys = keys
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def request(self, path: str, body: bytes | None, *, timeout_s: float, purpose: str) -> bytes:
        """Return the body of an answer.

        :param body: JSON to send; ``None`` sends a GET.
        :param purpose: Expected result, for errors: ``"the tokens of a text"``.
        :raises DeadlineError: No answer in time.
        :raises EngineAwayError: There is no connection, or the server failed.
        :raises RolloutError: The server refuses the request, today and tomorrow.
        """
        request_line = f"{'GET' if body is None else 'POST'} {path}"
        async with self._limited(timeout_s, request_line, purpose), self._request(path, body) as answer:
            data = await self._read(answer, request_line, purpose)
        self._check(answer.status, data, request_line, purpose)
        return data

    async def _read(self, answer: aiohttp.ClientResponse, request_line: str, purpose: str) -> bytes:
        data = bytearray()
        async for part in answer.content.iter_any():
            data += part
            if len(data) > _LARGEST_ANSWER:
                raise RolloutError(
                    f"{self.name} answered {request_line} with more than {_LARGEST_ANSWER} bytes, asked for "
                    f"{purpose}.",
                    hint="Is there an SGLang server at this address, and nothing in between?",
                )
        return bytes(data)

    @asynccontextmanager
    async def _limited(self, limit_s: float, request_line: str, purpose: str) -> AsyncIterator[None]:
        """Turn what happens to connections in the block into the project's errors."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineError(
                f"{self.name} did not answer {request_line} in {limit_s:.4g} s, for {purpose}.",
                hint="See its log; raise the time limits of [rollout.client] if it only needs longer.",
            ) from error
        except aiohttp.InvalidURL as error:
            raise RolloutError(
                f"{self.address!r} is not the address of an engine.", hint="Write http://HOST:PORT."
            ) from error
        except (aiohttp.ClientError, ConnectionError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise _too_many_files(request_line, purpose) from error
            reason = f"{type(error).__name__}: {error}"
            raise EngineAwayError(
                f"{self.name} cannot be reached for {purpose} ({request_line}): {reason}"
            ) from error

    def _request(self, path: str, body: bytes | None) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        verb = "GET" if body is None else "POST"
        headers = {**_JSON, **self._keys.headers(path)}
        return self._opened().request(verb, self.address + path, data=body, headers=headers)

    def _opened(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineAwayError(f"The connections to {self.name} were closed.")
        if self._session is None:
            allow_open_files()  # each request under way has a connection of its own
            # How many requests are under way is bounded by who asks, so that waiting has an order.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=None), read_bufsize=_BUFFER
            )
        return self._session

    def _check(self, status: int, body: bytes, request_line: str, purpose: str) -> None:
        """Raise what a bad status means."""
        if status < _BAD:
            return
        message = f"{self.name} answered {request_line} with {status}, asked for {purpose}: {_words(body)}"
        if status >= 500 or status in _PASSING:
            raise EngineAwayError(message)
        hint = "Name its keys: rollout.api_key, rollout.admin_api_key." if status in _KEYS else None
        raise RolloutError(message, hint=hint)

    async def close(self) -> None:
        """Close every connection, for good."""
        self._closed = True
        if self._session is not None:
            await self._session.close()


def allow_open_files() -> None:
    """Let this process open as many files as its hard limit allows: many shells begin with 1024.

    Containers may allow 2 ** 30. Commands of agents inherit the limit, and some programs close every number
    below it when they start, which takes them minutes then; :data:`_FILES` bounds it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _too_many_files(request_line: str, purpose: str) -> OpenFilesError:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OpenFilesError(
        f"{request_line} could not be sent for {purpose}: this process has reached its limit of "
        f"open files ({limit}).",
        hint="Each request in flight needs one. Raise it (ulimit -n, a container's --ulimit nofile) or "
        "lower rollout.client.concurrency.",
    )


def _words(body: bytes) -> str:
    """Return what a refusal says: SGLang answers ``{"error": {"message": ...}}``, or ``{"message": ...}``."""
    try:
        message: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip()[:_EXCERPT] or "nothing more"
    if isinstance(message, dict):
        message = message.get("error", message)
    if isinstance(message, dict):
        message = message.get("message", message)
    return str(message)[:_EXCERPT]
