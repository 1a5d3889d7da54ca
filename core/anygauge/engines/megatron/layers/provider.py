"""Layer provider: the classes of a layer, from the backend or from our own defaults."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from anygauge.engines.megatron.layers.activation import GatedActivation
from anygauge.engines.megatron.layers.gated_delta import DeltaRule, GatedNorm
from anygauge.engines.megatron.layers.linear import ColumnLinear, RowLinear
from anygauge.engines.megatron.layers.modules import CoreAttention, LayerNorm, RmsNorm, WideNorm
from anygauge.engines.megatron.layers.moe import Dispatcher, GroupedExperts, Router
from anygauge.kernels.table import KernelTable
from anygauge_hooks.errors import PluginError
from anygauge_hooks.kernels import KernelImpl

__all__ = ["SpecProvider", "complete"]


_log = logging.getLogger(__name__)


class SpecProvider:
    """Names the module class, or a builder with its signature, for each part of a layer.

    The default is our modules, bound to the kernel table.
    """

    def __init__(self, kernels: KernelTable, *, unit_angles: bool, remakes: bool = False) -> None:
        self.kernels = kernels
        self.remakes = remakes
        """Whether linears make the outputs of norms and activations again in their backward passes."""
        self.unit_angles = unit_angles
        """Whether the model's cosines and sines are within [-1, 1]."""

    def norm(self) -> ModuleSpec:
        """Return the norm of hidden states, queries and keys."""
        return ModuleSpec(module=RmsNorm, params={"kernels": self.kernels, "remade": self.remakes})

    def wide_norm(self, heads: int) -> ModuleSpec:
        """Return the norm of all queries, or keys, of a token as one."""
        return ModuleSpec(module=WideNorm, params={"kernels": self.kernels, "heads": heads})

    def layer_norm(self) -> ModuleSpec:
        """Return the norm with a mean and a bias: for vision towers, none of the text models has one."""
        return ModuleSpec(module=LayerNorm, params={"kernels": self.kernels})

    def core_attention(self) -> Any:
        """Return the builder of rotary embedding and attention."""
        return partial(CoreAttention, kernels=self.kernels, unit_angles=self.unit_angles)

    def column_parallel_linear(self) -> type:
        """Return the linear whose output is split."""
        return ColumnLinear

    def row_parallel_linear(self) -> type:
        """Return the linear whose input is split."""
        return RowLinear

    def gated_activation(self) -> ModuleSpec:
        """Return the builder of the gated activation."""
        return ModuleSpec(module=GatedActivation, params={"kernels": self.kernels, "remade": self.remakes})

    def delta_rule(self) -> ModuleSpec:
        """Return the builder of the convolution and the recurrence of a gated delta net."""
        return ModuleSpec(module=DeltaRule, params={"kernels": self.kernels})

    def gated_norm(self) -> ModuleSpec:
        """Return the norm of their output."""
        return ModuleSpec(module=GatedNorm, params={"kernels": self.kernels})

    def router(self) -> Any:
        """Return the builder of the router."""
        return partial(Router, kernels=self.kernels)

    def dispatcher(self) -> Any:
        """Return the builder of the token dispatcher."""
        return partial(Dispatcher, kernels=self.kernels)

    def experts(self) -> ModuleSpec:
        """Return the builder of the experts of a rank."""
        return ModuleSpec(module=GroupedExperts, params={"kernels": self.kernels})

    def preferred_kernels(self) -> Iterable[KernelImpl]:
        """Return kernels that our modules prefer to those of the table."""
        return ()


def complete(provided: Any | None, default: SpecProvider) -> Any:
    """Return a provider of all parts: those that a plugin's names are its own, the others the default's.

    :raises PluginError: It names something that is no part of a layer.
    """
    if provided is None:
        return default
    names = {name for name in dir(provided) if not name.startswith("_") and callable(getattr(provided, name))}
    parts = {name for name in vars(SpecProvider) if not name.startswith("_")}
    if unknown := sorted(names - parts):
        raise PluginError(
            f"get_spec_provider names {', '.join(unknown)}, which no layer uses.",
            hint=f"The parts are {', '.join(sorted(parts))}.",
        )
    _log.info("layers take %s from %s", ", ".join(sorted(names)), type(provided).__module__)
    return SimpleNamespace(**{part: getattr(provided if part in names else default, part) for part in parts})
