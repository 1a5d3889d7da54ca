"""Memory that does not fit, and other things that probably go wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from anygauge.planning.memory import GIB, is_cache_bounded
from anygauge.planning.plan import Plan
from anygauge_hooks.errors import DoesNotFitError

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["FULL", "check_fit", "plan_warnings"]

_TURNS = (
    'Let them sleep in turns (placement.offload = "auto", which needs rollout.schedule = "sync"), or give '
    "the servers devices of their own."
)
FULL = 0.94
"""Part of a device above which a run probably fails: torch's allocator leaves gaps between blocks."""


def check_fit(config: Config, plan: Plan) -> None:
    """Raise why a run cannot fit, whatever its samples are like.

    :raises DoesNotFitError: Weights, gradients and optimizer, or a server's weights, need more than a device;
        or both together, where they share it and never sleep.
    """
    limit = plan.assumptions.device_bytes
    if limit is None:
        return
    if plan.train.state > limit:
        raise DoesNotFitError(
            f"Weights, gradients and optimizer of {config.model.path} take {plan.train.state / GIB:.1f} GiB "
            f"on each training device, which has {limit / GIB:.1f} GiB.",
            hint=_smaller_state(config, plan),
        )
    weights = max((server.weights for server in plan.servers), default=0.0)
    if weights > limit:
        raise DoesNotFitError(
            f"The weights of {config.model.path} take {weights / GIB:.1f} GiB on each device of "
            f"a server, which has {limit / GIB:.1f} GiB.",
            hint="Raise tp_size in [rollout.sglang].",
        )
    if _never_sleep(config, plan) and plan.train.state + weights > limit:
        raise DoesNotFitError(
            f"Trainers take {plan.train.state / GIB:.1f} GiB and the weights of a server "
            f"{weights / GIB:.1f} GiB on each device that they share, which has {limit / GIB:.1f} GiB. "
            'With placement.offload = "never" both stay awake.',
            hint=_TURNS,
        )


def _never_sleep(config: Config, plan: Plan) -> bool:
    """Return whether trainers and servers share devices and are always awake."""
    is_never = config.placement.offload == "never"
    return is_never and plan.layout.is_colocated and plan.layout.trains and bool(plan.servers)


def _smaller_state(config: Config, plan: Plan) -> str:
    if config.train.lora.is_on:
        return "Raise train.parallel.tensor, or train.parallel.expert for a mixture of experts."
    if config.train.engine == "fsdp":
        return "Use more placement.train_workers, or train adapters: train.lora.rank = 16."
    more = "train.parallel.expert" if plan.shape.experts else "train.parallel.tensor"
    return f"Raise {more} or placement.train_workers, or train adapters: train.lora.rank = 16."


def plan_warnings(config: Config, plan: Plan) -> Iterator[str]:
    """Yield what probably fails or wastes time."""
    limit, needed = plan.assumptions.device_bytes, plan.needed
    spare, alone = plan.spare or 0.0, plan.train.peak if plan.layout.trains else 0.0
    if limit is not None and spare < 0 and alone <= FULL * limit and _never_sleep(config, plan):
        yield (
            f"trainers and servers never sleep (placement.offload), and lack {-spare / GIB:.1f} GiB of "
            f"{limit / GIB:.1f} GiB; a tenth is kept free. They probably run out of memory. "
            f"{_less_memory_awake(config, plan)}"
        )
    elif limit is not None and needed > FULL * limit:
        phase = max(plan.phases, key=lambda name: sum(plan.phases[name]))
        yield (
            f"{phase} needs {needed / GIB:.1f} GiB of {limit / GIB:.1f} GiB: it probably runs out of memory. "
            f"{_less_memory(config, plan)}"
        )
    yield from _cache_warnings(plan)
    if plan.layout.other_servers:
        yield (
            f"the plan leaves out the memory of {plan.layout.other_servers} servers of encoders or of other "
            "models than the policy"
        )
    host = plan.assumptions.host_bytes
    if host is not None and plan.host_asleep > host:
        yield (
            f"trainers asleep take {plan.host_asleep / GIB:.0f} GiB of host memory, and there are "
            f"{host / GIB:.0f} GiB"
        )
    stages, count = plan.layout.pipeline, plan.batches.micro_batches
    if plan.layout.trains and stages > 1 and count < 2 * stages:
        idle = (stages - 1) / (count + stages - 1)
        yield (
            f"{count} micro-batches for {stages} pipeline stages leave each stage idle for {idle:.0%} of the "
            "time; lower train.micro_batch_tokens or train.optimizer_steps"
        )


def _less_memory_awake(config: Config, plan: Plan) -> str:
    if is_cache_bounded(config) or any(group.static_part for group in plan.layout.servers):
        return f"Lower the limit of the KV cache, or train.micro_batch_tokens. {_TURNS}"
    return (
        "Nothing bounds the KV cache of the servers: set rollout.max_batch_tokens, or mem_fraction_static in "
        f"[rollout.sglang]. {_TURNS}"
    )


def _less_memory(config: Config, plan: Plan) -> str:
    longest = plan.batches.sample_tokens
    if config.train.micro_batch_tokens > longest:
        return f"Lower train.micro_batch_tokens, {longest} at least, or recompute more."
    if config.train.recompute != "full":
        return 'Set train.recompute = "full".'
    return "Divide the model or its sequences among more devices (train.parallel)."


def _cache_warnings(plan: Plan) -> Iterator[str]:
    """Yield a cache that holds no sample, or so few that they come in many waves."""
    if plan.assumptions.device_bytes is None:
        return
    longest = plan.batches.sample_tokens
    smallest = min((server.cache_tokens for server in plan.servers), default=longest)
    if smallest < longest:
        yield (
            f"the KV cache of a rollout engine holds {smallest} tokens, and a sample can have "
            f"{longest}; use more devices for each server"
        )
