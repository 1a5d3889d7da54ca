"""Pauses of engines behind a pool's back, as an operator or another program makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from anygauge.serving.engine_pool import EnginePool
from anygauge.serving.engine_state import attempting
from anygauge.serving.sglang.client import EngineClient as SGLangClient
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.serving import EngineClient
from anygauge_hooks.weights import PauseMode

__all__ = ["pause", "pause_all", "resume", "resume_all", "using"]


async def pause(client: EngineClient, mode: PauseMode) -> None:
    """Let an SGLang server make no token."""
    await cast(SGLangClient, client).command("/pause_generation", {"mode": mode}, purpose=f"a pause ({mode})")


async def resume(client: EngineClient) -> None:
    """Let a paused SGLang server go on."""
    await cast(SGLangClient, client).command("/continue_generation", {}, purpose="the end of a pause")


@asynccontextmanager
async def using(pool: EnginePool, name: str) -> AsyncIterator[EngineClient]:
    """Yield the client of an engine for commands that end at once if the engine is given up.

    :raises EngineAwayError: In the block, when the pool finds the engine dead or it is marked as lost.
    """
    engine = pool._engines[name]
    async with attempting(engine):
        yield engine.client


async def pause_all(pool: EnginePool, mode: PauseMode = "retract") -> None:
    """Let no engine make a token, and give them nothing new. An engine that cannot be paused is dead."""

    async def one(name: str) -> None:
        pool.mark(name, "paused", "all engines are paused")
        async with _dead_on_failure(pool, name), using(pool, name) as client:
            await pause(client, mode)

    await asyncio.gather(*map(one, _names(pool, "serving")))


async def resume_all(pool: EnginePool) -> None:
    """Let the engines that are paused go on."""

    async def one(name: str) -> None:
        async with _dead_on_failure(pool, name), using(pool, name) as client:
            await resume(client)
            if pool.report()[name].state == "paused":
                pool.mark(name, "serving")

    await asyncio.gather(*map(one, _names(pool, "paused")))


def _names(pool: EnginePool, state: str) -> list[str]:
    return [name for name, report in pool.report().items() if report.state == state]


@asynccontextmanager
async def _dead_on_failure(pool: EnginePool, name: str) -> AsyncIterator[None]:
    try:
        yield
    except (RolloutError, DeadlineError) as error:
        if name in pool.report() and pool.report()[name].state not in ("dead", "unusable"):
            pool.mark(name, "dead", str(error.args[0]))
