"""Agent rollout function: lets a user's agent talk to the policy, and returns the sampled turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from anygauge.config.schema import Rollout as RolloutTable
from anygauge.config.schema import RolloutGateway
from anygauge.plugins import imported
from anygauge.rollout.gateway.command import run_command
from anygauge.rollout.gateway.refusals import Refusal, no_room
from anygauge.rollout.gateway.server import Gateway
from anygauge.rollout.gateway.session import Session
from anygauge.rollout.rewards.call import Call, number
from anygauge.rollout.rewards.resolve import is_async
from anygauge_hooks.errors import ConfigError, PluginError, RolloutError
from anygauge_hooks.rl import Prompt, Sample
from anygauge_hooks.rollout import GenerateRequest, Generation, Rollout

__all__ = ["RolloutGenerator", "agent"]


async def agent(
    rollout: Rollout,
    prompt: Prompt,
    seed: int,
    *,
    agent: str | None = None,
    agent_options: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    pass_env: Sequence[str] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Sample]:
    """Run an agent, and return one sample for each branch of its conversation.

    What the agent returns is the reward of all of them: a number, or a dict with ``score``; ``None`` leaves
    them to the run's reward functions.

    :param agent: ``package.module:function``, awaited as ``fn(base_url=, api_key=, row=, **agent_options)``
        with the address of OpenAI's client, and the prompt, label and metadata of the row.
    :param command: A program and its arguments, instead: see :func:`run_command`.
    :param pass_env: Names of variables of the driver that the program gets, beside the usual ones.
    :param chat_template_kwargs: Further arguments of the chat template.
    :raises ConfigError: An option is wrong.
    :raises RolloutError: The agent asked nothing, or the engine failed.
    """
    talk = _talk(agent, command, pass_env, dict(agent_options or {}))
    template_options = dict(chat_template_kwargs or {})
    make = partial(Gateway, rollout.tokenizer, rollout.params, _gateway_options(rollout))
    async with _shared(partial(make, template_options=template_options)) as served:
        generator, look = RolloutGenerator(rollout), partial(rollout.look, chat=False)
        session = served.open(generator, seed=seed, look=look, max_media=rollout.max_media)
        try:
            returned = await talk(served, session, prompt)
        except Exception:  # foreign code: an agent
            if session.failure is not None:
                # an agent's error that follows from it helps nobody
                raise session.failure from session.failure.__cause__
            if not session.spent:
                raise
            returned = None  # cut off: it is scored as far as it got
        finally:
            await served.end(session)
        samples = session.trajectories(prompt)
    if not samples:
        raise RolloutError(
            "The agent ended without an answer from the policy.",
            hint="It must ask the model at the address that it is given.",
        )
    return _rewarded(samples, returned)


class RolloutGenerator:
    """Generates within the budget of one rollout."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._under_way = 0
        self._ended = asyncio.Event()
        """The next generation to end has ended."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return what follows; where others may need what is left of the budget, once they have ended.

        :raises Refusal: There is no room for another token.
        """
        stop = [each for each in request.params.stop if each not in self._rollout.params.stop]
        wanted = request.params.max_new_tokens
        while self._under_way and self._rollout.remaining < wanted:
            await self._ended.wait()
        self._under_way += 1
        try:
            said: Generation = await self._rollout.generate(
                request.tokens, max_new_tokens=wanted, stop=stop, media=request.media
            )
        finally:
            self._under_way -= 1
            ended, self._ended = self._ended, asyncio.Event()
            ended.set()
        if not said.tokens and said.finish_reason == "length":
            raise self._no_room(len(request.tokens))
        return said

    async def abort(self) -> None:
        """Leave it to the run, which knows when."""

    def _no_room(self, prompt_tokens: int) -> Refusal:
        if self._rollout.remaining:
            why = f"the prompt has {prompt_tokens} tokens, which is all that the model can take"
        else:
            budget = self._rollout.params.max_new_tokens
            why = f"rollout.max_new_tokens is {budget} for the whole rollout"
        return no_room(f"There is no room for another token: {why}.")


# -----------------------------------------------------------------------------
# The agent
# -----------------------------------------------------------------------------

Talk = Callable[[Gateway, Session, Prompt], Awaitable[Any]]


def _talk(
    agent: str | None, command: Sequence[str], pass_env: Sequence[str], options: Mapping[str, Any]
) -> Talk:
    if (agent is None) == (not command):
        raise ConfigError(
            "The rollout function 'agent' needs one of agent and command.",
            hint='Set rollout.function_options = {agent = "my_agent:solve"}.',
        )
    if agent is None:
        return lambda gateway, session, prompt: run_command(command, gateway, session, _row(prompt), pass_env)
    fn = imported(agent, "Agent")
    if not is_async(fn):
        raise PluginError(
            f"Agent {agent!r} is not async.",
            hint="Write async def fn(base_url, api_key, row), and never block in it.",
        )
    return lambda gateway, session, prompt: fn(
        base_url=gateway.openai_url(session), api_key=gateway.key(session), row=_row(prompt), **options
    )


def _row(prompt: Prompt) -> dict[str, Any]:
    return {
        "prompt": prompt.text,
        "label": prompt.label,
        "metadata": dict(prompt.metadata),
        "index": prompt.index,
    }


def _rewarded(samples: Sequence[Sample], returned: Any) -> list[Sample]:
    if returned is None:
        return list(samples)
    value, problem = Call(name="the agent", fn=_rewarded).outcome(returned)
    if problem is not None:
        raise RolloutError(f"{problem[0].upper()}{problem[1:]}.", hint="Return a number, a dict, or None.")
    reward = number(value, None)
    return [sample._replace(reward=reward, raw_reward=value) for sample in samples]


# -----------------------------------------------------------------------------
# Its gateway
# -----------------------------------------------------------------------------


def _gateway_options(rollout: Rollout) -> RolloutGateway:
    """Return the gateway's table with the model's own context where none is set."""
    options = cast(RolloutTable, rollout.config).gateway  # the contract does not have this table
    context = options.max_context_tokens or rollout.max_context_tokens
    return options.model_copy(update={"max_context_tokens": context})


class _Shared:
    """A gateway and how many rollouts use it."""

    def __init__(self, gateway: Gateway) -> None:
        self.users = 0
        self.turn = asyncio.Lock()
        self.gateway = gateway
        self.started = asyncio.ensure_future(self.gateway.start())


_open: dict[tuple[Any, ...], _Shared] = {}


@asynccontextmanager
async def _shared(make: partial[Gateway]) -> AsyncIterator[Gateway]:
    """Give a gateway of this event loop, which is closed when the last rollout has left it.

    :param make: Rollouts share a gateway that is made with equal arguments.
    """
    tokenizer, *settings = make.args
    key = id(asyncio.get_running_loop()), id(tokenizer), *settings, repr(make.keywords)
    if key not in _open:
        _open[key] = _Shared(make())
    shared = _open[key]
    shared.users += 1
    try:
        await asyncio.shield(shared.started)
        async with shared.turn:
            # One agent begins in each pass of the loop. To make a client takes tens of milliseconds, in which
            # no connection is taken; all at once would outlast the time that clients give a connection.
            await asyncio.sleep(0)
        yield shared.gateway
    finally:
        shared.users -= 1
        if not shared.users:
            del _open[key]
            await asyncio.wait([shared.started])
            await shared.gateway.close()
