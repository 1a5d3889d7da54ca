"""Choice of the layers that get an adapter, and of the modules that are trained in full, as peft chooses."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import Path

import torch.distributed as dist

from anygauge.config.lora import LoraSettings, lora_settings, read_adapter_config
from anygauge.config.schema import Lora
from anygauge.config.tree import is_inside
from anygauge.engines.dequantize import open_unquantized
from anygauge.wording import listed
from anygauge_hooks.errors import ConfigError

__all__ = ["chosen_layers", "distinct_names", "full_modules", "log_frozen_experts"]

_log = logging.getLogger(__name__)

Weights = Mapping[str, Collection[Hashable]]
"""Identities of the weights that are a module's own, by its name: modules that share one have the same."""


def chosen_layers(
    lora: Lora, settings: LoraSettings, layers: Iterable[str], output: str, saved: Sequence[str]
) -> list[str]:
    """Return the names of the linear layers that get an adapter.

    :param layers: Names of all linear layers.
    :param output: Name of the output layer.
    :param saved: Names of modules that are trained in full; no layer of these gets an adapter.
    :raises ConfigError: A target chooses none, or the output layer, or not the layers of ``lora.path``.
    """
    names = list(layers)
    chosen = _chosen(names, settings.targets, output, saved)
    if lora.path is not None and lora.targets is not None:
        _check_same(chosen, _chosen(names, read_adapter_config(lora.path).targets, output, saved))
    return chosen


def log_frozen_experts(lora: Lora, directory: Path) -> None:
    """Log, on rank 0, which experts the targets name: they stay frozen, because they are no linear layers.

    :param directory: Hugging Face directory of the model.
    """
    if dist.get_rank():
        return
    with open_unquantized(directory) as tensors:
        experts = sorted(name.removesuffix(".weight") for name in tensors.names if ".experts." in name)
    targets = lora_settings(lora).targets
    wanted = [targets] if isinstance(targets, str) or targets is None else targets
    matchers = [_matcher(each, is_pattern=not isinstance(targets, list | tuple)) for each in wanted]
    named = [name for name in experts if any(is_named(name) for is_named in matchers)]
    if named:
        level = logging.INFO if targets is None else logging.WARNING
        text = "LoRA: %d weights of experts have no adapter and stay frozen, such as %s"
        _log.log(level, text, len(named), named[0])


def _chosen(
    layers: Sequence[str], targets: Sequence[str] | str | None, output: str, saved: Sequence[str]
) -> list[str]:
    inner = [name for name in layers if name != output and not is_inside(name, saved)]
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


def _check_same(chosen: Sequence[str], stored: Sequence[str]) -> None:
    """Check that the config chooses the layers of the adapter that training starts from.

    :raises ConfigError: It does not.
    """
    if odd := sorted({*chosen} ^ {*stored}):
        raise ConfigError(
            f"train.lora.targets chooses other layers than the adapter of train.lora.path: {listed(odd)}.",
            hint="Leave train.lora.targets out.",
        )


def full_modules(lora: Lora, weights: Weights, wanted: Sequence[str]) -> Iterator[str]:
    """Yield the names of the modules that are trained in full.

    :param weights: Weights of all modules of the model; a module without any of its own has an empty entry.
    :param wanted: Ends of names at a dot, if the config has them. Those of an adapter of peft's end anywhere,
        as in peft: ``norm`` is ``input_layernorm`` too.
    :raises ConfigError: One is not there, or shares a weight with another module.
    """
    for target in wanted:
        is_wanted = _matcher(target, is_pattern=False)
        if lora.path is not None and lora.modules_to_save is None:
            is_wanted = methodcaller("endswith", target)
        names = [name for name in weights if is_wanted(name)]
        if not any(_weights_of(weights, name) for name in names):
            ends = sorted({name.rpartition(".")[2] for name, own in weights.items() if own})
            raise ConfigError(
                f"train.lora.modules_to_save: no module {target!r} has weights.",
                hint=f"Modules with weights end in: {', '.join(ends)}.",
            )
        for name in names:
            if others := _sharing(weights, name):
                raise ConfigError(
                    f"train.lora.modules_to_save: {name} shares a weight with {listed(others)}.",
                    hint="peft would train a copy, which no checkpoint of this model can hold; leave it out.",
                )
            yield name


def _weights_of(weights: Weights, name: str) -> set[Hashable]:
    """Return the identities of all weights of a module, those of its children included."""
    return {each for inner, own in weights.items() if is_inside(inner, [name]) for each in own}


def _sharing(weights: Weights, name: str) -> list[str]:
    """Return the names of other modules that have a weight of a module as their own."""
    own = _weights_of(weights, name)
    return [
        other
        for other, theirs in weights.items()
        if not is_inside(other, [name]) and not own.isdisjoint(theirs)
    ]


def distinct_names(layers: Iterable[str], others: Iterable[str]) -> Collection[str]:
    """Return names that choose these layers in peft and no other: the ends of theirs where that does it."""
    names = list(layers)
    ends = sorted({name.rpartition(".")[2] for name in names})
    return ends if {name.rpartition(".")[2] for name in others}.isdisjoint(ends) else names
