"""Choosing a layout: which ones are compared, and which is taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anygauge.planning.choose import Wishes, choose
from anygauge.planning.memory import GIB
from anygauge.planning.plan import Assumptions
from anygauge.planning.rates import RATES
from anygauge.planning.shape import read_shape

DENSE = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151_936,
}
WISHES = Wishes(
    devices=8,
    engine="megatron",
    task="rl",
    prompts=32,
    samples=8,
    prompt_tokens=512,
    response_tokens=1024,
    cache_tokens=65_536,
    has_servers=False,
)


def given(gib: float) -> Assumptions:
    return Assumptions(backend="cuda", master_bytes=2, device_bytes=gib * GIB, rates=RATES["H200"])


def test_the_layout_that_trains_fastest_is_taken_of_those_that_fit() -> None:
    shape = read_shape(DENSE)
    large, small = choose(shape, WISHES, given(140)), choose(shape, WISHES, given(60))
    assert (large.parallel, large.recompute, large.micro_batch) == ({}, "none", 16_384)
    assert large.fits
    assert small.fits
    assert large.plan.seconds["train"] < small.plan.seconds["train"]
    assert small.plan.needed <= 0.94 * 60 * GIB


def test_no_more_ranks_share_a_matrix_than_there_are_key_heads() -> None:
    smallest = choose(read_shape(DENSE), WISHES, given(1))
    assert not smallest.fits
    assert (smallest.tensor, smallest.recompute, smallest.micro_batch) == (2, "full", 2048)


def test_fsdp_divides_nothing_else() -> None:
    chosen = choose(read_shape(DENSE), replace(WISHES, engine="fsdp"), given(60))
    assert (chosen.parallel, chosen.plan.train.masters) == ({}, read_shape(DENSE).parameters / 2 - 1280)


@pytest.mark.parametrize(("gib", "devices"), [(140, 1), (24, 1), (12, 2), (1, 8)])
def test_a_server_has_the_devices_that_its_weights_need(gib: float, devices: int) -> None:
    shape = read_shape(DENSE)  # 8.3 GiB of weights in bfloat16
    chosen = choose(shape, replace(WISHES, has_servers=True), given(gib))
    assert chosen.server_devices == devices
    assert chosen.plan.layout.server is not None
    assert chosen.plan.layout.server.count == 8 // devices
    sft = choose(shape, replace(WISHES, has_servers=True, task="sft"), given(gib))
    assert (sft.server_devices, sft.plan.server) == (0, None)


def test_a_sample_longer_than_every_size_is_alone_in_a_micro_batch() -> None:
    chosen = choose(read_shape(DENSE), replace(WISHES, response_tokens=30_000), given(140))
    assert chosen.micro_batch == 30_512


def test_servers_whose_cache_holds_no_sample_do_not_fit() -> None:
    chosen = choose(read_shape(DENSE), replace(WISHES, has_servers=True), given(140))
    assert chosen.plan.server is not None
    empty = replace(chosen.plan, server=replace(chosen.plan.server, cache_tokens=1535))
    assert chosen.fits
    assert not replace(chosen, plan=empty).fits
