"""Requests to SGLang in bytes, and parsing of its answers."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from anygauge.serving.sglang.client.wire import (
    BootstrapRoom,
    generation_of,
    read_answer,
    request_body,
    version_of,
)
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest

PARAMS = SamplingParams(
    max_new_tokens=9, temperature=0.7, top_p=0.9, top_k=4, stop=("\n",), stop_token_ids=(3,), ignore_eos=True
)
REQUEST = GenerateRequest("7-0", (1, 2), PARAMS, seed=0)


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
        read_answer(data, "e", REQUEST)


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
        read_answer(json.dumps(whole).encode(), "e", REQUEST)


def test_a_log_prob_that_rounding_has_put_above_0_is_0() -> None:
    pairs = [[1e-7, 4, None], [-0.0, 5, None], [0, 6, None], [-1e9, 7, None]]
    found = generation_of({"meta_info": answer(output_token_logprobs=pairs)["meta_info"]}, "e")
    assert found.log_probs == (0.0, 0.0, 0, -1e9)


def test_weights_without_a_label_are_those_of_the_start() -> None:
    assert [version_of(label, "e") for label in (None, "default", "0", "12")] == [0, 0, 0, 12]
