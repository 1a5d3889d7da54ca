"""Pool of scoring processes, in the driver."""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

from anygauge.failures import on_failure
from anygauge.rollout.rewards.call import Call, Item, Outcome
from anygauge.rollout.rewards.child import Child
from anygauge.rollout.rewards.messages import Chunk, Ready, Results, Setup
from anygauge.rollout.rewards.pending_chunk import PendingChunk
from anygauge.rollout.rewards.resolve import is_async
from anygauge.wording import counted
from anygauge_hooks.errors import RewardError

__all__ = ["UNTRIED", "Bounds", "Job", "Pool"]

logger = logging.getLogger(__name__)

START_S = 300.0
"""Longest wait for a process to import the functions."""
POLL_S = 0.2
"""Interval of checks whether a process has ended without closing its connection."""
SILENCE_GRACE_S = 5.0
"""Added to the time of one sample, for a process at work that has nothing marked."""
SLOW_S = 60.0
"""Seconds after which a warning names a sample that is still being scored."""
WARNING_PAUSE_S = 30.0
"""Seconds between two warnings."""
EXIT_S = 2.0
"""For a process to end by itself."""
CHUNKS_PER_PROCESS = 4
"""Chunks of quick samples for each process, so that no process waits long for the slowest."""
LARGEST_CHUNK = 256
UNTRIED = "left, because too many others could not be scored"
"""The error of a sample that has none of its own."""


@dataclass(frozen=True, slots=True)
class Job:
    """Items for one of the calls of a pool."""

    call: int
    items: Sequence[Item]
    place: Callable[[int], str]
    """Names the prompt of an item, by index."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits that end scoring before all jobs are done."""

    most_failed: float = math.inf
    """Samples of one job that may fail."""
    seconds: float = math.inf
    late: str = ""
    """Error of a sample without an outcome at the deadline, as a clause."""


class Pool:
    """Processes that score. None is started before there is something to score.

    :param calls: Calls that its processes can make.
    :param setup: The same, as it is sent.
    :param count: Number of processes.
    :param log: Where their output goes: ``scorer.log`` stands for ``scorer-0.log`` and so on. ``None`` takes
        standard error.
    :param pass_env: Variables with secrets that they get.
    """

    def __init__(
        self,
        calls: Sequence[Call],
        setup: Setup,
        *,
        count: int,
        log: Path | None,
        pass_env: Collection[str] = (),
    ) -> None:
        self._calls = calls
        self._setup = pickle.dumps(setup)
        self._timeout_s = setup.timeout_s
        self._count = count
        self._log = log
        self._pass_env = pass_env
        self._processes: list[Child | None] = [None] * count
        self._waiting: deque[PendingChunk] = deque()
        self._failed: Counter[int] = Counter()
        """Samples, by call."""
        self._overdue = 0
        """Calls that took too long, of all jobs."""
        self._quiet_until = -math.inf
        """No warning before then."""
        self._is_cancelled = False

    def cancel(self) -> None:
        """Make the call that is under way, in another thread, and later ones return with nothing tried."""
        self._is_cancelled = True

    def start(self) -> None:
        """Start the processes that do not run, without waiting for them."""
        for rank, process in enumerate(self._processes):
            if process is None:
                self._processes[rank] = Child(self._setup, self._log_of(rank), self._pass_env)

    def run(self, jobs: Sequence[Job], bounds: Bounds) -> list[list[Sequence[Outcome]]]:
        """Return, for each job and item, the outcome of each of its samples.

        At a bound, the processes are ended and what is left fails: with :data:`UNTRIED` if too many others
        have, else with ``bounds.late``.

        :param jobs: Jobs of different calls.
        :raises RewardError: A process cannot start.
        """
        results: list[list[Sequence[Outcome]]] = [[()] * len(job.items) for job in jobs]
        for job, outcomes in zip(jobs, results, strict=True):
            whole = PendingChunk(job.call, job.items, range(len(job.items)), outcomes, job.place)
            self._waiting.extend(whole.remaining(self._chunk_size(job)))
        self._failed.clear()
        self._overdue, self._quiet_until = 0, -math.inf
        ends = time.monotonic() + bounds.seconds
        with on_failure(self._give_up):
            while self._has_work():
                if self._is_cancelled or max(self._failed.values(), default=0) > bounds.most_failed:
                    self._abandon(None)
                elif time.monotonic() >= ends:
                    self._abandon(bounds.late)
                else:
                    self._hand_out()
                    self._collect()
        return results

    def _give_up(self) -> None:
        self._waiting.clear()
        self.close()

    def close(self) -> None:
        """End every process."""
        running = [process for process in self._processes if process is not None]
        self._processes = [None] * self._count
        for process in running:
            process.hang_up()
        for process in running:
            process.end(0.0 if process.work else EXIT_S)
            process.close()

    def _chunk_size(self, job: Job) -> int:
        # An async call leaves its process free for the next: the more there are, the better.
        parts = self._count if is_async(self._calls[job.call].fn) else self._count * CHUNKS_PER_PROCESS
        size = -(-len(job.items) // parts)
        return max(1, size if is_async(self._calls[job.call].fn) else min(size, LARGEST_CHUNK))

    def _has_work(self) -> bool:
        return bool(self._waiting) or any(process and process.work for process in self._processes)

    def _abandon(self, why: str | None) -> None:
        """End every process and fail what has no outcome.

        :param why: Reason for the errors, as a clause; ``None`` for :data:`UNTRIED`.
        """
        for work in [*self._waiting, *(child.work for child in self._processes if child and child.work)]:
            call = self._calls[work.call]
            outcome = (None, UNTRIED) if why is None else call.failed(why)
            for index in sorted(work.open):
                work.settle(index, [outcome] * call.size(work.items[index]))
        self._waiting.clear()
        self.close()

    def _hand_out(self) -> None:
        """Give waiting work to idle processes."""
        if self._waiting:
            self.start()
        for process in filter(None, self._processes):
            if self._waiting and process.ready and process.work is None:
                process.work = work = self._waiting.popleft()
                process.send(pickle.dumps(Chunk.of(work.call, work.items)))

    def _collect(self) -> None:
        """Wait until something happens and deal with all that has."""
        running = {rank: process for rank, process in enumerate(self._processes) if process is not None}
        patience = self._patience(list(running.values()))
        arrived = wait([process.connection for process in running.values()], patience)
        for rank, process in running.items():
            if process.connection in arrived:
                self._heed(rank, process)
            elif process.exited():
                self._bury(rank, process, None, None)
            else:
                self._judge(rank, process)

    def _patience(self, processes: Sequence[Child]) -> float:
        """Return the seconds until a process may be overdue."""
        begun = [mark[1] / 1e9 for process in processes if (mark := process.marked())]
        return max(0.0, min([POLL_S, *(at + self._timeout_s - time.monotonic() for at in begun)]))

    def _heed(self, rank: int, process: Child) -> None:
        try:
            messages = process.receive()
            for message in messages or ():
                if self._processes[rank] is process:
                    self._take(rank, process, message)
        except ValueError as error:
            mark = process.marked()
            self._bury(rank, process, mark and mark[0], f"wrote to the connection of its process: {error}")
            return
        if messages is None:
            self._bury(rank, process, None, None)

    def _take(self, rank: int, process: Child, message: Ready | Results) -> None:
        if isinstance(message, Results):
            self._settle(rank, process, message)
        elif message.problem:
            raise self._cannot_start(process, message.problem)
        else:
            process.ready = True

    def _settle(self, rank: int, process: Child, results: Results) -> None:
        if process.work:
            self._write_down(process.work, results)
        if results.spent:
            self._processes[rank] = None
            process.end(EXIT_S)
            process.close()
            self._waiting.extendleft(process.work.remaining(LARGEST_CHUNK) if process.work else ())
        elif process.work and not process.work.open:
            process.work = None

    def _judge(self, rank: int, process: Child) -> None:
        """Kill a process that takes too long."""
        now, mark = time.monotonic(), process.marked()
        if not process.ready and now - process.heard > START_S:
            process.write_stacks()
            raise self._cannot_start(process, f"it is not ready after {START_S:g} s")
        if not process.ready or process.work is None:
            return
        took = now - mark[1] / 1e9 if mark else 0.0
        if took > self._timeout_s or now - process.heard > self._timeout_s + SILENCE_GRACE_S:
            where = f"; its stack is in {process.log.name}" if process.write_stacks() and process.log else ""
            why = f"did not return in {self._timeout_s:g} s{where}"
            self._overdue += 1
            overdue = mark[0] if mark and took > self._timeout_s else None
            self._warn(
                process.work,
                overdue,
                f"{why} ({counted(self._overdue, 'such call')} so far)",
            )
            self._bury(rank, process, overdue, why)
        elif mark and took > SLOW_S:
            self._warn(process.work, mark[0], f"has not returned for {took:.0f} s")

    def _warn(self, work: PendingChunk, index: int | None, what: str) -> None:
        """Say in the log of the run what a call does not do, unless another warning has just been given.

        :param index: Index of its item, where it is known.
        """
        now = time.monotonic()
        if now < self._quiet_until:
            return
        self._quiet_until = now + WARNING_PAUSE_S
        place = "" if index is None else f" for {work.place(work.positions[index])}"
        logger.warning("%s%s %s; reward.timeout_s bounds it", self._calls[work.call].name, place, what)

    def _bury(self, rank: int, process: Child, overdue: int | None, why: str | None) -> None:
        """End a process, fail the item that it did not survive, and leave the rest to another one.

        :param overdue: The item that took too long, if the process is ended for one.
        :param why: Reason for the item's error, as a clause; ``None`` if the process ends by itself.
        """
        self._processes[rank] = None
        how = process.end(EXIT_S if why is None else 0.0)
        mark, words = process.marked(), process.last_words()
        process.close()
        if not process.ready:
            raise self._cannot_start(process, f"it {why}" if why else f"its process {how}")
        if process.work is None:
            return
        with suppress(ValueError):  # nothing of what follows is believed
            for results in words:
                self._write_down(process.work, results)
        guilty = overdue if overdue is not None else mark[0] if mark and why is None else None
        why = why or f"did not return: its process {how}"
        self._waiting.extendleft(self._convict(process.work, guilty, why))

    def _convict(self, work: PendingChunk, guilty: int | None, why: str) -> list[PendingChunk]:
        """Fail the item that ended its process, and return what is to be done again."""
        if guilty is None and work.suspect:
            guilty = 0
        if guilty in work.open:
            call = self._calls[work.call]
            size = call.size(work.items[guilty])
            work.settle(guilty, [call.failed(why)] * size)
            self._failed[work.call] += size
            return work.remaining(LARGEST_CHUNK)
        # Nothing says which it was: one at a time will.
        return work.suspects()

    def _write_down(self, work: PendingChunk, results: Results) -> None:
        call = self._calls[work.call]
        for index, outcomes in results.outcomes:
            if index not in work.open:
                raise ValueError(f"outcomes of item {index}, which is none of the open ones")
            checked = call.received(outcomes, work.items[index])
            work.settle(index, checked)
            self._failed[work.call] += sum(error is not None for _, error in checked)

    def _cannot_start(self, process: Child, why: str) -> RewardError:
        return RewardError(
            f"A process for the reward functions cannot start: {why}.",
            hint=f"Its output is in {process.log}." if process.log else "Its output is on standard error.",
        )

    def _log_of(self, rank: int) -> Path | None:
        return self._log and self._log.with_stem(f"{self._log.stem}-{rank}")
