"""Rank programs for the tests of LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_worker import make_samples  # type: ignore[import-not-found]

from anygauge.config import Config
from anygauge.data.batch import mini_batches
from anygauge.distributed.layout import layout_of
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches

STEPS = 3


def trained(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Take two steps, save, and take another."""
    actor = ActorWorker(config, context)
    base = weights(actor)
    metrics = [step for part in steps(config, context, case)[:-1] for step in actor.train(part)]
    directory = Path(case["target"])
    actor.save_hf(str(directory))
    save(actor, directory / "checkpoint")
    return {"base": base, "metrics": metrics, **finished(actor, config, context, case)}


def resumed(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Load, and take the last step."""
    actor = ActorWorker(config, context)
    actor.load_checkpoint(case["source"])
    return finished(actor, config, context, case)


def finished(
    actor: ActorWorker, config: Config, context: WorkerContext, case: dict[str, Any]
) -> dict[str, Any]:
    """Return the weights before and after the last step, and what actor and reference say of its samples."""
    engine: Any = actor.trainer
    batch = steps(config, context, case)[-1]
    before, metrics = weights(actor), actor.train(batch)
    engine.load_role("reference", case["model"])
    tokens = [tuple(sample.tokens) for sample in batches.unpack_samples(batch)]
    said = {
        role: dict(
            zip(
                tokens,
                batches.split(batch, engine.log_probs(batch, temperature=0.8, role=role)),
                strict=True,
            )
        )
        for role in ("actor", "reference")
    }
    learning = [name for name, tensor in engine.policy.tensors.items() if tensor.requires_grad]
    after = weights(actor)
    sent = [each for part in engine.weights_by_sender().values() for each in part]
    return {
        "before": before,
        "last": metrics,
        "after": after,
        "sent": {name: tensor.clone() for name, tensor in sent},
        "learning": learning,
        **said,
    }


def steps(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Return what this rank trains on, step by step."""
    layout = layout_of(config)
    samples = make_samples(case["vocab"], 9, 24)
    plan = batches.plan_samples(samples, STEPS, layout.data, config.algorithm.loss_aggregation)
    return mini_batches(plan[layout.dp_rank(context.rank)])


def weights(actor: ActorWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.trainer.weights()}


def save(actor: ActorWorker, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    dist.barrier()
    engine: Any = actor.trainer
    engine.save_checkpoint(str(directory))
    engine._checkpoint._write.result()
    dist.barrier()
