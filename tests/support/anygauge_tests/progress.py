"""Progress of a generation in a real SGLang server, for benches that change its weights in the middle."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import orjson

from anygauge.serving.sglang.client.wire import read_answer, request_body
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.sglang import NO_KEYS, ServerKeys

__all__ = ["watched"]

_LINE = 2**26
"""Largest event: each has all tokens so far."""


async def watched(
    address: str, request: GenerateRequest, count: Callable[[int], None], keys: ServerKeys = NO_KEYS
) -> Generation:
    """Return what a server generates.

    :param count: Called with the number of tokens so far, whenever there are more.
    """
    body = orjson.dumps({**orjson.loads(request_body(request, request.id)), "stream": True})
    headers = {"content-type": "application/json", **keys.headers("/generate")}
    last = b""
    async with (
        aiohttp.ClientSession(read_bufsize=_LINE) as session,
        session.post(f"{address}/generate", data=body, headers=headers) as answer,
    ):
        async for line in answer.content:
            data = line.strip().removeprefix(b"data: ")
            if data and data != b"[DONE]":
                last = data
                count(orjson.loads(data)["meta_info"]["completion_tokens"])
    return read_answer(last, address, request)
