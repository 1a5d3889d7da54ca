"""Transports are found by name, and what the config says of them is checked."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.plugins import Plugins, load_plugins
from anygauge.weight_sync import plugin
from anygauge_cpu.plugin import CPU
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import DuplicateNameError, RolloutError
from anygauge_hooks.weights import WeightTarget, WeightTransportSpec


def test_the_core_registers_its_transports() -> None:
    found = load_plugins(only=()).named("register_weight_transports")
    assert sorted(found) == ["adapter", "delta", "disk", "distributed", "tensor"]
    assert [name for name, spec in found.items() if spec.same_host] == ["tensor"]


def test_two_transports_of_one_name_are_an_error() -> None:
    class Other:
        @hookimpl
        def register_weight_transports(self) -> list[WeightTransportSpec]:
            return [WeightTransportSpec(name="disk", make=lambda config, context: None)]  # type: ignore[arg-type,return-value]

    plugins = Plugins()
    plugins.register(plugin, "anygauge.weight_sync.plugin")
    plugins.register(Other(), "other")
    with pytest.raises(DuplicateNameError, match="'disk' is registered by"):
        plugins.named("register_weight_transports")


def test_the_group_for_weights_is_of_the_runs_own_backend() -> None:
    other = replace(CPU, name="other", dist_backend="another")
    backends = {"cpu": CPU, "other": other}
    config: Any = SimpleNamespace(weight_sync=SimpleNamespace(deadline_s=1.0))
    for own in (CPU, other):
        plugins = SimpleNamespace(named=lambda hook: backends)
        context: Any = SimpleNamespace(backend=own, plugins=plugins, rank=3)
        transport: Any = plugin._distributed(config, context)
        assert transport._backend == own.dist_backend


def test_an_engine_refuses_weights_that_come_in_a_way_it_lacks() -> None:
    nothing: Any = None
    with pytest.raises(RolloutError, match=r"takes no broadcasts\.\n .*weight_sync\.transport"):
        WeightTarget().load_broadcast(nothing, nothing, "group", whole=True)
