"""Chaos test of an engine pool: fake engines are killed, hang, refuse weights, and are restarted."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Literal, cast, get_args

from anygauge.config.schema import RolloutClient
from anygauge.serving.engine_pool import EnginePool
from anygauge.serving.sglang.client import EngineClient
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge_hooks.errors import AnygaugeError, DeadlineError, RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.serving import EngineAwayError
from anygauge_tests.chaos_summary import RequestSummary
from anygauge_tests.fake_engine import EOS, FakeServer, Options, expected
from anygauge_tests.fake_engine.process import MODULE
from anygauge_tests.fork_server import ForkServers
from anygauge_tests.pauses import pause, resume, using

__all__ = ["Outcome", "Strike", "run_chaos"]

Strike = Literal["kill", "pause", "update", "refuse", "refuse late", "die in update", "hang", "slow", "error"]
"""Fault injected into an engine. ``refuse`` rejects the beginning of an update, ``refuse late`` its end."""
_WEIGHTS: Mapping[Strike, int] = {
    "kill": 8,
    "pause": 8,
    "update": 4,
    "refuse": 6,
    "refuse late": 2,
    "die in update": 3,
    "hang": 3,
    "slow": 2,
    "error": 4,
}
_OPTIONS = RolloutClient(
    concurrency=16,
    request_timeout_s=60.0,
    control_timeout_s=20.0,
    attempts=100,
    pause_s=0.02,
    probe_every_s=0.2,
    probe_timeout_s=1.0,
    outage_timeout_s=60.0,
)
_ENGINE = Options(weight_version="0", token_s=0.004, slots=16, lengths="uniform:20:200", disconnect_s=0.5)
_LAST_S = 60.0
"""Seconds for in-flight requests to finish after the last fault."""


@dataclass
class Outcome(RequestSummary):
    """Result of a chaos run."""

    strikes: Counter[Strike] = field(default_factory=Counter)
    restarts: int = 0
    seconds: float = 0.0


def run_chaos(seed: int, strikes: int, *, engines: int = 4, under_way: int = 12) -> Outcome:
    """Return the outcome of an engine pool's requests while faults are injected into its engines.

    Each token of each response is compared with what the weights of its version give.

    :param under_way: Requests at any time.
    """
    return asyncio.run(_ChaosRun(seed, engines, under_way).run(strikes))


class _ChaosRun:
    def __init__(self, seed: int, engines: int, under_way: int) -> None:
        # Which engines serve depends on time, and what is drawn among them on that: it has its own numbers.
        self._kinds, self._draw, self._under_way = Random(seed), Random(seed + 1), under_way
        self._fork_servers = ForkServers(None, [MODULE])
        self._servers = {
            f"engine-{number}": FakeServer(_ENGINE, fork_servers=self._fork_servers)
            for number in range(engines)
        }
        self._version = 0
        self._numbers = itertools.count()
        self._over = False
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self.outcome = Outcome()

    async def run(self, strikes: int) -> Outcome:
        self._pool = EnginePool(_OPTIONS, died=self._restart_later)
        try:
            await asyncio.gather(*map(self._start, self._servers))
            workers = [asyncio.create_task(self._work()) for _ in range(self._under_way)]
            began = time.monotonic()
            for _ in range(strikes):
                await self._strike_one()
            self._over = True
            await self._finish(workers)
            self.outcome.seconds = time.monotonic() - began
        finally:
            await asyncio.gather(*self._restarts.values(), return_exceptions=True)
            await self._pool.close()
            for server in self._servers.values():
                server.close()
            self._fork_servers.close()
        return self.outcome

    async def _finish(self, workers: list[asyncio.Task[None]]) -> None:
        _, late = await asyncio.wait(workers, timeout=_LAST_S)
        for task in late:
            task.cancel()
            self.outcome.problems.append("a request was still in flight long after the faults ended")

    # ---- engines ----

    async def _start(self, name: str) -> None:
        """Start an engine, or start it again, with the weights of now."""
        server = self._servers[name]
        server.options = replace(server.options, weight_version=str(self._version))
        address = await asyncio.to_thread(server.start)
        self._pool.add(name, SGLangPeer(address=address), concurrency=_OPTIONS.concurrency)

    def _restart_later(self, name: str, reason: str) -> None:
        self.outcome.restarts += 1
        self._restarts[name] = asyncio.get_running_loop().create_task(self._start(name))

    def _check_restarts(self) -> None:
        """Raise what kept an engine from starting again: nobody would wait for it in vain."""
        for task in self._restarts.values():
            if task.done():
                task.result()

    def _serving(self) -> list[str]:
        return [name for name, report in self._pool.report().items() if report.state == "serving"]

    # ---- requests ----

    async def _work(self) -> None:
        while not self._over:
            number = next(self._numbers)
            self.outcome.sent += 1
            try:
                generation = await self._request(number)
            except AnygaugeError as error:
                self.outcome.problems.append(f"request {number}: {error}")
                continue
            self.outcome.answers[number] += 1
            self._check(number, generation)

    async def _request(self, number: int) -> Generation:
        params = SamplingParams(max_new_tokens=1000)
        request = GenerateRequest(
            str(number), (5, number % 997), params, seed=number, session=str(number // 4)
        )
        return await self._pool.generate(request)

    def _check(self, number: int, generation: Generation) -> None:
        """Compare every token and log-prob with what the weights of its version give."""
        start, prompt = 0, (5, number % 997)
        for version, run in itertools.groupby(generation.weight_versions):
            end = start + len(list(run))
            tokens, log_probs = expected(prompt, number, version, start, end)
            ours = generation.tokens[start:end]
            if end == len(generation.tokens):
                tokens = (*tokens[:-1], EOS)
            if ours != tokens or generation.log_probs[start:end] != log_probs:
                self.outcome.problems.append(f"request {number} has wrong tokens of version {version}")
            self.outcome.mixed += bool(start)
            start = end
        if generation.finish_reason != "stop":
            self.outcome.problems.append(f"request {number} ended for {generation.finish_reason}")

    # ---- strikes ----

    async def _strike_one(self) -> None:
        """Let something happen to an engine that serves, once there are two."""
        while len(self._serving()) < 2:
            self._check_restarts()
            await asyncio.sleep(0.01)
        name = self._draw.choice(sorted(self._serving()))
        (kind,) = self._kinds.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        with suppress(OSError):  # the engine has died meanwhile, of an earlier strike
            await self._strikes()[kind](name)
        self.outcome.strikes[kind] += 1
        await asyncio.sleep(self._draw.uniform(0, 0.05))

    def _strikes(self) -> Mapping[Strike, Callable[[str], Coroutine[Any, Any, None]]]:
        strikes: dict[Strike, Callable[[str], Coroutine[Any, Any, None]]] = {
            "kill": self._kill,
            "pause": self._pause,
            "update": self._update,
            "refuse": lambda name: self._update(name, "refuse", "begin"),
            "refuse late": lambda name: self._update(name, "refuse", "end"),
            "die in update": lambda name: self._update(name, "die_mid_update", "end"),
            "hang": lambda name: self._order(name, "hang"),
            "slow": self._slow,
            "error": lambda name: self._order(name, "error", count=1, argument=self._draw.choice([500, 503])),
        }
        assert set(strikes) == set(get_args(Strike))
        return strikes

    async def _order(self, name: str, kind: str, **more: Any) -> None:
        await asyncio.to_thread(self._servers[name].fault, kind, **more)

    async def _kill(self, name: str) -> None:
        await asyncio.to_thread(self._servers[name].kill)

    async def _slow(self, name: str) -> None:
        await self._order(name, "slow", argument=20.0)
        await asyncio.sleep(0.05)
        await self._order(name, "slow", argument=1.0)

    async def _pause(self, name: str) -> None:
        mode = self._draw.choice(["retract", "in_place"])
        await self._paused(name, lambda: asyncio.sleep(self._draw.uniform(0, 0.1)), mode)

    async def _update(self, name: str, fault: str | None = None, event: str = "") -> None:
        """Give an engine the next version of the weights; something may go wrong on the way."""
        if fault is not None:
            await self._order(name, fault, event=event, count=1)
        self._version += 1
        client, version = cast(EngineClient, self._pool.client(name)), str(self._version)

        async def change() -> None:
            await client.command(
                "/begin_weight_update", {}, purpose="the beginning of an update", repeat=False
            )
            body = {"new_version": version, "abort_all_requests": False}
            try:
                await client.command("/update_weight_version", body, purpose="a version", repeat=False)
                await client.command("/end_weight_update", {}, purpose="the end of an update", repeat=False)
            except RolloutError:
                # It began and did not end: what the engine would make from here on is anybody's guess.
                self._pool.mark(name, "unusable", "an update did not end")
                raise

        await self._paused(name, change, "retract")

    async def _paused(self, name: str, work: Callable[[], Awaitable[None]], mode: Any) -> None:
        """Do something to an engine that makes no token meanwhile, and let it serve again if it can."""
        client = self._pool.client(name)
        self._pool.mark(name, "paused", "somebody works on it")
        try:
            async with using(self._pool, name):
                await pause(client, mode)
                await self._attempted(work)
                if self._state(name, client) == "paused":
                    await resume(client)
                    self._pool.mark(name, "serving")
        except (EngineAwayError, DeadlineError) as error:
            if self._state(name, client) == "paused":
                self._pool.mark(name, "dead", str(error.args[0]))
        if self._state(name, client) == "unusable":
            self._pool.mark(name, "dead", "it is unusable")

    async def _attempted(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do something that an engine may refuse."""
        try:
            await work()
        except EngineAwayError:
            raise
        except RolloutError:
            return

    def _state(self, name: str, client: Any) -> str:
        """Return how an engine is, if it is still the same one."""
        return self._pool.report()[name].state if self._pool.client(name) is client else "replaced"
