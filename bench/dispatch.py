"""Measure how long a simulated fleet takes for a step, by who decides which engine a sample goes to.

Run as ``python bench/dispatch.py [--seeds 3]``; minutes, or one with ``--seeds 1``. 256 engines answer 65,536
samples, all there at once, sixteen to a prompt. Nobody but the last column knows how long a response will be.
An engine with ``b`` requests in its slots makes one token for each of them every ``step_s + request_s * b``
seconds, and reads a prompt in ``prompt_s`` per token before the first; one that it has just read costs
nothing. Of each row:

``list``        makespan in seconds of greedy list scheduling: each sample in turn goes to the engine with the
                fewest requests, as soon as one has a free slot
``ours``        that of ``anygauge.serving.load_balancer``, over that of list scheduling
``sessions``    the same where each sample is a session, and those of a prompt are a group
``read``        share of the prompts' tokens that are read with sessions
``round robin`` sample i goes to engine i modulo 256
``knows``       list scheduling that knows the lengths, and begins with the longest

The speed is that of one thread: ``decisions`` takes and gives back places in 256 engines, and ``requests`` is
the whole way of a request through the waiting room of a fleet, as a coroutine.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from anygauge.serving.admission_queue import AdmissionQueue
from anygauge.serving.load_balancer import LoadBalancer, Ticket
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest
from anygauge_tests.fake_engine.lengths import parse_lengths

ENGINES, SAMPLES, GROUP = 256, 65_536, 16
PREFIXES = 512
"""Prompts whose beginning an engine remembers."""


class Workload(NamedTuple):
    """Samples, and the engines that they go to."""

    name: str
    lengths: str
    prompts: str
    budget: int
    slots: int
    step_s: float
    request_s: float
    prompt_s: float


WORKLOADS = (
    Workload("reasoning", "lognormal:2000:0.9", "uniform:100:400", 16_384, 128, 8e-3, 1e-4, 2e-5),
    Workload("long tail", "longtail:300:12000:0.02", "uniform:200:1000", 12_288, 64, 6e-3, 5e-5, 2e-5),
    Workload("short answers", "uniform:16:256", "uniform:1000:6000", 256, 32, 6e-3, 2e-4, 2e-5),
)


class Sample(NamedTuple):
    """One response to come."""

    prompt: int
    prompt_tokens: int
    length: int


def samples_of(workload: Workload, seed: int) -> list[Sample]:
    """Return the samples of a step in the order in which they are asked for."""
    draw, lengths, prompts = Random(seed), parse_lengths(workload.lengths), parse_lengths(workload.prompts)
    found = []
    for prompt in range(SAMPLES // GROUP):
        tokens = prompts(draw.random())
        found += [Sample(prompt, tokens, min(lengths(draw.random()), workload.budget)) for _ in range(GROUP)]
    return found


class Engine:
    """Slots whose requests make tokens together, the slower the more there are."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.queue: deque[tuple[Sample, Ticket | None]] = deque()
        self.running: list[tuple[float, int, Sample, Ticket | None]] = []
        """Requests, ordered by the count of tokens at which each ends."""
        self.read = 0
        """Tokens of prompts."""
        self._known: OrderedDict[int, None] = OrderedDict()
        self._tokens, self._at, self._count = 0.0, 0.0, 0

    def submit(self, now: float, sample: Sample, ticket: Ticket | None = None) -> None:
        """Take a sample on, into a slot or into the engine's own queue."""
        self._advance(now)
        self.queue.append((sample, ticket))
        self._fill()

    def _fill(self) -> None:
        while self.queue and len(self.running) < self._workload.slots:
            sample, ticket = self.queue.popleft()
            self._count += 1
            # Reading holds every slot up; it is spread over the sample's own tokens here.
            extra = self._read(sample) * self._workload.prompt_s / self._workload.step_s
            heapq.heappush(self.running, (self._tokens + sample.length + extra, self._count, sample, ticket))

    def _read(self, sample: Sample) -> int:
        known = sample.prompt in self._known
        self._known[sample.prompt] = None
        self._known.move_to_end(sample.prompt)
        if len(self._known) > PREFIXES:
            self._known.popitem(last=False)
        read = 0 if known else sample.prompt_tokens
        self.read += read
        return read

    def _step_s(self) -> float:
        return self._workload.step_s + self._workload.request_s * len(self.running)

    def _advance(self, now: float) -> None:
        if self.running:
            self._tokens += (now - self._at) / self._step_s()
        self._at = now

    def next_end(self) -> float | None:
        """Return when the next request ends if nothing changes."""
        return self._at + (self.running[0][0] - self._tokens) * self._step_s() if self.running else None

    def finish(self, now: float) -> tuple[Sample, Ticket | None]:
        """Return the request that ends now."""
        self._advance(now)
        self._tokens = self.running[0][0]
        _, _, sample, ticket = heapq.heappop(self.running)
        self._fill()
        return sample, ticket


@dataclass
class Outcome:
    """Result of one simulation."""

    makespan: float
    read: float
    """Share of the prompts' tokens that were read."""


Finished = Callable[[int, Sample, Ticket | None], None]


class Fleet:
    """Engines on one clock."""

    def __init__(self, workload: Workload) -> None:
        self.engines = [Engine(workload) for _ in range(ENGINES)]
        self.now = 0.0
        self._events: list[tuple[float, int, int]] = []
        self._stamps = [0] * ENGINES

    def submit(self, engine: int, sample: Sample, ticket: Ticket | None = None) -> None:
        """Give a sample to an engine now."""
        self.engines[engine].submit(self.now, sample, ticket)
        self._plan(engine)

    def _plan(self, engine: int) -> None:
        self._stamps[engine] += 1
        if (at := self.engines[engine].next_end()) is not None:
            heapq.heappush(self._events, (at, engine, self._stamps[engine]))

    def run(self, finished: Finished) -> Outcome:
        """Let time pass until nothing is left."""
        total = 0
        while self._events:
            at, engine, stamp = heapq.heappop(self._events)
            if stamp != self._stamps[engine]:
                continue
            self.now = at
            sample, ticket = self.engines[engine].finish(at)
            total += sample.prompt_tokens
            self._plan(engine)
            finished(engine, sample, ticket)
        return Outcome(self.now, sum(engine.read for engine in self.engines) / total)


def round_robin(workload: Workload, samples: Sequence[Sample]) -> Outcome:
    """Give sample i to engine i modulo the count of engines, at once."""
    fleet = Fleet(workload)
    for number, sample in enumerate(samples):
        fleet.submit(number % ENGINES, sample)
    return fleet.run(lambda engine, sample, ticket: None)


def list_scheduling(workload: Workload, samples: Sequence[Sample]) -> Outcome:
    """Give each sample in turn to the engine with the fewest requests, once one has a free slot."""
    fleet, left = Fleet(workload), deque(samples)
    counts = [0] * ENGINES
    heap = [(0, engine) for engine in range(ENGINES)]

    def give() -> None:
        while left and heap:
            count, engine = heapq.heappop(heap)
            if count != counts[engine] or count >= workload.slots:
                continue
            counts[engine] += 1
            heapq.heappush(heap, (counts[engine], engine))
            fleet.submit(engine, left.popleft())

    def finished(engine: int, sample: Sample, ticket: Ticket | None) -> None:
        counts[engine] -= 1
        heapq.heappush(heap, (counts[engine], engine))
        give()

    give()
    return fleet.run(finished)


def ours(workload: Workload, samples: Sequence[Sample], *, sessions: bool) -> Outcome:
    """Let the dispatcher decide, which is told of each response when it ends."""
    fleet, left = Fleet(workload), deque(samples)
    dispatcher = LoadBalancer()
    for engine in range(ENGINES):
        dispatcher.add(str(engine), concurrency=workload.slots)

    def give() -> None:
        while left:
            first = left[0]
            group = str(first.prompt) if sessions else None
            session = f"{group}-{len(left)}" if sessions else None
            ticket = dispatcher.take(first.prompt_tokens, workload.budget, session, group=group)
            if ticket is None:
                return
            fleet.submit(int(ticket.engine), left.popleft(), ticket)

    def finished(engine: int, sample: Sample, ticket: Ticket | None) -> None:
        assert ticket is not None
        dispatcher.release(ticket, sample.length)
        give()

    give()
    return fleet.run(finished)


def decisions_per_second() -> float:
    """Return how many places one thread takes and gives back in a second."""
    draw, dispatcher = Random(0), LoadBalancer()
    for engine in range(ENGINES):
        dispatcher.add(str(engine), concurrency=64)
    held: deque[Ticket] = deque()
    lengths = [draw.randrange(1, 4096) for _ in range(SAMPLES)]
    began = time.process_time()
    for number, length in enumerate(lengths):
        ticket = dispatcher.take(300, 4096, str(number // GROUP))
        if ticket is None:
            dispatcher.release(held.popleft(), length)
            ticket = dispatcher.take(300, 4096, str(number // GROUP))
        assert ticket is not None
        held.append(ticket)
    while held:
        dispatcher.release(held.popleft(), 100)
    return SAMPLES / (time.process_time() - began)


def requests_per_second() -> float:
    """Return how many coroutines get through a waiting room in a second, and hold their place for a while."""
    dispatcher = LoadBalancer()
    for engine in range(ENGINES):
        dispatcher.add(str(engine), concurrency=64)
    room = AdmissionQueue(dispatcher, 60.0, lambda: "")
    room.set_outage(False)
    params = SamplingParams(max_new_tokens=4096)

    async def one(number: int) -> None:
        group = str(number // GROUP)
        request = GenerateRequest(
            str(number), (1, 2, 3), params, seed=0, session=f"{group}-{number}", group=group
        )
        ticket = await room.enter(request, ())
        assert ticket is not None
        await asyncio.sleep(0)
        dispatcher.release(ticket, number % 4096)
        room.serve()

    async def everybody() -> None:
        await asyncio.gather(*(one(number) for number in range(SAMPLES)))

    began = time.process_time()
    asyncio.run(everybody())
    return SAMPLES / (time.process_time() - began)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print(f"{ENGINES} engines, {SAMPLES} samples, the mean of {seeds} seeds")
    columns = ("list", "ours", "sessions", "read", "round robin", "knows")
    print(f"{'workload':14}" + "".join(f"{column:>13}" for column in columns))
    for workload in WORKLOADS:
        rows = [_row(workload, samples_of(workload, seed)) for seed in range(seeds)]
        means = [statistics.fmean(values) for values in zip(*rows, strict=True)]
        print(f"{workload.name:14}" + f"{means[0]:12.1f}s" + "".join(f"{value:13.4f}" for value in means[1:]))
    for workload in WORKLOADS:
        print(f"  {workload}")
    print(f"decisions: {statistics.median(decisions_per_second() for _ in range(5)):,.0f} per second")
    print(f"requests:  {statistics.median(requests_per_second() for _ in range(5)):,.0f} per second")


def _row(workload: Workload, samples: Sequence[Sample]) -> tuple[float, ...]:
    greedy = list_scheduling(workload, samples).makespan
    shared = ours(workload, samples, sessions=True)
    longest_first = sorted(samples, key=lambda sample: -sample.length)
    return (
        greedy,
        ours(workload, samples, sessions=False).makespan / greedy,
        shared.makespan / greedy,
        shared.read,
        round_robin(workload, samples).makespan / greedy,
        list_scheduling(workload, longest_first).makespan / greedy,
    )


if __name__ == "__main__":
    main()
