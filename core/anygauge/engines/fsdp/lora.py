"""LoRA: low-rank adapters beside frozen weights, under the names of peft.

An adapter is two further parameters of a linear layer, ``lora_A.weight`` and ``lora_B.weight``, and a forward
hook that adds what they compute. So the model keeps its modules and the names of its weights, which peft's
own wrappers change, and FSDP shards, casts and gathers adapters as it does any parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from anygauge.config.lora import LoraSettings, adapter_config, lora_settings
from anygauge.config.schema import Lora
from anygauge.engines.fsdp.weights import LocalShard, whole
from anygauge.engines.lora.base import AdapterState, checksum, first_values, index_sum, log_sizes
from anygauge.engines.lora.files import opened_adapter, write_adapter
from anygauge.engines.lora.layers import chosen_layers, distinct_names, full_modules
from anygauge.wording import listed
from anygauge_hooks.errors import ConfigError

__all__ = ["Adapters", "add_adapters"]

Trained = Callable[[nn.Parameter], nn.Parameter]
"""From a parameter of the model to the weight that an optimizer updates."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """The adapter of one layer."""

    layer: Any
    scale: float

    @property
    def is_transposed(self) -> bool:
        """Whether the layer's weight is ``[in, out]``."""
        return isinstance(self.layer, Conv1D)

    def rows(self, first: int, last: int, trained: Trained) -> Tensor:
        """Return rows of what the adapter adds to the layer's weight, float32. A collective."""
        parts = self.layer.lora_A, self.layer.lora_B
        down, up = (whole(trained(part.weight).detach()) for part in parts)
        if self.is_transposed:
            return (down[:, first:last].t() @ up.t()) * self.scale
        return (up[first:last] @ down) * self.scale


class Adapters(AdapterState):
    """The adapters of a model; without arguments, those of one that trains all weights."""

    def __init__(
        self,
        settings: LoraSettings | None = None,
        layers: Mapping[str, Any] | None = None,
        others: Collection[str] = (),
        saved: Sequence[str] = (),
    ) -> None:
        """Keep adapters that the layers have.

        :param layers: Linear layers by their names.
        :param others: Names of linear layers without an adapter.
        """
        super().__init__(settings)
        self._saved = tuple(saved)
        scale = settings.scale if settings else 0.0
        self._others = others
        self._by_layer = {name: _Adapter(layer, scale) for name, layer in (layers or {}).items()}

    @property
    def full_modules(self) -> Sequence[str]:
        """Names of the modules that are trained in full."""
        return self._saved

    @property
    def layers(self) -> Collection[str]:
        """Names of the layers that have an adapter."""
        return self._by_layer.keys()

    def owns(self, name: str) -> bool:
        """Return whether a parameter is of an adapter, by its name in a checkpoint."""
        layer, _, part = name.rpartition(".lora_")
        return layer in self._by_layer and part in ("A.weight", "B.weight")

    def merged(self, shard: LocalShard, trained: Trained) -> Tensor:
        """Return a parameter or buffer with its adapter's product added, in float32 and sharded as it is.

        Others are returned as they are. A collective.

        :param trained: ``ShardedModel.trained``.
        """
        tensor = shard.value
        adapter = self._by_layer.get(shard.name.removesuffix(".weight"))
        if adapter is None or not shard.name.endswith(".weight"):
            return tensor
        local = shard.local + adapter.rows(*shard.rows, trained)
        if not isinstance(tensor, DTensor):
            return local
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    @torch.no_grad()
    def start(self, shards: Sequence[LocalShard], seed: int) -> None:
        """Give adapters values that change nothing, and take the checksum of the base. A collective.

        ``lora_A`` is uniform as peft has it, and ``lora_B`` zero; a seed gives the same values on any number
        of ranks.
        """
        self.checksum = _checksum([shard for shard in shards if not self.owns(shard.name)])
        trained = sum(shard.tensor.numel() for shard in shards if shard.tensor.requires_grad)
        log_sizes(len(self.layers), trained, sum(shard.tensor.numel() for shard in shards))
        for shard in shards:
            if self.owns(shard.name) and shard.name.endswith("lora_A.weight"):
                first, last = shard.rows
                shard.local.copy_(first_values(shard.tensor.shape, f"{seed} {shard.name}")[first:last])
            elif self.owns(shard.name):
                shard.local.zero_()

    def read(self, shards: Sequence[LocalShard], directory: Path) -> None:
        """Read this rank's part of a peft adapter. A collective.

        :param shards: All of the model.
        :raises WeightMappingError: It does not fit.
        """
        trained = {shard.name: shard for shard in shards if shard.tensor.requires_grad}
        with opened_adapter(directory, {n: shard.tensor.shape for n, shard in trained.items()}) as source:
            for name, shard in trained.items():
                first, last = shard.rows
                if last > first:
                    shard.local.copy_(source.read(name, (slice(first, last),)))

    def write(self, target: Path, shards: Sequence[LocalShard], base: Path) -> None:
        """Write a peft adapter, float32. A collective; rank 0 writes.

        :param shards: All of the model.
        :param base: Directory of the weights that it belongs to.
        :raises CheckpointError: It cannot be written.
        """
        targets = distinct_names(self.layers, self._others)
        transposed = all(adapter.is_transposed for adapter in self._by_layer.values())
        config = adapter_config(self.settings, base, targets, self._saved, transposed=transposed)
        write_adapter(target, self.weights(shards), config)

    def weights(self, shards: Sequence[LocalShard]) -> Iterator[tuple[str, Tensor]]:
        """Yield all that is trained, whole and float32. A collective: every rank iterates to the end.

        :param shards: All of the model.
        """
        yield from ((shard.name, whole(shard.value)) for shard in shards if shard.tensor.requires_grad)


# -------------------------------------------------------------------------
# Building
# -------------------------------------------------------------------------


def add_adapters(root: Any, lora: Lora, dtype: torch.dtype) -> Adapters:
    """Freeze a model on the meta device and add adapters to its linear layers.

    Frozen weights get the dtype that the model computes in. Adapters, and modules that are trained in full,
    stay float32.

    :raises ConfigError: A target or a module to save matches nothing, or what cannot be trained so.
    """
    model, settings = root.model, lora_settings(lora)
    layers = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)
    }
    weights = {
        name: [id(each) for each in module._parameters.values() if each is not None]
        for name, module in model.named_modules()
    }
    saved = list(full_modules(lora, weights, settings.modules_to_save))
    chosen = chosen_layers(lora, settings, layers, root.output_name, saved)
    _check_unshared(model, {name: layers[name] for name in chosen})
    adapters = Adapters(settings, {name: layers[name] for name in chosen}, layers.keys() - {*chosen}, saved)
    kept = {id(each) for name in saved for each in model.get_submodule(name).parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
    for name in chosen:
        _add(layers[name], settings, adapters)
    return adapters


def _add(layer: Any, settings: LoraSettings, adapters: Adapters) -> None:
    size_in, size_out = layer.weight.shape if isinstance(layer, Conv1D) else reversed(layer.weight.shape)
    layer.lora_A = nn.Linear(size_in, settings.rank, bias=False, device="meta")
    layer.lora_B = nn.Linear(settings.rank, size_out, bias=False, device="meta")

    def add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not adapters.is_on:
            return output
        added: Tensor = module.lora_B(module.lora_A(inputs[0]))
        return output + added * settings.scale

    layer.register_forward_hook(add)


def _check_unshared(model: nn.Module, layers: Mapping[str, Any]) -> None:
    """Check that no two modules share the weight of a layer: merged weights would have both adapters or none.

    :raises ConfigError: Two do.
    """
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    if shared := [name for name, layer in layers.items() if owners[id(layer.weight)] > 1]:
        raise ConfigError(
            f"train.lora.targets: these share their weight with another module: {listed(shared)}.",
            hint="Choose others.",
        )


def _checksum(shards: Sequence[LocalShard]) -> str:
    """Return a checksum of weights that does not depend on how many ranks share them. A collective."""
    facts = [(shard.name, str(shard.tensor.dtype), list(shard.tensor.shape)) for shard in shards]
    return checksum(facts, torch.stack([_sum(shard) for shard in shards]))


def _sum(shard: LocalShard) -> Tensor:
    local, (first, last) = shard.local, shard.rows
    if not local.numel() or not shard.is_first_copy:
        return torch.zeros((), dtype=torch.int64, device=local.device)
    return index_sum(local.contiguous(), torch.arange(first, last, device=local.device))
