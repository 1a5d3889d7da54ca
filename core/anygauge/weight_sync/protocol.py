"""Update protocol for several servers: pause, begin, buckets, end, verify, resume.

A server is in one of these states, and what happens to it when something fails depends on nothing else:

=========  ====================================================================  =======================
state      reached by                                                            after a failure it is
=========  ====================================================================  =======================
serving    nothing was asked yet                                                 serving, the old version
paused     it makes no tokens; its weights are the old ones                      serving, the old version
opened     it has opened an update; no byte of it was sent                       serving, the old version
loading    a bucket was sent, so that its weights may be mixed                   unusable, left paused
current    it has closed the update, told the version, and passed the check     unusable, maybe left paused
=========  ====================================================================  =======================

A server that fails is out of the update; the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Literal

from anygauge.weight_sync.report import PeerOutcome
from anygauge_hooks.errors import AnygaugeError, RolloutError, WeightMappingError
from anygauge_hooks.weights import PauseMode, WeightPeer, WeightTarget

__all__ = ["RunningUpdate", "started"]

State = Literal["serving", "paused", "opened", "loading", "current"]
MemberTask = Callable[["_Member"], None]


class _Member:
    """One server in an update."""

    def __init__(self, peer: WeightPeer, target: WeightTarget, before: PeerOutcome | None) -> None:
        self.peer = peer
        self.target = target
        self.version = before.version if before else None
        """Version before the update; ``None`` where it is unknown."""
        self.is_broken = before is not None and before.state == "unusable"
        self.state: State = "serving"
        self.error: BaseException | None = None

    def outcome(self, version: int) -> PeerOutcome:
        """Return its outcome of the update to a version."""
        address = self.peer.address
        if self.state == "current" and self.error is None:
            return PeerOutcome(address=address, state="serving", version=version)
        error = str(self.error)
        if self.state in ("loading", "current") or self.is_broken:
            return PeerOutcome(address=address, state="unusable", version=None, error=error)
        return PeerOutcome(address=address, state="serving", version=self.version, error=error)


def started(peer: WeightPeer) -> tuple[str, int]:
    """Return the incarnation of a server."""
    return peer.address, peer.incarnation


class RunningUpdate:
    """An update in progress, through which a transport sends to the servers.

    :param before: How the servers came out of the update before, by address and incarnation, where there was
        one.
    :param pause: ``"retract"``, ``"in_place"``, ``"abort"``, or ``"none"``: the caller has paused them.
    :param flushes: Whether the cache of the old weights goes; not under requests that stay where they are.
    """

    def __init__(
        self,
        version: int,
        peers: Sequence[WeightPeer],
        before: Mapping[tuple[str, int], PeerOutcome],
        *,
        pause: PauseMode | Literal["none"],
        flushes: bool,
        deadline_s: float,
    ) -> None:
        self.version = version
        self.pause = pause
        self.flushes = flushes
        self._members = [
            _Member(peer, peer.target(deadline_s=deadline_s), before.get(started(peer))) for peer in peers
        ]
        self._threads = ThreadPoolExecutor(max(1, len(peers)), thread_name_prefix="weight-sync-peer")

    @property
    def _healthy(self) -> list[_Member]:
        return [member for member in self._members if member.error is None]

    @property
    def peers(self) -> Sequence[WeightPeer]:
        """The servers that have not failed so far."""
        return [member.peer for member in self._healthy]

    def open(self, *, session: bool) -> None:
        """Pause the servers and open the update in each.

        :param session: Whether the transport sends to an open update.
        """
        mode = self.pause
        if mode != "none":
            self._each(lambda member: _pause(member, mode))
        if session:
            self._each(_begin)

    def load(self, work: Callable[[WeightTarget], None]) -> None:
        """Run a loading step on all servers at once; one that refuses or is late is removed."""

        def run(member: _Member) -> None:
            member.state = "loading"
            work(member.target)

        self._each(run)

    def each(self, work: Callable[[WeightPeer], None], *, loads: bool) -> None:
        """Run a function for all servers at once; a server for which it raises is removed."""

        def run(member: _Member) -> None:
            if loads:
                member.state = "loading"
            work(member.peer)

        self._each(run)

    def exclude(self, errors: Mapping[str, str]) -> None:
        """Take out servers that failed at what another rank sent.

        :param errors: Error messages, by address.
        """
        for member in self._healthy:
            if member.peer.address in errors:
                member.error = RolloutError(errors[member.peer.address])

    def end(self, *, session: bool) -> None:
        """Close the update in each server, and check that it reports the new version."""
        if session:
            self._each(_end)
        self._each(self._check_version)

    def _check_version(self, member: _Member) -> None:
        version = member.target.version()
        if version is not None and version != str(self.version):
            raise RolloutError(
                f"{member.peer.address} reports weight version {version!r} instead of {self.version}.",
                hint="Something else updates this engine, or its server keeps no versions.",
            )

    def verify(self, compare: Callable[[list[dict[str, str]]], Sequence[str]]) -> None:
        """Compare the servers' weights with those sent.

        :param compare: Returns what differs, by the names of the tensors.
        """

        def check(member: _Member) -> None:
            if not member.peer.has_checksums:
                return
            wrong = compare(member.target.checksums())
            if wrong:
                raise WeightMappingError(
                    f"{member.peer.address} does not have the weights that were sent as version "
                    f"{self.version}: {', '.join(wrong)}.",
                    hint="Its weights are not used. If it happens again, look for faulty memory or network.",
                )

        self._each(check)

    def accept(self) -> None:
        """Resume the servers with the new version, and those that kept the old one."""
        for member in self._healthy:
            member.state = "current"
        self._close_unsent()
        resumed = [each for each in self._members if each.outcome(self.version).state == "serving"]
        if self.pause != "none":
            self._each(lambda member: member.target.resume(), resumed)

    def _close_unsent(self) -> None:
        """Close the update where it was opened and nothing was sent."""
        opened = [each for each in self._members if each.state == "opened"]
        self._each(_end, opened)

    def give_up(self, error: BaseException) -> None:
        """Abort the update; servers that received nothing continue with the old version."""
        for member in self._healthy:
            member.error = error
        self.accept()

    def outcomes(self) -> tuple[PeerOutcome, ...]:
        """Return the outcome of each server."""
        return tuple(member.outcome(self.version) for member in self._members)

    def close(self) -> None:
        """Close the connections. A thread that still waits for an answer ends with its deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for member in self._members:
            member.target.close()

    def _each(self, work: MemberTask, members: Sequence[_Member] | None = None) -> None:
        """Do it to every server at once, and take those out at which it fails.

        One alone is seen to in the calling thread: an engine of this process loads its weights there, where
        its device is current and collectives of the trainer are started.
        """
        chosen = self._healthy if members is None else members
        if len(chosen) == 1:
            _attempt(work, chosen[0])
            return
        futures = [self._threads.submit(_attempt, work, member) for member in chosen]
        wait(futures)
        for future in futures:
            future.result()

    def errors(self) -> Mapping[str, BaseException]:
        """Return the errors by server address."""
        return {each.peer.address: each.error for each in self._members if each.error is not None}


def _attempt(work: MemberTask, member: _Member) -> None:
    try:
        work(member)
    except (AnygaugeError, OSError) as error:
        member.error = member.error or error


def _pause(member: _Member, mode: PauseMode) -> None:
    member.target.pause(mode)
    member.state = "paused"


def _begin(member: _Member) -> None:
    member.target.begin()
    member.state = "opened"


def _end(member: _Member) -> None:
    member.target.end()
