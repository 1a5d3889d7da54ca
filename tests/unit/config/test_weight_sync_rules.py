"""Errors about wrong weight sync before a run starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from anygauge.config.load import LoadedConfig
from anygauge.plugins import Plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import ConfigError

Load = Callable[..., LoadedConfig]


class Served:
    """An engine that is a server."""

    @hookimpl
    def register_rollout_engines(self) -> Iterable[RolloutEngineSpec]:
        serve: Any = lambda config, context: None  # noqa: E731
        return [
            RolloutEngineSpec(name="server", serve=serve),
            RolloutEngineSpec(name="loader", serve=serve, loads_adapters=True, attach=serve),
        ]


@pytest.fixture(autouse=True)
def served(plugins: Plugins) -> None:
    plugins.register(Served(), "served")


@pytest.mark.parametrize(
    ("overrides", "found", "hint"),
    [
        (["--weight_sync.transport=pigeon"], "'pigeon'", "available: adapter, delta, disk"),
        (["--weight_sync.directory=/x"], "weight_sync.directory: found '/x'", "has no effect without"),
        (
            ["--weight_sync.senders=stages"],
            "weight_sync.senders: found 'stages'",
            "these have several: distr",
        ),
        (["--weight_sync.bucket_bytes=1"], "weight_sync.bucket_bytes: found 1", "4096"),
    ],
)
def test_wrong_keys(load: Load, overrides: list[str], found: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, overrides)
    assert found in str(caught.value)
    assert hint in str(caught.value)


LOADER = ["--placement.rollout_workers=1", "--rollout.engine=loader", "--weight_sync.transport=adapter"]
ADAPTER = [*LOADER, "--train.lora.rank=8"]


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (LOADER, "sends the adapter of [train.lora], which is off: set train.lora.rank"),
        ([*ADAPTER, "--rollout.engine=server"], "'server' loads no adapters; these do: loader"),
        ([*ADAPTER, '--train.lora.modules_to_save=["lm_head"]'], "trains more than adapters"),
        ([*ADAPTER, "--train.lora.base=nf4"], "train.lora.base is not what servers load"),
        ([*ADAPTER, '--model.modalities=["image"]'], "servers have adapters of text models alone"),
        ([*ADAPTER, "--placement.colocated=true"], "adapters do not survive that servers sleep"),
        ([*ADAPTER, "--debug.mode=rollout_only"], "no train engine sends an adapter"),
        ([*ADAPTER, "--weight_sync.pause=in_place"], 'write weight_sync.pause = "abort"'),
        ([*ADAPTER[1:], '--rollout.external=["http://127.0.0.1:9"]'], "and there is rollout.external"),
    ],
)
def test_an_adapter_by_itself_needs_adapters_alone_and_servers_that_load_them(
    load: Load, overrides: list[str], hint: str
) -> None:
    assert load({}, ADAPTER).config.starts_elsewhere
    with pytest.raises(ConfigError) as caught:
        load({}, overrides)
    assert "weight_sync.transport: found 'adapter'" in str(caught.value)
    assert hint in str(caught.value)


def test_an_evaluation_of_merged_weights_has_no_adapter(load: Load) -> None:
    assert not load({}, LOADER, trains=False).config.pushes_adapter


JOINED = ["--placement.rollout_workers=1", "--placement.launcher=ray", "--cluster.address=auto"]


def test_shared_memory_is_refused_where_a_cluster_places_the_engines(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, [*JOINED, "--rollout.engine=server", "--weight_sync.transport=tensor"])
    assert "weight_sync.transport: found 'tensor'" in str(caught.value)
    assert "these can: delta, disk, distributed" in str(caught.value)
    with pytest.raises(ConfigError, match=r"no effect with rollout\.engine = 'transformers'"):
        load({}, ["--weight_sync.transport=disk"])
    embedded = load({}, [*JOINED, "--weight_sync.transport=tensor"])
    assert embedded.config.weight_sync.transport == "tensor", "an embedded engine takes none"


def test_shared_memory_is_refused_where_engines_have_devices_of_their_own(load: Load) -> None:
    served = ["--placement.rollout_workers=1", "--rollout.engine=server", "--weight_sync.transport=tensor"]
    with pytest.raises(ConfigError, match="needs engines on the devices of the trainers"):
        load({}, served, backend="fast", check_files=False)
    assert load({}, served).config.weight_sync.transport == "tensor", "all have the memory of the host"


@pytest.mark.parametrize(
    ("backend", "overrides", "transport"),
    [
        ("cpu", ["--placement.rollout_workers=1"], "tensor"),
        ("cpu", JOINED, "distributed"),
        ("fast", ["--placement.rollout_workers=1"], "distributed"),
        ("fast", ["--placement.rollout_workers=1", "--weight_sync.transport=disk"], "disk"),
        ("fast", [], "tensor"),
    ],
)
def test_the_way_is_chosen_by_what_trainers_and_engines_share(
    load: Load, backend: str, overrides: list[str], transport: str
) -> None:
    loaded = load({}, [*overrides, "--rollout.engine=server"], backend=backend, check_files=False)
    assert loaded.config.weight_sync.transport == transport
