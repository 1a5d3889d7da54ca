"""Templates that end turns, take calls and answers of tools in other ways than Qwen's."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from anygauge.config.schema import RolloutGateway
from anygauge.rollout.gateway.messages import Call, Chat, Message
from anygauge.rollout.gateway.refusals import Refusal
from anygauge.rollout.gateway.rendering import Renderer
from anygauge.rollout.gateway.request_parsing import ChatRequest
from anygauge.rollout.gateway.server import Gateway
from anygauge.rollout.gateway.session import Session
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.rl import Prompt, SamplingParams
from anygauge_tests.scripted import ScriptedGenerator

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
PROMPT = Prompt(index=0, tokens=(1,), text="")

BY_ROLE = (
    # As GLM's: nothing ends a turn but the next one's role, which the model writes.
    "{%- for m in messages %}{{- '<|' + ('observation' if m.role == 'tool' else m.role) + '|>' + m.content }}"
    "{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function.name }}"
    "{%- for k, v in c.function.arguments.items() %}"
    "{{- '<arg_key>' + k + '</arg_key><arg_value>' + v + '</arg_value>' }}"
    "{%- endfor %}{{- '</tool_call>' }}{%- endfor %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
STRICT = (
    # As DeepSeek's and Mistral's: arguments are text, and a tool answers only after a call.
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{- raise_exception('a tool answers nothing') }}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    '{{- \'<tool_call>{"name": "\' + c.function.name + \'", "arguments": \' + c.function.arguments }}'
    "{{- '}</tool_call>' }}{%- endfor %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
OPENED = (
    # As R1's: the reasoning is opened for the model, and never shown again.
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}{#- </think> #}"
)


def with_template(tokenizer: Any, template: str, *special: str) -> Any:
    found = copy.deepcopy(tokenizer)
    found.add_special_tokens({"extra_special_tokens": [*special]})
    found.chat_template = template
    return found


def opened(tokenizer: Any, script: list[Any], **options: Any) -> tuple[Session, ScriptedGenerator]:
    generator = ScriptedGenerator(tokenizer, script)
    gateway = Gateway(tokenizer, SamplingParams(max_new_tokens=200), RolloutGateway(**options))
    return gateway.open(generator, seed=1), generator


async def say(session: Session, *messages: Message) -> Message:
    chat = Chat(messages, TOOLS)
    asked = ChatRequest("policy", chat), chat.characters(), str(len(session.turns))
    sampling = await session.submit(*asked, retried=False)
    async with sampling:
        answers = await sampling.answers()
    return answers[0].message()


@pytest.mark.parametrize(("token", "samples"), [("<|observation|>", 1), ("<|user|>", 2)])
def test_a_model_that_ends_a_turn_with_the_next_role(tokenizer: Any, token: str, samples: int) -> None:
    roles = with_template(tokenizer, BY_ROLE, "<|user|>", "<|assistant|>", "<|observation|>")

    async def main() -> None:
        text = "look<tool_call>f<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>"
        session, generator = opened(roles, [(text, "stop"), ("four", "length")])
        generator._characters = lambda said: [  # type: ignore[method-assign]
            *(one for character in said for one in roles.encode(character)),
            *([roles.convert_tokens_to_ids(token)] if said == text else []),
        ]
        ask = Message("user", "one")
        first = await say(session, ask)
        assert first.content == "look"
        assert [(call.name, call.parsed()) for call in first.calls] == [("f", {"a": "b"})]
        await say(session, ask, first, Message("tool", "seen"))
        assert roles.decode(generator.requests[1].tokens) == (
            f"<|user|>one<|assistant|>{text}<|observation|>seen<|assistant|>"
        )
        assert len(session.trajectories(PROMPT)) == samples

    asyncio.run(main())


def test_a_template_that_wants_calls_as_text_and_before_answers(tokenizer: Any) -> None:
    strict = with_template(tokenizer, STRICT)

    async def main() -> None:
        text = 'look<tool_call>{"name": "f",  "arguments": {"a":"b"}}</tool_call>'
        session, generator = opened(strict, [text, "four"])
        ask = Message("user", "one")
        first = await say(session, ask)
        await say(session, ask, first, Message("tool", "seen"))
        whole = strict.decode(generator.requests[1].tokens)
        assert whole == (
            f"<|im_start|>user\none<|im_end|><|im_start|>assistant\n{text}<|im_end|>"
            "<|im_start|>tool\nseen<|im_end|><|im_start|>assistant\n"
        )
        assert len(session.trajectories(PROMPT)) == 1
        with pytest.raises(Refusal, match="a tool answers nothing") as caught:
            await say(session, ask, Message("tool", "seen"))
        assert caught.value.status == 400

    asyncio.run(main())


@pytest.mark.parametrize(("history", "samples"), [("template", 2), ("append", 1)])
def test_a_template_that_opens_the_reasoning(tokenizer: Any, history: str, samples: int) -> None:
    found = with_template(tokenizer, OPENED)

    async def main() -> None:
        session, generator = opened(found, ["why</think>four", "so</think>five"], history=history)
        first = await say(session, Message("user", "one"))
        assert (first.content, first.reasoning) == ("four", "why")
        await say(session, Message("user", "one"), first, Message("user", "two"))
        assert len(session.trajectories(PROMPT)) == samples
        assert ("why" in found.decode(generator.requests[1].tokens)) == (samples == 1)

    asyncio.run(main())


def test_a_tokenizer_that_begins_each_text_as_a_word() -> None:
    # As SentencePiece's do: the beginning of a text gets a mark that the middle of one does not have.
    words = Tokenizer(models.WordLevel({"<end>": 0, "\u2581a": 1, "a": 2, "\u2581": 3}, unk_token="\u2581"))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    words.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", chat_template="x")
    renderer = Renderer(tokenizer)
    assert renderer.encode("a") == (1,)
    assert renderer.encode("<end>a") == (0, 2)
    assert renderer.encode_after(0, "a") == (2,)


def test_arguments_of_the_template(tokenizer: Any) -> None:
    session, _ = opened(tokenizer, [])
    for wrong in ({"tokenize": True}, {"chat_template": "x"}):
        with pytest.raises(Refusal, match="cannot set"):
            asyncio.run(session.count(Chat((Message("user", "one"),), (), wrong), 3))
    assert asyncio.run(session.count(Chat((Message("user", "one"),), (), {"enable_thinking": False}), 3))


def test_a_tokenizer_without_a_template(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        opened(with_template(tokenizer, ""), [])


def test_calls_that_an_agent_spells_otherwise() -> None:
    ours = Message("assistant", " look\n", "why", (Call("1", "f", '{"a": 1, "b": "é"}'),))
    theirs = Message("assistant", "look", None, (Call("x", "f", '{"b":"\\u00e9","a":1}'),))
    assert ours.meaning() == theirs.meaning()
    for other in (
        theirs._replace(content="looks"),
        theirs._replace(calls=()),
        theirs._replace(calls=(Call("1", "g", '{"a": 1, "b": "é"}'),)),
        theirs._replace(calls=(Call("1", "f", '{"a": 2, "b": "é"}'),)),
    ):
        assert ours.meaning() != other.meaning()
