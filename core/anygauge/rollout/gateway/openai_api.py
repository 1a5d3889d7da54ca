"""OpenAI's chat completions API: parse requests, build responses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anygauge.rollout.gateway.answers import Answer
from anygauge.rollout.gateway.messages import Call, Chat, Message
from anygauge.rollout.gateway.refusals import Refusal, bad_request
from anygauge.rollout.gateway.request_parsing import (
    ChatRequest,
    content_of,
    field,
    number,
    stop_strings,
    text_of,
)

__all__ = ["chunks", "completion", "error_body", "models", "parse_request"]

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)
_ABSENT = (
    *("functions", "function_call", "audio", "prediction", "web_search_options"),
    # What other servers add to the API; left undone in silence, an agent would get what it did not ask for.
    *("min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "echo", "continue_final_message"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("json_schema", "regex", "ebnf"),
)
"""Fields that are not here."""
_MOST_ANSWERS = 128
_ROLES = {"developer": "system", "function": "tool"}
_PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""How a part of a character is decoded."""
_KINDS = {401: "authentication_error", 404: "invalid_request_error", 429: "rate_limit_error"}


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request.

    :raises Refusal: It is wrong, or asks for what is not here.
    """
    _check_absent(body)
    tools = _tools(body)
    return ChatRequest(
        model=field(body, "model", str, ""),
        chat=Chat(_messages(body), tools, field(body, "chat_template_kwargs", dict, {})),
        max_tokens=number(body, "max_completion_tokens", 1, number(body, "max_tokens", 1)),
        stop=stop_strings(body, "stop"),
        seed=number(body, "seed", -(2**63)),
        answers=number(body, "n", 1, 1, most=_MOST_ANSWERS) or 1,
        calls=_calls(body, tools),
        sampling={name: body[name] for name in _SAMPLING if name in body},
        stream=field(body, "stream", bool, False),
        usage=bool(field(body, "stream_options", dict, {}).get("include_usage")),
        log_probs=field(body, "logprobs", bool, False),
    )


def _check_absent(body: Mapping[str, Any]) -> None:
    """Check that nothing is asked for that would be left undone in silence."""
    kind = field(body, "response_format", dict, {}).get("type", "text")
    if kind != "text":
        raise bad_request(
            f"response_format.type = {kind!r} would force tokens that the model did not choose; only "
            "'text' is here. Ask for JSON in the prompt.",
            "response_format",
        )
    if number(body, "top_logprobs", 0):
        raise bad_request("top_logprobs above 0 is not here: the engine returns only the token that it drew.")
    for name in _ABSENT:
        if body.get(name):
            raise bad_request(f"{name} is not here.", name)


def _calls(body: Mapping[str, Any], tools: Sequence[Any]) -> Any:
    choice = field(body, "tool_choice", (str, dict), "auto")
    if choice == "none" or not tools:
        return "none"
    if choice != "auto":
        raise bad_request(
            f"tool_choice = {json.dumps(choice)} would force tokens that the model did not choose; "
            "take 'auto' or 'none'.",
            "tool_choice",
        )
    return "many" if field(body, "parallel_tool_calls", bool, True) else "one"


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = field(body, "tools", list, [])
    for position, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"tools[{position}] is not a function with a name.", f"tools[{position}]")
    return tuple(tools)


def _messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    messages = field(body, "messages", list, [])
    if not messages:
        raise bad_request("messages is empty.", "messages")
    return tuple(_message(message, f"messages[{position}]") for position, message in enumerate(messages))


def _message(message: Any, where: str) -> Message:
    role: Any = message.get("role") if isinstance(message, dict) else None
    if role not in ("system", "developer", "user", "assistant", "tool", "function"):
        raise bad_request(f"{where} has no role that is known: {role!r}.", where)
    name = field(message, "name", str)
    if role != "assistant":
        content, images = content_of(message.get("content"), f"{where}.content")
        call_id = field(message, "tool_call_id", str)
        return Message(_ROLES.get(role, role), content, call_id=call_id, name=name, images=images)
    content = text_of(message.get("content"), f"{where}.content", between="")
    reasoning = field(message, "reasoning_content", str, field(message, "reasoning", str))
    calls = field(message, "tool_calls", list, [])
    return Message(
        role,
        content or field(message, "refusal", str, "") or "",
        reasoning,
        tuple(_call(call, f"{where}.tool_calls[{position}]") for position, call in enumerate(calls)),
        name=name,
    )


def _call(call: Any, where: str) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} is not a function call.", where)
    arguments = function.get("arguments", "{}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return Call(str(call.get("id", "")), function["name"], text)


def completion(
    name: str, created: int, chat_request: ChatRequest, answers: Sequence[Answer]
) -> dict[str, Any]:
    """Return the body of an answer that is sent as a whole."""
    return {
        **_head(name, created, chat_request),
        "choices": [_choice(answer, chat_request) for answer in answers],
        "usage": _usage(answers),
    }


def _head(name: str, created: int, chat_request: ChatRequest) -> dict[str, Any]:
    return {"id": name, "object": "chat.completion", "created": created, "model": chat_request.model}


def _choice(answer: Answer, chat_request: ChatRequest) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or None, "refusal": None}
    if not answer.calls:
        message["content"] = answer.content
    else:
        message["tool_calls"] = [_written_call(call) for call in answer.calls]
    if answer.reasoning and chat_request.reasoning:
        message["reasoning_content"] = answer.reasoning
    return {**_end(answer, chat_request), "message": message}


def _end(answer: Answer, chat_request: ChatRequest) -> dict[str, Any]:
    has_calls = bool(answer.calls) and answer.finish_reason == "stop"
    return {
        "index": answer.number,
        "finish_reason": "tool_calls" if has_calls else answer.finish_reason,
        "logprobs": _log_probs(answer) if chat_request.log_probs else None,
    }


def _written_call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _log_probs(answer: Answer) -> dict[str, Any]:
    entries = [
        {
            "token": text,
            # A token may be a part of a character, whose bytes its text does not tell.
            "bytes": None if _PARTIAL in text else list(text.encode()),
            "logprob": log_prob,
            "top_logprobs": [],
        }
        for text, log_prob in answer.log_probs
    ]
    return {"content": entries, "refusal": None}


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    prompt, completion = answers[0].prompt_tokens, sum(answer.response_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def chunks(name: str, created: int, chat_request: ChatRequest, answers: Sequence[Answer]) -> Iterator[bytes]:
    """Yield the events of an answer that is sent as a stream."""
    head: dict[str, Any] = {**_head(name, created, chat_request), "object": "chat.completion.chunk"}
    if chat_request.usage:
        head["usage"] = None
    for answer in answers:
        for delta in _deltas(answer, chat_request):
            choice = {"index": answer.number, "delta": delta, "finish_reason": None, "logprobs": None}
            yield _event({**head, "choices": [choice]})
        yield _event({**head, "choices": [{**_end(answer, chat_request), "delta": {}}]})
    if chat_request.usage:
        yield _event({**head, "choices": [], "usage": _usage(answers)})
    yield b"data: [DONE]\n\n"


def _deltas(answer: Answer, chat_request: ChatRequest) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": "", "refusal": None}
    calls = itertools.count()
    for piece in answer.blocks:
        if piece.kind == "text":
            yield {"content": piece.text}
        elif piece.call is not None:
            yield {"tool_calls": [{"index": next(calls), **_written_call(piece.call)}]}
        elif chat_request.reasoning:
            yield {"reasoning_content": piece.text}


def _event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return a refusal in the API's own shape."""
    kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    error = {
        "message": refusal.message,
        "type": kind,
        "param": refusal.parameter,
        "code": refusal.code,
    }
    return {"error": error}


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    """Return the list of models."""
    data = [{"id": name, "object": "model", "created": created, "owned_by": "anygauge"} for name in names]
    return {"object": "list", "data": data}
