"""The endpoints of a fake engine, with SGLang's names, bodies and status codes."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from anygauge_tests.fake_engine.active_request import ActiveRequest
from anygauge_tests.fake_engine.bootstrap_rooms import HANDOVER, BootstrapError
from anygauge_tests.fake_engine.engine import Engine
from anygauge_tests.fake_engine.faults import Fault, die
from anygauge_tests.fake_engine.images import ImageCountError
from anygauge_tests.fake_engine.keys import require_keys
from anygauge_tests.fake_engine.options import Options
from anygauge_tests.fake_engine.weight_endpoints import WeightEndpoints

__all__ = ["application"]

ENGINE = web.AppKey("engine", Engine)
_LARGEST_BODY = 1 << 30
_MEMORY = ("kv_cache", "weights", "cuda_graph")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(options: Options) -> web.Application:
    """Return the web application of an engine. Called on its event loop."""
    app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[require_keys(options), _hang])
    engine = app[ENGINE] = Engine(options)
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/generate", _generate),
        ("POST", "/abort_request", _abort),
        ("POST", "/pause_generation", _pause),
        ("POST", "/continue_generation", _continue),
        ("GET", "/flush_cache", _flush),
        ("POST", "/flush_cache", _flush),
        ("GET", "/health", _health),
        ("GET", "/health_generate", _health),
        ("POST", "/v1/tokenize", _tokenize),
        ("GET", "/model_info", _model_info),
        ("GET", "/get_model_info", _model_info),
        ("GET", "/server_info", _server_info),
        ("GET", "/get_server_info", _server_info),
        ("POST", "/release_memory_occupation", _release),
        ("POST", "/resume_memory_occupation", _resume),
        ("POST", "/start_profile", _start_profile),
        ("POST", "/stop_profile", _stop_profile),
        ("POST", "/fake/fault", _fault),
        ("GET", "/fake/state", _state),
        ("POST", HANDOVER, _handover),
        *WeightEndpoints(engine).routes(),
    ]
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    return app


@web.middleware
async def _hang(request: web.Request, handler: Handler) -> web.StreamResponse:
    if not request.path.startswith("/fake/"):
        await request.app[ENGINE].faults.wait_if_hung()
    answer = await handler(request)
    if not request.path.startswith("/fake/"):
        await request.app[ENGINE].faults.wait_if_hung()
    return answer


def json_response(content: Any, status: int = 200) -> web.Response:
    """Return an answer in JSON."""
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def _error(message: str, status: int = 400) -> web.Response:
    return json_response({"error": {"message": message}}, status)


async def body_of(request: web.Request) -> dict[str, Any]:
    """Return the JSON object that was sent; an empty body is an empty object."""
    data = await request.read()
    return dict(orjson.loads(data)) if data else {}


# ---- generation ----


async def _generate(http: web.Request) -> web.StreamResponse:
    engine, body = http.app[ENGINE], await body_of(http)
    ids: Any = body.get("input_ids")
    is_batch = bool(ids) and isinstance(ids[0], list)
    for _ in ids if is_batch else (ids,):
        fault = engine.faults.strike("generate")
        if fault is not None and (answer := _play(engine, fault)) is not None:
            return answer
    await engine.faults.wait_if_hung()
    if is_batch:
        return await _batch(http, engine, body)
    try:
        request = engine.new_request(body)
    except ValueError as error:
        return _error(str(error))
    except ImageCountError:
        return web.Response(status=500)
    half = engine.options.disaggregation
    try:
        if half == "decode":
            await engine.rooms.fetch(body)
        async with engine.generating(request):
            await _finished(http, engine, request)
        if half == "prefill" and (request.reason or {}).get("type") != "abort":
            await engine.rooms.hand_over(body)
        return json_response(engine.answer(request))
    except BootstrapError as error:
        engine.requests.pop(request.rid, None)
        return _error(str(error), 500)


async def _finished(http: web.Request, engine: Engine, request: ActiveRequest) -> None:
    """Wait for the end of a request; look now and then whether its client is still there."""
    while not request.moved.is_set():
        try:
            await asyncio.wait_for(request.moved.wait(), engine.options.disconnect_s)
        except TimeoutError:
            if http.transport is None or http.transport.is_closing():
                engine.abort(request.rid, everything=False)


async def _batch(http: web.Request, engine: Engine, body: Mapping[str, Any]) -> web.Response:
    rid, prompts, params = body.get("rid"), body["input_ids"], body.get("sampling_params")
    rids = [f"{rid}_{index}" for index in range(len(prompts))] if isinstance(rid, str) else rid
    singles = [
        {
            **body,
            "input_ids": prompt,
            "rid": rids and rids[i],
            "sampling_params": params[i] if isinstance(params, list) else params,
        }
        for i, prompt in enumerate(prompts)
    ]
    try:
        requests = [engine.new_request(single) for single in singles]
    except ValueError as error:
        return _error(str(error))
    return json_response(await asyncio.gather(*(_answer(http, engine, request) for request in requests)))


async def _answer(http: web.Request, engine: Engine, request: ActiveRequest) -> dict[str, Any]:
    async with engine.generating(request):
        await _finished(http, engine, request)
        return engine.answer(request)


def _play(engine: Engine, fault: Fault) -> web.Response | None:
    """Let a fault happen that is not the process's end; return the answer that it is."""
    if fault.kind == "slow":
        for rank in engine.ranks:
            rank.set_slow(fault.argument or 10.0)
    if fault.kind == "hang":
        engine.freeze()
    if fault.kind == "die_mid_update":
        die()
    if fault.kind == "error":
        return _error("This answer was ordered.", int(fault.argument) or 500)
    return None


# ---- control ----


async def _abort(http: web.Request) -> web.Response:
    body = await body_of(http)
    http.app[ENGINE].abort(body.get("rid") or "", everything=bool(body.get("abort_all")))
    return web.Response()


async def _pause(http: web.Request) -> web.Response:
    engine, body = http.app[ENGINE], await body_of(http)
    mode = body.get("mode", "abort")
    if mode not in ("abort", "retract", "in_place"):
        return _error(f"mode: Input should be 'abort', 'retract' or 'in_place', not {mode!r}")
    engine.faults.strike("pause")
    await engine.pause(mode)
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def _continue(http: web.Request) -> web.Response:
    http.app[ENGINE].faults.strike("continue")
    await http.app[ENGINE].resume()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def _flush(http: web.Request) -> web.Response:
    if http.app[ENGINE].flush():
        return web.Response(text="Cache flushed.\n")
    return web.Response(text="Flush cache failed.\n", status=400)


async def _health(http: web.Request) -> web.Response:
    engine = http.app[ENGINE]
    await asyncio.sleep(engine.options.health_s)
    if engine.paused:
        await asyncio.sleep(engine.options.health_timeout_s)
    return web.Response(status=503 if engine.paused or engine.asleep or engine.writes_profile else 200)


async def _model_info(http: web.Request) -> web.Response:
    engine = http.app[ENGINE]
    options = engine.options
    return json_response(
        {
            "model_path": options.model_path,
            "tokenizer_path": options.tokenizer_path or options.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.weights.version,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": options.architecture.removesuffix("ForCausalLM").lower(),
            "architectures": [options.architecture],
        }
    )


async def _server_info(http: web.Request) -> web.Response:
    engine = http.app[ENGINE]
    options = engine.options
    return json_response(
        {
            "model_path": options.model_path,
            "tokenizer_path": options.tokenizer_path or options.model_path,
            "dp_size": options.dp_size,
            "tp_size": options.tp_size,
            "device": options.device,
            "context_length": options.context_length,
            "max_running_requests": options.slots,
            "skip_tokenizer_init": options.skip_tokenizer,
            "weight_version": engine.weights.version,
            "internal_states": [{"last_gen_throughput": 0.0} for _ in engine.ranks],
            "version": options.sglang,
        }
    )


async def _tokenize(http: web.Request) -> web.Response:
    engine, body = http.app[ENGINE], await body_of(http)
    tokenizer = engine.tokenizer()
    if tokenizer is None:
        return _error("This engine has no tokenizer.", 500)
    tokens = tokenizer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True)).ids
    size = engine.options.context_length
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": size})


async def _release(http: web.Request) -> web.Response:
    engine, body = http.app[ENGINE], await body_of(http)
    if not engine.flush():
        die()  # an assertion of the real scheduler, which takes the server down
    engine.release(body.get("tags") or _MEMORY)
    return json_response(None)


async def _resume(http: web.Request) -> web.Response:
    engine, body = http.app[ENGINE], await body_of(http)
    tags = body.get("tags") or _MEMORY
    if not engine.asleep.issuperset(tags):
        die()  # the same: what was not released cannot be removed from the set
    engine.regain(tags)
    return json_response(None)


async def _start_profile(http: web.Request) -> web.Response:
    engine, body = http.app[ENGINE], await body_of(http)
    fault = engine.faults.strike("profile")
    if fault is not None and (answer := _play(engine, fault)) is not None:
        return answer
    engine.profile = body
    return web.Response(text="Start profiling.\n")


async def _stop_profile(http: web.Request) -> web.Response:
    engine = http.app[ENGINE]
    engine.writes_profile = True
    await asyncio.sleep(engine.options.profile_s)
    engine.writes_profile = False
    if engine.profile is not None:
        directory = Path(engine.profile["output_dir"])
        directory.mkdir(parents=True, exist_ok=True)
        event = {"name": "extend", "ph": "X", "pid": 0, "tid": 0, "ts": 0, "dur": engine.finished}
        with gzip.open(directory / "1-TP-0.trace.json.gz", "wb") as file:
            has_stacks = engine.profile.get("with_stack", True)
            file.write(orjson.dumps({"with_stack": int(has_stacks), "traceEvents": [event]}))
    engine.profile = None
    return web.Response(text="Stop profiling. This will take some time.\n")


# ---- what the real server has not ----


async def _handover(http: web.Request) -> web.Response:
    engine, body = http.app[ENGINE], await body_of(http)
    await engine.faults.wait_if_hung()
    try:
        await engine.rooms.fetched(body["room"], body["tokens"])
    except BootstrapError as error:
        return _error(str(error), 500)
    return json_response(None)


async def _fault(http: web.Request) -> web.Response:
    engine, body = http.app[ENGINE], await body_of(http)
    fault = Fault(**body)
    if fault.count <= 0:
        _play(engine, fault)
    if fault.count > 0 or fault.kind in ("die", "hang"):
        engine.faults.add(fault)
    return json_response(asdict(fault))


async def _state(http: web.Request) -> web.Response:
    return json_response(http.app[ENGINE].state())
