"""The rollout function ``agent``: agents of the user's."""

from __future__ import annotations

import asyncio
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anygauge.plugins import Plugins
from anygauge.rollout.gateway import agent as module
from anygauge.rollout.gateway.agent import RolloutGenerator, agent
from anygauge.rollout.gateway.refusals import Refusal
from anygauge.rollout.journal import Journal
from anygauge.rollout.samples import check_sample
from anygauge_hooks.errors import ConfigError, PluginError, RolloutError
from anygauge_hooks.rl import Prompt, SamplingParams
from anygauge_hooks.rollout import GenerateRequest
from anygauge_tests import scripted_gateway

PROMPT = Prompt(index=7, tokens=(1,), text="the weather?", label="sunny", metadata={"city": "Paris"})


ScriptedRollout = partial(scripted_gateway.ScriptedRollout, PROMPT)


async def two_questions(base_url: str, api_key: str, row: Any, times: int = 2) -> Any:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
        for _ in range(times):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            said = reply.choices[0].message.content
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "sure?"}]
        return {"score": float(said == row["label"]), "said": said}


async def silent(base_url: str, api_key: str, row: Any) -> None:
    pass


async def broken(base_url: str, api_key: str, row: Any) -> None:
    raise ZeroDivisionError("the agent's own")


async def strange(base_url: str, api_key: str, row: Any) -> Any:
    await two_questions(base_url, api_key, row, 1)
    return "good"


async def shows_an_image(base_url: str, api_key: str, row: Any) -> None:
    from openai import AsyncOpenAI

    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": [shown]}])


def blocking(base_url: str, api_key: str, row: Any) -> None: ...


@pytest.fixture(autouse=True)
def agents(monkeypatch: pytest.MonkeyPatch) -> None:
    found = types.ModuleType("my_agents")
    for each in (two_questions, silent, broken, strange, blocking, shows_an_image, at_once, slow_to_begin):
        setattr(found, each.__name__, each)
    monkeypatch.setitem(sys.modules, "my_agents", found)


def test_an_agent_is_scored_and_becomes_one_sample(tokenizer: Any) -> None:
    async def main() -> None:
        rollout = ScriptedRollout(tokenizer, ["rainy", "sunny"])
        [sample] = await agent(rollout, PROMPT, 5, agent="my_agents:two_questions")
        assert (sample.prompt_index, sample.seed, sample.reward) == (7, 5, 1.0)
        assert sample.raw_reward == {"score": 1.0, "said": "sunny"}
        first, second = rollout.generator.sampled
        assert sum(sample.loss_mask) == len(first.tokens) + len(second.tokens)
        assert sample.text.startswith("rainy\nuser\nsure?")
        assert check_sample(sample, PROMPT) == sample
        assert not module._open

    asyncio.run(main())


def test_it_is_registered(plugins: Plugins) -> None:
    assert plugins.get("register_rollout_functions", "agent").fn is agent


@pytest.mark.parametrize("forbidden", [(), (90,)])
def test_an_agent_in_a_run_of_text_is_told_that_it_may_show_nothing(
    tokenizer: Any, forbidden: tuple[int, ...]
) -> None:
    async def main() -> None:
        rollout = ScriptedRollout(tokenizer, ["rainy"])
        rollout.params = replace(rollout.params, forbidden=forbidden)
        with pytest.raises(Exception, match=r"400.*model takes none.*model\.modalities"):
            await agent(rollout, PROMPT, 5, agent="my_agents:shows_an_image")

    asyncio.run(main())


def test_an_agent_that_is_run_again_gets_the_same_answers(tokenizer: Any) -> None:
    async def main() -> None:
        rollout = ScriptedRollout(tokenizer, ["rainy", "sunny"])
        [first] = await agent(rollout, PROMPT, 5, agent="my_agents:two_questions")
        # As rollout control does with a rollout that was cut short.
        again = ScriptedRollout(tokenizer, [])
        again.journal = Journal(rollout.journal.records)
        [second] = await agent(again, PROMPT, 5, agent="my_agents:two_questions")
        assert second == first

    asyncio.run(main())


def test_the_example_of_the_documentation(tokenizer: Any) -> None:
    async def main() -> None:
        text = (Path(__file__).parents[4] / "docs" / "agents.md").read_text()
        code = text.split("```python\n")[1].split("```")[0]
        example = types.ModuleType("my_agent")
        exec(code, example.__dict__)
        sys.modules["my_agents"].solve = example.solve  # type: ignore[attr-defined]
        rollout = ScriptedRollout(tokenizer, ["rainy", "sunny "])
        [sample] = await agent(rollout, PROMPT, 5, agent="my_agents:solve")
        assert sample.reward == 1.0

    asyncio.run(main())


def test_rollouts_of_a_loop_share_a_gateway(tokenizer: Any) -> None:
    async def main() -> None:
        rollouts = [ScriptedRollout(tokenizer, ["rainy", "sunny"]) for _ in range(3)]
        starting = [agent(each, PROMPT, 1, agent="my_agents:two_questions") for each in rollouts]
        done = await asyncio.gather(*starting)
        assert [len(samples) for samples in done] == [1, 1, 1]
        assert not module._open

    asyncio.run(main())


events: list[str] = []


async def slow_to_begin(base_url: str, api_key: str, row: Any) -> float:
    events.append("begin")
    await asyncio.sleep(0)
    events.append("loop")
    await two_questions(base_url, api_key, row, 1)
    return 1.0


def test_the_loop_goes_round_between_agents_that_begin_together(tokenizer: Any) -> None:
    async def main() -> None:
        events.clear()
        rollouts = [ScriptedRollout(tokenizer, ["rainy"]) for _ in range(5)]
        await asyncio.gather(*(agent(each, PROMPT, 1, agent="my_agents:slow_to_begin") for each in rollouts))
        assert events == ["begin", "loop"] * 5

    asyncio.run(main())


def test_an_agent_whose_budget_is_spent_is_scored_as_far_as_it_got(tokenizer: Any) -> None:
    async def main() -> None:
        rollout = ScriptedRollout(tokenizer, ["rainy", "sunny"], budget=8)
        options = {"times": 5}
        [sample] = await agent(rollout, PROMPT, 5, agent="my_agents:two_questions", agent_options=options)
        assert (sample.reward, sample.finish_reason, sum(sample.loss_mask)) == (None, "length", 8)

    asyncio.run(main())


async def at_once(base_url: str, api_key: str, row: Any) -> float:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        ask: Any = [{"role": "user", "content": row["prompt"]}]
        create = client.chat.completions.create
        await asyncio.gather(create(model="policy", messages=ask), create(model="policy", messages=ask, n=2))
    return 1.0


def test_requests_at_once_that_name_no_limit_take_turns_with_the_budget(tokenizer: Any) -> None:
    async def main() -> None:
        rollout = ScriptedRollout(tokenizer, ["one", "two", "three"], budget=20)
        samples = await agent(rollout, PROMPT, 5, agent="my_agents:at_once")
        assert sorted(sample.text for sample in samples) == ["one", "three", "two"]
        assert [request.params.max_new_tokens for request in rollout.generator.requests] == [20, 16, 12]

    asyncio.run(main())


@pytest.mark.parametrize(("context", "why"), [(60, "all that the model can take"), (None, "is 8 for the")])
def test_why_there_is_no_room(tokenizer: Any, context: int | None, why: str) -> None:
    async def main() -> None:
        rollout = ScriptedRollout(tokenizer, ["rainy", "sunny"], budget=8)
        rollout.max_context_tokens = context
        generator = RolloutGenerator(rollout)
        request = GenerateRequest("r", (1,) * 55, SamplingParams(max_new_tokens=8), 0, None)
        said = await generator.generate(request)
        assert len(said.tokens) == min(6, (context or 99) - 55)
        await generator.generate(request._replace(tokens=(1,))) if context is None else None
        with pytest.raises(Refusal, match=why) as caught:
            await generator.generate(request._replace(tokens=(1,) * 60))
        assert caught.value.code == "context_length_exceeded"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"agent": "my_agents:silent"}, RolloutError, "without an answer"),
        ({"agent": "my_agents:broken"}, ZeroDivisionError, "the agent's own"),
        ({"agent": "my_agents:strange"}, RolloutError, "returned 'good'"),
        ({"agent": "my_agents:blocking"}, PluginError, "is not async"),
        ({}, ConfigError, "one of agent and command"),
        ({"agent": "a:b", "command": ["c"]}, ConfigError, "one of agent and command"),
        ({"command": ["/no/such/program"]}, RolloutError, "cannot be started"),
    ],
)
def test_what_goes_wrong(tokenizer: Any, options: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        asyncio.run(agent(ScriptedRollout(tokenizer, ["rainy"]), PROMPT, 5, **options))
    assert not module._open


def test_an_engine_that_fails_is_the_error(tokenizer: Any) -> None:
    rollout = ScriptedRollout(tokenizer, [])
    rollout.generator.failure = RolloutError("The engine is away.")
    with pytest.raises(RolloutError, match="The engine is away"):
        asyncio.run(agent(rollout, PROMPT, 5, agent="my_agents:two_questions"))


PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = {"model": "policy", "messages": [{"role": "user", "content": row["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "example.org,127.0.0.1"
print("it said", said)
print(float(said == row["label"]))
"""


def test_a_program(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("NO_PROXY", "example.org")
        rollout = ScriptedRollout(tokenizer, ["sunny"])
        [sample] = await agent(rollout, PROMPT, 5, command=[sys.executable, "-c", PROGRAM])
        assert (sample.reward, sample.text) == (1.0, "sunny")
        code = "import sys; sys.stderr.write('so it is'); sys.exit(3)"
        with pytest.raises(RolloutError, match="status 3: so it is"):
            await agent(rollout, PROMPT, 5, command=[sys.executable, "-c", code])

    asyncio.run(main())
