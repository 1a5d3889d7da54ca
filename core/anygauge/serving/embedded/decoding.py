"""Graph decoding: the forward pass of one token is recorded on the device and replayed as a whole.

A pass for one token is hundreds of short kernels, and starting them takes longer than running them. The
device records them once; what changes between tokens lies in memory that each pass reads: the tokens, their
positions, the place in the cache, the mask. Recordings last for one batch, in memory of its own size, so an
engine that generates nothing holds none, and one whose weights were replaced reads the new ones.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from anygauge.device import is_out_of_memory
from anygauge.serving.embedded.cache import ReservedLayer, fixed_cache

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache

    from anygauge_hooks.types import CaptureGraph, Graph

__all__ = ["RecordedStep", "Recorder", "covers"]

_log = logging.getLogger(__name__)

_SHORTEST = 256
"""Tokens that the first recording of a batch spans at least."""


class Recorder:
    """Records decode steps, until one cannot be recorded.

    :param capture: The device's; ``None`` records nothing.
    """

    def __init__(self, capture: CaptureGraph | None) -> None:
        self._capture = capture

    @property
    def able(self) -> bool:
        """Whether recording may work."""
        return self._capture is not None

    def record(self, step: RecordedStep) -> bool:
        """Record a step; on failure, warn once and stop recording.

        :raises RuntimeError: There is not enough memory for it.
        """
        assert self._capture is not None
        try:
            step.graph = self._capture(step.forward)
        except Exception as error:  # foreign code: a model of transformers
            if is_out_of_memory(error):
                raise
            # not every model takes the mask; what else is wrong, the pass that is queued anew raises
            _log.warning("Tokens are decoded without graphs: this model cannot be recorded: %s", error)
            self._capture = None
        return self._capture is not None


class RecordedStep:
    """The forward pass of one token for every row of a cache, to be recorded and replayed.

    It computes the attention over ``width`` places of the cache, of which those yet to be written are masked.

    :param cache: Cache of :class:`ReservedLayer` alone; its rows stay what they are.
    :param padding: ``[P, S]``, bool, the places that hold tokens or will; ``None`` where all do.
    :param length: Tokens of each row, padding included, with the one to come.
    """

    def __init__(
        self, model: Any, cache: DynamicCache, padding: Tensor | None, rows: int, length: int
    ) -> None:
        self._model = model
        device = model.device
        self._place = torch.full((1,), length - 1, device=device)
        self._cache = fixed_cache(cache, _width(length), self._place)
        self.width: int = self._cache.layers[0].keys.shape[-2]
        visible = (torch.arange(self.width, device=device) < length).expand(rows, -1)
        if padding is not None:
            visible = visible & padding[:, : self.width]
        # added to the scores: a mask of truth values would be turned into one of numbers by every layer
        self._mask = torch.zeros(rows, 1, 1, self.width, dtype=model.dtype, device=device)
        self._mask.masked_fill_(~visible[:, None, None], -torch.inf)
        self._ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._logits: Tensor | None = None
        self.graph: Graph | None = None

    def forward(self) -> None:
        """Compute the logits of the next token. Idempotent."""
        self._mask.index_fill_(-1, self._place, 0)
        output = self._model(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._logits = output.logits[:, -1]

    def load(self, ids: Tensor, positions: Tensor, length: int) -> None:
        """Set the inputs of the next pass.

        :param ids: ``[P]``, int64: the token of each row.
        :param positions: ``[P]``, int64: its position, padding not counted.
        :param length: Tokens of each row with this one, padding included; at most ``width``.
        """
        self._ids.copy_(ids[:, None])
        self._positions.copy_(positions[:, None])
        self._place.fill_(length - 1)

    def replay(self) -> Tensor:
        """Return the logits ``[P, V]``, which the next pass overwrites."""
        assert self.graph is not None
        self.graph.replay()
        assert self._logits is not None
        return self._logits


def covers(cache: DynamicCache) -> bool:
    """Return whether steps over a cache can be recorded: every layer keeps all tokens, in reserved memory."""
    return all(isinstance(layer, ReservedLayer) and layer.is_reserved for layer in cache.layers)


def _width(length: int) -> int:
    """Return how many places a recording spans: twice as many each time, so that a batch needs few."""
    return max(_SHORTEST, 1 << (length - 1).bit_length())
