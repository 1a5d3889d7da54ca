"""The client of one SGLang server."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, aclosing, asynccontextmanager, suppress
from random import Random
from typing import Any, TypeVar

import orjson

from anygauge.serving.client.channel import Channel, OpenFilesError
from anygauge.serving.client.memory import EngineMemory, MemoryPart
from anygauge.serving.client.wire import (
    BootstrapRoom,
    StreamDecoder,
    check_length,
    read_answer,
    reading,
    request_body,
    was_aborted,
)
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.serving import ClientLimits, EngineAwayError, ImageEncoder, MemoryState
from anygauge_hooks.sglang import NO_KEYS, ServerKeys
from anygauge_hooks.weights import PauseMode

__all__ = ["EngineClient", "retry_pause_s"]

_LONGEST_PAUSE_S = 10.0
_ABANDON_S = 10.0
"""For telling an engine that nobody waits for a request any more."""
_jitter = Random()
"""Separate random generator, so that a retry draws no random number of the run."""
T = TypeVar("T")


class EngineClient:
    """Speaks to one engine. Belongs to the event loop that first uses it.

    :param address: ``http://host:port``.
    :param options: Limits; ``concurrency`` bounds what this client has under way.
    :param name: How errors call the engine.
    :param image_encoder: Of requests that have media; ``None`` refuses them.
    :param keys: That the server asks for.

    Example::

        client = EngineClient("http://127.0.0.1:30000", RolloutClient())
        generation = await client.generate(request)
        await client.close()
    """

    def __init__(
        self,
        address: str,
        options: ClientLimits,
        *,
        name: str | None = None,
        image_encoder: ImageEncoder | None = None,
        keys: ServerKeys = NO_KEYS,
    ) -> None:
        self.address = address.rstrip("/")
        self.name = name or f"the engine at {self.address}"
        self.options = options
        self._image_encoder = image_encoder
        self._rids: set[str] = set()
        self._probes = 0
        self.silence = ""
        """Why the last health probe failed."""
        self.weight_version = 0
        """Not used: SGLang's answers say which weights made a token."""
        self._memory = EngineMemory()
        self._channel = Channel(self.address, self.name, keys)
        self._room = asyncio.Semaphore(options.concurrency)
        self._head, self._numbers = secrets.token_hex(6), itertools.count()
        self._farewells: set[asyncio.Task[None]] = set()

    # ---- generation ----

    async def generate(
        self,
        request: GenerateRequest,
        *,
        rank: int | None = None,
        attempts: int | None = None,
        bootstrap: BootstrapRoom | None = None,
        ends: float | None = None,
    ) -> Generation:
        """Generate a continuation of a request's tokens. Waits while the client is at its concurrency limit.

        An attempt that fails is ended in the engine before the request is given again, under another id.
        Cancelling the call ends the request in the engine too.

        :param rank: Data-parallel rank of the engine; ``None`` leaves the choice to the engine.
        :param attempts: ``None`` takes ``options.attempts``.
        :param bootstrap: With an engine that has read the prompt.
        :param ends: Of the time for all attempts, as the event loop tells it; ``None`` begins it now.
        :raises RolloutError: The engine refuses the request, or failed in every attempt.
        :raises DeadlineError: No answer in ``options.request_timeout_s``.
        """
        if ends is None:
            ends = asyncio.get_running_loop().time() + self.options.request_timeout_s

        async def attempt() -> Generation:
            return read_answer(await self._request(request, rank, bootstrap, ends), self.name, request)

        return await self._repeat(attempt, attempts or self.options.attempts, ends)

    async def read(
        self, request: GenerateRequest, bootstrap: BootstrapRoom, *, rank: int | None = None
    ) -> None:
        """Prefill the prompt for another engine. Returns once that has fetched the KV cache.

        What the answer says of the first token counts for nothing: the other engine says it too.

        :raises EngineAwayError: It failed, or was told to end it.
        :raises RolloutError: It refuses the request.
        :raises DeadlineError: No answer in ``options.request_timeout_s``.
        """
        ends = asyncio.get_running_loop().time() + self.options.request_timeout_s
        if was_aborted(await self._request(request, rank, bootstrap, ends)):
            raise EngineAwayError(f"{self.name} has ended request {request.label} before it was read.")

    async def _request(
        self, request: GenerateRequest, rank: int | None, bootstrap: BootstrapRoom | None, ends: float
    ) -> bytes:
        async with self._attempt(request, ends) as rid:
            images = await self._images(request)
            left_s = ends - asyncio.get_running_loop().time()
            body = request_body(request, rid, rank=rank, bootstrap=bootstrap, images=images)
            purpose = f"request {request.label}"
            return await self._channel.request("/generate", body, timeout_s=left_s, purpose=purpose)

    async def stream(
        self, request: GenerateRequest, *, rank: int | None = None, bootstrap: BootstrapRoom | None = None
    ) -> AsyncGenerator[Generation, None]:
        """Stream a continuation; only the last part has a valid finish reason.

        :raises RolloutError: The engine refuses the request, or broke off (:class:`EngineAwayError`): it is
            not given again here, since parts of it are out already.
        """
        purpose = f"the stream of request {request.label}"
        limit_s = self.options.request_timeout_s
        ends = asyncio.get_running_loop().time() + limit_s
        async with self._attempt(request, ends) as rid:
            model = await self.command("/model_info", None, purpose=purpose, repeat=False)
            parts = StreamDecoder(self.name, model.get("weight_version"))
            images = await self._images(request)
            body = request_body(request, rid, rank=rank, stream=True, bootstrap=bootstrap, images=images)
            pieces = self._channel.stream("/generate", body, timeout_s=limit_s, purpose=purpose)
            async with aclosing(pieces), aclosing(_events(pieces)) as events:
                async for event in events:
                    with reading(event, self.name):
                        chunk = self._chunk(event, purpose)
                        check_length(chunk, request, self.name)
                        part = parts.next(chunk)
                    if part.tokens or parts.finished:
                        yield part
                    if parts.finished:
                        return
            raise EngineAwayError(f"{self.name} interrupted {purpose} after {parts.seen} tokens.")

    async def _images(self, request: GenerateRequest) -> list[bytes]:
        if not request.media:
            return []
        if self._image_encoder is None:
            raise RolloutError(
                f"Request {request.label} has media, and this run has no store of them.",
                hint='Say what the model takes: model.modalities = ["image"].',
            )
        return await self._image_encoder.encoded(request.media)

    def _chunk(self, event: bytes, purpose: str) -> Mapping[str, Any]:
        chunk: Mapping[str, Any] = orjson.loads(event)
        if (error := chunk.get("error")) is None:
            return chunk
        failed = EngineAwayError if int(error.get("code", 400)) >= 500 else RolloutError
        raise failed(f"{self.name} refused {purpose}: {error.get('message')}")

    @asynccontextmanager
    async def _attempt(self, request: GenerateRequest, ends: float) -> AsyncIterator[str]:
        """Yield an id for an attempt once there is room; end it in the engine too if the block fails."""
        await self._wait_for_room(request, ends)
        try:
            # Of one length up to the request's own id: no id begins with another, see request_body.
            rid = f"{self._head}{next(self._numbers):010x}-{request.id}"
            self._rids.add(rid)
            with ExitStack() as attempt:
                attempt.callback(self._rids.discard, rid)
                attempt.push(lambda kind, error, _: self._abandon_failed(rid, error))
                yield rid
        finally:
            self._room.release()

    def _abandon_failed(self, rid: str, error: BaseException | None) -> None:
        if error is not None and not _is_refusal(error):
            self._abandon(rid)

    async def _wait_for_room(self, request: GenerateRequest, ends: float) -> None:
        try:
            async with asyncio.timeout_at(ends):
                await self._room.acquire()
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name} had no room for request {request.label} in "
                f"{self.options.request_timeout_s:.4g} s: {len(self._rids)} others are in flight.",
                hint="Raise rollout.client.concurrency, or request_timeout_s.",
            ) from error

    def _abandon(self, rid: str) -> None:
        """Tell the engine that nobody waits for a request, without waiting for that."""
        task = asyncio.get_running_loop().create_task(self._tell(rid))
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _tell(self, rid: str) -> None:
        with suppress(RolloutError, DeadlineError):  # a dead engine generates nothing either
            body = orjson.dumps({"rid": rid})
            await self._channel.request(
                "/abort_request", body, timeout_s=_ABANDON_S, purpose=f"the end of {rid}"
            )

    # ---- control ----

    def in_flight(self) -> frozenset[str]:
        """Return the ids of the requests that were sent and not answered."""
        return frozenset(self._rids)

    @property
    def is_idle(self) -> bool:
        """Return whether the engine owes this client no token, also of a health check."""
        return not self._rids and not self._probes

    async def abort(self, rids: Iterable[str] | None = None) -> None:
        """Abort generations in the engine; each returns its tokens so far.

        :param rids: Of these alone; ``None`` ends all, also those of other clients.
        """
        if rids is None:
            body: dict[str, Any] = {"rid": "", "abort_all": True}
            await self.command("/abort_request", body, purpose="the end of all requests")
            return
        for rid in rids:
            await self.command("/abort_request", {"rid": rid}, purpose=f"the end of {rid}")

    async def pause(self, mode: PauseMode = "retract") -> None:
        """Let the engine make no token until :meth:`resume`. Requests that come meanwhile wait in it."""
        await self.command("/pause_generation", {"mode": mode}, purpose=f"a pause ({mode})")

    async def resume(self) -> None:
        """Let the engine go on."""
        await self.command("/continue_generation", {}, purpose="the end of a pause")

    async def flush_cache(self) -> bool:
        """Return whether the engine has forgotten all prefixes; it refuses while requests run."""
        try:
            await self.command("/flush_cache", {}, purpose="an empty cache")
        except EngineAwayError:
            raise
        except RolloutError:
            return False
        return True

    async def set_memory_state(self, state: MemoryState) -> None:
        """Have the engine release or restore memory, up to a memory state."""
        await self._memory.set_state(self, state)

    async def release(self, parts: Iterable[MemoryPart]) -> None:
        """Release parts of the engine's memory. An engine with requests, or without that part, dies."""
        await self._move_memory("release", parts)

    async def regain(self, parts: Iterable[MemoryPart]) -> None:
        """Let the engine take parts of its memory again that it has released."""
        await self._move_memory("resume", parts)

    async def _move_memory(self, verb: str, parts: Iterable[MemoryPart]) -> None:
        tags = sorted(parts)
        path, purpose = f"/{verb}_memory_occupation", f"the {verb} of {' and '.join(tags)}"
        await self.command(path, {"tags": tags}, purpose=purpose, repeat=False)

    async def is_healthy(self, timeout_s: float | None = None) -> bool:
        """Return whether the engine makes tokens. A paused one does not; see :meth:`is_answering`."""
        self._probes += 1
        try:
            return await self._answers("/health", timeout_s)
        finally:
            self._probes -= 1

    async def is_answering(self, timeout_s: float | None = None) -> bool:
        """Return whether the engine's front answers, also while it is paused."""
        return await self._answers("/model_info", timeout_s)

    async def _answers(self, path: str, timeout_s: float | None) -> bool:
        limit_s = timeout_s or self.options.probe_timeout_s
        try:
            await self._channel.request(path, None, timeout_s=limit_s, purpose="a sign of life")
        except OpenFilesError:  # it was never asked; who waits for a request is told
            return True
        except (RolloutError, DeadlineError) as error:
            self.silence = str(error.args[0])
            return False
        return True

    async def model_info(self) -> Mapping[str, Any]:
        """Return the engine's report of its model."""
        return await self.command("/model_info", None, purpose="its model")

    async def server_info(self) -> Mapping[str, Any]:
        """Return the server's arguments and version."""
        return await self.command("/server_info", None, purpose="its arguments")

    async def command(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        purpose: str,
        timeout_s: float | None = None,
        repeat: bool = True,
    ) -> Mapping[str, Any]:
        """Call an endpoint and return its answer as a mapping; empty if it is not an object.

        :param body: ``None`` sends a GET.
        :param timeout_s: For all attempts; ``None`` takes ``options.control_timeout_s``.
        :param repeat: Whether it may be sent again after a failure, since a second time changes nothing.
        :raises RolloutError: The engine refuses, or failed in every attempt.
        :raises DeadlineError: No answer in time.
        """
        limit_s = timeout_s or self.options.control_timeout_s
        ends = asyncio.get_running_loop().time() + limit_s
        data = None if body is None else orjson.dumps(body)

        async def attempt() -> Mapping[str, Any]:
            left_s = max(ends - asyncio.get_running_loop().time(), 0.001)
            answer = await self._channel.request(path, data, timeout_s=left_s, purpose=purpose)
            return _mapping(answer)

        return await self._repeat(attempt, self.options.attempts if repeat else 1, ends)

    async def _repeat(self, attempt: Callable[[], Awaitable[T]], attempts: int, ends: float) -> T:
        """Return the first success, with pauses of full jitter between the failures."""
        for number in range(1, attempts + 1):
            try:
                return await attempt()
            except EngineAwayError:
                pause_s = retry_pause_s(self.options, number)
                if number == attempts or asyncio.get_running_loop().time() + pause_s >= ends:
                    raise
            await asyncio.sleep(pause_s)
        raise AssertionError("an attempt returns or raises")

    async def close(self, *, farewell_s: float = _ABANDON_S) -> None:
        """Abort abandoned requests in the engine, then close the connections.

        :param farewell_s: Longest wait for that; an engine that is dead is not worth any.
        """
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=farewell_s)
        await self._channel.close()


def retry_pause_s(options: ClientLimits, failures: int) -> float:
    """Return how long to wait before the next attempt: full jitter below a bound that doubles."""
    return _jitter.uniform(0, min(options.pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S))


def _is_refusal(error: BaseException) -> bool:
    """Return whether the engine has answered, so that nothing is left to end in it."""
    return isinstance(error, RolloutError) and not isinstance(error, EngineAwayError)


def _mapping(data: bytes) -> Mapping[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


async def _events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the data of each server-sent event but the last, ``[DONE]``, however long it is."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                yield data
