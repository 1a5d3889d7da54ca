"""Rules of ``[placement]`` and ``[cluster]``."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from anygauge.config.schema import Config
from anygauge_hooks.types import ConfigProblem

__all__ = ["cluster_rule", "engines_rule"]

ADDRESS = re.compile(r"start|auto|(ray://)?(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):([1-9]\d{0,4})")
LARGEST_PORT = 65535


def engines_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield a number of rollout engines that a run cannot use."""
    engines, prompts = config.placement.rollout_workers, config.rollout.prompts_per_step
    if not engines:
        return
    if config.debug.mode == "train_only":
        hint = 'there is nothing to generate with debug.mode = "train_only"; leave it out'
    elif engines > prompts:
        hint = f"leaves engines without a prompt: at most rollout.prompts_per_step = {prompts}"
    else:
        return
    yield ConfigProblem(path="placement.rollout_workers", found=engines, hint=hint)


def cluster_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield an address that is none, and what has no effect without Ray."""
    address = config.cluster.address
    match = ADDRESS.fullmatch(address)
    if match is None or int(match[3] or 1) > LARGEST_PORT:
        hint = 'write "start", "auto", "HOST:PORT" or "ray://HOST:PORT"; an IPv6 address in brackets'
        yield ConfigProblem(path="cluster.address", found=address, hint=hint)
    if config.placement.launcher == "local" and "cluster.address" in user_keys and address != "start":
        hint = 'has no effect with placement.launcher = "local"; leave it out, or launch with "ray"'
        yield ConfigProblem(path="cluster.address", found=address, hint=hint)
