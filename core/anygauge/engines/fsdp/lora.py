"""LoRA: low-rank adapters beside frozen weights, under the names of peft.

An adapter is two further parameters of a linear layer, ``lora_A.weight`` and ``lora_B.weight``, and a forward
hook that adds what they compute. So the model keeps its modules and the names of its weights, which peft's
own wrappers change, and FSDP shards, casts and gathers adapters as it does any parameter.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from anygauge.config.lora import LoraSettings, lora_settings, read_adapter_config
from anygauge.config.schema import Lora
from anygauge.engines.agreement import shown
from anygauge.engines.fsdp.weights import LocalShard, whole
from anygauge_hooks.errors import ConfigError

__all__ = ["Adapters", "add_adapters"]

Trained = Callable[[nn.Parameter], nn.Parameter]
"""From a parameter of the model to the weight that an optimizer updates."""
_log = logging.getLogger(__name__)
_ROWS = 0x9E3779B97F4A7C15
"""2 ** 64 over the golden ratio: the odd factor between the rows of a checksum."""


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


class Adapters:
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
        self.settings = settings
        self.saved = tuple(saved)
        """Names of the modules that are trained in full."""
        self.is_on = True
        """Whether the model computes with them."""
        self.checksum = ""
        """Checksum of the base weights, set by :meth:`start`."""
        scale = settings.scale if settings else 0.0
        self._others = {name.rpartition(".")[2] for name in others}
        self._by_layer = {name: _Adapter(layer, scale) for name, layer in (layers or {}).items()}

    @property
    def layers(self) -> Collection[str]:
        """Names of the layers that have an adapter."""
        return self._by_layer.keys()

    @property
    def target_names(self) -> Collection[str]:
        """Names that choose these layers and no other: the ends of their names where that does it."""
        ends = sorted({name.rpartition(".")[2] for name in self.layers})
        return ends if self._others.isdisjoint(ends) else self.layers

    def owns(self, name: str) -> bool:
        """Return whether a parameter is of an adapter, by its name in a checkpoint."""
        layer, _, part = name.rpartition(".lora_")
        return layer in self._by_layer and part in ("A.weight", "B.weight")

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute without its adapters."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before

    def merged(self, shard: LocalShard, trained: Trained) -> Tensor:
        """Return a parameter or buffer with its adapter's product added, in float32 and sharded as it is.

        Others are returned as they are. A collective.

        :param trained: ``ShardedModel.trained``.
        """
        tensor = shard.tensor.detach()
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
        self._log_sizes(shards)
        for shard in shards:
            if self.owns(shard.name) and shard.name.endswith("lora_A.weight"):
                first, last = shard.rows
                shard.local.copy_(_uniform(shard.tensor.shape, f"{seed} {shard.name}")[first:last])
            elif self.owns(shard.name):
                shard.local.zero_()

    def _log_sizes(self, shards: Sequence[LocalShard]) -> None:
        total = sum(shard.tensor.numel() for shard in shards)
        trained = sum(shard.tensor.numel() for shard in shards if shard.tensor.requires_grad)
        if dist.get_rank() == 0:
            text = "LoRA: %d layers have adapters; %s of %s parameters are trained"
            _log.info(text, len(self.layers), f"{trained:,}", f"{total:,}")

    @property
    def are_transposed(self) -> bool:
        """Whether all layers have weights ``[in, out]``."""
        return all(adapter.is_transposed for adapter in self._by_layer.values())

    def description(self, base: str) -> Mapping[str, Any]:
        """Return what a checkpoint of the adapters says of the weights that they belong to."""
        if self.settings is None:
            return {}
        scale = {"rank": self.settings.rank, "alpha": self.settings.alpha}
        return {"path": base, "checksum": self.checksum, **scale}


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
    saved = list(_modules_to_save(model, settings.modules_to_save))
    chosen = _targets(layers, settings.targets, root.output_name, saved)
    if lora.path is not None and lora.targets is not None:
        _check_same(chosen, _targets(layers, read_adapter_config(lora.path).targets, root.output_name, saved))
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


def _targets(
    layers: Mapping[str, Any], targets: Sequence[str] | str | None, output: str, saved: Sequence[str]
) -> list[str]:
    """Return the names of the layers that targets choose, as peft does.

    :param output: Name of the output layer.
    :param saved: Names of modules that are trained in full; no layer of these gets an adapter.
    :raises ConfigError: One of the targets chooses none, or the output layer.
    """
    inner = [name for name in layers if name != output and not _is_inside(name, saved)]
    wanted = [targets] if isinstance(targets, str) or targets is None else list(targets)
    chosen: set[str] = set()
    for target in wanted:
        is_chosen = _matcher(target, is_pattern=not isinstance(targets, list | tuple))
        names = {name for name in inner if is_chosen(name)}
        if target is not None and is_chosen(output):
            raise ConfigError(
                f"train.lora.targets: {target!r} chooses the output layer {output}, whose weight the fused "
                "loss reads.",
                hint=f"Leave it out, or train it in full: train.lora.modules_to_save = [{output!r}].",
            )
        if not names:
            ends = sorted({name.rpartition(".")[2] for name in inner})
            raise ConfigError(
                f"train.lora.targets: {target!r} matches no linear layer.",
                hint=f"The model's linear layers end in: {', '.join(ends) or 'it has none'}.",
            )
        chosen |= names
    return [name for name in inner if name in chosen]


def _matcher(target: str | None, *, is_pattern: bool) -> Callable[[str], bool]:
    if target is None:
        return lambda name: True
    if is_pattern:
        return lambda name: re.fullmatch(target, name) is not None
    return lambda name: name == target or name.endswith(f".{target}")


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _modules_to_save(model: Any, wanted: Sequence[str]) -> Iterator[str]:
    """Yield the names of the modules that are trained in full.

    :raises ConfigError: One is not there, or shares a weight with another module.
    """
    modules = dict(model.named_modules())
    for target in wanted:
        names = [name for name in modules if _matcher(target, is_pattern=False)(name)]
        if not any(list(modules[name].parameters()) for name in names):
            ends = sorted({name.rpartition(".")[2] for name, each in modules.items() if each._parameters})
            raise ConfigError(
                f"train.lora.modules_to_save: no module {target!r} has weights.",
                hint=f"Modules with weights end in: {', '.join(ends)}.",
            )
        for name in names:
            if others := _sharing(modules, name):
                raise ConfigError(
                    f"train.lora.modules_to_save: {name} shares a weight with {shown(others)}.",
                    hint="peft would train a copy, which no checkpoint of this model can hold; leave it out.",
                )
            yield name


def _sharing(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """Return the names of other modules that have a parameter of a module as their own."""
    own = {id(parameter) for parameter in modules[name].parameters()}
    return [
        other
        for other, module in modules.items()
        if not _is_inside(other, [name]) and any(id(each) in own for each in module._parameters.values())
    ]


def _check_unshared(model: nn.Module, layers: Mapping[str, Any]) -> None:
    """Check that no two modules share the weight of a layer: merged weights would have both adapters or none.

    :raises ConfigError: Two do.
    """
    owners = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    if shared := [name for name, layer in layers.items() if owners[id(layer.weight)] > 1]:
        raise ConfigError(
            f"train.lora.targets: these share their weight with another module: {shown(shared)}.",
            hint="Choose others.",
        )


def _check_same(chosen: Sequence[str], stored: Sequence[str]) -> None:
    """Check that the config chooses the layers of the adapter that training starts from.

    :raises ConfigError: It does not.
    """
    if odd := sorted({*chosen} ^ {*stored}):
        raise ConfigError(
            f"train.lora.targets chooses other layers than the adapter of train.lora.path: {shown(odd)}.",
            hint="Leave train.lora.targets out.",
        )


# -------------------------------------------------------------------------
# Values
# -------------------------------------------------------------------------


def _uniform(shape: Sequence[int], seed: str) -> Tensor:
    """Return the first values of a ``lora_A``, ``[rank, in]``, on the host: the same wherever it is drawn."""
    number = int.from_bytes(blake2b(seed.encode(), digest_size=8).digest(), "big") >> 1
    generator = torch.Generator().manual_seed(number)
    bound = shape[1] ** -0.5
    return torch.empty(*shape).uniform_(-bound, bound, generator=generator)


def _checksum(shards: Sequence[LocalShard]) -> str:
    """Return a checksum of weights that does not depend on how many ranks share them. A collective.

    Each row is summed up as integers and counts an odd number of times, modulo 2 ** 64, so one changed
    element always changes it.
    """
    sums = torch.stack([_sum(shard) for shard in shards])
    dist.all_reduce(sums)
    names = [(shard.name, str(shard.tensor.dtype), list(shard.tensor.shape)) for shard in shards]
    return blake2b(repr((names, sums.tolist())).encode(), digest_size=8).hexdigest()


def _sum(shard: LocalShard) -> Tensor:
    local, (first, last) = shard.local, shard.rows
    if not local.numel() or not shard.is_first_copy:
        return torch.zeros((), dtype=torch.int64, device=local.device)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.element_size()]
    rows = local.contiguous().view(words).view(last - first, -1).sum(1, dtype=torch.int64)
    factors = torch.arange(first, last, device=local.device) * (_ROWS - 2**64 - 1) + 1
    return (rows * factors).sum()
