"""KV cache of a batch: room for the responses is allocated once, then tokens are written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FixedLayer", "ReservedLayer", "fixed_cache", "make_cache", "select_rows"]


class ReservedLayer(DynamicLayer):
    """A layer's keys and values ``[B, K, S, D]``, as views into buffers of fixed length.

    transformers' own layer copies everything for each token.

    :param capacity: Longest sequence, in tokens.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._capacity = capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens and return all."""
        if not self.is_initialized:
            # The prompts: they are copied when it is known how many rows continue each of them.
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        if self._buffers is None:
            self._reserve(self.keys, self.values)
        assert self._buffers is not None
        start, end = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        keys, values = self._buffers
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows, in this order; a row may be taken more than once."""
        self._reserve(self.keys.index_select(0, indices), self.values.index_select(0, indices))

    @property
    def is_reserved(self) -> bool:
        """Whether the buffers exist: from the first token after the prompts."""
        return self._buffers is not None

    def fixed(self, length: int, place: Tensor) -> FixedLayer:
        """Return the first ``length`` places of the buffers, all at once, written at ``place``."""
        assert self._buffers is not None
        keys, values = self._buffers
        for unwritten in (keys[:, :, self.keys.shape[-2] :], values[:, :, self.keys.shape[-2] :]):
            unwritten.zero_()  # what is masked still enters the sum, times zero
        return FixedLayer(keys[:, :, :length], values[:, :, :length], place)

    def set_length(self, length: int) -> None:
        """Count tokens that were written into the buffers through :meth:`fixed`."""
        assert self._buffers is not None
        self.keys, self.values = (buffer[:, :, :length] for buffer in self._buffers)

    def _reserve(self, keys: Tensor, values: Tensor) -> None:
        buffers = []
        for filled in (keys, values):
            batch, heads, length, dim = filled.shape
            buffer = filled.new_empty(batch, heads, self._capacity, dim)
            buffer[:, :, :length] = filled
            buffers.append(buffer)
        length = keys.shape[-2]
        self._buffers = (buffers[0], buffers[1])
        self.keys, self.values = (buffer[:, :, :length] for buffer in buffers)


class FixedLayer(DynamicLayer):
    """Keys and values ``[B, K, S, D]`` at fixed addresses, unwritten places included.

    :param place: ``[1]``, int64, on the device: where the next token is written. Its value may change.
    """

    def __init__(self, keys: Tensor, values: Tensor, place: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._place = keys, values, place
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of one token and return all."""
        self.keys.index_copy_(2, self._place, key_states)
        self.values.index_copy_(2, self._place, value_states)
        return self.keys, self.values


def make_cache(config: Any, capacity: int) -> DynamicCache:
    """Return an empty cache for a model.

    :param config: The model's Hugging Face config. Layers with another state than full attention, such as a
        sliding window, keep transformers' own.
    :param capacity: Longest sequence, in tokens.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        ReservedLayer(capacity) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


def fixed_cache(cache: DynamicCache, length: int, place: Tensor) -> DynamicCache:
    """Return the buffers of a cache of :class:`ReservedLayer`, cut to a length; see :class:`FixedLayer`."""
    fixed = DynamicCache()
    fixed.layers = [layer.fixed(length, place) for layer in cache.layers]
    fixed.layer_class_to_replicate = None
    return fixed


def select_rows(cache: DynamicCache, rows: Tensor) -> None:
    """Keep the given rows of every layer, in this order; a row may be taken more than once.

    :param rows: ``[B']``, int64.
    """
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            # It has no other selection, and where it holds keys and values too, theirs alone would be taken.
            layer.reorder_cache(rows)
        else:
            layer.batch_select_indices(rows)
