"""Engine pool: routes requests to the least loaded engine, and retries those of a lost engine on another."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from anygauge.config.schema import RolloutClient
from anygauge.observability.phases import PhaseTime
from anygauge.serving.activity import Activity
from anygauge.serving.admission_queue import AdmissionQueue
from anygauge.serving.engine_state import (
    DisplacedError,
    EngineReport,
    EngineState,
    PoolEngine,
    attempting,
    end_attempts,
    retry_pause_s,
)
from anygauge.serving.image_encoder import ImageEncoder
from anygauge.serving.load_balancer import LoadBalancer, Ticket
from anygauge.serving.prefill import Prefill, handover
from anygauge_hooks.errors import AnygaugeError, DeadlineError, RolloutError
from anygauge_hooks.media import MediaStore
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.serving import EngineAwayError, EngineClient, MemoryState, ServerKind, ServerPeer

if TYPE_CHECKING:
    from anygauge_hooks.serving import SupportsProfile

__all__ = ["EnginePool", "EngineReport", "EngineState"]

_SIGNS = 2
"""Probes that an engine may miss, one after the other, before it counts as dead."""
CONCURRENCY = 256
"""Requests in flight for a rank of an engine that does not tell how many it runs at once."""
T = TypeVar("T")


class _Failure(NamedTuple):
    engines: Sequence[str]
    error: AnygaugeError


class _Tickets(NamedTuple):
    """In the engine that answers, and in the one that reads the prompt for it."""

    answering: Ticket
    prefill: Ticket | None

    @property
    def engines(self) -> list[str]:
        return [each.engine for each in self if each is not None]


@dataclass(eq=False, slots=True)
class _Active:
    """A request under way."""

    failures: list[_Failure] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    ends: float | None = None
    """Deadline of all attempts, on the event loop's clock; ``None`` before the first."""


class EnginePool:
    """A :class:`~anygauge_hooks.rollout.Generator` over engines that come and go. Belongs to one event loop.

    :param options: Limits of each engine's client and of the pool.
    :param died: Called with the name of an engine and the reason, when it is found dead.
    :param store: Where the media of requests are; ``None`` in a run of text.

    Example::

        pool = EnginePool(config.rollout.client)
        pool.add("engine-0", server.peer())
        generation = await pool.generate(request)
        await pool.close()
    """

    def __init__(
        self,
        options: RolloutClient,
        *,
        died: Callable[[str, str], None] | None = None,
        store: MediaStore | None = None,
    ) -> None:
        self._options, self._died = options, died
        self._image_encoder = None if store is None else ImageEncoder(store)
        self._balancer = LoadBalancer(affinity=options.affinity)
        self._queue = AdmissionQueue(self._balancer, options.outage_timeout_s, self._describe)
        self._prefill_balancer = LoadBalancer(affinity=options.affinity)
        """Load balancer of the prefill engines."""
        self._prefill_queue = AdmissionQueue(self._prefill_balancer, options.outage_timeout_s, self._describe)
        self._engines: dict[str, PoolEngine] = {}
        self._activities: defaultdict[str, Activity] = defaultdict(Activity)
        """Activities by name; an engine that takes the place of another goes on with its activity."""
        self._active: set[_Active] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---- engines ----

    def add(
        self,
        name: str,
        peer: ServerPeer,
        *,
        kind: ServerKind = "regular",
        concurrency: int | None = None,
        state: EngineState = "serving",
    ) -> None:
        """Let requests go to an engine. One of this name, such as a dead one, is replaced.

        :param kind: Requests go to ``regular`` engines, or to one that only reads prompts (``prefill``) and
            one that only writes responses (``decode``). An ``encoder`` gets none, but is asked for signs of
            life.
        :param concurrency: Most requests in flight per data-parallel rank; ``None`` takes the options', or
            else the engine's own limit.
        :param state: Before its first request: ``"paused"`` until :meth:`mark` lets it serve.
        """
        if name in self._engines:
            self._forget(name, "it was replaced")
        limit = concurrency or self._options.concurrency or peer.max_running_requests or CONCURRENCY
        ranks = peer.data_parallel
        options = self._options.model_copy(update={"concurrency": limit * ranks})
        client = peer.client(options, name=f"{name} ({peer.address})", images=self._image_encoder)
        engine = self._engines[name] = PoolEngine(name, client, ranks, kind, state)
        if (balancer := self._balancer_of(engine)) is not None:
            balancer.add(name, ranks=ranks, concurrency=limit)
        engine.watch = self._spawn(self._watch(engine))
        self._changed(engine)

    def _balancer_of(self, engine: PoolEngine) -> LoadBalancer | None:
        if engine.kind == "encoder":
            return None
        return self._prefill_balancer if engine.kind == "prefill" else self._balancer

    def remove(self, name: str) -> None:
        """Remove an engine; its requests are retried elsewhere. The server is not stopped."""
        self._changed(self._forget(name, "it was removed"))

    def _forget(self, name: str, reason: str) -> PoolEngine:
        engine = self._engines.pop(name)
        if (balancer := self._balancer_of(engine)) is not None:
            balancer.remove(name)
        patience = {"farewell_s": 0.0} if engine.state == "dead" else {}
        engine.state, engine.reason = "dead", reason
        end_attempts(engine)
        for task in (engine.watch, engine.probe):
            if task is not None:
                task.cancel()
        self._spawn(engine.client.close(**patience))
        return engine

    def client(self, name: str) -> EngineClient:
        """Return the client of an engine, for commands to that engine alone."""
        return self._engines[name].client

    def mark(self, name: str, state: EngineState, reason: str = "") -> None:
        """Say how an engine is. What it has is generated elsewhere if it is unusable or dead.

        One that is asleep serves or is paused once it wakes.
        """
        engine = self._engines[name]
        if engine.state == "asleep" and state in ("serving", "paused"):
            engine.awake = state
            return
        was, engine.state = engine.state, state
        engine.reason = reason or ("" if state == "serving" else f"it was marked {state}")
        if engine.is_lost:
            end_attempts(engine)
        self._changed(engine)
        if state == "dead" and was != "dead" and self._died is not None:
            self._died(name, engine.reason)

    def report(self) -> Mapping[str, EngineReport]:
        """Return how each engine is, by name."""
        loads = {**self._balancer.loads(), **self._prefill_balancer.loads()}
        return {
            name: EngineReport(
                engine.state, engine.client.address, engine.reason, loads.get(name, []), engine.kind
            )
            for name, engine in self._engines.items()
        }

    def take_idle(self) -> list[str]:
        """Return the engines that got no request since the last call; encoders get none."""
        return [*self._balancer.take_idle(), *self._prefill_balancer.take_idle()]

    def take_phases(self) -> Mapping[str, Sequence[PhaseTime]]:
        """Return and forget what each engine did since the last call, by name."""
        return {name: activity.take() for name, activity in self._activities.items()}

    @property
    def waiting(self) -> int:
        """Return how many requests wait for an engine with room."""
        return len(self._queue) + len(self._prefill_queue)

    @property
    def serves(self) -> bool:
        """Return whether requests are answered, by one engine or by the two halves of one."""
        return not self._queue.outage

    def _changed(self, engine: PoolEngine) -> None:
        """Let the state of an engine take effect."""
        self._activities[engine.name].set_state(engine.state)
        reads = any(each.state == "serving" for each in self._of_kind("prefill"))
        # who only writes is of no use without one who reads
        affected = [engine, *self._of_kind("decode")] if engine.kind == "prefill" else [engine]
        for each in affected:
            if (balancer := self._balancer_of(each)) is not None:
                is_open = each.state == "serving" and each.probe is None
                balancer.set_open(each.name, is_open and (reads or each.kind != "decode"))
        answering = (*self._of_kind("regular"), *(self._of_kind("decode") if reads else ()))
        self._queue.set_outage(all(each.state != "serving" for each in answering))
        self._prefill_queue.set_outage(not reads)
        self._serve()

    def _of_kind(self, kind: ServerKind) -> Iterable[PoolEngine]:
        return (each for each in self._engines.values() if each.kind == kind)

    def _serve(self) -> None:
        """Give places to those who wait."""
        self._prefill_queue.serve()
        self._queue.serve()

    def _describe(self) -> str:
        listed = [f"{name} is {each.state}: {each.reason}." for name, each in self._engines.items()]
        return " ".join(listed) or "There is no engine."

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- signs of life ----

    def _suspect(self, engine: PoolEngine) -> None:
        """Give an engine nothing new until it says that it is well; without that it is dead."""
        if engine.state == "serving" and engine.probe is None:
            engine.probe = self._spawn(self._probe(engine))
            self._changed(engine)

    async def _probe(self, engine: PoolEngine) -> None:
        well = await self._shows_life(engine)
        engine.probe = None
        self._conclude(engine, well)

    async def _watch(self, engine: PoolEngine) -> None:
        """Ask an engine that owes answers now and then whether it is well."""
        while engine.state != "dead":
            await asyncio.sleep(self._options.probe_every_s)
            owes = engine.attempts or engine.kind == "encoder"  # the encoders' debtors are other engines
            if owes and engine.probe is None and not engine.is_lost:
                self._conclude(engine, await self._shows_life(engine))

    async def _shows_life(self, engine: PoolEngine) -> bool:
        for _ in range(_SIGNS):
            asked = engine.state
            # Paused, or writing a profile, it makes no token, as its health check wants; its front answers.
            makes_tokens = asked == "serving" and not engine.writes_profile
            healthy = engine.client.is_healthy if makes_tokens else engine.client.is_answering
            if await healthy() or engine.state != asked:
                return True
        return False

    def _conclude(self, engine: PoolEngine, well: bool) -> None:
        if self._engines.get(engine.name) is not engine or engine.is_lost:
            return
        if well:
            self._changed(engine)
        else:
            self.mark(engine.name, "dead", f"it shows no sign of life: {engine.client.silence}")

    # ---- generation ----

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate a continuation. A lost engine costs only time."""
        with self._active_request() as active:
            while True:
                tickets = await self._enter(active, request)
                if tickets is None:
                    return Generation((), (), (), "abort")
                try:
                    generation = await self._generate(active, request, tickets)
                except (EngineAwayError, DeadlineError) as error:
                    self._note(request, active, _Failure(tickets.engines, error))
                else:
                    self._balancer.release(tickets.answering, _length(generation))
                    return generation
                finally:
                    self._leave(tickets)

    async def _enter(self, active: _Active, request: GenerateRequest) -> _Tickets | None:
        """Return a place, or ``None`` if the request was aborted."""
        if active.failures and not isinstance(active.failures[-1].error, DisplacedError):
            with suppress(TimeoutError):
                async with asyncio.timeout(retry_pause_s(self._options, len(active.failures))):
                    await active.aborted.wait()
        if active.aborted.is_set():
            return None
        if self._sleeps():
            raise RolloutError(
                f"Request {request.label} came while the trainers have the engines' devices. "
                f"{self._describe()}",
                hint="Generate before a step trains, or after its weights were synced.",
            )
        avoid = {engine for failure in active.failures for engine in failure.engines}
        answering = await self._queue.enter(request, avoid)
        if answering is None:
            return None
        engine = self._engines.get(answering.engine)
        if engine is None or engine.kind != "decode":
            return _Tickets(answering, None)
        prefill = None
        try:
            prefill = await self._prefill_queue.enter(_prompt_alone(request), avoid)
        finally:
            if prefill is None:
                self._give_back(self._balancer, answering)
        return None if prefill is None else _Tickets(answering, prefill)

    async def _generate(self, active: _Active, request: GenerateRequest, tickets: _Tickets) -> Generation:
        if active.ends is None:
            active.ends = asyncio.get_running_loop().time() + self._options.request_timeout_s
        engine, rank = self._engine_of(tickets.answering)
        with self._activities[engine.name].request(), self._prefill(request, tickets) as prefills:
            async with attempting(engine, *prefills):
                return await engine.client.generate(
                    request, rank=rank, ends=active.ends, **handover(prefills)
                )

    @contextmanager
    def _prefill(self, request: GenerateRequest, tickets: _Tickets) -> Iterator[Sequence[Prefill]]:
        """Have the prompt read by the engine that the place names for that, if it names one."""
        if (ticket := tickets.prefill) is None:
            yield ()
            return
        engine, rank = self._engine_of(ticket)
        prefill, activity = Prefill(engine, request, rank), self._activities[engine.name]
        activity.add(1)
        prefill.task.add_done_callback(lambda _: activity.add(-1))
        prefill.task.add_done_callback(lambda _: self._give_back(self._prefill_balancer, ticket))
        try:
            yield (prefill,)
        finally:
            prefill.end()

    def _engine_of(self, ticket: Ticket) -> tuple[PoolEngine, int | None]:
        """Return the engine of a place, and the rank in it if it has several."""
        engine = self._engines.get(ticket.engine)
        if engine is None:
            raise DisplacedError(f"{ticket.engine} was removed before a request reached it")
        return engine, ticket.rank if engine.ranks > 1 else None

    def _note(self, request: GenerateRequest, active: _Active, failure: _Failure) -> None:
        """Remember a failed attempt; raise if there were too many, or no time is left."""
        failures = active.failures
        failures.append(failure)
        for name in failure.engines:
            engine = self._engines.get(name)
            if engine is not None and not isinstance(failure.error, DisplacedError):
                self._suspect(engine)
        is_late = active.ends is not None and asyncio.get_running_loop().time() >= active.ends
        if is_late or len(failures) >= self._options.attempts:
            listed = "\n    ".join(dict.fromkeys(str(each.error.args[0]) for each in failures))
            raise RolloutError(
                f"Request {request.label} failed in {len(failures)} attempts:\n    {listed}",
                hint="See the logs of these engines.",
            ) from failure.error

    def _leave(self, tickets: _Tickets) -> None:
        self._give_back(self._balancer, tickets.answering)
        if tickets.prefill is not None:
            self._give_back(self._prefill_balancer, tickets.prefill)

    def _give_back(self, balancer: LoadBalancer, ticket: Ticket) -> None:
        balancer.release(ticket)
        self._serve()

    @contextmanager
    def _active_request(self) -> Iterator[_Active]:
        """Let :meth:`abort` see that a request is under way."""
        active = _Active()
        self._active.add(active)
        try:
            yield active
        finally:
            self._active.discard(active)

    # ---- all engines at once ----

    async def abort(self) -> None:
        """Abort all generations in flight; each returns its tokens so far, with finish reason ``"abort"``.

        A request that reaches an engine just after goes on: ask again while any is unanswered. With an abort
        for each of a thousand requests, an engine would need longer than to answer them.
        """
        await self.abort_waiting()
        for active in self._active:
            active.aborted.set()
        for engine, error in await self._command(self._reachable(), lambda engine: engine.client.abort()):
            self._lose(engine, error)

    async def abort_waiting(self) -> None:
        """End the requests that wait for an engine, with no tokens; those that engines have go on."""
        self._queue.abort()
        self._prefill_queue.abort()

    async def set_memory_state(self, state: MemoryState) -> None:
        """Let the engines have that much in memory: all but ``"everything"`` puts them to sleep.

        One that cannot be moved there counts as dead. None may have a request that is to be answered.
        """
        engines = self._living()
        for engine in engines if state != "everything" else ():
            if engine.state != "asleep":
                engine.awake = engine.state
            self.mark(engine.name, "asleep", f"it has {state} in memory")
        for engine, error in await self._command(
            engines, lambda engine: engine.client.set_memory_state(state)
        ):
            self._lose(engine, error)
        for engine in engines:
            engine.memory_state = state
        for engine in self._living() if state == "everything" else ():
            if engine.state == "asleep":
                engine.state = "paused"
                self.mark(engine.name, engine.awake)

    async def start_profile(self, directories: Mapping[str, Path]) -> list[str]:
        """Have engines begin a profile, and return what went wrong.

        :param directories: Directories by name of the engine; others record none.
        """
        engines = [each for each in self._living() if each.name in directories]
        return await self._profile(
            engines, lambda engine: _profiler(engine).start_profile(str(directories[engine.name]))
        )

    async def stop_profile(self, names: Collection[str]) -> list[str]:
        """Have engines write the profiles that they have begun, and return what went wrong."""
        engines = [each for each in self._living() if each.name in names]
        return await self._profile(engines, _write_profile)

    async def _profile(
        self, engines: Sequence[PoolEngine], call: Callable[[PoolEngine], Awaitable[None]]
    ) -> list[str]:
        failed = await self._command(engines, call)
        return [f"{engine.name} records no profile: {error.args[0]}" for engine, error in failed]

    def _sleeps(self) -> bool:
        """Return whether the engines have nothing left to generate with, so that no wait would help."""
        held = [engine.memory_state for engine in self._living()]
        return bool(held) and set(held) == {"nothing"}

    def _living(self) -> list[PoolEngine]:
        return [each for each in self._engines.values() if not each.is_lost]

    def _reachable(self) -> list[PoolEngine]:
        """Return the engines that requests go to."""
        return [each for each in self._engines.values() if not each.is_lost and each.kind != "encoder"]

    async def _command(
        self, engines: Sequence[PoolEngine], call: Callable[[PoolEngine], Awaitable[None]]
    ) -> list[tuple[PoolEngine, AnygaugeError]]:
        """Command engines at once; return those that failed, and why."""

        async def one(engine: PoolEngine) -> AnygaugeError | None:
            try:
                async with attempting(engine):
                    await call(engine)
            except (RolloutError, DeadlineError) as error:
                return error
            return None

        errors = await asyncio.gather(*map(one, engines))
        return [(engine, error) for engine, error in zip(engines, errors, strict=True) if error is not None]

    def _lose(self, engine: PoolEngine, error: AnygaugeError) -> None:
        """Count an engine as dead that did not do as it was told."""
        if self._engines.get(engine.name) is engine and not engine.is_lost:
            self.mark(engine.name, "dead", str(error.args[0]))

    async def close(self) -> None:
        """Let go of every engine; requests under way fail. No server is stopped."""
        for name in list(self._engines):
            self.remove(name)
        self._queue.close()
        self._prefill_queue.close()
        while self._tasks:
            await asyncio.wait(self._tasks)


async def _write_profile(engine: PoolEngine) -> None:
    engine.writes_profile = True
    try:
        await _profiler(engine).stop_profile()
    finally:
        engine.writes_profile = False


def _prompt_alone(request: GenerateRequest) -> GenerateRequest:
    """Return what one who only reads has to do."""
    return request._replace(params=replace(request.params, max_new_tokens=1))


def _profiler(engine: PoolEngine) -> SupportsProfile:
    return cast("SupportsProfile", engine.client)


def _length(generation: Generation) -> int | None:
    """Return the length of a response that ended by itself."""
    return None if generation.finish_reason == "abort" else len(generation.tokens)
