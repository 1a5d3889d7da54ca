"""Anthropic's messages API: parse requests, build responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from anygauge.rollout.gateway.answers import Answer, Piece
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

__all__ = ["chat_of", "error_body", "events", "message", "models", "parse_request"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """Parse a request.

    :raises Refusal: It is wrong, or asks for what is not here.
    """
    _check_absent(body)
    max_tokens = number(body, "max_tokens", 1)
    if max_tokens is None:
        raise bad_request("max_tokens is missing.", "max_tokens")
    chat = chat_of(body)
    return ChatRequest(
        model=field(body, "model", str, ""),
        chat=chat,
        max_tokens=max_tokens,
        stop=stop_strings(body, "stop_sequences"),
        calls=_calls(body, chat.tools),
        sampling={name: body[name] for name in ("temperature", "top_p", "top_k") if name in body},
        stream=field(body, "stream", bool, False),
        reasoning=field(body, "thinking", dict, {}).get("type") in ("enabled", "adaptive"),
    )


def _check_absent(body: Mapping[str, Any]) -> None:
    """Check that nothing is asked for that would be left undone in silence."""
    if field(body, "output_config", dict, {}).get("format") or body.get("output_format"):
        raise bad_request(
            "A format would force tokens that the model did not choose; ask for it in the prompt.",
            "output_config",
        )
    for name in ("container", "mcp_servers", "context_management"):
        if body.get(name):
            raise bad_request(f"{name} is not here.", name)


def chat_of(body: Mapping[str, Any]) -> Chat:
    """Return the conversation of a request.

    :raises Refusal: It is wrong.
    """
    messages = field(body, "messages", list, [])
    if not messages:
        raise bad_request("messages is empty.", "messages")
    system = text_of(body.get("system"), "system")
    said = [Message("system", system)] if system else []
    for position, each in enumerate(messages):
        said += _said(each, f"messages[{position}]")
    if said[-1].role == "assistant":
        raise bad_request(
            "The last message is the assistant's; an answer cannot be begun for this model.", "messages"
        )
    return Chat(tuple(said), _tools(body), field(body, "chat_template_kwargs", dict, {}))


def _tools(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the tools as OpenAI's API has them, which is what chat templates take."""
    return tuple(
        _tool(tool, f"tools[{position}]") for position, tool in enumerate(field(body, "tools", list, []))
    )


def _tool(tool: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
        raise bad_request(
            f"{where} is not a tool with a name and an input_schema; Anthropic's own tools are not here.",
            where,
        )
    function = {"name": tool["name"], "parameters": field(tool, "input_schema", dict, {})}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _calls(body: Mapping[str, Any], tools: Sequence[Any]) -> Any:
    choice = field(body, "tool_choice", dict, {})
    kind = choice.get("type", "auto")
    if kind == "none" or not tools:
        return "none"
    if kind != "auto":
        raise bad_request(
            f"tool_choice.type = {kind!r} would force tokens that the model did not choose; "
            "take 'auto' or 'none'.",
            "tool_choice",
        )
    return "one" if choice.get("disable_parallel_tool_use") else "many"


def _said(message: Any, where: str) -> Iterator[Message]:
    """Yield what a message says; answers of tools are messages of their own for a chat template."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where} has no role that is known: {role!r}.", where)
    content = message.get("content")
    if role == "assistant":
        yield _assistant(content, where)
        return
    blocks = content if isinstance(content, list) else []
    results = [block for block in blocks if _is_result(block)]
    for result in results:
        text, images = content_of(result.get("content"), f"{where}.content")
        yield Message("tool", text, call_id=str(result.get("tool_use_id", "")), images=images)
    rest = [block for block in blocks if not _is_result(block)] if results else content
    if rest or not results:
        text, images = content_of(rest, f"{where}.content")
        yield Message(role, text, images=images)


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _assistant(content: Any, where: str) -> Message:
    if not isinstance(content, list):
        return Message("assistant", text_of(content, f"{where}.content"))
    kinds: dict[Any, list[Any]] = {"text": [], "thinking": [], "tool_use": [], "redacted_thinking": []}
    for position, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise bad_request(f"{where}.content[{position}] is {kind!r}, which is not here.", where)
        kinds[kind].append(block)
    reasoning = "".join(str(block.get("thinking", "")) for block in kinds["thinking"])
    return Message(
        "assistant",
        text_of(kinds["text"], f"{where}.content", between=""),
        reasoning or None,
        tuple(
            Call(str(block.get("id", "")), str(block.get("name", "")), json.dumps(block.get("input", {})))
            for block in kinds["tool_use"]
        ),
    )


def message(name: str, chat_request: ChatRequest, answer: Answer) -> dict[str, Any]:
    """Return the body of an answer that is sent as a whole."""
    return {
        **_head(name, chat_request, answer.prompt_tokens, answer.response_tokens),
        **_end(answer),
        "content": [_block(piece) for piece in _shown(chat_request, answer)],
    }


def _shown(chat_request: ChatRequest, answer: Answer) -> list[Piece]:
    return [piece for piece in answer.blocks if piece.kind != "reasoning" or chat_request.reasoning]


def _head(name: str, chat_request: ChatRequest, prompt_tokens: int, response_tokens: int) -> dict[str, Any]:
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": chat_request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": response_tokens},
    }


def _end(answer: Answer) -> dict[str, Any]:
    if answer.finish_reason == "length":
        reason = "max_tokens"
    elif answer.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if answer.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop if reason == "stop_sequence" else None}


def _block(piece: Piece) -> dict[str, Any]:
    if piece.call is not None:
        return {
            "type": "tool_use",
            "id": piece.call.id,
            "name": piece.call.name,
            "input": piece.call.parsed(),
        }
    if piece.kind == "reasoning":
        return {"type": "thinking", "thinking": piece.text, "signature": ""}
    return {"type": "text", "text": piece.text}


def events(name: str, chat_request: ChatRequest, answer: Answer) -> Iterator[bytes]:
    """Yield the events of an answer that is sent as a stream."""
    yield _event("message_start", message=_head(name, chat_request, answer.prompt_tokens, 0))
    for index, piece in enumerate(_shown(chat_request, answer)):
        yield _event("content_block_start", index=index, content_block=_empty(piece))
        yield _event("content_block_delta", index=index, delta=_delta(piece))
        yield _event("content_block_stop", index=index)
    usage = {"input_tokens": answer.prompt_tokens, "output_tokens": answer.response_tokens}
    yield _event("message_delta", delta=_end(answer), usage=usage)
    yield _event("message_stop")


def _empty(piece: Piece) -> dict[str, Any]:
    block = _block(piece)
    return block | {
        key: {} if key == "input" else "" for key in ("input", "thinking", "text") if key in block
    }


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.call is not None:
        return {"type": "input_json_delta", "partial_json": piece.call.arguments}
    if piece.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": piece.text}
    return {"type": "text_delta", "text": piece.text}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def error_body(refusal: Refusal) -> dict[str, Any]:
    """Return a refusal in the API's own shape."""
    kind = _KINDS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def models(names: Sequence[str], created: str) -> dict[str, Any]:
    """Return the list of models."""
    data = [{"type": "model", "id": name, "display_name": name, "created_at": created} for name in names]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}
