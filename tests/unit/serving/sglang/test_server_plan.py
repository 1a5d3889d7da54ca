"""Groups of servers: order, devices, what each kind is started with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.config.rules.group import groups_rule
from anygauge.serving.server_plan import plan_servers
from anygauge.serving.sglang.arguments import by_name, command_line
from anygauge.serving.sglang.installed import Installed
from anygauge.serving.sglang.kinds import plan_arguments, plan_devices, plan_ranks

Make = Callable[..., Config]


def test_without_groups_every_worker_serves_the_policy(config: Make) -> None:
    made = config({"sglang": {"tp_size": 2}}, placement={"rollout_workers": 3})
    plans = plan_servers(made)
    assert [(plan.rank, plan.wave, plan.kind, plan.model, plan_devices(made, plan)) for plan in plans] == [
        (0, 0, "regular", "policy", 2),
        (1, 0, "regular", "policy", 2),
        (2, 0, "regular", "policy", 2),
    ]
    assert all(plan_arguments(made, plan) == {"tp_size": 2} and plan.path is None for plan in plans)


def test_a_group_lays_its_arguments_over_those_of_all(config: Make) -> None:
    groups = [{"servers": 1}, {"servers": 2, "sglang": {"tp_size": 4, "context_length": 512}}]
    rollout = {"sglang": {"tp_size": 1, "context_length": 1024}, "groups": groups}
    made = config(rollout, placement={"rollout_workers": 3})
    plans = plan_servers(made)
    assert [plan_arguments(made, plan) for plan in plans] == [
        {"tp_size": 1, "context_length": 1024},
        *[{"tp_size": 4, "context_length": 512}] * 2,
    ]
    assert [plan_devices(made, plan) for plan in plans] == [1, 4, 4]


def test_a_group_may_spell_an_argument_otherwise(config: Make) -> None:
    rollout = {"sglang": {"tp_size": 1}, "groups": [{"sglang": {"--tensor-parallel-size": 4}}]}
    made = config(rollout)
    assert [plan_devices(made, plan) for plan in plan_servers(made)] == [4]


@pytest.mark.parametrize(
    ("arguments", "devices", "ranks"),
    [
        ({}, 1, 1),
        ({"tp-size": 2, "pp_size": 2}, 4, 1),
        ({"tensor_parallel_size": 2, "dp_size": 3}, 6, 3),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 4, 4),
        ({"tp_size": 4, "dp_size": 2, "attn_dp_size": 2}, 4, 2),
        ({"tp_size": 4, "attn_dp_size": 2}, 4, 2),
    ],
)
def test_the_devices_and_ranks_of_a_server_follow_from_its_sizes(
    arguments: dict[str, Any], devices: int, ranks: int, config: Make
) -> None:
    made = config({"sglang": arguments})
    (plan,) = plan_servers(made)
    assert (plan_devices(made, plan), plan_ranks(made, plan)) == (devices, ranks)


def of_all_kinds(config: Make) -> Config:
    groups = [
        {"kind": "prefill", "servers": 2, "sglang": {"tp_size": 2}},
        {"kind": "decode"},
        {"kind": "encoder"},
        {"kind": "regular"},
        {"model": "judge", "path": "/models/judge"},
    ]
    return config({"groups": groups, "sglang": {"disaggregation_transfer_backend": "nixl"}})


def test_encoders_start_first_and_the_others_wait_for_them(config: Make) -> None:
    plans = plan_servers(of_all_kinds(config))
    assert [(plan.kind, plan.wave) for plan in plans] == [
        ("encoder", 0),
        ("prefill", 1),
        ("prefill", 1),
        ("decode", 1),
        ("regular", 1),
        ("regular", 1),
    ]
    assert [plan.rank for plan in plans] == list(range(6))


def test_those_that_read_prompts_of_a_model_ask_its_encoders_and_only_these_get_no_weights(
    config: Make,
) -> None:
    plans = plan_servers(of_all_kinds(config))
    assert [plan.needs_encoders for plan in plans] == [False, True, True, False, True, False]
    assert [plan.is_synced for plan in plans] == [False, True, True, True, True, False]


def test_a_deployment_of_all_kinds_against_its_recorded_command_lines(
    config: Make, installed: Installed
) -> None:
    made = of_all_kinds(config)
    backend = "--disaggregation-transfer-backend nixl"
    lines = [
        " ".join(command_line(by_name(plan_arguments(made, plan), installed), installed))
        for plan in plan_servers(made)
    ]
    prefill = f"{backend} --tp-size 2 --disaggregation-mode prefill --language-only"
    assert lines == [
        f"{backend} --encoder-only",
        *[prefill] * 2,
        f"{backend} --disaggregation-mode decode",
        f"{backend} --language-only",
        backend,
    ]


def test_a_second_model_is_where_its_group_says(config: Make) -> None:
    groups = [{}, {"model": "judge", "path": "/models/judge"}, {"model": "judge", "sglang": {"tp_size": 2}}]
    plans = plan_servers(config({"groups": groups}, placement={"rollout_workers": 3}))
    assert [(plan.model, plan.path) for plan in plans] == [
        ("policy", None),
        ("judge", Path("/models/judge")),
        ("judge", Path("/models/judge")),
    ]


@pytest.mark.parametrize(
    ("groups", "workers", "path", "hint"),
    [
        ([{"servers": 2}], 3, "placement.rollout_workers", "2 servers together: write 2"),
        ([{"model": "judge", "path": "/j"}], 1, "rollout.groups", "no group serves the policy"),
        ([{"path": "/p"}], 1, "rollout.groups[0].path", "the policy is model.path"),
        ([{}, {"model": "judge"}], 2, "rollout.groups[1].path", "where the model 'judge' is"),
        (
            [{}, {"model": "j", "path": "/a"}, {"model": "j", "path": "/b"}],
            3,
            "rollout.groups[1].path",
            "groups of one model differ: /a, /b",
        ),
        ([{"kind": "prefill"}], 1, "rollout.groups[0].kind", "needs a group of kind decode"),
        ([{}, {"kind": "decode"}], 2, "rollout.groups[1].kind", "needs a group of kind prefill"),
        ([{"kind": "encoder"}], 1, "rollout.groups[0].kind", "kind prefill or regular of the same model"),
    ],
)
def test_what_is_wrong_with_groups_is_named(
    groups: list[dict[str, Any]], workers: int, path: str, hint: str, config: Make
) -> None:
    made = config({"groups": groups}, placement={"rollout_workers": workers})
    found = {each.path: each.hint for each in groups_rule(made, ())}
    assert hint in found[path]


def test_groups_that_fit_have_no_problem(config: Make) -> None:
    made = of_all_kinds(config)
    placed = made.model_copy(update={"placement": made.placement.model_copy(update={"rollout_workers": 6})})
    assert list(groups_rule(placed, ())) == []
