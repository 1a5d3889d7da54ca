"""Report of a weight update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["PeerOutcome", "SyncReport"]

PeerState = Literal["serving", "unusable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOutcome:
    """Outcome of an update on one server."""

    address: str
    state: PeerState
    """``unusable``: its weights may be mixed. It is left paused, and must not generate before a whole update
    or a start of its own."""
    version: int | None
    """Version of its weights; ``None`` where that is not one version, or unknown."""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """Report of an update, from training rank 0. Picklable; errors are text."""

    version: int
    transport: str
    bytes: int
    """Bytes of the weights."""
    wire_bytes: int
    """Bytes sent to each server, where the transport counts them; else ``bytes``."""
    buckets: int
    tensors: int
    senders: int = 1
    """Training ranks that sent, one after another."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: ``pause``, ``begin``, ``move``, ``end``, ``verify``, ``resume``, ``total``."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the tensors that were sent, where servers report theirs and the update was verified."""
    unverified: tuple[str, ...] = ()
    """Parameters of engines that nothing sent could be compared with."""
    peers: tuple[PeerOutcome, ...] = ()

    @property
    def failed(self) -> tuple[PeerOutcome, ...]:
        """The servers that do not serve this version."""
        return tuple(peer for peer in self.peers if peer.version != self.version)

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics of the update, named ``weight_sync/<name>``."""
        figures = {"bytes": float(self.bytes), "wire_bytes": float(self.wire_bytes)}
        figures |= {"failed_engines": float(len(self.failed)), "buckets": float(self.buckets)}
        figures |= {f"{phase}_s": value for phase, value in self.seconds.items()}
        return {f"weight_sync/{name}": value for name, value in figures.items()}
