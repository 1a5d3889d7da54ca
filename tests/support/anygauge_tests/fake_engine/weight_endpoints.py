"""The endpoints of a fake engine that change its weights: gates and faults around :class:`Weights`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import orjson
from aiohttp import web

from anygauge_tests.fake_engine.engine import Engine
from anygauge_tests.fake_engine.faults import die
from anygauge_tests.fake_engine.weights import Answer

__all__ = ["WeightEndpoints"]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class WeightEndpoints:
    """Handlers that wait for the gates of an engine, play its faults, and leave the rest to its weights."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler = ThreadPoolExecutor(1, thread_name_prefix="scheduler")

    def routes(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each endpoint that this version has."""
        weights = self._engine.weights
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/update_weight_version", self._set_version),
            ("POST", "/update_weights_from_tensor", self._handler("update", weights.update_from_tensor)),
            ("POST", "/update_weights_from_disk", self._handler("update", weights.update_from_disk)),
            (
                "POST",
                "/update_weights_from_distributed",
                self._handler("update", weights.update_from_distributed),
            ),
            ("POST", "/init_weights_update_group", self._handler("init", weights.init_group)),
            ("POST", "/destroy_weights_update_group", self._handler("destroy", weights.destroy_group)),
            ("POST", "/load_lora_adapter", self._handler("adapter", weights.load_adapter)),
            ("POST", "/unload_lora_adapter", self._unload),
            ("GET", "/weights_checker", self._handler("check", weights.check)),
            ("POST", "/weights_checker", self._handler("check", weights.check)),
        ]
        if self._engine.options.sglang != "0.5.17":
            routes += [
                ("POST", "/begin_weight_update", self._handler("begin", weights.begin)),
                ("POST", "/end_weight_update", self._handler("end", weights.end)),
            ]
        return routes

    def _handler(self, event: str, change: Callable[[Mapping[str, Any]], Answer]) -> Handler:
        async def handle(http: web.Request) -> web.StreamResponse:
            return await self._change(http, event, change)

        return handle

    async def _unload(self, http: web.Request) -> web.StreamResponse:
        """Unload an adapter once no request uses it; a pause that keeps requests makes this wait for ever."""
        while self._engine.requests:
            await asyncio.sleep(0.01)
        return await self._change(http, "adapter", self._engine.weights.unload_adapter)

    async def _set_version(self, http: web.Request) -> web.StreamResponse:
        body = orjson.loads(await http.read())
        if body.get("abort_all_requests", True):
            self._engine.abort("", everything=True)
        self._engine.weights.set_version(body["new_version"])
        message = f"Weight version updated to {body['new_version']}"
        return _answer(Answer(True, message, {"new_version": body["new_version"]}))

    async def _change(
        self, http: web.Request, event: str, change: Callable[[Mapping[str, Any]], Answer]
    ) -> web.StreamResponse:
        """Answer with what a change of the weights says, made once the gates let it through."""
        data = await http.read()
        fault = self._engine.faults.strike(event)
        if fault is not None and fault.kind == "refuse":
            return _answer(Answer(False, "This update was to be refused."))
        if fault is not None and fault.kind == "die_mid_update":
            die()
        if fault is not None and fault.kind == "stall":
            await asyncio.sleep(fault.argument)
        if event == "update" and "weights" in self._engine.asleep:
            return _answer(Answer(False, "The weights are asleep: their memory was released."))
        async with self._gate(event):
            # One after the other, as in the scheduler's process; a collective blocks those that follow.
            answer = await asyncio.get_running_loop().run_in_executor(
                self._scheduler, change, orjson.loads(data) if data else {}
            )
        if event == "update" and answer.success:
            self._engine.is_hollow = False
        if fault is not None and fault.kind == "corrupt":
            self._engine.weights.corrupt()
        return _answer(answer)

    def _gate(self, event: str) -> AbstractAsyncContextManager[None]:
        """Return what lets a request wait for others, as those do that change what is generated with."""
        return self._engine.updating() if event in ("begin", "end", "update") else nullcontext()


def _answer(answer: Answer) -> web.Response:
    content = {"success": answer.success, "message": answer.message, **answer.more}
    status = 200 if answer.success else 400
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")
