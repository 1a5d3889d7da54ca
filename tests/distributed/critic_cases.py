"""Rank programs for the tests of the critic."""

from __future__ import annotations

from typing import Any

from parallel_worker import make_samples  # type: ignore[import-not-found]

from anygauge.config import Config
from anygauge.config.roles import Components
from anygauge.distributed.layout import layout_of
from anygauge.trainer.actors import ActorWorker
from anygauge.trainer.plan import plan_steps
from anygauge_hooks.engines import WorkerContext


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
    mine = plan_steps(samples, 2, layout.data, config.algorithm.loss_aggregation)[
        layout.dp_rank(context.rank)
    ]
    own = [sample for share in mine for sample in share.samples]
    metrics = [actor.train(mine) for _ in range(2)]
    values = dict(zip((tuple(sample.tokens) for sample in own), actor._critic.values(own), strict=True))
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
