"""HTTP reward: a server computes it."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from random import Random
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from anygauge.strict_json import parse_json
from anygauge.wording import counted
from anygauge_hooks.errors import RewardError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

__all__ = ["remote"]

_RETRIED = (408, 429)
"""Answers of the 4xx kind that another attempt may change."""
_BAD = 300
"""Statuses from here on are no success."""
_LONGEST_PAUSE_S = 10.0
_EXCERPT = 120
_ANSWER = "Answer with a number, or an object of which reward.key names the number."
_LARGEST_ANSWER = 16 * 2**20
"""Bytes, unpacked. A reward is a number with some words; a compressed answer may be a thousand times as long
as what came."""
_jitter = Random()
"""Separate random generator, so that a retry draws no random number of the run."""
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, ClientSession] = WeakKeyDictionary()


async def remote(
    response: str,
    label: Any = None,
    metadata: Mapping[str, Any] | None = None,
    prompt: str | None = None,
    *,
    url: str,
    headers: Mapping[str, str] | None = None,
    attempts: int = 6,
    request_timeout_s: float = 10.0,
    deadline_s: float = 25.0,
    pause_s: float = 0.5,
) -> Any:
    """Return a server's answer: a number, or an object whose key ``reward.key`` has the number.

    The server gets a POST with the JSON object ``{"response", "label", "metadata", "prompt"}``. A failed
    connection, a time-out, 408, 429 and 5xx are tried again after pauses that double and vary, or that
    ``Retry-After`` asks for; any other answer but a 2xx fails the sample at once.

    :param url: Address of the server.
    :param headers: Further headers. ``$NAME`` in a value is taken from the environment, so that the config
        and the run directory hold no secret.
    :param attempts: Most requests for one sample.
    :param request_timeout_s: Longest wait for one answer, in seconds.
    :param deadline_s: Longest time for all attempts, in seconds; below ``reward.timeout_s``, or that one ends
        the sample without the server's words.
    :param pause_s: The first pause between two attempts, in seconds.
    :raises RewardError: No attempt was answered as it should be, or a variable of a header is missing.
    """
    body = {"response": response, "label": label, "metadata": dict(metadata or {}), "prompt": prompt}
    sent = {name: _expanded(value) for name, value in (headers or {}).items()}
    ends = time.monotonic() + deadline_s
    for attempt in range(1, attempts + 1):
        reply, data, problem = await _post(url, body, sent, min(request_timeout_s, ends - time.monotonic()))
        if reply is not None and reply.status < _BAD:
            return _answer(data, url)
        if reply is not None and reply.status < 500 and reply.status not in _RETRIED:
            raise RewardError(f"{url} answered {problem}.", hint="Correct reward.options or the server.")
        pause = _pause(reply, pause_s * 2 ** (attempt - 1))
        if attempt == attempts or time.monotonic() + pause >= ends:
            break
        await asyncio.sleep(pause)
    tried = f"{counted(attempt, 'attempt')} and {deadline_s:g} s"
    raise RewardError(f"{url} did not answer in {tried}; the last: {problem}.", hint="Is the server up?")


async def _post(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str], timeout_s: float
) -> tuple[ClientResponse | None, bytes, str]:
    """Return the answer to one request, if there is one, its body, and what happened in words."""
    from aiohttp import ClientError, InvalidURL, NonHttpUrlClientError

    try:
        async with (
            asyncio.timeout(timeout_s),
            _client().post(url, json=body, headers=headers, allow_redirects=False) as reply,
        ):
            data = await _read(reply, url)
    except TimeoutError:
        return None, b"", f"no answer in {timeout_s:.3g} s"
    except (InvalidURL, NonHttpUrlClientError) as error:
        raise RewardError(
            f"{url!r} is not a valid address: {error}", hint="Write http://HOST:PORT/PATH."
        ) from error
    except (ClientError, OSError) as error:
        return None, b"", f"{type(error).__name__}: {error}"
    return reply, data, f"{reply.status} {reply.reason}: {_excerpt(data)}"


def _expanded(header: str) -> str:
    """Return a header with the variables that it names.

    :raises RewardError: The environment has not all of them.
    """
    value = os.path.expandvars(header)
    if missing := re.search(r"\$\{?(\w+)", value):
        raise RewardError(
            f"A header of the remote reward names ${missing[1]}, which reward processes do not have.",
            hint=f'Set it, and name it in reward.pass_env = ["{missing[1]}"].',
        )
    return value


async def _read(reply: ClientResponse, url: str) -> bytes:
    data = bytearray()
    async for part in reply.content.iter_any():
        data += part
        if len(data) > _LARGEST_ANSWER:
            raise RewardError(
                f"{url} answered more than {_LARGEST_ANSWER} bytes.",
                hint=_ANSWER,
            )
    return bytes(data)


def _excerpt(data: bytes) -> str:
    return repr(data.decode(errors="replace")[:_EXCERPT])


def _client() -> ClientSession:
    """Return the client of the running event loop, whose connections are used again."""
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        # How many requests run at once is bounded by who calls: reward.concurrency.
        _clients[loop] = ClientSession(
            connector=TCPConnector(limit=0), timeout=ClientTimeout(), trust_env=True
        )
    return _clients[loop]


def _pause(reply: ClientResponse | None, backoff_s: float) -> float:
    """Return the seconds before the next attempt."""
    asked = reply.headers.get("retry-after") if reply is not None else None
    if asked is None:
        return min(backoff_s, _LONGEST_PAUSE_S) * _jitter.uniform(0.5, 1.0)
    try:
        return max(0.0, float(asked))
    except ValueError:
        return _until(asked, backoff_s)


def _until(date: str, otherwise_s: float) -> float:
    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - time.time())
    except ValueError:
        return otherwise_s


def _answer(data: bytes, url: str) -> Any:
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RewardError(
            f"{url} answered {_excerpt(data)}, which is not JSON: {error}.",
            hint=_ANSWER,
        ) from error
    if isinstance(value, (int, float, dict)):
        return value
    raise RewardError(
        f"{url} answered {value!r:.{_EXCERPT}}, neither a number nor an object.",
        hint=_ANSWER,
    )
