"""Interface of weight transports from the trainer to the rollout engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, Protocol

from anygauge_hooks.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.settings import RunConfig
    from anygauge_hooks.types import WorkerContext

__all__ = [
    "BroadcastGroup",
    "PauseMode",
    "WeightBucket",
    "WeightPeer",
    "WeightTarget",
    "WeightTensor",
    "WeightTransport",
    "WeightTransportSpec",
    "WeightUpdate",
]


class WeightTensor(NamedTuple):
    """Position of a tensor in a bucket."""

    name: str
    """Name in the Hugging Face checkpoint."""
    shape: tuple[int, ...]
    dtype: str
    """As torch names it: ``"bfloat16"``."""
    start: int
    """First byte in the bucket."""
    end: int
    """The byte after the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """A part of an update: whole tensors, one after the other, without a gap."""

    index: int
    """Index, from 0."""
    tensors: tuple[WeightTensor, ...]
    data: Tensor
    """``[bytes]``, uint8, in memory that is used again: valid until the transport's :meth:`send` returns, for
    what it has asked the memory's device to do until then."""
    last: bool


PauseMode = Literal["abort", "retract", "in_place"]
"""Fate of a server's requests in a pause: ``abort`` returns the part of every response that was sampled;
``retract`` recomputes its KV cache with the new weights; ``in_place`` continues with the old cache."""


class BroadcastGroup(NamedTuple):
    """A process group in which a training rank, its first rank, broadcasts weights to servers."""

    name: str
    host: str
    """Address of the group's store, as part of a URL: IPv6 in brackets."""
    port: int
    backend: str
    """The ``torch.distributed`` backend."""
    world_size: int
    first_rank: int
    """Rank of the server's first process; the others follow."""


class WeightTarget:
    """One engine that takes an update, in its own protocol. Used by one thread at a time.

    An engine overrides what it has; each takes weights by at least one of the ``load_*`` methods.
    Each method raises :class:`~anygauge_hooks.errors.DeadlineError` if the engine does not answer in time and
    :class:`~anygauge_hooks.errors.RolloutError` if it refuses or cannot be reached.
    """

    def pause(self, mode: PauseMode) -> None:
        """Pause generation.

        :param mode: One that it lacks, or cannot keep over the update, becomes ``"abort"``.
        """

    def resume(self) -> None:
        """Resume generation."""

    def begin(self) -> None:
        """Open an update from memory or by broadcast, where engines do that. It keeps its weights."""

    def end(self) -> None:
        """Close the update."""

    def load_tensors(self, weights: Iterable[tuple[str, Tensor]], update: WeightUpdate) -> None:
        """Load all of an update in this process, tensor by tensor as they are gathered."""
        _refuse("tensors of its own process")

    def load_memory(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Load a bucket from memory of this process; with the last one the update is complete."""
        _refuse("buckets from memory")

    def load_broadcast(self, bucket: WeightBucket, update: WeightUpdate, group: str, *, whole: bool) -> None:
        """Receive a bucket in a group; with the last one the update is complete.

        :param whole: Whether it is broadcast as one tensor; otherwise its tensors are, one by one.
        """
        _refuse("broadcasts")

    def load_directory(self, path: str, update: WeightUpdate) -> None:
        """Load a Hugging Face directory, all of an update."""
        _refuse("checkpoints")

    def load_adapter(self, path: str, update: WeightUpdate) -> None:
        """Load a peft adapter, all of an update, in the place of the one before."""
        _refuse("adapters")

    def join_group(self, group: BroadcastGroup) -> None:
        """Join a group. Returns once all members have joined."""
        _refuse("broadcasts")

    def leave_group(self, name: str) -> None:
        """Leave a group, which ends a broadcast that the engine still waits in."""

    def version(self) -> str | None:
        """Return the weight version that the engine reports; ``None`` if it keeps none."""
        return None

    def checksums(self) -> list[dict[str, str]]:
        """Return, for each process of the engine, the checksums of its parameters by name.

        Called where :attr:`WeightPeer.has_checksums`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections."""


def _refuse(what: str) -> NoReturn:
    raise RolloutError(
        f"This rollout engine takes no {what}.", hint="Set weight_sync.transport to one that it takes."
    )


@dataclass(frozen=True, kw_only=True)
class WeightPeer:
    """One rollout engine, as seen by weight transports: an instance of the engine's own subclass."""

    address: str
    """``http://host:port``; how errors name it."""
    tensor_parallel: int = 1
    """Processes that split its model; each is given the whole weights and takes its part."""
    device: str | None = None
    """The ``torch.device`` type that the server says it runs on, if it says so."""
    dtype: str | None = None
    """Dtype of the model's parameters, as torch names it; ``None`` if they are of the dtype that is sent."""
    incarnation: int = 0
    """How often it has been started again: after that it knows no group and no earlier weights."""
    receiver: str | None = None
    """``host:port`` of what takes changes on its node, for the transport ``delta``."""
    secret: str = field(default="", repr=False)
    """Shown to the receiver."""

    @property
    def is_local(self) -> bool:
        """Whether the engine is in the sender's process, as its only peer. It gets the gathered tensors
        themselves instead of buckets, by :meth:`WeightTarget.load_tensors`.
        """
        return False

    @property
    def needs_transport(self) -> bool:
        """Whether its weights travel by ``weight_sync.transport``; an embedded engine's are handed over."""
        return True

    @property
    def keeps_requests(self) -> bool:
        """Whether a pause in mode ``retract`` keeps the requests under way; otherwise it aborts them."""
        return True

    @property
    def has_checksums(self) -> bool:
        """Whether it reports checksums of its parameters: the first 64 bits of SHA-256, in hex."""
        return False

    @property
    def takes_whole_buckets(self) -> bool:
        """Whether a bucket can be broadcast to it as one tensor."""
        return True

    def target(self, *, deadline_s: float) -> WeightTarget:
        """Return the server's target for an update, without sending anything.

        :param deadline_s: Longest wait for one answer, in seconds.
        """
        raise NotImplementedError


class WeightUpdate(Protocol):
    """An update in progress, with the servers that still take part."""

    version: int

    @property
    def flushes(self) -> bool:
        """Whether the servers must drop the KV cache of the old weights."""

    @property
    def peers(self) -> Sequence[WeightPeer]:
        """The servers that have not failed so far."""

    def load(self, work: Callable[[WeightTarget], None]) -> None:
        """Run a loading step on all servers at once; one that refuses or is late is removed."""

    def each(self, work: Callable[[WeightPeer], None], *, loads: bool) -> None:
        """Run a function for all servers at once; a server for which it raises is removed.

        :param work: Raises an error of this project, or an ``OSError``.
        :param loads: Whether a server that it fails for may hold mixed weights.
        """


class WeightTransport:
    """Sends buckets to engines; lives in the process of the sending rank for the whole run.

    A transport overrides :meth:`send` and what else it needs.
    """

    stages: bool = False
    """Whether :meth:`send` only brings the buckets to where an engine can take them, which it does in
    :meth:`commit`. Otherwise :meth:`send` has them loaded, by engines that are paused and have opened an
    update."""
    opens_session: bool = True
    """Whether :meth:`commit`, or :meth:`send`, is for engines that have opened an update."""

    def connect(self, peers: Sequence[WeightPeer]) -> None:
        """Prepare for these engines before an update. Called for every update.

        :raises RolloutError: They cannot be reached this way.
        """

    def send(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Send a bucket; the last one carries ``update.version``. Runs in a thread.

        :raises DeadlineError: Names the bucket, its tensors and the engines.
        """
        raise NotImplementedError

    def wire_bytes(self) -> int | None:
        """Return the most bytes that the last update sent to one engine; ``None`` for the whole payload."""
        return None

    def commit(self, update: WeightUpdate) -> None:
        """Let the engines load the staged weights, if the transport stages them."""

    def abandon(self) -> None:
        """Discard the state of a failed update; the next one sends all weights."""

    def close(self) -> None:
        """Release memory, groups and files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransportSpec:
    """A transport that a config can name."""

    name: str
    make: Callable[[RunConfig, WorkerContext], WeightTransport]
    """Called in each rank that sends, with the config and the worker's context. Only training rank 0 sends,
    unless :attr:`several_senders` is set."""
    same_host: bool = False
    """Whether servers must be on the host of training rank 0."""
    buffer_device: Callable[[WorkerContext], str] | None = None
    """Device of the buckets, as a ``torch.device`` string; ``None`` takes host memory."""
    same_device: bool = True
    """Whether servers may be on the accelerators of the trainers; a communicator cannot have one twice."""
    other_device: bool = True
    """Whether servers may be on accelerators that the trainers do not see."""
    shares_buffers: bool = False
    """Whether buckets in host memory are to be in memory that other processes can map."""
    several_senders: bool = False
    """Whether several ranks may each send a part of an update, one after another, each by a transport of its
    own that does not stage. ``False``: training rank 0 gathers and sends all."""
    needs_receiver: bool = False
    """Whether it sends to a receiver beside each server, which is there for servers of the run alone."""
