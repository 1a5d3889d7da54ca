"""A gateway that says what a test wants, and a tokenizer whose chats have reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from anygauge.config.schema import Data, Rollout, RolloutGateway
from anygauge.rollout.context import ProducerContext, RolloutContext
from anygauge.rollout.functions import UserFunction, UserFunctions, single_turn
from anygauge.rollout.gate import Gate
from anygauge.rollout.gateway.server import Gateway
from anygauge.rollout.gateway.session import Session
from anygauge.rollout.live import LiveRollout
from anygauge.rollout.text import TextTools
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_tests.scripted import ScriptedGenerator
from anygauge_tests.scripted_engine import ListSource

__all__ = ["TEMPLATE", "ScriptedRollout", "Served", "chat_tokenizer", "serve_script"]

TEMPLATE = r"""
{%- set ns = namespace(question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>tools\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.question %}
            {{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- message.content.strip() }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""Like Qwen3's: calls between markers, and no reasoning but that since the last question."""

PROMPT = Prompt(index=7, tokens=(1,), text="")


class Served(NamedTuple):
    """A gateway with one session."""

    gateway: Gateway
    session: Session
    generator: ScriptedGenerator

    @property
    def samples(self) -> list[Sample]:
        """Return the trajectories."""
        return self.session.trajectories(PROMPT)

    def openai(self, **options: Any) -> Any:
        """Return the real client."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        url, key = self.gateway.openai_url(self.session), self.gateway.key(self.session)
        # Reading the certificates of the host takes longer than a test.
        http = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(**{"base_url": url, "api_key": key, "http_client": http, **options})

    def anthropic(self, **options: Any) -> Any:
        """Return the real client."""
        from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient

        url, key = self.gateway.anthropic_url(self.session), self.gateway.key(self.session)
        http = DefaultAsyncHttpxClient(verify=False)
        return AsyncAnthropic(**{"base_url": url, "api_key": key, "http_client": http, **options})


class ScriptedRollout(LiveRollout):
    """A rollout of rollout control, on a script."""

    def __init__(
        self, prompt: Prompt, tokenizer: Any, script: Any, budget: int = 200, context: int | None = None
    ) -> None:
        self.generator = ScriptedGenerator(tokenizer, script)
        gate = Gate(self.generator)
        gate.open()
        shared = RolloutContext(
            config=Rollout(),
            generator=self.generator,
            functions=UserFunctions(UserFunction("single_turn", single_turn)),
            text=TextTools(tokenizer, Data.model_validate({"train": ["data.jsonl"]}), context),
        )
        own = ProducerContext(
            rollout_context=shared,
            source=ListSource([prompt]),
            seeds=lambda _: [5],
            params=SamplingParams(max_new_tokens=budget),
            config=shared.config,
        )
        super().__init__(own, gate, prompt, 0, 0, 5)


def chat_tokenizer(directory: Path) -> Any:
    """Return a tokenizer that merges characters, and a template that shortens history."""
    words = "the weather in Paris is sunny and the answer is four, says the assistant to the user " * 4
    tokenizer = tiny_tokenizer(directory, texts=[words, "<tool_call> </tool_call>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@asynccontextmanager
async def serve_script(
    tokenizer: Any, script: Any, *, params: SamplingParams | None = None, **options: Any
) -> AsyncIterator[Served]:
    """Serve a script.

    :param script: See :class:`ScriptedGenerator`.
    :param options: Of the gateway.
    """
    generator = ScriptedGenerator(tokenizer, script)
    run = params or SamplingParams(max_new_tokens=500)
    async with Gateway(tokenizer, run, RolloutGateway(**options)) as gateway:
        yield Served(gateway, gateway.open(generator, seed=3), generator)
