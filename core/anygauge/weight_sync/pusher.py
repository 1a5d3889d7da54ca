"""Weight pusher: sends a training worker's weights to rollout engines, in complete versions."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.delivery import Sender
from anygauge.weight_sync.joint_push import JointPush
from anygauge.weight_sync.push import Push
from anygauge.weight_sync.sharing import shared_memory
from anygauge.weight_sync.transports.tensor import TensorTransport

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge.config import Config
    from anygauge.config.schema import WeightSync
    from anygauge.weight_sync.report import PeerOutcome, SyncReport
    from anygauge_hooks.engines import WorkerContext
    from anygauge_hooks.types import Device
    from anygauge_hooks.weights import WeightPeer, WeightTransport, WeightTransportSpec

__all__ = ["WeightPusher", "make_pusher", "takes_several_senders"]

_log = logging.getLogger(__name__)

Weights = Iterable[tuple[str, "Tensor"]]


class WeightPusher:
    """The sender of a run. One update at a time, from one thread.

    :param options: The config's ``[weight_sync]``.
    :param buffers: Memory for the buckets.
    """

    def __init__(self, options: WeightSync, transport: WeightTransport, buffers: Buffers) -> None:
        self._options = options
        self._transport = transport
        self._buffers = buffers
        self._outcomes: dict[tuple[str, int], PeerOutcome] = {}
        self._verified: set[tuple[str, int]] = set()

    def push(
        self, weights: Weights, version: int, peers: Sequence[WeightPeer], *, pauses: bool = True
    ) -> SyncReport:
        """Send a version to the servers and return the outcome of each.

        The weights are iterated to their end whatever happens: the other ranks do, and gathering them is a
        collective. A server that refuses or fails is left out; see :class:`PeerOutcome` for what it is then.

        :param weights: Full tensors under Hugging Face names.
        :param pauses: Whether to pause the servers and to let them go on; else the caller does.
        :raises RolloutError: The servers cannot be reached by this transport; nothing was sent.
        """
        # A plain iterator: what is left of it is gathered and dropped, whoever stopped asking.
        stream = iter(weights)
        try:
            return Push(self._sender, version, peers, stream, pauses=pauses).run()
        finally:
            for _ in stream:
                pass

    def push_jointly(
        self,
        weights: Mapping[int, Iterator[tuple[str, Tensor]]],
        version: int,
        peers: Sequence[WeightPeer],
        *,
        rank: int,
    ) -> SyncReport | None:
        """Send a version to the servers from several ranks. A collective of all training ranks.

        :param weights: Full tensors by the rank that sends them, from
            :meth:`~anygauge_hooks.engines.HasSenders.weights_by_sender`.
        :param rank: Training rank of this process.
        :returns: The outcome of each server, on rank 0.
        """
        if rank == 0 and not self._outcomes:
            _log.info("training ranks %s send the weights to the servers", ", ".join(map(str, weights)))
        report = JointPush(self._sender, version, peers, weights, rank=rank).run()
        return report if rank == 0 else None

    def release_buffers(self) -> None:
        """Release the buffers' memory until the next update."""
        self._buffers.release()

    def close(self) -> None:
        """Release the transport and the buffers."""
        self._transport.close()
        self._buffers.release()

    @property
    def _sender(self) -> Sender:
        return Sender(self._options, self._transport, self._buffers, self._outcomes, self._verified)


def make_pusher(config: Config, context: WorkerContext, peers: Sequence[WeightPeer] = ()) -> WeightPusher:
    """Return the pusher for a config.

    :param peers: The engines that it will send to, if they are known: all of one kind.
    """
    options = config.weight_sync
    if peers and not peers[0].needs_transport:
        return WeightPusher(options, TensorTransport(), Buffers(partial(torch.empty, dtype=torch.uint8)))
    spec: WeightTransportSpec = context.plugins.get("register_weight_transports", options.transport)
    # A server that is divided has processes on other devices too, and memory that its allocator reserves for
    # sleep takes no copy from another device: CUDA calls it an invalid argument.
    is_divided = any(peer.tensor_parallel > 1 for peer in peers)
    if spec.shares_buffers and (is_divided or context.device.type == "cpu"):
        buffers = Buffers(shared_memory)
    elif spec.shares_buffers:
        buffers = Buffers(partial(_mappable, context.device))
    else:
        device = torch.device(spec.buffer_device(context) if spec.buffer_device is not None else "cpu")
        lends = None if device.type == "cpu" else device.type
        buffers = Buffers(partial(torch.empty, dtype=torch.uint8, device=device), lends=lends)
    return WeightPusher(options, spec.make(config, context), buffers)


def _mappable(device: Device, size: int) -> Tensor:
    """Return bytes on a device that its other processes can map, uint8."""
    with device.shareable():
        return torch.empty(size, dtype=torch.uint8, device=device.torch_device)


def takes_several_senders(config: Config, context: WorkerContext, peers: Sequence[WeightPeer]) -> bool:
    """Return whether several training ranks may each send a part of an update to these engines."""
    if config.weight_sync.senders == "one" or not all(peer.needs_transport for peer in peers):
        return False
    spec: WeightTransportSpec = context.plugins.get(
        "register_weight_transports", config.weight_sync.transport
    )
    return spec.several_senders
