"""Interface of weight transports from the trainer to the servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.types import WorkerContext

__all__ = [
    "NO_KEYS",
    "ServerKeys",
    "WeightApi",
    "WeightBucket",
    "WeightPeer",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightApi:
    """Endpoints and formats of the server's version. The engine that serves it fills this in."""

    has_session: bool = True
    """An update from memory is opened and closed: ``/begin_weight_update`` and ``/end_weight_update``."""
    has_flattened_broadcast: bool = True
    """A bucket can be broadcast as one tensor; otherwise its tensors are, one by one."""
    retracted_survive_flush: bool = True
    """Whether requests that a pause has sent back to the queue survive that the cache is dropped; where not,
    a pause ends them with what they have."""
    checksums: Literal["sha256", "none"] = "none"
    """Checksums that ``/weights_checker`` returns for each parameter: ``sha256`` is the first 64 bits of
    SHA-256 where parameters are in host memory; ``none`` is for values that cannot be compared with anything
    else."""
    info_path: str = "/model_info"
    """Answers with the ``weight_version``."""


_GENERATES = (
    *("/generate", "/v1/", "/model_info", "/server_info"),
    *("/get_model_info", "/get_server_info"),  # their older names
)
"""Paths, or their beginnings, that SGLang has for whoever generates; the others manage the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """Keys that a server asks for, as SGLang tells them apart; an error or a log shows neither."""

    api: str = field(default="", repr=False)
    """For generation and what describes the model; empty if the server asks for none."""
    admin: str = field(default="", repr=False)
    """For what changes the server: weights, cache, memory, pauses; empty if it asks for ``api`` there too."""

    def headers(self, path: str) -> dict[str, str]:
        """Return the headers that a request for a path of the server needs."""
        key = self.api if path.startswith(_GENERATES) else self.admin or self.api
        return {"authorization": f"Bearer {key}"} if key else {}


NO_KEYS = ServerKeys()
"""Keys for a server that requires none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPeer:
    """One server that generates."""

    address: str
    """``http://host:port``."""
    tensor_parallel: int = 1
    """Processes that split its model; each is given the whole weights and takes its part."""
    api: WeightApi = WeightApi()
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
    keys: ServerKeys = NO_KEYS
    """Shown to the server."""


class WeightUpdate(Protocol):
    """One update on its way. It keeps count of which servers are still part of it."""

    version: int

    @property
    def flushes(self) -> bool:
        """Whether the servers are to drop the cache that the old weights have made."""

    @property
    def peers(self) -> Sequence[WeightPeer]:
        """The servers that have refused or failed nothing so far."""

    def request(
        self, path: str, bodies: Callable[[WeightPeer], Any], *, bucket: WeightBucket | None = None
    ) -> None:
        """Post what changes weights to every server at once; one that refuses or is late is taken out.

        :param bodies: Makes the JSON body for a server.
        :param bucket: What is being sent, for the words of an error.
        """

    def each(self, work: Callable[[WeightPeer], None], *, loads: bool) -> None:
        """Do something for every server at once; one for which it raises is taken out.

        :param work: Raises an error of this project, or an ``OSError``.
        :param loads: Whether a server that it fails for may hold mixed weights.
        """


class WeightTransport(Protocol):
    """A way for buckets to servers; in the process of training rank 0, for the whole run."""

    stages: bool
    """Whether :meth:`send` only brings the buckets to where a server can take them, which it does in
    :meth:`commit`. Otherwise :meth:`send` has them loaded, by servers that are paused and have opened an
    update."""
    opens_session: bool
    """Whether :meth:`commit`, or :meth:`send`, is for servers that have opened an update."""

    def connect(self, peers: Sequence[WeightPeer]) -> None:
        """Make ready for these servers, before anything is asked of them. Called for every update.

        :raises RolloutError: They cannot be reached this way.
        """

    def send(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Move a bucket; with the last one the servers are told ``update.version``. Runs in a thread.

        :raises DeadlineError: Names the bucket, its tensors and the servers.
        """

    def wire_bytes(self) -> int | None:
        """Return how many bytes the last update moved to each server, at most; ``None`` for all of them."""

    def commit(self, update: WeightUpdate) -> None:
        """Have the servers load what was staged, where the transport stages."""

    def abandon(self) -> None:
        """Forget what an update that failed has left half done; the next one is whole."""

    def close(self) -> None:
        """Release memory, groups and files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTransportSpec:
    """A transport that a config can name."""

    name: str
    make: Callable[[Any, WorkerContext], WeightTransport]
    """Called in training rank 0 with the config and the worker's context."""
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
    needs_receiver: bool = False
    """Whether it sends to a receiver beside each server, which is there for servers of the run alone."""
