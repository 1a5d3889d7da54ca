"""Load balancer: chooses the engine with the fewest tokens in flight. Pure: no clock and no I/O."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Load", "LoadBalancer", "Ticket"]

_SHARE = 1 / 64
"""How much of the expected response length each finished response decides, once there were as many."""


class Load(NamedTuple):
    """Requests and tokens in flight on one data-parallel rank of an engine."""

    requests: int
    tokens: int
    """Expected: prompts and what is to come of the responses."""


@dataclass(slots=True, eq=False)
class _Rank:
    """A data-parallel rank of an engine; a rank without such parallelism is its only one."""

    engine: str
    number: int
    concurrency: int
    serial: int
    requests: int = 0
    tokens: int = 0
    open: bool = True
    stamp: int = 0
    """Counts the changes: an entry of the heap with another stamp is out of date."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A place in an engine. Give it back with :meth:`LoadBalancer.release`, however the request ends."""

    engine: str
    rank: int
    tokens: int
    """Expected."""
    _held: _Rank | None


class LoadBalancer:
    """Counts what each engine has in flight, and picks for each request. ``O(log n)`` for ``n`` ranks.

    The length of a response is not known before it ends. It is taken to be the mean of those that ended
    lately, and ``max_new_tokens`` before the first has; :meth:`release` takes off what was added, and learns.

    :param affinity: A session stays with the rank that has read its beginning while that one's load is at
        most this many times what the least loaded one would have with the request.
    :param sessions: How many sessions and groups are remembered; the one that was not asked for longest is
        forgotten.

    Example::

        balancer = LoadBalancer()
        balancer.add("engine-0", ranks=2, concurrency=64)
        ticket = balancer.take(prompt_tokens=100, max_new_tokens=512)
        balancer.release(ticket)
    """

    def __init__(self, *, affinity: float = 1.5, sessions: int = 1 << 16) -> None:
        self.expected = 0.0
        """Tokens of a response; 0 before the first has ended."""
        self._ended = 0
        self._affinity, self._most_sessions = affinity, sessions
        self._engines: dict[str, list[_Rank]] = {}
        self._heap: list[tuple[int, int, int, int, _Rank]] = []
        self._ranks = 0
        self._serials = itertools.count()
        self._homes: OrderedDict[str, _Rank] = OrderedDict()
        self._busy: set[str] = set()
        """Engines with a request since :meth:`take_idle` was last called."""

    # ---- engines ----

    def add(self, engine: str, *, ranks: int = 1, concurrency: int) -> None:
        """Add an engine; it replaces one of the same name, whose tickets become invalid.

        :param concurrency: Most requests that one rank has under way.
        """
        self.remove(engine)
        self._engines[engine] = [
            _Rank(engine, number, concurrency, next(self._serials)) for number in range(ranks)
        ]
        self._ranks += ranks
        for rank in self._engines[engine]:
            self._changed(rank)

    def remove(self, engine: str) -> None:
        """Forget an engine, if there is one of this name."""
        for rank in self._engines.pop(engine, ()):
            rank.open = False
            rank.stamp += 1
            self._ranks -= 1

    def set_open(self, engine: str, is_open: bool) -> None:
        """Open or close an engine for new requests; those in flight stay counted."""
        for rank in self._engines.get(engine, ()):
            rank.open = is_open
            self._changed(rank)

    def loads(self) -> Mapping[str, list[Load]]:
        """Return the load of each rank of each engine."""
        return {
            engine: [Load(rank.requests, rank.tokens) for rank in ranks]
            for engine, ranks in self._engines.items()
        }

    def take_idle(self) -> list[str]:
        """Return the engines that had no request since the last call."""
        idle = [engine for engine in self._engines if engine not in self._busy]
        self._busy = {
            engine for engine, ranks in self._engines.items() if any(each.requests for each in ranks)
        }
        return idle

    # ---- requests ----

    def take(
        self,
        prompt_tokens: int,
        max_new_tokens: int,
        session: str | None = None,
        avoid: Collection[str] = (),
        *,
        group: str | None = None,
    ) -> Ticket | None:
        """Return a place for a request; ``None`` where every engine has enough under way.

        :param session: Requests of one session begin alike.
        :param avoid: Engines that get the request only if no other has room.
        :param group: Sessions of one group begin alike.
        """
        least = self._least(avoid)
        if least is None:
            return None
        tokens = prompt_tokens + self._response(max_new_tokens)
        names = [name for name in (session, group) if name is not None]
        rank = self._at_home(names, least, tokens, avoid) if names else least
        self._busy.add(rank.engine)
        rank.requests += 1
        rank.tokens += tokens
        self._changed(rank)
        return Ticket(rank.engine, rank.number, tokens, rank)

    def release(self, ticket: Ticket, response_tokens: int | None = None) -> None:
        """Release a ticket. Idempotent.

        :param response_tokens: Length of the response, if it ended by itself.
        """
        rank, ticket._held = ticket._held, None
        if rank is None:
            return
        rank.requests -= 1
        rank.tokens -= ticket.tokens
        self._changed(rank)
        if response_tokens is not None:
            self._ended += 1
            self.expected += (response_tokens - self.expected) * max(_SHARE, 1 / self._ended)

    def _response(self, max_new_tokens: int) -> int:
        return min(round(self.expected), max_new_tokens) if self._ended else max_new_tokens

    def _at_home(self, names: Sequence[str], least: _Rank, tokens: int, avoid: Collection[str]) -> _Rank:
        """Return where the first of these that is known goes on, and remember it for all."""
        known = [self._homes.pop(name, None) for name in names]
        home = next((rank for rank in known if rank is not None), None)
        if home is None or not self._may_stay(home, least, tokens) or home.engine in avoid:
            home = least
        self._homes |= dict.fromkeys(names, home)
        while len(self._homes) > self._most_sessions:
            self._homes.popitem(last=False)
        return home

    def _may_stay(self, home: _Rank, least: _Rank, tokens: int) -> bool:
        has_room = home.open and home.requests < home.concurrency
        return has_room and home.tokens <= self._affinity * (least.tokens + tokens)

    # ---- the heap ----

    def _least(self, avoid: Collection[str]) -> _Rank | None:
        """Return the least loaded rank with room. It stays in the heap until its load changes."""
        heap, avoided = self._heap, []
        least = None
        while heap:
            entry = heap[0]
            rank = entry[4]
            if entry[3] != rank.stamp:
                heapq.heappop(heap)
            elif rank.engine in avoid:
                avoided.append(heapq.heappop(heap))
            else:
                least = rank
                break
        for entry in avoided:
            heapq.heappush(heap, entry)
        return least or (avoided[0][4] if avoided else None)

    def _changed(self, rank: _Rank) -> None:
        """Bring the heap's idea of a rank up to date."""
        rank.stamp += 1
        if rank.open and rank.requests < rank.concurrency:
            heapq.heappush(self._heap, (rank.tokens, rank.requests, rank.serial, rank.stamp, rank))
        if len(self._heap) > 4 * self._ranks + 64:
            self._heap = [entry for entry in self._heap if entry[3] == entry[4].stamp]
            heapq.heapify(self._heap)
