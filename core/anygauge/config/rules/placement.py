"""Rules of ``[placement]`` and ``[cluster]``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from anygauge.config.schema import POLICY, Config
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.engines import RolloutEngineSpec, TrainEngineSpec

__all__ = ["cluster_rule", "colocation_rules", "engines_rule"]

ADDRESS = re.compile(r"start|auto|(ray://)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([1-9]\d{0,4})")
LARGEST_PORT = 65535


def engines_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield a number of rollout engines that a run cannot use."""
    engines, prompts = config.placement.rollout_workers, config.rollout.prompts_per_step
    if not engines:
        return
    if config.debug.mode == "train_only":
        hint = 'there is nothing to generate with debug.mode = "train_only"; leave it out'
    elif engines > prompts and not config.rollout.groups:  # one prompt may need two of these
        hint = f"leaves engines without a prompt: at most rollout.prompts_per_step = {prompts}"
    else:
        return
    yield ConfigProblem(path="placement.rollout_workers", found=engines, hint=hint)


def colocation_rules(config: Config, plugins: Plugins) -> Iterator[ConfigProblem]:
    """Yield problems of colocated trainers and engines."""
    placement = config.placement
    if not placement.colocated or config.debug.mode == "train_only":
        return
    if not placement.rollout_workers:
        hint = "needs engines that are servers: set placement.rollout_workers and rollout.engine"
        yield ConfigProblem(path="placement.colocated", found=True, hint=hint)
    if config.rollout.schedule != "sync" and placement.sleeps:
        hint = (
            "with placement.colocated trainers and engines work at the same time only if nobody sleeps: "
            'write placement.offload = "never" where both fit, or rollout.schedule = "sync", or give the '
            "engines devices of their own: placement.colocated = false"
        )
        yield ConfigProblem(path="rollout.schedule", found=config.rollout.schedule, hint=hint)
    for index, group in enumerate(config.rollout.groups):
        if placement.sleeps and (group.model != POLICY or group.kind == "encoder"):
            hint = "releases its weights with placement.colocated and cannot load them again; leave it out"
            yield ConfigProblem(
                path=f"rollout.groups[{index}]", found=f"{group.kind} of {group.model}", hint=hint
            )
    yield from _engines_that_sleep(config, plugins)


def _engines_that_sleep(config: Config, plugins: Plugins) -> Iterator[ConfigProblem]:
    """Yield engines that cannot give memory back, and more servers than there are devices for."""
    trainers: Mapping[str, TrainEngineSpec] = plugins.named("register_train_engines")
    trainer = trainers.get(config.train.engine)
    sleeps = config.placement.sleeps
    if trainer is not None and sleeps and not trainer.supports_offload:
        hint = (
            "never releases its memory, which placement.colocated requires; take another engine, or write "
            'placement.offload = "never"'
        )
        yield ConfigProblem(path="train.engine", found=trainer.name, hint=hint)
    engines: Mapping[str, RolloutEngineSpec] = plugins.named("register_rollout_engines")
    engine = engines.get(config.rollout.engine)
    if engine is None:
        return
    if engine.serve is None or (sleeps and not engine.releases_memory):
        fit = ", ".join(sorted(name for name, other in engines.items() if other.releases_memory)) or "none"
        hint = f"placement.colocated needs a server that can release its memory; choose from: {fit}"
        yield ConfigProblem(path="rollout.engine", found=engine.name, hint=hint)
        return
    servers, devices = config.placement.rollout_workers, engine.devices(config) if engine.devices else 1
    if servers * devices > config.placement.train_workers:
        hint = (
            f"with placement.colocated {servers} servers of {devices} devices each must fit on the devices "
            f"of placement.train_workers = {config.placement.train_workers}; at most "
            f"{config.placement.train_workers // devices}"
        )
        yield ConfigProblem(path="placement.rollout_workers", found=servers, hint=hint)


def cluster_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield an invalid address, and keys that have no effect without Ray."""
    address = config.cluster.address
    match = ADDRESS.fullmatch(address)
    if match is None or int(match[3] or 1) > LARGEST_PORT:
        hint = 'write "start", "auto", "HOST:PORT" or "ray://HOST:PORT"; an IPv6 address in brackets'
        yield ConfigProblem(path="cluster.address", found=address, hint=hint)
    if config.placement.launcher == "local" and "cluster.address" in user_keys and address != "start":
        hint = 'has no effect with placement.launcher = "local"; leave it out, or launch with "ray"'
        yield ConfigProblem(path="cluster.address", found=address, hint=hint)
