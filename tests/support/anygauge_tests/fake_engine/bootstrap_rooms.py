"""The halves of a divided deployment: one fake engine reads a prompt, another writes what follows it.

Both are told the same room. Who writes asks who reads for it, at the address that the request names, and says
which prompt it has; a room that nobody has been told in time, or that is of another prompt, fails both.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from anygauge_tests.fake_engine.options import Options

__all__ = ["HANDOVER", "BootstrapError", "BootstrapRooms"]

HANDOVER = "/fake/handover"


class BootstrapError(Exception):
    """The two halves of a request did not meet."""


class BootstrapRooms:
    """Where prompts that were read wait for those who write.

    :param options: Of the engine; ``disaggregation`` says which half it is.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._read: defaultdict[int, asyncio.Future[Any]] = defaultdict(
            lambda: asyncio.get_running_loop().create_future()
        )
        self._fetched: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.used: list[int] = []
        """Rooms that were met in."""

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuse a request without a room, as SGLang does.

        :raises ValueError: It has none.
        """
        if self._options.disaggregation != "null" and body.get("bootstrap_room") is None:
            raise ValueError("Invalid request: Disaggregated request received without bootstrap room id.")

    async def hand_over(self, body: Mapping[str, Any]) -> None:
        """Return once somebody has fetched the prompt that was read."""
        room = body["bootstrap_room"]
        self._read[room].set_result(body["input_ids"])
        try:
            await self._in_time(self._fetched[room].wait(), f"nobody fetched room {room}")
        finally:
            del self._read[room], self._fetched[room]

    async def fetched(self, room: int, tokens: list[int]) -> None:
        """Let somebody fetch a prompt, once it is read."""
        read = await self._in_time(asyncio.shield(self._read[room]), f"nobody read for room {room}")
        if read != tokens:
            raise BootstrapError(f"room {room} holds another prompt")
        self._fetched[room].set()
        self.used.append(room)

    async def fetch(self, body: Mapping[str, Any]) -> None:
        """Return once the prompt has come from who has read it."""
        host, port, room = (body[f"bootstrap_{name}"] for name in ("host", "port", "room"))
        asked = orjson.dumps({"room": room, "tokens": body["input_ids"]})
        limit = aiohttp.ClientTimeout(total=self._options.bootstrap_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.post(f"http://{host}:{port}{HANDOVER}", data=asked) as answer,
            ):
                if answer.status != 200:
                    raise BootstrapError((await answer.read()).decode())
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise BootstrapError(f"room {room} of {host}:{port}: {error!r}") from error
        self.used.append(room)

    async def _in_time(self, work: Any, what: str) -> Any:
        try:
            async with asyncio.timeout(self._options.bootstrap_s):
                return await work
        except TimeoutError as error:
            raise BootstrapError(f"{what} in {self._options.bootstrap_s:g} s") from error
