"""Router replay: captures the experts of a micro-batch's tokens in one pass, replays them in another.

Routes are read by layer from the record that travels with the micro-batch's inputs. Recompute and the
interleaved schedule run a layer twice and out of order, so nothing may be taken from a queue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anygauge.data.batch import ranges, starts
from anygauge.engines.megatron.layers.context_parallel import SequenceParts, gather_together
from anygauge_hooks.errors import RouterReplayError

__all__ = ["Routes", "RoutingStore"]

STORED = torch.int16
"""Dtype of expert indices between passes; no model has more than 32,767 experts."""


@dataclass(slots=True)
class Routes:
    """The routes of one micro-batch's tokens on this rank."""

    is_replay: bool
    """Whether layers take them from here; else they put them here."""
    experts: dict[int, Tensor] = field(default_factory=dict)
    """Experts of each token of this rank, by global layer index: ``[T, K]``, int16."""

    def put(self, layer: int, chosen: Tensor) -> None:
        """Record the experts that a layer chose, ``[T, K]``."""
        self.experts[layer] = chosen.detach().to(STORED)

    def take(self, layer: int) -> Tensor:
        """Return the experts that a layer chose, ``[T, K]``, int16.

        :raises RouterReplayError: The layer captured nothing for this micro-batch.
        """
        if layer not in self.experts:
            raise RouterReplayError(
                f"Layer {layer} has no captured routes for this micro-batch; "
                f"captured: {', '.join(map(str, sorted(self.experts))) or 'none'}.",
                hint="The log-prob pass that captures must run the same layers on this rank.",
            )
        return self.experts[layer]


class RoutingStore:
    """Routes of whole samples, between the pass that captures them and the passes that replay them.

    :param layers: Global indices of the layers of this rank that have experts.
    :param group: The ranks that divide sequences.
    """

    def __init__(self, layers: Iterable[int], group: torch.distributed.ProcessGroup) -> None:
        self._layers = sorted(layers)
        self._group = group
        self._routes: dict[bytes, dict[int, Tensor]] = {}

    def replay(self, sequences: Sequence[Tensor], parts: SequenceParts) -> Routes:
        """Return the record of a micro-batch, cut like its tokens.

        :param sequences: Tokens of each sample, in packing order.
        :param parts: How they are divided among ranks.
        :raises RouterReplayError: Nothing was captured for a sample.
        """
        routes_of_samples = [self._of(tokens) for tokens in sequences]
        rows = _real_rows(sequences, parts)
        return Routes(
            is_replay=True,
            experts={
                layer: _padded(torch.cat([routes[layer] for routes in routes_of_samples]), rows, parts)
                for layer in self._layers
            },
        )

    def _of(self, tokens: Tensor) -> dict[int, Tensor]:
        routes = self._routes.get(_key(tokens))
        if routes is None:
            raise RouterReplayError(
                f"A sample of {len(tokens)} tokens has no captured routes; "
                f"those of {len(self._routes)} samples are kept.",
                hint="A sample needs a log-prob pass of the actor on the same rank before it is trained on.",
            )
        return routes

    def clear(self) -> None:
        """Forget all routes."""
        self._routes.clear()

    def keep(self, sequences: Sequence[Tensor], parts: SequenceParts, routes: Routes) -> None:
        """Record the routes that a pass captured. A collective of the context-parallel ranks.

        :param sequences: Tokens of each sample, in packing order.
        :raises RouterReplayError: Nothing was captured.
        """
        if routes.experts.keys() != set(self._layers):
            raise RouterReplayError(
                f"A log-prob pass captured routes of {len(routes.experts)} layers, "
                f"this rank has {len(self._layers)} with experts.",
                hint="A router must ask for its routes; use the engine's own, or set "
                "train.router_replay = false.",
            )
        rows = _real_rows(sequences, parts)
        lengths = [len(tokens) for tokens in sequences]
        whole = {layer: self._whole(routes.experts[layer], parts)[rows] for layer in self._layers}
        split = {layer: chosen.split(lengths) for layer, chosen in whole.items()}
        for index, tokens in enumerate(sequences):
            # equal tokens have equal routes, so that a sample needs no other name
            self._routes[_key(tokens)] = {layer: chosen[index] for layer, chosen in split.items()}

    def _whole(self, chosen: Tensor, parts: SequenceParts) -> Tensor:
        """Return the routes of all tokens of a micro-batch in packing order, on the host."""
        if self._group.size() > 1:
            wide = chosen.int()  # gloo gathers no int16
            (whole,) = gather_together([wide], parts.whole_rows.to(chosen.device), self._group)
            chosen = whole.to(STORED)
        return chosen.cpu()


def _key(tokens: Tensor) -> bytes:
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=16).digest()


def _real_rows(sequences: Sequence[Tensor], parts: SequenceParts) -> Tensor:
    """Return which rows of the packed sequences are no padding."""
    return ranges(starts(parts.lengths)[: len(sequences)], [len(tokens) for tokens in sequences])


def _padded(chosen: Tensor, rows: Tensor, parts: SequenceParts) -> Tensor:
    """Return the routes of this rank's tokens; padding goes to as many experts as a token does."""
    count = chosen.shape[1]
    whole = torch.arange(count, dtype=STORED).repeat(sum(parts.lengths), 1)
    whole[rows] = chosen
    return whole[parts.own_rows]
