"""Batches: requests of one group that are sent at the same moment are one HTTP request.

SGLang's front end, one process, needs 1.8 ms for an HTTP request and 0.3 ms for a request of a batch of 16
(0.5.23, on one core), so that with a small model the front end decides how fast short samples are generated.
After an asynchronous update it gets all samples in flight at once, each with the tokens that it has so far.
Long ones are sent alone: the answer to a batch comes with its last sample, and until then all keep their
places.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from anygauge.serving.sglang.client.channel import OpenFilesError
from anygauge.serving.sglang.client.wire import batch_body, read_answer, read_answers, request_body
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.serving import EngineAwayError

__all__ = ["Batches", "RefusedTogetherError"]

_log = logging.getLogger(__name__)
MOST_TOKENS = 256
"""Longest response of a request that is joined with others."""

Post = Callable[[bytes, float, str], Awaitable[bytes]]
"""Sends a body, with the deadline on the event loop's clock and what is asked for."""


class RefusedTogetherError(Exception):
    """The engine refuses a batch; it may take its requests one by one, each under a new id."""


class _Key(NamedTuple):
    alike: str | tuple[tuple[int, ...], SamplingParams]
    rank: int | None


class _Member(NamedTuple):
    request: GenerateRequest
    rid: str
    ends: float
    answer: asyncio.Future[Generation]


class Batches:
    """Collects the requests of one group that come in one pass of the event loop, and sends them as one.

    Requests of different prompts are never joined: one that ends late would delay another group.

    :param post: Sends a body to ``/generate``.
    :param engine: How errors call the engine.
    """

    def __init__(self, post: Post, engine: str, *, adapter: str = "") -> None:
        self._post, self._engine, self._adapter = post, engine, adapter
        self._waiting: dict[_Key, list[_Member]] = {}
        self._tasks: set[asyncio.Task[Sequence[Generation]]] = set()

    def takes(self, request: GenerateRequest) -> bool:
        """Return whether a request may be joined with others."""
        try:
            hash((request.tokens, request.params))
        except TypeError:  # a list, in the place of a tuple
            return False
        return not request.media and request.params.max_new_tokens <= MOST_TOKENS

    async def generate(
        self, request: GenerateRequest, rid: str, *, rank: int | None, ends: float
    ) -> Generation:
        """Return the generation of a request.

        :param rid: The id that the engine knows it by.
        :param rank: Data-parallel rank of the engine.
        :param ends: Deadline on the event loop's clock.
        :raises RolloutError: The engine refuses it, or failed, or its answer is invalid.
        :raises DeadlineError: No answer in time.
        :raises RefusedTogetherError: The engine refuses it and others together.
        """
        loop = asyncio.get_running_loop()
        member = _Member(request, rid, ends, loop.create_future())
        key = _Key(_alike(request), rank)
        if key not in self._waiting:
            self._waiting[key] = []
            loop.call_soon(self._start, key)
        self._waiting[key].append(member)
        return await member.answer

    def _start(self, key: _Key) -> None:
        members = _unanswered(self._waiting.pop(key))
        if not members:
            return
        task = asyncio.get_running_loop().create_task(self._exchange(members, key.rank))
        self._tasks.add(task)
        task.add_done_callback(partial(self._answer, members))
        for member in members:  # once nobody waits any more, the connection is closed
            member.answer.add_done_callback(lambda _: _unanswered(members) or task.cancel())

    def _answer(self, members: Sequence[_Member], task: asyncio.Task[Sequence[Generation]]) -> None:
        """Give each member its generation, or what went wrong."""
        self._tasks.discard(task)
        if task.cancelled():
            for member in members:
                member.answer.cancel()
        elif (error := task.exception()) is not None:
            if len(members) > 1 and _is_refusal(error):
                # SGLang 0.5.17 refuses all if one was aborted before it was read
                _log.info("%s: %s; they are sent one by one", self._engine, error.args[0])
                error = RefusedTogetherError(*error.args)
            for member in _unanswered(members):
                member.answer.set_exception(error)
        else:
            for member, generation in zip(members, task.result(), strict=True):
                if not member.answer.done():
                    member.answer.set_result(generation)

    async def _exchange(self, members: Sequence[_Member], rank: int | None) -> Sequence[Generation]:
        first, ends = members[0], max(member.ends for member in members)
        purpose = f"request {first.request.label}"
        if len(members) == 1:
            body = request_body(first.request, first.rid, rank=rank, adapter=self._adapter)
            return [read_answer(await self._post(body, ends, purpose), self._engine, first.request)]
        purpose += f" and {len(members) - 1} more of its group"
        requests, rids = [each.request for each in members], [each.rid for each in members]
        body = batch_body(requests, rids, rank=rank, adapter=self._adapter)
        return read_answers(await self._post(body, ends, purpose), self._engine, len(members))


def _alike(request: GenerateRequest) -> str | tuple[tuple[int, ...], SamplingParams]:
    """Return the group of a request, or its tokens and parameters.

    Only first generations are joined by their group: answers come together, and samples of several turns that
    went on together would wait for the slowest of them in each turn.
    """
    is_first = not request.order or request.order[-1] == 0
    return request.group if request.group and is_first else (request.tokens, request.params)


def _unanswered(members: Sequence[_Member]) -> list[_Member]:
    """Return the members whose callers still wait."""
    return [member for member in members if not member.answer.done()]


def _is_refusal(error: BaseException) -> bool:
    """Return whether the engine has answered, and might answer otherwise to each request alone."""
    return isinstance(error, RolloutError) and not isinstance(error, EngineAwayError | OpenFilesError)
