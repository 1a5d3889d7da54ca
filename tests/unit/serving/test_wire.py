"""Requests to SGLang in bytes, and parsing of its answers."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from anygauge.serving.client.wire import (
    BootstrapRoom,
    StreamDecoder,
    generation_of,
    read_answer,
    reading,
    request_body,
    version_of,
)
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest

PARAMS = SamplingParams(
    max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=4, stop=("\n",), stop_token_ids=(3,), ignore_eos=True
)


def answer(**meta: Any) -> dict[str, Any]:
    pairs = [[-0.5, 4, None], [-0.25, 5, None], [-0.125, 6, None]]
    found = {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": 6},
        "output_token_logprobs": pairs,
        "completion_tokens": len(pairs),
        "weight_version": "2",
        **meta,
    }
    return {"output_ids": [4, 5, 6], "meta_info": found}


def test_a_request_in_bytes() -> None:
    request = GenerateRequest("7-0", (1, 2), PARAMS, seed=2**64 + 5)
    assert orjson.loads(request_body(request, "ab-7-0", rank=1)) == {
        "rid": "ab-7-0",
        "input_ids": [1, 2],
        "sampling_params": {
            "max_new_tokens": 9,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 4,
            "ignore_eos": True,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": 5,
            "stop": ["\n"],
            "stop_token_ids": [3],
        },
        "return_logprob": True,
        "stream": False,
        "routed_dp_rank": 1,
    }


def test_what_is_off_is_left_to_the_engine() -> None:
    request = GenerateRequest("7-0", (1, 2), SamplingParams(max_new_tokens=1), seed=0)
    body = orjson.loads(request_body(request, "r"))
    assert body["sampling_params"]["top_k"] == -1
    assert not {"stop", "stop_token_ids"} & set(body["sampling_params"])
    assert not {"routed_dp_rank", "bootstrap_room", "disagg_prefill_dp_rank"} & set(body)


def test_both_halves_of_a_request_are_told_the_same_meeting() -> None:
    request = GenerateRequest("7-0", (1, 2), SamplingParams(max_new_tokens=1), seed=0)
    bootstrap = BootstrapRoom("10.0.0.3", 8998, 2**63 - 1, rank=2)
    reads = orjson.loads(request_body(request, "r", rank=2, bootstrap=bootstrap))
    writes = orjson.loads(request_body(request, "w", rank=5, bootstrap=bootstrap))
    told = {"bootstrap_host": "10.0.0.3", "bootstrap_port": 8998, "bootstrap_room": 2**63 - 1}
    assert reads == {**reads, **told, "routed_dp_rank": 2}
    assert writes == {**reads, "rid": "w", "routed_dp_rank": 5, "disagg_prefill_dp_rank": 2}


def test_spans_say_which_weights_made_which_token() -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}]
    found = generation_of(answer(weight_versions=spans), "e")
    assert found.weight_versions == (0, 3, 3)
    assert found.tokens == (4, 5, 6)
    assert found.log_probs == (-0.5, -0.25, -0.125)


def test_one_label_stands_for_all_tokens() -> None:
    assert generation_of(answer(), "e").weight_versions == (2, 2, 2)


def test_a_request_that_was_aborted_in_the_queue_has_nothing() -> None:
    reason = {"type": "abort", "message": "Abort in waiting queue"}
    meta = {"id": "x", "finish_reason": reason, "weight_version": "2", "completion_tokens": 0}
    assert generation_of({"output_ids": [], "meta_info": meta}, "e") == ((), (), (), "abort")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"finish_reason": {"type": "tired"}}, "for the reason 'tired'"),
        ({"finish_reason": None}, "for the reason"),
        ({"weight_version": "v1"}, "'v1', which is not a number"),
        (
            {"weight_versions": [{"version": "1", "start": 0, "end": 2}]},
            "3 tokens and the weight versions of 2",
        ),
        ({"output_token_logprobs": [[-0.5, 4, None]]}, "3 tokens and 1 log-prob"),
        ({"output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None], [-0.1, 9, None]]}, "not of the same"),
        (
            {"weight_versions": [{"version": "1", "start": -(10**15), "end": 3}]},
            "3 tokens and the weight versions of 0",
        ),
        (
            {
                "weight_versions": [
                    {"version": "1", "start": 0, "end": 2},
                    {"version": "1", "start": 1, "end": 3},
                ]
            },
            "3 tokens and the weight versions of 2",
        ),
    ],
)
def test_an_answer_that_contradicts_itself(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        generation_of(answer(**meta), "e")


@pytest.mark.parametrize(
    "data", [b"<html>busy</html>", b"[]", b"7", b'{"text": "a"}', b'{"meta_info": null}', b""]
)
def test_an_answer_of_somebody_else(data: bytes) -> None:
    with pytest.raises(RolloutError, match="e returned an invalid generation"):
        read_answer(data, "e")


BAD_VALUES = [
    *([-0.5, token, None] for token in (-5, 2**31, 1.5, "7", [7], None, True)),
    *([log_prob, 4, None] for log_prob in (0.5, 1e-4, None, "-1", [-1], False, 10**400, -(10**400))),
    *([], [-0.5], None, 7),
]


@pytest.mark.parametrize("pair", BAD_VALUES, ids=repr)
def test_values_that_are_no_tokens_and_no_log_probs(pair: Any) -> None:
    pairs = [[-0.5, 4, None], pair, [-0.125, 6, None]]
    whole = answer(output_token_logprobs=pairs)
    del whole["output_ids"]
    with pytest.raises(RolloutError, match="e returned an invalid generation"):
        read_answer(json.dumps(whole).encode(), "e")
    streamed = {"meta_info": {**chunk(3, "7")["meta_info"], "output_token_logprobs": pairs}}
    with pytest.raises(RolloutError, match="e returned an invalid generation"), reading(b"", "e"):
        StreamDecoder("e", "7").next(streamed)


def test_a_log_prob_that_rounding_has_put_above_0_is_0() -> None:
    pairs = [[1e-7, 4, None], [-0.0, 5, None], [0, 6, None], [-1e9, 7, None]]
    found = generation_of({"meta_info": answer(output_token_logprobs=pairs)["meta_info"]}, "e")
    assert found.log_probs == (0.0, 0.0, 0, -1e9)


def test_weights_without_a_label_are_those_of_the_start() -> None:
    assert [version_of(label, "e") for label in (None, "default", "0", "12")] == [0, 0, 0, 12]


def chunk(count: int, version: str, *, since: int = 0, spans: Any = None) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": "x",
        "finish_reason": {"type": "length", "length": count} if spans else None,
        "weight_version": version,
        "completion_tokens": count,
        "output_token_logprobs": [[-1.0, token, None] for token in range(since, count)],
    }
    if spans:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return {"meta_info": meta}


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_of_a_stream_wait_until_their_weights_are_known(incremental: bool) -> None:
    """The third chunk names version 8, but its first token may be of version 7: only the last chunk tells."""
    parts = StreamDecoder("e", "7")
    since = (0, 2, 4, 6) if incremental else (0, 0, 0, 0)
    chunks = [
        chunk(2, "7", since=since[0]),
        chunk(4, "7", since=since[1]),
        chunk(6, "8", since=since[2]),
        chunk(9, "8", since=since[3], spans=[("7", 0, 5), ("8", 5, 9)]),
    ]
    found = [parts.next(each) for each in chunks]
    assert [part.tokens for part in found] == [(0, 1), (2, 3), (), (4, 5, 6, 7, 8)]
    assert found[3].weight_versions == (7, 8, 8, 8, 8)
    assert parts.finished
    assert found[3].finish_reason == "length"


def test_the_first_tokens_of_a_stream_may_be_of_the_weights_before() -> None:
    parts = StreamDecoder("e", "7")
    assert parts.next(chunk(3, "8")).tokens == ()
    last = parts.next(chunk(4, "8", spans=[("7", 0, 2), ("8", 2, 4)]))
    assert (last.tokens, last.weight_versions) == ((0, 1, 2, 3), (7, 7, 8, 8))


def test_a_stream_with_a_gap() -> None:
    parts = StreamDecoder("e", "7")
    parts.next(chunk(2, "7"))
    with pytest.raises(RolloutError, match=r"streamed 3 tokens .* there are 5"):
        parts.next(chunk(5, "7", since=4))
