"""Wire format of SGLang's ``/generate``: encode requests, decode and check responses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import orjson

from anygauge.rollout.answer_limits import LARGEST_LOG_PROB, stray_token
from anygauge.serving.sglang.client.media import media_fields
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import FinishReason, SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation

__all__ = [
    "BootstrapRoom",
    "batch_body",
    "generation_of",
    "read_answer",
    "read_answers",
    "request_body",
    "version_of",
    "was_aborted",
]

NEVER = -1e9
"""Added to the logits of a token that is not to be drawn; no probability is left of it."""
_EXCERPT = 100
_LARGEST_SEED = 2**63 - 1
_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class BootstrapRoom(NamedTuple):
    """Bootstrap room through which a prefill server hands a prompt's KV cache to a decode server."""

    host: str
    port: int
    """Port of the prefill engine's bootstrap server."""
    room: int
    """Room id, unique to this request and below ``2**63``."""
    rank: int | None = None
    """Data-parallel rank of the reading engine; ``None`` if it has but one."""


def request_body(
    request: GenerateRequest,
    rid: str,
    *,
    rank: int | None = None,
    bootstrap: BootstrapRoom | None = None,
    media: Sequence[bytes] = (),
    adapter: str = "",
) -> bytes:
    """Return the body of a request.

    :param rid: The id that the engine knows it by. An engine that aborts ends every request whose id *begins*
        with the one it is given, so no id may begin with another.
    :param rank: Data-parallel rank of the engine that is to serve it; ``None`` lets the engine choose.
    :param bootstrap: For an engine that does but one half of it; the other is told the same.
    :param media: The request's media, encoded; see :func:`media_fields`.
    :param adapter: Name of the adapter that answers; empty for the engine's weights alone.
    :raises RolloutError: Its placeholders and media do not go together.
    """
    body: dict[str, Any] = {
        "rid": rid,
        **media_fields(request, media),
        "sampling_params": _sampling_params(request.params, request.seed),
        "return_logprob": True,
    }
    body |= _routing(rank, adapter)
    if bootstrap is not None:
        body |= {
            "bootstrap_host": bootstrap.host,
            "bootstrap_port": bootstrap.port,
            "bootstrap_room": bootstrap.room,
        }
        if bootstrap.rank is not None:
            body["disagg_prefill_dp_rank"] = bootstrap.rank
    return orjson.dumps(body)


def batch_body(
    requests: Sequence[GenerateRequest], rids: Sequence[str], *, rank: int | None = None, adapter: str = ""
) -> bytes:
    """Return the body of several requests, which the engine answers together.

    :param requests: Without media.
    :param rids: Their ids in the engine; see :func:`request_body`.
    """
    body: dict[str, Any] = {
        "rid": rids,
        "input_ids": [request.tokens for request in requests],
        "sampling_params": [_sampling_params(request.params, request.seed) for request in requests],
        "return_logprob": True,
    }
    return orjson.dumps({**body, **_routing(rank, adapter)})


def _routing(rank: int | None, adapter: str) -> dict[str, Any]:
    """Return what says who answers, where the engine does not choose."""
    fields: dict[str, Any] = {} if rank is None else {"routed_dp_rank": rank}
    return {**fields, "lora_path": adapter} if adapter else fields


def _sampling_params(params: SamplingParams, seed: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
        "ignore_eos": params.ignore_eos,
        # What ends a response is part of it, and its text is made from its tokens by whoever wants it.
        "no_stop_trim": True,
        "skip_special_tokens": False,
        "sampling_seed": seed & _LARGEST_SEED,
    }
    if params.stop:
        fields["stop"] = params.stop
    if params.stop_token_ids:
        fields["stop_token_ids"] = params.stop_token_ids
    if params.forbidden:
        fields["logit_bias"] = {str(token): NEVER for token in params.forbidden}
    return fields


def read_answer(data: bytes, engine: str, request: GenerateRequest) -> Generation:
    """Decode an answer.

    :param request: Request that was sent; with media, the engine must have read as many tokens as it has.
    :raises RolloutError: It is none, or its parts contradict each other or the request.
    """
    with _invalid(data, engine):
        answer = orjson.loads(data)
        _check_length(answer, request, engine)
        return generation_of(answer, engine)


def read_answers(data: bytes, engine: str, count: int) -> list[Generation]:
    """Decode the answer to :func:`batch_body`, in the order of its requests.

    :raises RolloutError: It is none, or another number, or the parts of one contradict each other.
    """
    with _invalid(data, engine):
        answers = orjson.loads(data)
        if not isinstance(answers, list) or len(answers) != count:
            raise ValueError(f"{count} requests were sent")
        return [generation_of(answer, engine) for answer in answers]


@contextmanager
def _invalid(data: bytes, engine: str) -> Iterator[None]:
    """Turn what an answer of another form leads to into the project's error."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise RolloutError(
            f"{engine} returned an invalid generation: {error!r}; it begins with {data[:_EXCERPT]!r}.",
            hint="Is there an SGLang server of a known version at this address, and nothing in between?",
        ) from error


def _check_length(answer: Mapping[str, Any], request: GenerateRequest, engine: str) -> None:
    """Check the engine's count of prompt tokens for a request with media.

    :raises RolloutError: It made other numbers of tokens of the media.
    """
    meta = answer["meta_info"]
    read = meta.get("prompt_tokens") if request.media else None
    if read is not None and read != len(request.tokens):
        raise RolloutError(
            f"{engine} has read {read} tokens in request {request.label}, which has "
            f"{len(request.tokens)} with {len(request.media)} media.",
            hint="The server makes other sizes of images: start it with the run's model and its "
            "preprocessor_config.json, without limits on pixels of its own.",
        )


def was_aborted(data: bytes) -> bool:
    """Return whether an answer reports that its request was aborted."""
    try:
        return bool(orjson.loads(data)["meta_info"]["finish_reason"]["type"] == "abort")
    except (ValueError, LookupError, TypeError):
        return False


def generation_of(answer: Mapping[str, Any], engine: str) -> Generation:
    """Return the generation of a decoded answer.

    :raises RolloutError: Its parts contradict each other.
    """
    meta = answer["meta_info"]
    tokens, log_probs = _sampled(meta.get("output_token_logprobs") or ())
    _check_tokens(tokens, answer, engine)
    return Generation(
        tokens=tokens,
        log_probs=log_probs,
        weight_versions=_versions(meta, len(tokens), engine),
        finish_reason=_reason(meta, engine),
    )


def _sampled(pairs: Sequence[Sequence[Any]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return tokens and log-probs, each of which is one.

    :raises ValueError: One is none; TypeError if it is no number.
    """
    tokens = tuple([pair[1] for pair in pairs])
    log_probs = tuple([pair[0] for pair in pairs])
    if (stray := stray_token(tokens)) is not None:
        raise ValueError(f"token {stray} is {tokens[stray]!r}")
    if set(map(type, log_probs)) - {float, int} or not math.isfinite(math.fsum(log_probs)):
        raise ValueError("a log-prob is not finite")
    most = max(log_probs, default=0.0)
    if most > LARGEST_LOG_PROB:
        raise ValueError(f"a log-prob is {most}, above 0")
    return tokens, log_probs if most <= 0 else tuple([min(each, 0.0) for each in log_probs])


def _check_tokens(tokens: tuple[int, ...], answer: Mapping[str, Any], engine: str) -> None:
    """Compare the tokens that have log-probs with those that the answer lists, if it lists any."""
    listed = answer.get("output_ids")
    if listed is not None and tuple(listed) != tokens:
        raise RolloutError(
            f"{engine} answered request {answer['meta_info'].get('id')} with {len(listed)} tokens and "
            f"{len(tokens)} log-probabilities that are not of the same tokens.",
            hint="Was the server started with an option that changes what it puts out?",
        )


def _reason(meta: Mapping[str, Any], engine: str) -> FinishReason:
    reason = str((meta.get("finish_reason") or {}).get("type"))
    if reason not in _REASONS:
        raise RolloutError(
            f"{engine} says that request {meta.get('id')} finished for the reason {reason!r}.",
            hint=f"Known reasons are {', '.join(_REASONS)}; is this an SGLang server of a known version?",
        )
    return _REASONS[reason]


def _versions(meta: Mapping[str, Any], count: int, engine: str) -> tuple[int, ...]:
    spans: Sequence[Mapping[str, Any]] | None = meta.get("weight_versions")
    if spans is None:  # an engine of a version that labels the whole answer
        return (version_of(meta.get("weight_version"), engine),) * count
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):  # a gap could be as long as memory
            break
        versions += [version_of(span["version"], engine)] * (min(span["end"], count) - span["start"])
    if len(versions) != count:
        raise RolloutError(
            f"{engine} answered request {meta.get('id')} with {count} tokens and the weight versions of "
            f"{len(versions)}: {spans!r}."
        )
    return tuple(versions)


def version_of(label: str | None, engine: str) -> int:
    """Return the number of the weights that an engine serves; without a label they are those it began with.

    :raises RolloutError: Somebody else has labeled them.
    """
    if label is None or label == "default":
        return 0
    try:
        return int(label)
    except ValueError as error:
        raise RolloutError(
            f"{engine} serves weights of version {label!r}, which is not a number.",
            hint="Restart the server without --weight-version, or with the number of a step.",
        ) from error
