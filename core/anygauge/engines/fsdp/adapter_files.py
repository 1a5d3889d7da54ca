"""Adapters as peft writes and reads them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from anygauge.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from anygauge.disk import appearing
from anygauge.engines.agreement import check_facts_agree, on_every_rank, shown
from anygauge.engines.fsdp.lora import Adapters
from anygauge.engines.fsdp.weights import LocalShard, whole
from anygauge.engines.hf_directory import TensorReader
from anygauge.hub.weight_files import open_weight_file
from anygauge_hooks.errors import CheckpointError, WeightMappingError

__all__ = ["read_adapter", "write_adapter"]

PEFT_PREFIX = "base_model.model."
"""How peft begins the names of an adapter's tensors."""


def read_adapter(trained: Sequence[LocalShard], directory: Path) -> None:
    """Read this rank's part of an adapter. A collective.

    :raises WeightMappingError: Lists the tensors that are missing, unexpected or of a wrong shape.
    """
    with on_every_rank(_open_adapter(directory), directory) as source:
        check_facts_agree(lambda: ((name, _fact(source, name)) for name in sorted(source.names)))
        by_name = {PEFT_PREFIX + shard.name: shard for shard in trained}
        problems = [f"{name} is missing" for name in by_name if name not in source.names]
        problems += [f"{name} is not known" for name in sorted(source.names - by_name.keys())]
        for name in by_name.keys() & source.names:
            here, there = list(by_name[name].tensor.shape), list(source.shape(name))
            problems += [f"{name} is {there} and not {here}"] if here != there else []
        if problems:
            raise WeightMappingError(
                f"The adapter of {directory} does not fit the model: {shown(problems)}.",
                hint="Name the model that it was trained on as model.path.",
            )
        for name, shard in by_name.items():
            first, last = shard.rows
            if last > first:
                shard.local.copy_(source.read(name, (slice(first, last),)))


@contextmanager
def _open_adapter(directory: Path) -> Iterator[TensorReader]:
    with open_weight_file(directory / ADAPTER_WEIGHTS) as handle:
        yield TensorReader(dict.fromkeys(handle.keys(), handle))


def _fact(source: TensorReader, name: str) -> str:
    """Return the shape and digest of a tensor, in which ranks must agree."""
    tensor = source(name).contiguous()
    digest = blake2b(tensor.view(-1).view(torch.uint8).numpy().tobytes(), digest_size=8)
    return f"{list(tensor.shape)} {digest.hexdigest()}"


def write_adapter(target: Path, adapters: Adapters, shards: Sequence[LocalShard], base: Path) -> None:
    """Write a peft adapter, atomically. A collective; rank 0 writes.

    :param shards: All of the model; those that are trained are written, float32.
    :param base: Directory of the weights that it belongs to.
    :raises CheckpointError: It cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if shard.tensor.requires_grad:
            tensor = whole(shard.tensor.detach())
            if dist.get_rank() == 0:
                tensors[PEFT_PREFIX + shard.name] = tensor.cpu().contiguous()
    if dist.get_rank() == 0:
        try:
            with appearing(target) as partial:
                save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
                config = json.dumps(_adapter_config(adapters, base), indent=2)
                (partial / ADAPTER_CONFIG).write_text(f"{config}\n")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{target} cannot be written: {error}.",
                hint="Free space there, or choose another directory; continue the run with --resume.",
            ) from error
    dist.barrier()


def _adapter_config(adapters: Adapters, base: Path) -> dict[str, Any]:
    settings = adapters.settings
    assert settings is not None, "the model has no adapters"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": adapters.are_transposed,
        "target_modules": list(adapters.target_names),
        "modules_to_save": list(adapters.saved) or None,
    }
