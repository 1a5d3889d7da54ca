"""Checks of an attached engine against the requirements of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from anygauge.serving.sglang.client.engine import EngineClient
from anygauge_hooks.errors import RolloutError

__all__ = ["Expected", "check_engine", "running_limit"]


class Expected(NamedTuple):
    """Properties that a run requires of an engine; ``None`` or empty ones are not checked."""

    architectures: tuple[str, ...] = ()
    """Architectures in the model's ``config.json``."""
    tokens: Mapping[str, tuple[int, ...]] = {}
    """Token ids from the run's own tokenizer for some texts, without special tokens."""
    context_length: int | None = None
    """Prompt and response together, at least."""


async def check_engine(client: EngineClient, expected: Expected) -> Mapping[str, str]:
    """Check a running engine, and return its facts for the run's records.

    :raises RolloutError: It serves another model, has another tokenizer, or is too small; all that differs is
        listed.
    """
    model, server = await client.model_info(), await client.server_info()
    problems = [*_of_model(model, expected), *_of_size(server, expected)]
    if server.get("skip_tokenizer_init"):
        tokenizer = "none: the server gives and takes token ids alone"
    else:
        tokenizer = str(model.get("tokenizer_path"))
        problems += await _of_tokenizer(client, expected)
    if problems:
        raise RolloutError(
            f"{client.name} is not the engine that this run needs:\n    " + "\n    ".join(problems),
            hint="Start the server with the run's model (--model-path), or correct the address.",
        )
    return {
        "address": client.address,
        "model": str(model.get("model_path")),
        "tokenizer": tokenizer,
        "version": str(server.get("version")),
    }


def running_limit(server: Mapping[str, Any]) -> int | None:
    """Return how many requests a data-parallel rank runs at once, from the answer of ``/server_info``.

    What the server was told is divided among its ranks, and lowered where its cache is small.
    """
    state: Mapping[str, Any] = next(iter(server.get("internal_states") or ()), {})
    limit, ranks = state.get("effective_max_running_requests_per_dp"), 1
    if limit is None:
        limit, ranks = server.get("max_running_requests"), server.get("dp_size") or 1
    return max(1, limit // ranks) if isinstance(limit, int) and limit > 0 else None


def _of_model(model: Mapping[str, Any], expected: Expected) -> list[str]:
    if not model.get("is_generation", True):
        return [f"{model.get('model_path')} does not generate"]
    served = tuple(model.get("architectures") or ())
    if expected.architectures and served and not set(served) & set(expected.architectures):
        wanted = ", ".join(expected.architectures)
        return [f"it serves {model.get('model_path')}, a {', '.join(served)}; the run's model is a {wanted}"]
    return []


def _of_size(server: Mapping[str, Any], expected: Expected) -> list[str]:
    length = server.get("context_length")
    if expected.context_length is not None and length is not None and length < expected.context_length:
        return [f"its context length is {length} tokens; the run needs {expected.context_length}"]
    return []


async def _of_tokenizer(client: EngineClient, expected: Expected) -> list[str]:
    problems = []
    for text, tokens in expected.tokens.items():
        body = {"prompt": text, "add_special_tokens": False}
        answer = await client.command("/v1/tokenize", body, purpose="the tokens of a text")
        if tuple(answer.get("tokens", ())) != tokens:
            problems.append(
                f"its tokenizer makes {answer.get('tokens')} of {text!r}; the run's makes {list(tokens)}"
            )
    return problems
