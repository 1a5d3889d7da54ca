"""SFT: the loss is on what the policy would have to write, token for token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anygauge.config.schema import Data, DataFile
from anygauge.data.conversations import TurnFinder
from anygauge.data.problems import BadRowError
from anygauge.data.rows import Row, RowReader
from anygauge.data.source import FileSource
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.errors import ConfigError, DataError
from anygauge_hooks.rl import Prompt

WriteRows = Callable[..., Path]
Read = Callable[..., list[Prompt]]

THINKING_TEMPLATE = r"""
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set last = namespace(question=-1) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set content = message.content or '' %}
  {%- if message.role == 'assistant' %}
    {%- set thought = message.reasoning_content or '' %}
    {%- if '</think>' in content %}
      {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
      {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > last.question and (loop.last or thought) %}
      {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
      {{- '\n<tool_call>' + call.function.name + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
  {{- '<|im_start|>assistant\n' }}
  {%- if enable_thinking is defined and not enable_thinking %}
    {{- '<think>\n\n</think>\n\n' }}
  {%- endif %}
{%- endif %}"""
"""Does as Qwen3's: the turns after the last question alone keep their thinking, and the last one has some."""


def template_of(answer: str, question: str, opening: str) -> str:
    """Return a template from what it writes of a turn, of anything else, and before generation."""
    return (
        "{%- for message in messages %}{% set text = message.content | trim %}"
        "{%- if message.role == 'assistant' %}" + answer + "{%- else %}" + question + "{%- endif %}"
        "{%- endfor %}{%- if add_generation_prompt %}" + opening + "{%- endif %}"
    )


LLAMA_OPENING = "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
R1_OPENING = "{{ '<Assistant>' }}"
R1_THINKING = R1_OPENING + "{{ '<think>\\n' }}"
TEMPLATES = {
    "mistral": (template_of("{{ ' ' + text + '</s>' }}", "{{ '[INST] ' + text + '[/INST]' }}", ""), ["</s>"]),
    "seed_oss": (
        template_of(
            "{{ '<seed:bos>assistant\n' + text + '<seed:eos>' }}",
            "{{ '<seed:bos>user\n' + text + '<seed:eos>' }}",
            "{{ '<seed:bos>assistant\n' }}",
        ),
        ["<seed:eos>"],
    ),
    "llama": (
        template_of(
            LLAMA_OPENING + "{{ text + '<|eot_id|>' }}",
            "{{ '<|start_header_id|>user<|end_header_id|>\n\n' + text + '<|eot_id|>' }}",
            LLAMA_OPENING,
        ),
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
    ),
    "phi3": (
        template_of(
            "{{ '<|assistant|>\n' + text + '<|end|>\n' }}",
            "{{ '<|user|>\n' + text + '<|end|>\n' }}",
            "{{ '<|assistant|>\n' }}{%- else %}{{ '<|endoftext|>' }}",
        ),
        ["<|endoftext|>", "<|end|>"],
    ),
    "deepseek_v3": (
        template_of(R1_OPENING + "{{ text + '<end>' }}", "{{ '<User>' + text }}", R1_OPENING),
        ["<end>"],
    ),
    "r1": (
        template_of(R1_OPENING + "{{ text + '<end>' }}", "{{ '<User>' + text }}", R1_THINKING),
        ["<end>"],
    ),
    "glm4": (
        template_of("{{ '<|assistant|>\n' + text }}", "{{ '<|user|>\n' + text }}", "{{ '<|assistant|>' }}"),
        ["<|endoftext|>", "<|user|>", "<|observation|>"],
    ),
    "plain": (template_of("{{ 'A: ' + text + '\n' }}", "{{ 'Q: ' + text + '\n' }}", "{{ 'A:' }}"), ["<eos>"]),
    "marked whole": (
        template_of(
            "{% generation %}{{ '<|im_start|>assistant\n' + text + '<|im_end|>\n' }}{% endgeneration %}",
            "{{ '<|im_start|>user\n' + text + '<|im_end|>\n' }}",
            "{{ '<|im_start|>assistant\n' }}",
        ),
        ["<|im_end|>"],
    ),
    "marked content": (
        template_of(
            "{{ '<|im_start|>assistant\\n' }}"
            "{% generation %}{{ text }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
            "{{ '<|im_start|>user\n' + text + '<|im_end|>\n' }}",
            "{{ '<|im_start|>assistant\n' }}",
        ),
        ["<|im_end|>"],
    ),
    "marked": (
        template_of(
            "{{ '[' }}{% generation %}{{ text + '<end>' }}{% endgeneration %}{{ ']' }}",
            "{{ '(' + text + ')' }}",
            "{{ '[' }}",
        ),
        ["<end>"],
    ),
}
"""Templates that mark turns as those of published models do, and their stop tokens."""

CHATML = ["<|im_end|>"]


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    texts = ["What is the sum of two and three? It is five. Hello, how are you?\n\n\n"]
    return tiny_tokenizer(tmp_path_factory.mktemp("chat"), texts=texts)


@pytest.fixture
def thinking_tokenizer(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(chat_tokenizer, "chat_template", THINKING_TEMPLATE)
    return chat_tokenizer


@pytest.fixture
def read(write_rows: WriteRows) -> Read:
    """Return a function that reads rows for SFT."""

    def read_(
        *rows: Any,
        tokenizer: Any,
        stops: Sequence[str] | None = CHATML,
        max_tokens: int | None = None,
        **settings: Any,
    ) -> list[Prompt]:
        settings = {"input_key": "messages", "apply_chat_template": True, **settings}
        data = Data(train=(DataFile(path=str(write_rows(*rows))),), **settings)
        return FileSource(data, tokenizer, max_tokens=max_tokens, stop_tokens=stops).all()

    return read_


def chat(*contents: str) -> dict[str, Any]:
    """Return a row in which user and assistant take turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]}


def trained(prompt: Prompt, tokenizer: Any) -> list[str]:
    """Return what the loss is on, run by run."""
    runs: list[list[int]] = []
    before = 0
    for token, mask in zip(prompt.response, prompt.loss_mask, strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return [tokenizer.decode(run) for run in runs]


def test_one_turn(read: Read, chat_tokenizer: Any) -> None:
    (prompt,) = read(chat("What is two and three?", "It is five."), tokenizer=chat_tokenizer)
    generated = chat_tokenizer.apply_chat_template(
        chat("What is two and three?")["messages"], tokenize=False, add_generation_prompt=True
    )
    assert prompt.text == generated
    assert list(prompt.tokens) == chat_tokenizer(generated, add_special_tokens=False)["input_ids"]
    assert trained(prompt, chat_tokenizer) == ["It is five.<|im_end|>"]
    assert prompt.loss_mask[0] == 1
    assert list(compress(prompt.response, prompt.loss_mask))[-1] == chat_tokenizer.eos_token_id


def test_every_turn_of_the_assistant_is_trained_on(read: Read, chat_tokenizer: Any) -> None:
    row = chat("Hello", "Hello!", "How are you?", "Well.\nAnd you?", "So so.", "Oh.")
    row["messages"].insert(0, {"role": "system", "content": "Be kind."})
    (prompt,) = read(row, tokenizer=chat_tokenizer)
    assert trained(prompt, chat_tokenizer) == [
        "Hello!<|im_end|>",
        "Well.\nAnd you?<|im_end|>",
        "Oh.<|im_end|>",
    ]
    whole = chat_tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert chat_tokenizer.decode(prompt.tokens + prompt.response) == whole


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("mistral", [" Hello!</s>", " Well.</s>"]),
        ("seed_oss", ["Hello!<seed:eos>", "Well.<seed:eos>"]),
        ("llama", ["Hello!<|eot_id|>", "Well.<|eot_id|>"]),
        ("phi3", ["Hello!<|end|>", "Well.<|end|>"]),
        ("deepseek_v3", ["Hello!<end>", "Well.<end>"]),
        ("r1", ["Hello!<end>", "Well.<end>"]),
        ("glm4", ["\nHello!<|user|>", "\nWell.<|endoftext|>"]),
        ("plain", [" Hello!", " Well.<eos>"]),
        ("marked", ["Hello!<end>", "Well.<end>"]),
        ("marked whole", ["Hello!<|im_end|>", "Well.<|im_end|>"]),
        ("marked content", ["Hello!<|im_end|>", "Well.<|im_end|>"]),
    ],
)
def test_turns_are_found_in_any_template(
    read: Read, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str, runs: list[str]
) -> None:
    template, stops = TEMPLATES[name]
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    row = chat("Hello", "Hello!", "How are you?", "Well.")
    (prompt,) = read(row, tokenizer=chat_tokenizer, stops=stops)
    assert trained(prompt, chat_tokenizer) == runs
    row["messages"].append({"role": "user", "content": "So?"})
    (prompt,) = read(row, tokenizer=chat_tokenizer, stops=stops)
    if name not in ("glm4", "plain"):
        assert trained(prompt, chat_tokenizer) == runs


def test_a_base_model_is_trained_to_close_a_turn(read: Read, chat_tokenizer: Any) -> None:
    """Its stop token is another than the chat template writes."""
    row = chat("Hello", "Hello!", "How are you?", "Well.")
    (prompt,) = read(row, tokenizer=chat_tokenizer, stops=["<|endoftext|>"])
    assert trained(prompt, chat_tokenizer) == ["Hello!<|im_end|>", "Well.<|im_end|>"]


def test_the_answer_of_a_tool_may_name_the_called_function(
    read: Read, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% set last = namespace(name='') %}{% for message in messages %}"
        "{% for call in message.tool_calls or [] %}{% set last.name = call.function.name %}"
        "<start>to={{ call.function.name }}{{ call.function.arguments | tojson }}<call>{% else %}"
        "<start>{% if message.role == 'tool' %}{{ last.name }}{% else %}{{ message.role }}{% endif %}: "
        "{{ message.content }}<end>{% endfor %}{% endfor %}{% if add_generation_prompt %}<start>{% endif %}"
    )
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    row = chat("a", "", "b", "c")
    row["messages"][1] |= {"tool_calls": [{"function": {"name": "look", "arguments": {"at": "it"}}}]}
    row["messages"][2]["role"] = "tool"
    (prompt,) = read(row, tokenizer=chat_tokenizer, stops=["<end>", "<call>"])
    assert trained(prompt, chat_tokenizer) == ['to=look{"at": "it"}<call>', "assistant: c<end>"]


def test_content_in_parts_is_found_and_compared(chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    finder = TurnFinder(chat_tokenizer, Data(train=()), CHATML)
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}]}
        for role, text in (("user", "a"), ("assistant", "b"))
    ]
    assert finder.split(messages, None)[1] == "b<|im_end|>"
    shortening = template.replace("part.text", "part.text.split('</think>')[-1]")
    monkeypatch.setattr(chat_tokenizer, "chat_template", shortening)
    messages[1]["content"][0]["text"] = "<think>hm</think>b"
    with pytest.raises(BadRowError, match="no turn of the assistant that the chat template leaves whole"):
        finder.split(messages, None)


def test_tools_that_glm_calls_end_the_turn(
    read: Read, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}"
        "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}"
        "{{ call.function.arguments | tojson }}</call>{% endfor %}"
        "{% elif message.role == 'tool' %}<|observation|>{{ message.content }}"
        "{% else %}<|user|>{{ message.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    row = chat("a", "", "b", "c")
    calls = [{"function": {"name": "look", "arguments": {"at": "it"}}}]
    row["messages"][1] |= {"tool_calls": calls}
    row["messages"][2]["role"] = "tool"
    (prompt,) = read(row, tokenizer=chat_tokenizer, stops=["<eos>", "<|user|>", "<|observation|>"])
    call = '<call>look{"at": "it"}</call><|observation|>'
    assert trained(prompt, chat_tokenizer) == [call, "c<eos>"]


def test_marks_of_another_rendering_are_not_taken(
    read: Read, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, stops = TEMPLATES["marked"]
    monkeypatch.setattr(chat_tokenizer, "chat_template", template + "{{ range(100000) | random }}")
    with pytest.raises(DataError, match="has 1 turns of the assistant; 0 can be found"):
        read(chat("a", "b"), tokenizer=chat_tokenizer, stops=stops)


TEXTS = st.text("ab \n.<>|", min_size=1, max_size=12).filter(str.strip)


@given(contents=st.lists(TEXTS, min_size=2, max_size=7))
def test_prompt_and_pieces_make_up_the_whole(chat_tokenizer: Any, contents: list[str]) -> None:
    row = chat(*contents)
    config = Data(train=(), input_key="messages", apply_chat_template=True, label_key=None)
    (found,) = RowReader(config, chat_tokenizer, None, CHATML).read([json.dumps(row).encode()])
    assert isinstance(found, Row)
    whole = chat_tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert chat_tokenizer.decode(found.tokens + found.response) == whole
    expected = "".join(f"{text}<|im_end|>" for text in contents[1::2])
    assert chat_tokenizer.decode(list(compress(found.response, found.loss_mask))) == expected
    # The prompt is what the engine would be given, whatever the answer begins with.
    before = whole[: whole.index("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")]
    assert list(found.tokens) == chat_tokenizer(before, add_special_tokens=False)["input_ids"]


def test_thinking_of_the_last_turn_is_trained_on(read: Read, thinking_tokenizer: Any) -> None:
    row = chat("a", "<think>\nhm\n</think>\n\nfive")
    (prompt,) = read(row, tokenizer=thinking_tokenizer)
    assert trained(prompt, thinking_tokenizer) == ["<think>\nhm\n</think>\n\nfive<|im_end|>"]
    row["messages"][1] = {"role": "assistant", "content": "five", "reasoning_content": "hm"}
    assert read(row, tokenizer=thinking_tokenizer)[0].response == prompt.response


def test_a_turn_that_the_template_shortens_is_context(read: Read, thinking_tokenizer: Any) -> None:
    row = chat("a", "<think>\nhm\n</think>\n\nfive", "b", "six")
    (prompt,) = read(row, tokenizer=thinking_tokenizer)
    assert "five<|im_end|>" in prompt.text
    assert "hm" not in prompt.text
    assert trained(prompt, thinking_tokenizer) == ["<think>\n\n</think>\n\nsix<|im_end|>"]


def test_what_the_generation_prompt_holds_is_not_trained_on(read: Read, thinking_tokenizer: Any) -> None:
    settings = {"tokenizer": thinking_tokenizer, "chat_template_kwargs": {"enable_thinking": False}}
    (prompt,) = read(chat("a", "five", "b", "six"), **settings)
    assert trained(prompt, thinking_tokenizer) == ["five<|im_end|>", "six<|im_end|>"]
    (prompt,) = read(chat("a", "six"), **settings)
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert prompt.text == thinking_tokenizer.apply_chat_template(
        chat("a")["messages"], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )


def test_no_turn_is_left_whole(read: Read, thinking_tokenizer: Any) -> None:
    with pytest.raises(DataError, match="no turn of the assistant that the chat template leaves whole"):
        read(chat("a", "<think>hm</think>five", "b"), tokenizer=thinking_tokenizer)


def test_tools_and_their_calls(read: Read, thinking_tokenizer: Any) -> None:
    row = chat("a", "", "b", "done")
    row["messages"][1] = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "look", "arguments": {}}}],
    }
    row["messages"][2]["role"] = "tool"
    row["tools"] = [{"type": "function", "function": {"name": "look"}}]
    (prompt,) = read(row, tokenizer=thinking_tokenizer, tools_key="tools")
    assert prompt.text.startswith('<|im_start|>system\n{"type": "function"')
    assert trained(prompt, thinking_tokenizer) == [
        "\n<tool_call>look</tool_call><|im_end|>",
        "<think>\n\n</think>\n\ndone<|im_end|>",
    ]
    (without,) = read({**row, "tools": None}, tokenizer=thinking_tokenizer, tools_key="tools")
    assert without.text.startswith("<|im_start|>user")


@pytest.mark.parametrize(
    ("tools", "problem"),
    [('"look"', "is a string"), ([1], "is a list of other things"), ({}, "is an object")],
)
def test_tools_that_are_none(read: Read, chat_tokenizer: Any, tools: Any, problem: str) -> None:
    with pytest.raises(DataError, match=rf"train\.jsonl:1: field 'tools' {problem}, not a list of objects"):
        read({**chat("a", "b"), "tools": tools}, tokenizer=chat_tokenizer, tools_key="tools")


def test_a_row_without_a_turn_of_the_assistant_is_named(read: Read, chat_tokenizer: Any) -> None:
    with pytest.raises(DataError) as error:
        read(chat("a", "b"), chat("a"), chat("a", "b"), tokenizer=chat_tokenizer)
    assert "1 of 3 rows cannot be used" in str(error.value)
    assert "train.jsonl:2: field 'messages' has no turn of the assistant to train on" in str(error.value)
    assert "SFT needs a message with the role 'assistant'" in str(error.value)


@pytest.mark.parametrize("text", ["so<|im_end|>", "<|im_end|>\n<|im_start|>assistant\nso"])
@pytest.mark.parametrize("turn", [0, 1])
def test_content_with_a_marker_is_a_bad_row(read: Read, chat_tokenizer: Any, text: str, turn: int) -> None:
    contents = ["a", "b"]
    contents[turn] = text
    with pytest.raises(DataError, match=rf"train\.jsonl:1: field 'messages' message {turn}: holds '<\|im_"):
        read(chat(*contents), tokenizer=chat_tokenizer)


def test_a_template_that_leaves_turns_out(
    read: Read, chat_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% if not add_generation_prompt %}{% set messages = messages[-2:] %}{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    monkeypatch.setattr(chat_tokenizer, "chat_template", template)
    with pytest.raises(DataError, match="has 2 turns of the assistant; 1 can be found"):
        read(chat("a", "b", "c", "d"), tokenizer=chat_tokenizer)


def test_the_label_ends_a_conversation_that_ends_before_it(read: Read, chat_tokenizer: Any) -> None:
    row = {**chat("a", "b", "c"), "label": "the answer"}
    (prompt,) = read(row, tokenizer=chat_tokenizer)
    assert trained(prompt, chat_tokenizer) == ["b<|im_end|>", "the answer<|im_end|>"]
    assert prompt.label == "the answer"
    (prompt,) = read({**chat("a", "b"), "label": "other"}, tokenizer=chat_tokenizer)
    assert trained(prompt, chat_tokenizer) == ["b<|im_end|>"]


def test_a_string_and_its_label_are_a_chat(read: Read, chat_tokenizer: Any) -> None:
    settings = {"tokenizer": chat_tokenizer, "input_key": "prompt", "system_prompt": "Be brief."}
    (prompt,) = read({"prompt": "Hello", "label": "Hello!", "level": 2}, **settings)
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert trained(prompt, chat_tokenizer) == ["Hello!<|im_end|>"]
    assert prompt.metadata == {"level": 2}


def test_a_plain_prompt_and_its_label(read: Read, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, alphabet="0123456789+=")
    settings = {"tokenizer": tokenizer, "input_key": "prompt", "apply_chat_template": False}
    (prompt,) = read({"prompt": "37+58=", "label": "59"}, **settings)
    assert list(prompt.tokens) == tokenizer("37+58=")["input_ids"]
    assert tokenizer.decode(prompt.response) == "59<eos>"
    assert prompt.loss_mask == (1, 1, 1)
    assert (prompt.text, prompt.label) == ("37+58=", "59")


def test_special_tokens_are_before_the_prompt_alone(read: Read, tokenizer: Any) -> None:
    tokenizer.eos_token = "a"
    (prompt,) = read({"messages": "x", "label": "y"}, tokenizer=tokenizer, apply_chat_template=False)
    tokenizer.eos_token = None
    assert list(prompt.tokens) == tokenizer("x")["input_ids"]
    assert tokenizer.decode(prompt.response) == "ya"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "1+1="}, "field 'label' is missing"),
        ({"prompt": "1+1=", "label": None}, "field 'label' is null"),
        ({"prompt": "1+1=", "label": ""}, "field 'label' is empty; SFT trains on it"),
        ({"prompt": "1+1=", "label": 2}, "field 'label' is a number, not a string; SFT trains on it"),
        ({"prompt": "1+1=", "label": "two"}, "field 'label': the tokenizer refuses 'two'"),
        (
            {"prompt": [{"role": "user", "content": "a"}], "label": "2"},
            "field 'prompt' is a list of messages",
        ),
    ],
)
def test_a_label_that_cannot_be_trained_on(read: Read, tmp_path: Path, row: Any, problem: str) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "model", alphabet="0123456789+=")
    with pytest.raises(DataError) as error:
        read(row, tokenizer=tokenizer, input_key="prompt", apply_chat_template=False)
    assert f"train.jsonl:1: {problem}" in str(error.value)


def test_lengths_are_those_of_whole_conversations(read: Read, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path / "model", alphabet="0123456789+=")
    rows = [{"prompt": "1+1=", "label": "2" * count} for count in (1, 4, 2)]
    settings = {"tokenizer": tokenizer, "input_key": "prompt", "apply_chat_template": False}
    with pytest.raises(DataError, match=r":2: .* has 9 tokens with its answer; the model takes 8"):
        read(*rows, max_tokens=8, **settings)
    assert [p.label for p in read(*rows, max_tokens=8, max_prompt_tokens=7, **settings)] == ["2", "22"]


def test_a_tokenizer_without_an_end(read: Read, tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="end-of-sequence token, but the tokenizer has none"):
        read({"messages": "a", "label": "b"}, tokenizer=tokenizer, apply_chat_template=False)


def test_prompts_to_generate_from_have_no_response(read: Read, chat_tokenizer: Any) -> None:
    row = {**chat("a", "b"), "label": "c"}
    (prompt,) = read(row, tokenizer=chat_tokenizer, stops=None)
    assert (prompt.response, prompt.loss_mask) == ((), ())
    assert prompt.text.endswith("b<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("metadata", "problem"), [("x", "is a string that is not JSON"), (None, "is null, not an object")]
)
def test_metadata_is_an_object(read: Read, chat_tokenizer: Any, metadata: Any, problem: str) -> None:
    row = {**chat("a", "b"), "extra": metadata}
    with pytest.raises(DataError, match=rf"train\.jsonl:1: field 'extra' {problem}"):
        read(row, tokenizer=chat_tokenizer, metadata_key="extra")
    with pytest.raises(DataError, match=r"field 'extra' is missing"):
        read(chat("a", "b"), tokenizer=chat_tokenizer, metadata_key="extra")
    (prompt,) = read({**row, "extra": {"a": 1}, "more": 2}, tokenizer=chat_tokenizer, metadata_key="extra")
    assert prompt.metadata == {"a": 1}
