"""The client of one SGLang server."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any, Literal

import orjson

from anygauge.serving.engine_state import retry_pause_s
from anygauge.serving.sglang.client.batches import Batches, RefusedTogetherError
from anygauge.serving.sglang.client.channel import Channel, OpenFilesError
from anygauge.serving.sglang.client.media import needs_contents
from anygauge.serving.sglang.client.wire import BootstrapRoom, read_answer, request_body, was_aborted
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.serving import ClientLimits, EngineAwayError, ImageEncoder, MemoryState
from anygauge_hooks.sglang import NO_KEYS, ServerKeys

__all__ = ["EngineClient"]

_ABANDON_S = 10.0
"""For telling an engine that nobody waits for a request any more."""
_PROFILE_S = 600.0
"""For writing a profile, during which an engine answers nothing."""
_LOOK_S = 0.05
"""Interval of checks whether an engine is idle."""
MemoryPart = Literal["kv_cache", "weights", "cuda_graph"]
"""Part of an engine's memory, by SGLang's tag. Released parts come back empty."""
_RELEASED: Mapping[MemoryState, frozenset[MemoryPart]] = {
    "nothing": frozenset({"kv_cache", "cuda_graph", "weights"}),
    "weights": frozenset({"kv_cache", "cuda_graph"}),
    "everything": frozenset(),
}


class EngineClient:
    """Speaks to one engine. Belongs to the event loop that first uses it.

    :param address: ``http://host:port``.
    :param options: Limits; ``concurrency`` bounds what this client has under way.
    :param name: How errors call the engine.
    :param image_encoder: Encoder for requests that have media; ``None`` refuses them.
    :param keys: Keys that the server asks for.
    :param bootstrap: ``host:port`` of the bootstrap server of one that only reads prompts.
    :param adapter: Name of the adapter that answers; empty for the engine's weights alone.

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
        bootstrap: str = "",
        adapter: str = "",
    ) -> None:
        self.address = address.rstrip("/")
        self.name = name or f"the engine at {self.address}"
        self.options = options
        self._image_encoder = image_encoder
        self._bootstrap = bootstrap
        self._adapter = adapter
        self._rids: set[str] = set()
        self._probes = 0
        self._aborts = 0
        self.silence = ""
        """Why the last health probe failed."""
        self.weight_version = 0
        """Not used: SGLang's answers say which weights made a token."""
        self._released: frozenset[MemoryPart] = frozenset()
        self._channel = Channel(self.address, self.name, keys)
        self._batches = Batches(self._post, self.name, adapter=adapter)
        self._room = asyncio.Semaphore(options.concurrency or sys.maxsize)
        self._head, self._numbers = secrets.token_hex(6), itertools.count()
        self._farewells: set[asyncio.Task[None]] = set()

    # ---- generation ----

    async def generate(
        self,
        request: GenerateRequest,
        *,
        rank: int | None = None,
        handover: BootstrapRoom | None = None,
        ends: float | None = None,
    ) -> Generation:
        """Generate a continuation of a request's tokens. Waits while the client is at its concurrency limit.

        A request that fails, or whose caller is cancelled, is ended in the engine too. It may be given again,
        to this engine or another: each attempt has an id of its own.

        :param rank: Data-parallel rank of the engine; ``None`` leaves the choice to the engine.
        :param handover: With an engine that reads the prompt.
        :param ends: Deadline on the event loop's clock; ``None`` takes ``options.request_timeout_s``.
        :raises RolloutError: The engine refuses the request, or failed.
        :raises DeadlineError: No answer in ``options.request_timeout_s``.
        """
        if ends is None:
            ends = asyncio.get_running_loop().time() + self.options.request_timeout_s
        aborts = self._aborts
        if handover is None and self._batches.takes(request):
            with suppress(RefusedTogetherError):
                async with self._attempt(request, ends) as rid:
                    return await self._batches.generate(request, rid, rank=rank, ends=ends)
            if self._aborts != aborts:  # SGLang refuses a batch if an abort hits it half read
                return Generation((), (), (), "abort")
        return read_answer(await self._request(request, rank, handover, ends), self.name, request)

    def handover(self, rank: int | None) -> BootstrapRoom:
        """Return a new room at the server's bootstrap address.

        https://docs.sglang.io/advanced_features/pd_disaggregation.html
        """
        host, _, port = self._bootstrap.rpartition(":")
        return BootstrapRoom(host, int(port), secrets.randbits(63), rank)

    async def read(
        self, request: GenerateRequest, handover: BootstrapRoom, *, rank: int | None = None
    ) -> None:
        """Prefill the prompt for another engine. Returns once that has fetched the KV cache.

        What the answer says of the first token counts for nothing: the other engine says it too.

        :raises EngineAwayError: It failed, or was told to end it.
        :raises RolloutError: It refuses the request.
        :raises DeadlineError: No answer in ``options.request_timeout_s``.
        """
        ends = asyncio.get_running_loop().time() + self.options.request_timeout_s
        if was_aborted(await self._request(request, rank, handover, ends)):
            raise EngineAwayError(f"{self.name} has ended request {request.label} before it was read.")

    async def _request(
        self, request: GenerateRequest, rank: int | None, bootstrap: BootstrapRoom | None, ends: float
    ) -> bytes:
        async with self._attempt(request, ends) as rid:
            media = await self._media(request)
            body = request_body(
                request, rid, rank=rank, bootstrap=bootstrap, media=media, adapter=self._adapter
            )
            return await self._post(body, ends, f"request {request.label}")

    async def _post(self, body: bytes, ends: float, purpose: str) -> bytes:
        left_s = ends - asyncio.get_running_loop().time()
        return await self._channel.request("/generate", body, timeout_s=left_s, purpose=purpose)

    async def _media(self, request: GenerateRequest) -> list[bytes]:
        if not request.media:
            return []
        if self._image_encoder is None:
            raise RolloutError(
                f"Request {request.label} has media, and this run has no store of them.",
                hint='Say what the model takes: model.modalities = ["image"].',
            )
        return await self._image_encoder.encoded(request.media, contents=needs_contents(request))

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

    async def abort(self) -> None:
        """Abort all generations in the engine, also other clients'; each returns its tokens so far."""
        self._aborts += 1
        body = {"rid": "", "abort_all": True}
        await self.command("/abort_request", body, purpose="the end of all requests")

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
        wanted = _RELEASED[state]
        if releases := wanted - self._released:
            await self._wait_until_idle()
            await self.move_memory("release", releases)
        if restores := self._released - wanted:
            await self.move_memory("resume", restores)
        self._released = wanted

    async def _wait_until_idle(self) -> None:
        """Return once the engine has no request and has forgotten all prefixes: it would die otherwise.

        Requests that were given up here may still run there for a moment.
        """
        limit_s = self.options.control_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while self._rids or self._probes or not await self.flush_cache():
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name} still had requests {limit_s:g} s after it was asked to make room for the "
                "trainers.",
                hint="Send it no requests but those of the run; raise rollout.client.control_timeout_s if "
                "its requests end later.",
            ) from error

    async def move_memory(self, verb: Literal["release", "resume"], parts: Iterable[MemoryPart]) -> None:
        """Have the engine release parts of its memory, or restore them.

        An engine dies that has requests, or is told to release a part twice.
        """
        tags = sorted(parts)
        path, purpose = f"/{verb}_memory_occupation", f"the {verb} of {' and '.join(tags)}"
        await self.command(path, {"tags": tags}, purpose=purpose, repeat=False)

    async def start_profile(self, directory: str) -> None:
        """Begin a profile with torch's profiler.

        SGLang writes one trace for each of its ranks, without Python's stacks: those of a rollout
        take it minutes to write, and it serves nothing while it writes.
        https://docs.sglang.io/developer_guide/benchmark_and_profiling.html
        """
        body = {"output_dir": directory, "with_stack": False}
        await self.command("/start_profile", body, purpose="a profile", repeat=False)

    async def stop_profile(self) -> None:
        """End the profile; SGLang answers once it is written."""
        purpose = "the end of the profile"
        await self.command("/stop_profile", {}, purpose=purpose, repeat=False, limit_s=_PROFILE_S)

    async def is_healthy(self) -> bool:
        """Return whether the engine makes tokens. A paused one does not; see :meth:`is_answering`."""
        self._probes += 1
        try:
            return await self._answers("/health")
        finally:
            self._probes -= 1

    async def is_answering(self) -> bool:
        """Return whether the engine's front answers, also while it is paused."""
        return await self._answers("/model_info")

    async def _answers(self, path: str) -> bool:
        limit_s = self.options.probe_timeout_s
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
        repeat: bool = True,
        limit_s: float | None = None,
    ) -> Mapping[str, Any]:
        """Call an endpoint and return its answer as a mapping; empty if it is not an object.

        :param body: ``None`` sends a GET.
        :param repeat: Whether it may be sent again after a failure, since a second time changes nothing.
        :param limit_s: Longest wait, for all attempts; ``options.control_timeout_s`` by default.
        :raises RolloutError: The engine refuses, or failed in every attempt.
        :raises DeadlineError: No answer in that time.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + (limit_s or self.options.control_timeout_s)
        data = None if body is None else orjson.dumps(body)
        for number in itertools.count(1):
            left_s = max(ends - clock(), 0.001)
            try:
                answer = await self._channel.request(path, data, timeout_s=left_s, purpose=purpose)
            except EngineAwayError:
                pause_s = retry_pause_s(self.options, number)
                if not repeat or number >= self.options.attempts or clock() + pause_s >= ends:
                    raise
                await asyncio.sleep(pause_s)
            else:
                break
        return _mapping(answer)

    async def close(self, *, farewell_s: float = _ABANDON_S) -> None:
        """Abort abandoned requests in the engine, then close the connections.

        :param farewell_s: Longest wait for that; an engine that is dead is not worth any.
        """
        if self._farewells:
            await asyncio.wait(self._farewells, timeout=farewell_s)
        await self._channel.close()


def _is_refusal(error: BaseException) -> bool:
    """Return whether the engine has answered, so that nothing is left to end in it."""
    return isinstance(error, RolloutError) and not isinstance(error, EngineAwayError)


def _mapping(data: bytes) -> Mapping[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
