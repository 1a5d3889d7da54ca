"""Rank programs for the tests of conversion: Megatron's own dist-checkpoints of our models."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.validation import StrictHandling

from anygauge.config import Config
from anygauge.engines.megatron.scope import make_scope
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks.engines import WorkerContext


def load_and_save(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Load a converted checkpoint with Megatron into a model of zeros, save it again, return its weights."""
    trainer: Any = ActorWorker(config, context).trainer
    chunks = trainer.policy.chunks
    with torch.no_grad():
        for tensor in trainer.policy.tensors.values():
            tensor.zero_()
    metadata = dist_checkpointing.load_content_metadata(case["source"])
    state = sharded_state(chunks, metadata)
    # Megatron's linears have an entry of no content each, which a conversion does not write.
    loaded, missing, unexpected = dist_checkpointing.load(
        state, case["source"], strict=StrictHandling.RETURN_ALL
    )
    assert not [name for name in (*missing, *unexpected) if "_extra_state" not in name]
    for number, chunk in enumerate(chunks):
        missing, unexpected = chunk.load_state_dict(loaded[f"model{number}"], strict=False)
        assert not [name for name in (*missing, *unexpected) if "_extra_state" not in name]
    target = Path(case["target"])
    if context.rank == 0:
        target.mkdir()
    torch.distributed.barrier()
    # Megatron starts a process for its queue, which outlives the case with what a failed one left in it.
    filesystem_async._results_queue = SimpleQueue()
    with make_scope(context.device):
        metadata = {**metadata, "non_homogeneous_layers": not case["stacked"]}
        dist_checkpointing.save(sharded_state(chunks, metadata), str(target), content_metadata=metadata)
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def sharded_state(chunks: Any, metadata: Any) -> dict[str, Any]:
    return {
        f"model{number}": chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)
    }
