"""Choose sizes of a first config: the fastest layout of a model on some devices that fits by the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, log
from typing import TYPE_CHECKING, Any

from anygauge.planning.fit import FULL
from anygauge.planning.plan import Assumptions, Plan, make_plan
from anygauge.planning.shape import ModelShape
from anygauge.serving.sglang.defaults import SPARE_CACHE

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["Choice", "Wishes", "any_config", "choose"]

MODES = {"megatron": ("none", "elementwise", "full"), "fsdp": ("none", "full")}
MICRO_BATCHES = (16_384, 8192, 4096, 2048, 1024)
DEVICES_OF_HOST = 8
LARGE = 0.5
"""Part of a device that a server's weights may take before it gets more devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Facts of a run that are not chosen."""

    devices: int
    engine: str
    task: str
    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    cache_tokens: int
    """Cache of an embedded engine."""
    has_servers: bool
    """Whether rollout engines may be servers on the training devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Sizes of a config and their plan."""

    tensor: int
    expert: int
    recompute: str
    micro_batch: int
    server_devices: int
    """Devices of each server; 0 for engines in the training workers."""
    plan: Plan

    @property
    def fits(self) -> bool:
        """Whether the plan leaves the allocator room on every device."""
        limit = self.plan.assumptions.device_bytes
        server = self.plan.server
        can_answer = server is None or server.cache_tokens >= self.plan.batches.sample_tokens
        return limit is None or (self.plan.needed <= FULL * limit and can_answer)

    @property
    def parallel(self) -> dict[str, int]:
        """Keys of ``[train.parallel]`` that differ from 1."""
        sizes = {"tensor": self.tensor, "expert": self.expert}
        return {name: size for name, size in sizes.items() if size > 1}


def any_config(config: Config) -> bool:
    """Accept every config: the train engine has no rules for the model."""
    return True


def choose(
    shape: ModelShape, wishes: Wishes, given: Assumptions, accepts: Callable[[Config], bool] = any_config
) -> Choice:
    """Return the layout that trains fastest and fits; if none fits, the one that needs least memory.

    :param given: With rates; those of one kind of GPU order the layouts for all kinds.
    :param accepts: Whether the train engine can divide the model as a config says.
    """
    choices = list(_choices(shape, wishes, given, accepts))
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        # of layouts that need the same, the later ones recompute more
        return min(reversed(choices), key=lambda choice: choice.plan.needed)
    return min(fitting, key=_preference)


def _preference(choice: Choice) -> tuple[int, int, float]:
    """Return an order: time to a percent, then few and large micro-batches, then little memory."""
    percents = round(100 * log(choice.plan.seconds["train"]))
    return percents, -choice.micro_batch, choice.plan.needed


def _choices(
    shape: ModelShape, wishes: Wishes, given: Assumptions, accepts: Callable[[Config], bool]
) -> Iterator[Choice]:
    longest = wishes.prompt_tokens + wishes.response_tokens
    micro_batches = [tokens for tokens in MICRO_BATCHES if tokens >= longest] or [longest]
    servers = _server_devices(shape, wishes, given)
    for tensor, expert in _layouts(shape, wishes):
        for recompute, micro_batch in product(MODES[wishes.engine], micro_batches):
            sizes = {"tensor": tensor, "expert": expert}
            config = _config(wishes, sizes, recompute, micro_batch, servers)
            if not accepts(config):
                break  # neither recompute nor micro-batches decide it
            plan = make_plan(config, shape, given)
            yield Choice(
                **sizes, recompute=recompute, micro_batch=micro_batch, server_devices=servers, plan=plan
            )


def _layouts(shape: ModelShape, wishes: Wishes) -> Iterator[tuple[int, int]]:
    """Yield tensor and expert sizes that divide the model and the devices of one host."""
    if wishes.engine == "fsdp":
        yield 1, 1
        return
    host = min(wishes.devices, DEVICES_OF_HOST)
    own = shape.attention
    key_heads = max(1, own.key // max(1, own.query // own.heads))
    experts = 1 if shape.experts is None else shape.experts.count
    for tensor, expert in product(_divisors(host), _divisors(host)):
        if wishes.devices % tensor == 0 and key_heads % tensor == 0 and experts % expert == 0:
            yield tensor, expert


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _server_devices(shape: ModelShape, wishes: Wishes, given: Assumptions) -> int:
    """Return the devices of a server; 0 without servers."""
    if not wishes.has_servers or wishes.task == "sft":
        return 0
    sizes = _divisors(min(wishes.devices, DEVICES_OF_HOST))
    limit = given.device_bytes
    if limit is None:
        return 1
    return next((size for size in sizes if 2 * shape.parameters / size <= LARGE * limit), sizes[-1])


def _config(wishes: Wishes, sizes: dict[str, int], recompute: str, micro_batch: int, servers: int) -> Config:
    """Return the config of a choice, as far as a plan reads it."""
    from anygauge.config import Config

    count = wishes.devices // servers if servers else 0
    rollout: dict[str, Any] = {
        "prompts_per_step": wishes.prompts,
        "samples_per_prompt": wishes.samples,
        "max_new_tokens": wishes.response_tokens,
        "max_batch_tokens": wishes.cache_tokens,
    }
    if servers:
        in_flight = ceil(wishes.prompts * wishes.samples / count)
        longest = wishes.prompt_tokens + wishes.response_tokens
        rollout |= {"engine": "sglang", "sglang": {"tp_size": servers}}
        rollout["max_batch_tokens"] = ceil(in_flight * longest * SPARE_CACHE)
    return Config.model_validate(
        {
            "run": {"name": "chosen", "task": wishes.task},
            "model": {"path": "chosen"},
            "data": {"train": [], "max_prompt_tokens": wishes.prompt_tokens},
            "reward": {} if wishes.task == "sft" else {"function": "none"},
            "rollout": rollout,
            "train": {
                "engine": wishes.engine,
                "dtype": "bfloat16",
                "recompute": recompute,
                "micro_batch_tokens": micro_batch,
                "parallel": sizes,
            },
            "placement": {
                "train_workers": wishes.devices,
                "rollout_workers": count,
                "colocated": bool(servers),
            },
        }
    )
