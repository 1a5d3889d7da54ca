"""Plans against figures of docs/performance.md and docs/plan.md: one NVIDIA H200, November 2026."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anygauge.planning.memory import GIB
from anygauge.planning.plan import Assumptions, Plan, make_plan
from anygauge.planning.rates import RATES
from anygauge.planning.shape import read_shape
from anygauge_cuda.plugin import CUDA
from anygauge_tests.engine_config import engine_config

BENCH = Path(__file__).parents[3] / "bench"
SMALL_EXPERTS = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 3072,
    "moe_intermediate_size": 768,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 49_152,
}
"""The mixture of ``bench/end_to_end.py``."""
SHAPES = {**runpy.run_path(str(BENCH / "train_step.py"))["SHAPES"], "small-experts": SMALL_EXPERTS}
H200 = Assumptions(
    backend="cuda", master_bytes=2, device_bytes=CUDA.device_memory["H200"], gpu="H200", rates=RATES["H200"]
)
LEAN: dict[str, Any] = {"loss_memory_gib": 0}
"""Keeps no logits, as the loss did before 2026-11-28."""
ALONE = {"1.7b-data": [184.0], "1.7b-fsdp": [273.6, 222.7], "4b-fsdp": [481.1], "4b-tensor": [436.9]}
"""Milliseconds of a rank whose exchanges take no time; of the second case on two machines."""
FIRST_OF_EIGHT = {"30b-a3b-init": (70.6, 2549), "4b-fsdp": (40.7, 460)}
"""GiB and milliseconds; the host takes most of the first one's time, for experts."""
FSDP: dict[str, Any] = {"engine": "fsdp"}
LORA: dict[str, Any] = {"lora": {"rank": 16}}


def planned(shape: str, keys: dict[str, Any], given: Assumptions = H200) -> Plan:
    """Return the plan of a run on one H200.

    :param keys: Sections of its config.
    """
    return make_plan(engine_config("m", **keys), read_shape(SHAPES[shape]), given)


def train_step(shape: str, length: int, count: int, **train: Any) -> Plan:
    """Return the plan of a step of ``bench/train_step.py``: some samples of one length, at once."""
    rollout = {"prompts_per_step": count, "samples_per_prompt": 1, "max_new_tokens": length - 1}
    own = {"dtype": "bfloat16", "micro_batch_tokens": length * count, **train}
    data = {"train": [], "max_prompt_tokens": 1}
    given = replace(H200, is_plain_batch=length % 512 == 0)
    return planned(shape, {"data": data, "rollout": rollout, "train": own}, given)


def colocated(shape: str, *, samples: int, prompt: int, response: int, **more: Any) -> Plan:
    """Return the plan of a colocated run of ``bench/end_to_end.py`` with 64 prompts."""
    rollout = {
        "engine": "sglang",
        "prompts_per_step": 64,
        "samples_per_prompt": samples,
        "max_new_tokens": response,
        **more,
    }
    train = {"dtype": "bfloat16", "micro_batch_tokens": 16_384, "optimizer_steps": 2}
    return planned(
        shape,
        {
            "data": {"train": [], "max_prompt_tokens": prompt},
            "rollout": rollout,
            "train": train,
            "placement": {"rollout_workers": 1, "colocated": True},
        },
    )


@pytest.mark.parametrize(
    ("shape", "count", "train", "gib"),
    [
        ("135m", 2, {}, 7.2),
        ("0.6b", 2, {}, 21.5),
        ("1.7b", 2, {}, 43.9),
        ("4b", 2, {}, 93.2),
        ("4b", 2, LEAN | {"recompute": "elementwise"}, 82.8),
        ("4b", 4, LEAN, 122.3),
        ("4b", 2, FSDP, 86.9),
        ("30b-a3b", 2, {}, 74.0),
        ("4b", 2, LORA, 41.2),
        ("4b", 2, FSDP | LORA, 41.2),
        ("4b", 2, LEAN | FSDP | LORA | {"recompute": "full"}, 10.6),
        ("1.7b", 2, LEAN, 41.7),
        ("0.6b", 2, LEAN, 19.2),
    ],
)
def test_the_memory_of_a_train_step_is_as_measured(
    shape: str, count: int, train: dict[str, Any], gib: float
) -> None:
    memory = train_step(shape, 4096, count, **train).train
    assert (memory.peak - memory.others) / GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(
    ("case", "gib", "ms"),
    [
        ("135m-data", 6.6, None),  # bound by the host
        ("0.6b-data", 18.7, None),
        ("0.6b-tensor", 17.1, None),
        ("1.7b-data", 35.9, 204.1),
        ("1.7b-tensor", 31.2, 228.4),
        ("1.7b-context", 37.7, 257.4),
        ("1.7b-fsdp", 29.3, None),
        ("30b-a3b-expert", 43.7, 153.8),
        ("30b-a3b-data", 53.7, 189.8),
        ("4b-fsdp", 57.6, 512.0),
        ("4b-tensor", 63.3, 495.2),
        ("4b-data", 74.4, 464.5),
    ],
)
def test_a_train_step_on_two_gpus_is_as_measured(
    case: str, gib: float, ms: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    bench = runpy.run_path(str(BENCH / "plan_check.py"))
    memory, milliseconds = bench["planned"](bench["divided"](2, 4096)[case], "H200", "cuda")
    assert memory == pytest.approx(gib, rel=0.02)
    assert ms is None or milliseconds == pytest.approx(ms, rel=0.2)
    if case in ALONE:
        _, milliseconds = bench["planned"](bench["divided"](2, 4096)[case], "H200", "cuda", exchanges=False)
        for ms in ALONE[case]:
            assert milliseconds == pytest.approx(ms, rel=0.2)


@pytest.mark.parametrize("case", FIRST_OF_EIGHT)
def test_the_first_of_eight_ranks_is_as_measured(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    bench = runpy.run_path(str(BENCH / "plan_check.py"))
    memory, ms = bench["planned"](bench["divided"](8, 4096)[case], "H200", "cuda", exchanges=False)
    assert (memory, ms) == (
        pytest.approx(FIRST_OF_EIGHT[case][0], rel=0.1),
        pytest.approx(FIRST_OF_EIGHT[case][1], rel=0.2),
    )


@pytest.mark.parametrize(
    ("shape", "parallel", "seconds"), [("small-experts", {"expert": 2}, 0.54), ("135m", {}, 0.66)]
)
def test_small_models_on_two_gpus_train_as_measured(
    shape: str, parallel: dict[str, int], seconds: float
) -> None:
    """Both are bound by the host, and were measured on one machine."""
    keys = {
        "data": {"train": [], "max_prompt_tokens": 32},
        "rollout": {"prompts_per_step": 64, "samples_per_prompt": 16, "max_new_tokens": 64},
        "train": {"dtype": "bfloat16", "micro_batch_tokens": 16_384, "parallel": parallel},
        "placement": {"train_workers": 2},
    }
    assert planned(shape, keys).seconds["train"] == pytest.approx(seconds, rel=0.2)


def test_full_recompute_repeats_the_forward_pass_of_the_host() -> None:
    once, again = (train_step("thin", 96, 170, recompute=name).seconds["train"] for name in ("none", "full"))
    assert again - RATES["H200"].step_s == pytest.approx(4 / 3 * (once - RATES["H200"].step_s), rel=0.01)


def test_the_memory_of_colocated_runs_is_as_measured() -> None:
    large = colocated("1.7b", samples=8, prompt=48, response=1024, max_batch_tokens=686_080)
    assert large.train.peak / GIB == pytest.approx(61, rel=0.1)
    small = colocated("135m", samples=16, prompt=32, response=64, sglang={"mem_fraction_static": 0.3})
    assert small.train.peak / GIB == pytest.approx(12.7, rel=0.1)


def test_trainers_and_servers_sleep_in_turns_where_they_did() -> None:
    large = colocated("1.7b", samples=8, prompt=48, response=1024, max_batch_tokens=686_080)
    assert large.sleeps
    assert large.spare is not None
    assert large.spare < 0
    assert large.phases["generate"][0] == 0
    small = colocated("135m", samples=16, prompt=32, response=64, sglang={"mem_fraction_static": 0.3})
    assert not small.sleeps
    assert small.seconds.keys() == {"generate", "log_probs", "train", "sync"}


@pytest.mark.parametrize(
    ("shape", "length", "count", "train", "ms"),
    [
        ("135m", 4096, 2, {}, 98.1),
        ("135m", 4096, 2, {}, 72.8),  # bound by the host, which was another
        ("135m", 96, 170, {}, 150),
        ("0.6b", 4096, 2, {}, 108.4),
        ("1.7b", 4096, 2, {}, 185.3),
        ("1.7b", 1072, 15, {}, 337),
        ("4b", 4096, 2, {}, 437.9),
        ("4b", 4096, 4, LEAN, 848),
        ("4b", 4096, 2, FSDP, 464),
        ("4b", 4096, 2, LORA, 352),
        ("4b", 4096, 2, FSDP | LORA, 413),
        ("1.7b", 4096, 2, FSDP, 224),
        ("4b", 4096, 2, LORA | {"recompute": "full"}, 509),
        ("4b", 4096, 2, FSDP | LORA | {"recompute": "full"}, 560),
        ("30b-a3b", 4096, 2, {}, 158),
        ("30b-a3b", 4096, 2, {}, 148),
    ],
)
def test_the_time_of_a_train_step_is_as_measured(
    shape: str, length: int, count: int, train: dict[str, Any], ms: float
) -> None:
    step = train_step(shape, length, count, **train)
    assert step.seconds["train"] * 1e3 == pytest.approx(ms, rel=0.2)


@pytest.mark.parametrize(
    ("shape", "parallel", "ms", "exposed"),
    [
        ("1.7b", {}, 217, 26),
        ("1.7b", {"tensor": 2}, 241, 34),
        ("1.7b", {"context": 2}, 253, 37),
        ("30b-a3b", {"expert": 2}, 159, 28),
    ],
)
def test_the_communication_of_two_gpus_is_as_measured(
    shape: str, parallel: dict[str, int], ms: float, exposed: float
) -> None:
    """8,192 tokens for each GPU, with the loss of that time, which computed its logits twice.

    :param exposed: Milliseconds of communication beside which nothing else ran.
    """
    keys = {
        "run": {"name": "t", "task": "sft"},
        "data": {"train": [], "max_prompt_tokens": 4096},
        "rollout": {"prompts_per_step": 4},
        "train": {"dtype": "bfloat16", "micro_batch_tokens": 16_384, "parallel": parallel, **LEAN},
        "placement": {"train_workers": 2},
    }
    plan = planned(shape, keys, replace(H200, is_plain_batch=True))
    assert plan.seconds["train"] * 1e3 == pytest.approx(ms, rel=0.2)
    rates = replace(RATES["H200"], link=float("inf"))
    alone = planned(shape, keys, replace(H200, is_plain_batch=True, rates=rates))
    communication = plan.seconds["train"] - alone.seconds["train"]
    assert communication * 1e3 == pytest.approx(exposed, rel=0.2)


def test_the_parts_of_a_colocated_step_are_as_measured() -> None:
    plan = colocated("1.7b", samples=8, prompt=48, response=1024, max_batch_tokens=686_080)
    measured = {"generate": 16.4, "train": 9.4, "log_probs": 1.75, "sleep": 1.2}
    for part, seconds in measured.items():
        assert plan.seconds[part] == pytest.approx(seconds, rel=0.2), part
    assert plan.total_seconds == pytest.approx(29.0, rel=0.1)
