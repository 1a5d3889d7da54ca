"""Media in requests to SGLang: images as files, and what needs more as the contents that the run has."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import orjson

from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Media
from anygauge_hooks.rollout import GenerateRequest

__all__ = ["CONTENT", "LONGEST_S", "collapsed", "media_fields", "needs_contents", "read_content"]

CONTENT = "anygauge-content:"
"""Beginning of a string that :mod:`anygauge.serving.sglang.processors` reads; SGLang itself refuses it.

It is followed by a medium as JSON, a line break, and its content in base64. In place of media, SGLang accepts
nothing but strings and options of its own processors.
"""

LONGEST_S = 30
"""Longest recording. SGLang concatenates recordings of all requests, which it needs in one length."""


def needs_contents(request: GenerateRequest) -> bool:
    """Return whether SGLang's own processor would make something else of a request than the trainer.

    It samples the frames of a video, and tokenizes the text around video and audio again.
    """
    return any(medium.kind != "image" for medium in request.media)


def media_fields(request: GenerateRequest, encoded: Sequence[bytes]) -> dict[str, Any]:
    """Return the fields of a request's body with its tokens and media.

    :param encoded: Its media, each as a JSON string: files, or contents where they are needed.
    :raises RolloutError: Its placeholders and media do not go together.
    """
    if not request.media:
        return {"input_ids": request.tokens}
    if not needs_contents(request):
        return {"input_ids": collapsed(request), "image_data": [orjson.Fragment(each) for each in encoded]}
    _check_spans(request)
    fields: dict[str, Any] = {"input_ids": request.tokens}
    for medium, data in zip(request.media, encoded, strict=True):
        fields.setdefault(f"{medium.kind}_data", []).append(_content(medium, data))
    return fields


def _content(medium: Media, data: bytes) -> orjson.Fragment:
    """Return a JSON string of a medium and its content, which is one itself."""
    described = f"{CONTENT}{orjson.dumps(medium._asdict()).decode()}\n"
    return orjson.Fragment(orjson.dumps(described)[:-1] + data[1:])


def read_content(text: str) -> tuple[Media, bytes]:
    """Return what such a string says: a medium, and its content as a file of NumPy."""
    described, _, data = text.removeprefix(CONTENT).partition("\n")
    fields = orjson.loads(described)
    spans = tuple((start, count) for start, count in fields["spans"])
    medium = Media(**{**fields, "spans": spans, "grid": tuple(fields["grid"])})
    return medium, base64.b64decode(data)


def collapsed(request: GenerateRequest) -> list[int]:
    """Return the tokens of a request with one placeholder for each image, as SGLang takes them.

    :raises RolloutError: The placeholders and the images do not go together.
    """
    _check_spans(request)
    tokens, spans = request.tokens, [span for medium in request.media for span in medium.spans]
    ids: list[int] = []
    end = 0
    for start, count in spans:
        ids += tokens[end : start + 1]
        end = start + count
    ids += tokens[end:]
    pads = {tokens[start] for start, _ in spans}
    if (count := sum(token in pads for token in ids)) != len(request.media):
        raise _refused(request, f"its tokens have {count} placeholders for {len(request.media)} images")
    return ids


def _check_spans(request: GenerateRequest) -> None:
    """Check that each run of placeholders is one, and that they are in order."""
    tokens, end = request.tokens, 0
    for medium in request.media:
        for start, count in medium.spans:
            if count < 1 or not end <= start <= start + count <= len(tokens):
                raise _refused(request, f"the places {medium.spans} of {medium.kind} are not in order")
            end = start + count
            if len(set(tokens[start:end])) != 1:
                raise _refused(request, f"tokens {start} to {end} are not of {medium.kind} alone")


def _refused(request: GenerateRequest, why: str) -> RolloutError:
    return RolloutError(
        f"Request {request.label} cannot be sent to a server: {why}.",
        hint="Show media with draft.observe(*await rollout.look(messages)), which keeps tokens and media "
        "together.",
    )
