"""Rollout engines on NVIDIA GPUs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

from anygauge_cuda.env import CUMEM
from anygauge_hooks.settings import RunConfig
from anygauge_hooks.types import ConfigProblem

__all__ = ["MEMORY_SAVER", "engine_args", "missing", "unlike_memory"]

SGLANG: Mapping[str, Any] = {"device": "cuda"}
MEMORY_SAVER = "torch_memory_saver"
SYMMETRIC = "enable_symm_mem"
"""An argument of SGLang that lets NCCL make memory in another way."""


def engine_args(engine: str, *, sleeps: bool) -> Mapping[str, Any] | None:
    """Return the arguments of a server on this backend.

    :param sleeps: Whether it is to give its memory back and take it again.
    """
    return {**SGLANG, "enable_memory_saver": sleeps} if engine == "sglang" else None


def missing(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield missing requirements for servers that sleep."""
    if config.placement.sleeps and importlib.util.find_spec(MEMORY_SAVER) is None:
        hint = f"servers that share their GPUs give memory back through a package: pip install {MEMORY_SAVER}"
        yield ConfigProblem(path="placement.colocated", found=True, hint=hint)


def unlike_memory(config: Any) -> Iterator[ConfigProblem]:
    """Yield a server's argument that gives NCCL other memory than the trainers' has."""
    if os.environ.get(CUMEM) == "1":
        return
    groups = {f"rollout.groups[{index}]": group for index, group in enumerate(config.rollout.groups)}
    for path, servers in {"rollout": config.rollout, **groups}.items():
        arguments = {name.replace("-", "_"): value for name, value in servers.sglang.items()}
        if arguments.get(SYMMETRIC):
            hint = f"leave it out, or export {CUMEM}=1: unlike ends of a broadcast hang"
            yield ConfigProblem(path=f"{path}.sglang.{SYMMETRIC}", found=arguments[SYMMETRIC], hint=hint)
