"""Config rules for agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anygauge.config.modalities import media_fields
from anygauge.config.named_functions import import_problems, taken_options
from anygauge.config.schema import RolloutGateway
from anygauge.plugins import imported
from anygauge.rollout.gateway.tool_formats import find_format
from anygauge.rollout.rewards.resolve import is_async
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["agent_problems"]

WITHOUT_GATEWAY = ("single_turn", "multi_turn")
"""Rollout functions that open none; one of the user's may."""
EVERYWHERE = ("0.0.0.0", "::")
"""Addresses to listen at that lead nowhere."""
OPTIONS = "rollout.function_options"

Problems = Iterator[ConfigProblem]


def agent_problems(config: Config) -> Problems:
    """Yield problems of the agent or its gateway, and keys without effect."""
    rollout = config.rollout
    if rollout.function in WITHOUT_GATEWAY:
        yield from _without_effect(rollout.function, rollout.gateway)
        return
    yield from _gateway(config)
    if rollout.function != "agent":
        return
    yield from _agent(rollout.function_options)
    if config.data.apply_chat_template:
        hint = "the gateway renders what an agent sends, which gets the row's text as it is; leave it out"
        yield ConfigProblem(path="data.apply_chat_template", found=True, hint=hint)
    for path, keys in media_fields(config).items():
        hint = (
            "an agent sends its images itself, from paths or data in the row's metadata; name what the model "
        )
        hint += 'takes instead: model.modalities = ["image"]'
        if keys:
            yield ConfigProblem(path=path, found=keys, hint=hint)


def _without_effect(function: str, gateway: RolloutGateway) -> Problems:
    for key, field in RolloutGateway.model_fields.items():
        if (value := getattr(gateway, key)) != field.default:
            hint = f"has no effect with rollout.function = {function!r}; leave it out"
            yield ConfigProblem(path=f"rollout.gateway.{key}", found=value, hint=hint)


def _gateway(config: Config) -> Problems:
    gateway = config.rollout.gateway
    if gateway.host in EVERYWHERE:
        hint = "agents are given this address; name one of this host that they can reach"
        yield ConfigProblem(path="rollout.gateway.host", found=gateway.host, hint=hint)
    path = "rollout.gateway.tool_format"
    problems = list(import_problems(path, gateway.tool_format)) if ":" in gateway.tool_format else []
    yield from problems
    if not problems:
        try:
            find_format(gateway.tool_format, "")
        except ConfigError as error:
            yield ConfigProblem(path=path, found=gateway.tool_format, hint=f"no such format; {error.hint}")
    rollouts = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    if gateway.max_requests is not None and gateway.max_requests < rollouts:
        hint = f"a step has {rollouts} rollouts at once, whose agents would be refused; leave it out"
        yield ConfigProblem(path="rollout.gateway.max_requests", found=gateway.max_requests, hint=hint)


def _agent(options: Mapping[str, Any]) -> Problems:
    agent, command = options.get("agent"), options.get("command", ())
    if (agent is None) == (not command):
        hint = "the rollout function 'agent' needs one of agent and command: {agent = \"my_agent:solve\"}"
        yield ConfigProblem(path=OPTIONS, found=dict(options), hint=hint)
    if isinstance(command, str) or not all(isinstance(each, str) for each in command):
        hint = 'a program and its arguments, each a string: ["python", "my_agent.py"]'
        yield ConfigProblem(path=f"{OPTIONS}.command", found=command, hint=hint)
    pass_env = options.get("pass_env", ())
    if isinstance(pass_env, str) or not all(isinstance(each, str) for each in pass_env):
        hint = 'names of environment variables: ["SEARCH_API_KEY"]'
        yield ConfigProblem(path=f"{OPTIONS}.pass_env", found=pass_env, hint=hint)
    if agent is None:
        return
    if pass_env:
        hint = "has no effect with agent, which runs in the driver; leave it out"
        yield ConfigProblem(path=f"{OPTIONS}.pass_env", found=pass_env, hint=hint)
    path = f"{OPTIONS}.agent"
    problems = list(import_problems(path, str(agent)))
    yield from problems
    if not problems:
        yield from _function(path, imported(agent, "Agent"), options.get("agent_options") or {})


def _function(path: str, agent: Any, options: Mapping[str, Any]) -> Problems:
    if not is_async(agent):
        hint = "write async def fn(base_url, api_key, row), and never block in it"
        yield ConfigProblem(path=path, found=str(agent), hint=hint)
        return
    for option in sorted(set(options) - set(taken_options(agent, options))):
        hint = f"{agent.__qualname__} takes no such argument"
        yield ConfigProblem(path=f"{OPTIONS}.agent_options.{option}", found=options[option], hint=hint)
