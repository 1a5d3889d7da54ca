"""The synchronous loop: generate, score, train, sync; evaluate now and then.

Data flows one way through the functions below. What a step needs is in :class:`Loop`; what it made is in the
metrics that it returns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anygauge.config import Config
from anygauge.observability.metrics import eval_metrics, rollout_metrics
from anygauge.plugins import Plugins
from anygauge.rollout.rewards import score
from anygauge.trainer.plan import group_samples, plan_steps, sample_seeds, split_evenly, train_samples
from anygauge.trainer.state import RunState
from anygauge.trainer.worker_group import Arguments, PendingCall, WorkerGroup
from anygauge_hooks.rl import Group, Prompt, Sample, SamplingParams
from anygauge_hooks.types import RunInfo, Tracker

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Loop", "run_loop"]

TRAIN_STREAM, EVAL_STREAM = 0, 1
ENGINE_PHASES = ("generate", "log_probs", "forward_backward", "optimizer")


@dataclass(slots=True)
class Loop:
    """What the steps of a run share."""

    config: Config
    plugins: Plugins
    workers: WorkerGroup
    source: Any
    """Training prompts, from ``register_data_sources``."""
    eval_prompts: Sequence[Prompt]
    reward: Callable[..., float]
    estimator: Callable[..., Tensor]
    """Advantages from the rewards of a group."""
    trackers: Sequence[Tracker]
    state: RunState
    next_prompts: Sequence[Prompt] = ()
    """Read ahead of the next step."""

    @property
    def info(self) -> RunInfo:
        """The run as it stands."""
        return self.state.info

    @property
    def num_workers(self) -> int:
        """Number of data-parallel ranks, each with a rollout engine."""
        return self.config.placement.num_workers


def run_loop(loop: Loop) -> None:
    """Run every step."""
    loop.plugins.notify("before_train", run=loop.info)
    interval, total = loop.config.eval.interval, loop.config.run.steps
    evaluate(loop)
    for step in range(1, total + 1):
        metrics = train_one(loop, step)
        loop.state.finish_step(step)
        track(loop, metrics)
        loop.plugins.notify("after_train_step", run=loop.info, metrics=metrics)
        if step % interval == 0 or step == total:
            evaluate(loop)


def train_one(loop: Loop, step: int) -> dict[str, float]:
    """Take one RL step and return its metrics."""
    started = time.perf_counter()
    prompts = loop.next_prompts or draw_prompts(loop)
    samples = generate(loop, prompts, TRAIN_STREAM, step)
    groups = score_groups(loop, group_samples(prompts, samples))
    loop.plugins.notify("after_rollout", run=loop.info, groups=groups)
    training = start_training(loop, groups)
    # While the workers train, the driver does what needs nothing of them.
    loop.next_prompts = draw_prompts(loop) if step < loop.info.total_steps else ()
    sampled = rollout_metrics(groups)
    trained = mean_over_steps(training.result()[0])
    sync_weights(loop)
    performance = measure(loop, groups, time.perf_counter() - started)
    return {**prefixed("train", trained), **sampled, **performance}


def generate(loop: Loop, prompts: Sequence[Prompt], stream: int, step: int) -> list[list[Sample]]:
    """Divide the prompts among the rollout engines and return their samples, in order."""
    config, seed = loop.config, loop.config.run.seed
    count = config.rollout.samples_per_prompt if stream == TRAIN_STREAM else config.eval.samples_per_prompt
    params = rollout_params(config) if stream == TRAIN_STREAM else eval_params(config)
    seeds = sample_seeds(seed, stream, step, len(prompts), count)
    parts = split_evenly(len(prompts), loop.num_workers)
    shares: list[Arguments] = [((prompts[part], params, seeds[part]), {}) for part in parts]
    return [samples for share in loop.workers.call("generate", per_rank=shares) for samples in share]


def rollout_params(config: Config) -> SamplingParams:
    """Return how training samples are drawn."""
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
    )


def eval_params(config: Config) -> SamplingParams:
    """Return how evaluation samples are drawn."""
    return replace(
        rollout_params(config),
        max_new_tokens=config.eval.max_new_tokens or config.rollout.max_new_tokens,
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        top_k=0,
    )


def score_groups(loop: Loop, groups: Sequence[Group]) -> list[Group]:
    """Return the groups with a reward on every sample."""
    prompts = [group.prompt for group in groups for _ in group.samples]
    samples = [sample for group in groups for sample in group.samples]
    rewards = iter(score(samples, prompts, loop.reward, loop.config.reward.options))
    return [
        replace(group, samples=tuple(sample._replace(reward=next(rewards)) for sample in group.samples))
        for group in groups
    ]


def start_training(loop: Loop, groups: Sequence[Group]) -> PendingCall:
    """Send each rank its share of the groups; its answer has the metrics of every optimizer step."""
    config = loop.config
    samples = train_samples(groups, loop.estimator)
    shares = plan_steps(samples, config.train.optimizer_steps, loop.num_workers, config.algorithm.aggregation)
    return loop.workers.call_async("train", per_rank=[((share,), {}) for share in shares])


def draw_prompts(loop: Loop) -> Sequence[Prompt]:
    """Return the prompts of one step."""
    prompts: Sequence[Prompt] = loop.source.next(loop.config.rollout.prompts_per_step)
    return prompts


def mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric; the log-prob difference to the engine is that of the first step.

    Only before the first step do trainer and engine hold the same weights.
    """
    means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
    first = steps[0].get("rollout_current_log_prob_abs_diff")
    if first is not None:
        del means["rollout_current_log_prob_abs_diff"]
        means["rollout_log_prob_abs_diff"] = first
    return means


def sync_weights(loop: Loop) -> None:
    """Give the new weights to every rollout engine."""
    loop.state.version += 1
    loop.workers.call("sync_weights", version=loop.state.version)
    loop.plugins.notify("after_weight_sync", run=loop.info, version=loop.state.version)


def measure(loop: Loop, groups: Sequence[Group], wall_s: float) -> dict[str, float]:
    """Return ``perf/*``: seconds by phase, tokens per second, and the overhead.

    Overhead is what is in none of the engines' phases in the worker that spent most in them.
    """
    timings = loop.workers.call("timings")
    slowest = max(timings, key=engine_seconds)
    tokens = sum(len(s.prompt_tokens) + len(s.response_tokens) for g in groups for s in g.samples)
    return {
        "perf/step_time_s": wall_s,
        "perf/overhead_time_s": wall_s - engine_seconds(slowest),
        "perf/tokens_per_s": tokens / wall_s,
        **{f"perf/{phase}_time_s": seconds for phase, seconds in slowest.items()},
    }


def engine_seconds(timings: Mapping[str, float]) -> float:
    """Return the seconds of generation, forward, backward and optimizer."""
    return sum(timings.get(phase, 0.0) for phase in ENGINE_PHASES)


def evaluate(loop: Loop) -> None:
    """Sample the evaluation prompts with the engines' current weights, score and record them."""
    if not loop.eval_prompts:
        return
    # The same numbers each time: what changes between evaluations is the policy alone.
    samples = generate(loop, loop.eval_prompts, EVAL_STREAM, step=0)
    loop.workers.call("timings")
    metrics = eval_metrics(score_groups(loop, group_samples(loop.eval_prompts, samples)))
    track(loop, metrics)
    loop.plugins.notify("after_evaluate", run=loop.info, metrics=metrics)


def track(loop: Loop, metrics: Mapping[str, float]) -> None:
    """Give metrics to every tracker."""
    for tracker in loop.trackers:
        tracker.log(metrics, step=loop.info.step)


def prefixed(group: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics under ``<group>/<name>``."""
    return {f"{group}/{name}": value for name, value in metrics.items()}
