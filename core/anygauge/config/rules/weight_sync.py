"""Rules of ``[weight_sync]``."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from anygauge.config.lora import lora_settings
from anygauge.config.modalities import modalities
from anygauge.config.schema import Config
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.engines import RolloutEngineSpec
    from anygauge_hooks.types import BackendSpec
    from anygauge_hooks.weights import WeightTransportSpec

__all__ = ["are_on_other_devices", "are_on_other_hosts", "transport_rule", "weight_sync_rules"]

ADAPTER = "adapter"
"""Transport of adapters by themselves."""
HOST = "cpu"
"""Device type of what is no accelerator: processes share it as they like."""


def weight_sync_rules(
    config: Config, backend: BackendSpec, plugins: Plugins, *, trains: bool = True
) -> Iterator[ConfigProblem]:
    """Yield a transport that cannot reach the run's engines, and keys that have no effect.

    :param trains: Whether it is the config of a training; an evaluation of merged weights has no adapter.
    """
    options = config.weight_sync
    if options.directory is not None and options.transport not in ("disk", "adapter"):
        hint = 'has no effect without weight_sync.transport = "disk" or "adapter"; leave it out'
        yield ConfigProblem(path="weight_sync.directory", found=str(options.directory), hint=hint)
    transports: Mapping[str, WeightTransportSpec] = plugins.named("register_weight_transports")
    transport = transports.get(options.transport)
    if options.senders != "one" and transport is not None and not transport.several_senders:
        able = ", ".join(sorted(name for name, each in transports.items() if each.several_senders))
        hint = (
            f"weight_sync.transport = {transport.name!r} has one sender; these have several: {able or 'none'}"
        )
        yield ConfigProblem(path="weight_sync.senders", found=options.senders, hint=hint)
    engines: Mapping[str, RolloutEngineSpec] = plugins.named("register_rollout_engines")
    engine = engines.get(config.rollout.engine)
    if options.transport == ADAPTER and (trains or config.pushes_adapter):
        loading = sorted(name for name, each in engines.items() if each.loads_adapters)
        for reason in _adapter_obstacles(config, loading):
            yield ConfigProblem(path="weight_sync.transport", found=options.transport, hint=reason)
    if not config.has_engines_apart or (engine is not None and engine.serve is None):
        return
    if transport is None or (obstacle := _obstacle(config, backend, transport)) is None:
        return
    fits = (name for name, each in transports.items() if _obstacle(config, backend, each) is None)
    fit = [name for name in fits if name != ADAPTER]  # which has needs of its own
    hint = f"{obstacle}; these can: {', '.join(sorted(fit)) or 'none'}"
    yield ConfigProblem(path="weight_sync.transport", found=transport.name, hint=hint)


def _adapter_obstacles(config: Config, able: Sequence[str]) -> Iterator[str]:
    """Yield why servers cannot get the adapter by itself.

    :param able: Engines that load adapters.
    """
    lora, fix = config.train.lora, "send merged weights, by another transport"
    if not lora.is_on:
        yield "sends the adapter of [train.lora], which is off: set train.lora.rank"
        return
    if config.debug.mode == "rollout_only":
        yield f'no train engine sends an adapter with debug.mode = "rollout_only"; {fix}'
    if config.rollout.engine not in able:
        yield f"rollout.engine = {config.rollout.engine!r} loads no adapters; these do: {', '.join(able)}"
    with suppress(CheckpointError):  # a problem of its own
        if lora_settings(lora).modules_to_save:
            yield f"train.lora.modules_to_save trains more than adapters; {fix}"
    if lora.base is not None:
        yield f"train.lora.base is not what servers load; {fix}"
    if modalities(config):
        yield f"servers have adapters of text models alone; {fix}"
    if config.placement.sleeps:
        yield f"adapters do not survive that servers sleep (placement.colocated); {fix}"
    if config.rollout.groups or config.rollout.external:
        key = "rollout.groups" if config.rollout.groups else "rollout.external"
        yield f"servers that are all alike and the run's own load adapters, and there is {key}; {fix}"
    if config.weight_sync.pause == "in_place":
        yield 'an adapter is not changed under requests: write weight_sync.pause = "abort"'


def transport_rule(config: Config, user_keys: Collection[str], plugins: Plugins) -> Iterator[ConfigProblem]:
    """Yield a transport that was chosen for an engine that is not a server."""
    engines: Mapping[str, RolloutEngineSpec] = plugins.named("register_rollout_engines")
    engine = engines.get(config.rollout.engine)
    transport, key = config.weight_sync.transport, "weight_sync.transport"
    is_chosen = key in user_keys and transport != type(config.weight_sync).model_fields["transport"].default
    if engine is not None and engine.serve is None and is_chosen:
        hint = f"has no effect with rollout.engine = {engine.name!r}, which is not a server; leave it out"
        yield ConfigProblem(path=key, found=transport, hint=hint)


def are_on_other_devices(config: Config, backend: BackendSpec) -> bool:
    """Return whether engines have accelerators that the trainers do not see."""
    return backend.device_type != HOST and not config.placement.colocated


def are_on_other_hosts(config: Config) -> bool:
    """Return whether engines may be on hosts where no trainer is."""
    if config.placement.colocated:
        return False
    if config.rollout.external:
        return not all(map(_is_loopback, config.rollout.external))
    return config.placement.launcher == "ray" and config.cluster.address != "start"


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _obstacle(config: Config, backend: BackendSpec, transport: WeightTransportSpec) -> str | None:
    """Return why weights cannot go that way to the engines."""
    if transport.same_host and are_on_other_hosts(config):
        where = (
            "rollout.external names others" if config.rollout.external else "a cluster places them anywhere"
        )
        return f"needs every engine on the host of training rank 0, and {where}"
    if transport.needs_receiver and config.rollout.external:
        return "has a receiver beside each engine, which a run starts with engines of its own alone"
    if not transport.other_device and are_on_other_devices(config, backend):
        return "needs engines on the devices of the trainers (placement.colocated)"
    if not transport.same_device and config.placement.colocated and backend.device_type != HOST:
        return "cannot reach engines on the trainers' devices (placement.colocated)"
    return None
