"""NF4: the frozen weights below adapters in 4 bits (QLoRA, arXiv:2305.14314), by bitsandbytes.

A weight is kept as 4-bit numbers and a scale for each 64 of them, which are 8-bit numbers themselves: 0.516
bytes per element. Each pass dequantizes it to the dtype of the model and multiplies, so that log-probs of
all passes, merged weights and exports come from the same values.

FSDP shards parameters by rows, which 4-bit numbers and their scales do not have. They are no parameters
here, so that FSDP leaves them alone: every rank has all of them, and shards the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from anygauge.engines.fsdp.weights import LocalShard
from anygauge.extras import install_extra
from anygauge_hooks.errors import ConfigError

__all__ = ["Nf4Shard", "Nf4Weight", "quantize_layers"]

BLOCK = 64
"""Elements with one scale."""


class Nf4Weight:
    """A frozen weight in 4 bits.

    :param shape: ``[out, in]``.
    :param dtype: Dtype that the model computes in.
    :param functions: bitsandbytes' functions, checked on the device.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device, functions: Any) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._functions = functions
        self._packed: Tensor | None = None
        self._state: Any = None

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        """Quantize a weight, in place after the first time: other objects hold views of its memory."""
        packed, state = self._functions.quantize_4bit(
            weight.to(self.dtype).contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        if self._packed is None:
            self._packed, self._state = packed, state
            return
        for stored, new in zip(self.tensors, _tensors(packed, state), strict=True):
            stored.copy_(new)

    def values(self) -> Tensor:
        """Return the weight ``[out, in]`` that the model computes with."""
        weight: Tensor = self._functions.dequantize_4bit(self._packed, self._state)
        return weight

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Storage of the weight: 4-bit numbers, scales, scales of scales and their offset."""
        assert self._packed is not None, "nothing was written"
        return _tensors(self._packed, self._state)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output ``[..., out]`` of a linear layer."""
        product: Tensor = _Product.apply(x, self)
        return product if bias is None else product + bias


def _tensors(packed: Tensor, state: Any) -> Sequence[Tensor]:
    return packed, state.absmax, state.state2.absmax, state.offset


class _Product(torch.autograd.Function):
    """Product of an input with a weight that is dequantized in both directions, and kept in neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Nf4Weight) -> Tensor:
        """Return ``[..., out]``.

        :param x: ``[..., in]``.
        """
        ctx.weight = weight
        return F.linear(x, weight.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the input."""
        return grads[0] @ ctx.weight.values(), None


@dataclass(frozen=True, slots=True)
class Nf4Shard(LocalShard):
    """A weight in 4 bits, whole on each rank."""

    weight: Nf4Weight
    """``tensor`` has its shape and dtype, and no memory."""

    @property
    def value(self) -> Tensor:
        """Return the dequantized weight."""
        return self.weight.values()

    @property
    def local(self) -> Tensor:
        """Return the dequantized weight, in memory of its own."""
        return self.weight.values()

    @property
    def stored(self) -> Sequence[Tensor]:
        """Return the tensors that the weight is stored in."""
        return self.weight.tensors

    @property
    def is_first_copy(self) -> bool:
        """Return whether this is rank 0."""
        return dist.get_rank() == 0

    @contextmanager
    def writing(self) -> Iterator[Tensor]:
        """Yield memory for the weight, which is quantized at the end."""
        weight = torch.empty(self.weight.shape, dtype=self.weight.dtype, device=self.weight.device)
        yield weight
        self.weight.write(weight)


def quantize_layers(root: Any, dtype: torch.dtype, device: torch.device) -> Sequence[Nf4Shard]:
    """Let the linear layers of the decoder layers compute with frozen weights in 4 bits, yet to be written.

    Each keeps its module, bias, adapter and hooks, and loses its parameter ``weight``. Modules that are
    trained in full keep theirs.

    :param root: A ``ShardedModel`` on the meta device.
    :raises ConfigError: bitsandbytes is not there or not for this device, or there are no such layers.
    """
    inside = {id(module) for layer in root.layers for module in layer.modules()}
    kept = {
        id(module)
        for name in root.adapters.full_modules
        for module in root.model.get_submodule(name).modules()
    }
    layers = {
        name: module
        for name, module in root.model.named_modules()
        if type(module) is nn.Linear
        and id(module) in inside - kept
        and not root.adapters.owns(f"{name}.weight")
    }
    if not layers:
        raise ConfigError(
            "train.lora.base = 'nf4' is of linear layers, and the model's decoder layers have none.",
            hint="Leave it out.",
        )
    functions = _functions(device)
    return [
        _quantize(
            f"{name}.weight", layer, partial(Nf4Weight, dtype=dtype, device=device, functions=functions)
        )
        for name, layer in layers.items()
    ]


def _quantize(name: str, layer: Any, make_weight: Callable[[torch.Size], Nf4Weight]) -> Nf4Shard:
    shape = layer._parameters.pop("weight").shape
    weight = make_weight(shape)
    layer.forward = lambda x: weight.forward(x, layer.bias)
    place = nn.Parameter(torch.empty(shape, dtype=weight.dtype, device="meta"), requires_grad=False)
    return Nf4Shard(name, place, weight)


def _functions(device: torch.device) -> Any:
    """Return bitsandbytes' functions, after a trial.

    :raises ConfigError: It is not there, or has no kernels for the device.
    """
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ConfigError(
            f"train.lora.base = 'nf4' needs bitsandbytes, which cannot be imported: {error}.",
            hint=f"{install_extra('qlora')}; or leave train.lora.base out.",
        ) from error
    try:
        functional.dequantize_4bit(
            *functional.quantize_4bit(torch.zeros(BLOCK, device=device), quant_type="nf4")
        )
    except (RuntimeError, NotImplementedError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"train.lora.base = 'nf4': bitsandbytes has no 4-bit weights on {device.type}: {error}",
            hint="Leave train.lora.base out.",
        ) from error
    return functional
