"""Arguments of SGLang servers by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anygauge.serving.server_plan import ServerPlan, plan_servers

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = [
    "context_room",
    "plan_argument",
    "plan_arguments",
    "plan_copies",
    "plan_devices",
    "plan_ranks",
    "plan_stages",
]

_OF_KIND: Mapping[str, Mapping[str, Any]] = {
    "regular": {},
    "prefill": {"disaggregation_mode": "prefill"},
    "decode": {"disaggregation_mode": "decode"},
    "encoder": {"encoder_only": True},
}
_LANGUAGE = {"language_only": True}
SPARE = 6
"""Tokens of its context that a server refuses as a prompt, and so as a response that goes on."""
_SIZES = {
    "tp_size": ("tp_size", "tensor_parallel_size"),
    "pp_size": ("pp_size", "pipeline_parallel_size"),
    "dp_size": ("dp_size", "data_parallel_size"),
}
"""Sizes that multiply the devices of a server, each with its spellings."""
_ATTENTION_SIZES = ("attn_dp_size", "attention_data_parallel_size")
_WITHIN_TENSOR = (*_ATTENTION_SIZES, "enable_dp_attention")
"""With these, data-parallel ranks share the devices of ``tp_size``."""


def plan_arguments(config: Config, plan: ServerPlan) -> dict[str, Any]:
    """Return the user's arguments for a server, and those that its kind needs."""
    told = _LANGUAGE if plan.needs_encoders else {}
    return {**config.rollout.sglang, **plan.group.sglang, **_OF_KIND[plan.kind], **told}


def plan_argument(config: Config, plan: ServerPlan, name: str) -> Any:
    """Return one argument of a server, however it is spelled; ``None`` if it is not set.

    :param name: As Python spells it, such as ``mem_fraction_static``.
    """
    return _plain(config, plan).get(name)


def plan_devices(config: Config, plan: ServerPlan) -> int:
    """Return how many devices a server takes."""
    tensor = _last(_plain(config, plan), _SIZES["tp_size"])
    return tensor * plan_stages(config, plan) * plan_copies(config, plan)


def plan_stages(config: Config, plan: ServerPlan) -> int:
    """Return in how many stages a server divides the layers."""
    return _last(_plain(config, plan), _SIZES["pp_size"])


def plan_copies(config: Config, plan: ServerPlan) -> int:
    """Return the number of copies of the weights in a server."""
    plain = _plain(config, plan)
    return 1 if any(plain.get(name) for name in _WITHIN_TENSOR) else _last(plain, _SIZES["dp_size"])


def plan_ranks(config: Config, plan: ServerPlan) -> int:
    """Return how many data-parallel ranks a server has, whether they share the weights or not."""
    plain = _plain(config, plan)
    return max(_last(plain, _SIZES["dp_size"]), _last(plain, _ATTENTION_SIZES))


def context_room(config: Config, longest: int | None) -> int | None:
    """Return how many tokens a prompt and its response may have, for every server of the policy.

    :param longest: Longest context that the model takes; ``None`` for any number.
    """
    plans = [plan for plan in plan_servers(config) if plan.is_synced]
    told = [_plain(config, plan).get("context_length") for plan in plans]
    limits = [limit for limit in (*told, longest) if isinstance(limit, int)]
    return min(limits) - SPARE if limits else None


def _plain(config: Config, plan: ServerPlan) -> dict[str, Any]:
    arguments = plan_arguments(config, plan)
    return {name.removeprefix("--").replace("-", "_"): value for name, value in arguments.items()}


def _last(arguments: Mapping[str, Any], spellings: Sequence[str]) -> int:
    """Return what a server takes of one argument: that of its group comes after that of all."""
    values = [value for name, value in arguments.items() if name in spellings and isinstance(value, int)]
    return values[-1] if values else 1
