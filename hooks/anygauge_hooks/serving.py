"""Interfaces of rollout engines that are served: the server, its client, and how other processes know it.

What goes over the wire is the engine's own affair; the core speaks to a server through these alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from anygauge_hooks.errors import RolloutError
from anygauge_hooks.weights import WeightPeer

if TYPE_CHECKING:
    from anygauge_hooks.media import Media
    from anygauge_hooks.rollout import GenerateRequest, Generation

__all__ = [
    "ClientLimits",
    "EngineAwayError",
    "EngineClient",
    "EngineServer",
    "HandoverClient",
    "ImageEncoder",
    "MemoryState",
    "ServerKind",
    "ServerPeer",
    "SupportsEarlyStart",
    "SupportsProfile",
]

MemoryState = Literal["nothing", "weights", "everything"]
"""How much an engine has on its device: nothing, its model's weights alone, or all that it works with."""

ServerKind = Literal["regular", "prefill", "decode", "encoder"]
"""Task of a server: whole requests, prefill alone, decode alone, or the encoding of images and audio
alone."""


class EngineAwayError(RolloutError):
    """An engine is gone or failed at its task: the same request may succeed elsewhere or later."""


class ClientLimits(Protocol):
    """Limits of a client: the table ``[rollout.client]`` of the config."""

    @property
    def concurrency(self) -> int | None:
        """Most requests in flight; ``None`` leaves that to the caller."""

    @property
    def attempts(self) -> int:
        """Most attempts of a command or a request."""

    @property
    def pause_s(self) -> float:
        """Longest pause before the second attempt, in seconds."""

    @property
    def request_timeout_s(self) -> float:
        """Longest time for one response, in seconds."""

    @property
    def control_timeout_s(self) -> float:
        """Longest wait for a control command, in seconds."""

    @property
    def probe_timeout_s(self) -> float:
        """Timeout of a health probe, in seconds."""


class ImageEncoder(Protocol):
    """Encodes the media of requests, each once for all clients of a run."""

    async def encoded(self, media: Sequence[Media], *, contents: bool = False) -> list[bytes]:
        """Return each medium as a JSON string: base64 of a PNG file.

        :param contents: Encode contents as NumPy's files (``.npy``) instead: the arrays that the trainer has.
            Video and audio are sent in no other form.
        :raises RolloutError: One is not in the run's store.
        """


class EngineClient(Protocol):
    """Speaks to one server in its engine's protocol. Belongs to one event loop.

    Methods raise :class:`EngineAwayError` where another server, or this one later, may do what was asked,
    :class:`~anygauge_hooks.errors.DeadlineError` where no answer came in time, and
    :class:`~anygauge_hooks.errors.RolloutError` where the server refuses.
    """

    name: str
    """How errors call the server."""
    address: str
    """``http://host:port``."""
    silence: str
    """Why the last health probe failed."""
    weight_version: int
    """Version of the weights that the server was given last. The core sets it, for engines whose answers do
    not say which weights made a token."""

    async def generate(
        self,
        request: GenerateRequest,
        *,
        rank: int | None = None,
        ends: float | None = None,
    ) -> Generation:
        """Generate a continuation of a request's tokens. Cancelling the call aborts it in the server too.

        One attempt: the core gives a request again that failed, to this server or another.

        :param rank: Data-parallel rank of the server; ``None`` leaves the choice to it.
        :param ends: Deadline on the event loop's clock; ``None`` takes the limits'.
        """

    async def abort(self) -> None:
        """Abort all generations in the server; each returns its tokens so far.

        Called again every 0.2 s until all requests are answered: one may reach the server after an abort.
        """

    async def set_memory_state(self, state: MemoryState) -> None:
        """Have the server release or restore device memory.

        Called only for engines with :attr:`~anygauge_hooks.engines.RolloutEngineSpec.releases_memory`.
        """

    async def is_healthy(self) -> bool:
        """Return whether the server makes tokens."""

    async def is_answering(self) -> bool:
        """Return whether the server answers, also while it is paused."""

    async def close(self, *, farewell_s: float = 10.0) -> None:
        """Close the connections.

        :param farewell_s: Longest wait for the server to learn what was abandoned.
        """


class SupportsProfile(Protocol):
    """An :class:`EngineClient` whose server records profiles of itself."""

    async def start_profile(self, directory: str) -> None:
        """Begin a profile.

        :param directory: Directory on the server's host that the files go to.
        """

    async def stop_profile(self) -> None:
        """End the profile; returns once it is written."""


class HandoverClient(EngineClient, Protocol):
    """A client of servers that divide requests, of the kinds ``prefill`` and ``decode``.

    Both halves of a request run at once, with the same handover of the engine's own type.
    """

    def handover(self, rank: int | None) -> Any:
        """Return where this prefill server hands over one more prompt.

        :param rank: Data-parallel rank that reads it; ``None`` if the server has but one.
        """

    async def read(self, request: GenerateRequest, handover: Any, *, rank: int | None = None) -> None:
        """Prefill the prompt of a request. Returns once the decode server has it."""

    async def generate(
        self,
        request: GenerateRequest,
        *,
        rank: int | None = None,
        ends: float | None = None,
        handover: Any = None,
    ) -> Generation:
        """Generate as :meth:`EngineClient.generate` does, with what a prefill server reads.

        :param handover: ``None`` for a server that reads the prompt itself.
        """


@dataclass(frozen=True, kw_only=True)
class ServerPeer(WeightPeer):
    """One server, as other processes know it: a picklable value of the engine's own subclass.

    Example::

        @dataclass(frozen=True, kw_only=True)
        class MyPeer(ServerPeer):
            def target(self, *, deadline_s):
                return MyTarget(self.address, deadline_s)

            def client(self, limits, *, name, images):
                return MyClient(self.address, limits, name)
    """

    data_parallel: int = 1
    """Data-parallel ranks, among which requests are balanced."""
    max_running_requests: int | None = None
    """Most requests that a data-parallel rank runs at once; ``None`` if the engine does not tell."""

    def client(self, limits: ClientLimits, *, name: str, images: ImageEncoder | None) -> EngineClient:
        """Return a client of the server.

        :param name: How errors call the server.
        :param images: ``None`` in a run of text.
        """
        raise NotImplementedError


class EngineServer(Protocol):
    """A process that serves an engine over HTTP, on the node of the worker that started it."""

    def start(self, encoders: Sequence[str] = ()) -> str:
        """Start the process, or start it again after its end, and return its address: ``http://host:port``.

        Returns once it answers.

        :param encoders: Addresses of the servers that encode images and sound for it.
        :raises RolloutError: It ended, or did not answer in time; the end of its log is attached.
        """

    def is_alive(self) -> bool:
        """Return whether the process runs; it may hang nevertheless."""

    def facts(self) -> Mapping[str, str]:
        """Return facts for the run's records: version, command line, log. The run reads none of them."""

    def peer(self) -> ServerPeer:
        """Return how other processes speak to it, where it listens now.

        How often it was started, and what takes changes for it, is told by the worker that looks after it.
        """

    def close(self) -> None:
        """End the process and its descendants, and remove their leftovers from the host."""


class SupportsEarlyStart(Protocol):
    """An :class:`EngineServer` whose process can start while the trainers still do."""

    def begin(self, *, hold: bool) -> None:
        """Start the process and return at once; :meth:`EngineServer.start` waits for it.

        Called once, before the first ``start``, which has no encoders then.

        :param hold: Take no memory of the devices before ``start``: the trainers have it until then.
        :raises RolloutError: The process cannot be started.
        """
