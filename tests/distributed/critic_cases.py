"""Rank programs for the tests of the critic."""

from __future__ import annotations

from typing import Any

from parallel_worker import make_samples  # type: ignore[import-not-found]

from anygauge.config import Config
from anygauge.config.roles import Components
from anygauge.distributed.layout import layout_of
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches


def train(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of two rollouts, and the values after them."""
    actor: Any = ActorWorker(
        config, context, components=Components(trains=True, generates=False, learns=True)
    )
    layout = layout_of(config)
    samples = [
        sample._replace(reward=float(index % 3), baseline=1.0)
        for index, sample in enumerate(make_samples(case["vocab"], 9, 24))
    ]
    plan = batches.plan_samples(samples, 2, layout.data, config.algorithm.loss_aggregation)
    mine = plan[layout.dp_rank(context.rank)]
    metrics = [actor.train(mine) for _ in range(2)]
    tokens = (tuple(sample.tokens) for sample in batches.unpack_samples(mine))
    values = dict(zip(tokens, batches.split(mine, actor._critic.values(mine)), strict=True))
    if "export" in case:
        actor.save_hf(case["export"])
    sizes = actor._critic.policy.options.transformer
    return {
        "metrics": metrics,
        "values": values,
        "divided": {
            "tensor": sizes.tensor_model_parallel_size,
            "pipeline": sizes.pipeline_model_parallel_size,
            "virtual_pipeline": len(actor._critic.chunks),
            "context": sizes.context_parallel_size,
            "expert": sizes.expert_model_parallel_size,
        },
    }
