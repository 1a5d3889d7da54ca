"""Rank programs for the tests of checkpoints."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parallel_worker import make_samples  # type: ignore[import-not-found]

from anygauge.config import Config
from anygauge.config.roles import Components
from anygauge.data.batch import mini_batches
from anygauge.distributed.layout import layout_of
from anygauge.engines.background_save import CHANGING
from anygauge.engines.megatron.checkpoints.checkpoint import _rng_state
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import CheckpointError
from anygauge_tests.batches import plan_samples

STEPS = 3
Weights = dict[str, torch.Tensor]


def saved(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Save before the last step, and take it."""
    actor = make_actor(config, context)
    keep_small(actor)
    for part in mini_batches(shares(config, context, case))[:-1]:
        actor.train(part)
    save(actor, Path(case["target"]))
    return finished(actor, config, context, case)


def resumed(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Load, save what was loaded, and take the last step."""
    actor = make_actor(config, context)
    actor.load_checkpoint(case["source"])
    save(actor, Path(case["target"]))
    return finished(actor, config, context, case)


def finished(
    actor: ActorWorker, config: Config, context: WorkerContext, case: dict[str, Any]
) -> dict[str, Any]:
    """Take the last step, and save what came of it if the case says where."""
    found = {"before": weights(actor), **last_step(actor, config, context, case)}
    if "after" in case:
        save(actor, Path(case["after"]))
    return found


def saved_at_ties(config: Config, context: WorkerContext, case: dict[str, Any]) -> Weights:
    """Save float32 weights that are each in the middle between two bfloat16 ones; the model has the even."""
    actor = make_actor(config, context)
    engine: Any = actor.trainer
    for part in engine.optimizer.chained_optimizers:
        for main in chain(*part.shard_fp32_from_float16_groups):
            main.view(torch.int32).bitwise_and_(-0x10000).add_(0x8000)
        part._copy_main_params_to_model_params()
    for chunk in engine.chunks:
        chunk.start_param_sync()
    save(actor, Path(case["target"]))
    return weights(actor)


def loaded(config: Config, context: WorkerContext, case: dict[str, Any]) -> Weights:
    """Load, and save what was loaded."""
    actor = make_actor(config, context)
    actor.load_checkpoint(case["source"])
    save(actor, Path(case["target"]))
    return weights(actor)


def refused(config: Config, context: WorkerContext, case: dict[str, Any]) -> list[tuple[str, bool]]:
    """Load what does not fit, and return for each the error and whether anything has changed."""
    actor = ActorWorker(config, context)
    actor.train(mini_batches(shares(config, context, case))[0])
    found = []
    for sources in case["sources"]:
        before = everything(actor)
        try:
            actor.load_checkpoint(sources[context.rank])
            text = ""
        except CheckpointError as error:
            text = str(error)
        found.append((text, everything(actor) == before))
    return found


def everything(actor: ActorWorker) -> dict[str, Any]:
    """Return all that a load would change on this rank, as what can be compared."""
    engine: Any = actor.trainer
    description, tensors = engine._checkpoint._copy(lambda _, tensor: tensor.detach().cpu().clone())
    return {
        **{name: tensor.numpy().tobytes() for name, tensor in tensors.items()},
        "steps": [(piece.name, piece.start, piece.scalars) for piece in description.pieces],
        "schedule": dict(engine.schedule.state_dict()),
        "groups": [{key: group.get(key) for key in CHANGING} for group in engine.optimizer.param_groups],
        "generators": _rng_state(actor._context.device),
    }


def make_actor(config: Config, context: WorkerContext) -> ActorWorker:
    """Return an actor, with a critic where the algorithm needs one."""
    learns = config.algorithm.advantage == "gae"
    return ActorWorker(config, context, components=Components(trains=True, generates=False, learns=learns))


def keep_small(actor: ActorWorker) -> None:
    """Make no weight larger than a half: next to 1, neighboring float32 numbers are 1.2e-7 apart."""
    trainer: Any = actor.trainer
    with torch.no_grad():
        for tensor in trainer.policy.tensors.values():
            tensor.clamp_(max=0.5)
    trainer.optimizer.reload_model_params()


def shares(config: Config, context: WorkerContext, case: dict[str, Any]) -> Any:
    """Return what this rank trains on in each step."""
    layout = layout_of(config)
    samples = [
        sample._replace(reward=float(index % 3), baseline=1.0)
        for index, sample in enumerate(make_samples(case["vocab"], 12, 24))
    ]
    plan = plan_samples(samples, STEPS, layout.data, config.algorithm.loss_aggregation)
    return plan[layout.dp_rank(context.rank)]


def last_step(
    actor: ActorWorker, config: Config, context: WorkerContext, case: dict[str, Any]
) -> dict[str, Any]:
    metrics = actor.train(mini_batches(shares(config, context, case))[-1])
    return {"metrics": metrics, "after": weights(actor)}


def weights(actor: ActorWorker) -> Weights:
    return {name: tensor.clone() for name, tensor in actor.trainer.weights()}


def save(actor: ActorWorker, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    dist.barrier()
    actor.save_checkpoint(str(directory))
    engines: Any = [each for each in (actor._critic, actor.trainer) if each is not None]
    for engine in engines:
        engine._checkpoint._write.exception()
    assert actor.checkpoint_written() is True
    dist.barrier()
