"""Errors about a wrong ``[profile]`` before a run starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from anygauge.config.load import LoadedConfig
from anygauge.config.rules.profile import profile_rules
from anygauge.config.schema import Config
from anygauge.plugins import load_plugins
from anygauge_cpu.plugin import CPU
from anygauge_cuda.plugin import CUDA
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.types import BackendSpec
from anygauge_npu.plugin import NPU

Load = Callable[..., LoadedConfig]
TABLES = {"run": {"name": "x", "steps": 10}, "model": {"path": "m"}, "data": {"train": ["t"]}}
SERVED = {"rollout": {"engine": "sglang"}, "placement": {"rollout_workers": 2, "train_workers": 4}}


def problems(backend: BackendSpec, profile: dict[str, object], **tables: object) -> list[str]:
    config = Config.model_validate({**TABLES, **tables, "profile": profile})
    found = profile_rules(config, backend, load_plugins(only=[]))
    return [f"{each.path} {each.found}: {each.hint}" for each in found]


@pytest.mark.parametrize(
    ("backend", "kind", "tables"),
    [
        (CPU, "torch", {}),
        (CPU, "sglang", SERVED),
        (CUDA, "memory", {}),
        (NPU, "memory", {}),
        (NPU, "npu", {}),
    ],
)
def test_kinds_that_something_records(backend: BackendSpec, kind: str, tables: dict[str, object]) -> None:
    assert problems(backend, {"kind": kind, "steps": [1, 10]}, **tables) == []


@pytest.mark.parametrize(
    ("backend", "kind", "tables", "told"),
    [
        (CPU, "memory", {}, "backend cpu with rollout.engine = 'transformers' records torch"),
        (CPU, "transformers", {}, "backend cpu with rollout.engine = 'transformers' records torch"),
        (CUDA, "npu", SERVED, "backend cuda with rollout.engine = 'sglang' records torch, memory, sglang"),
        (replace(NPU, profile_kinds=()), "npu", {}, "rollout.engine = 'transformers' records torch"),
    ],
)
def test_a_kind_that_nothing_records(
    backend: BackendSpec, kind: str, tables: dict[str, object], told: str
) -> None:
    (problem,) = problems(backend, {"kind": kind}, **tables)
    assert problem.startswith(f"profile.kind {kind}: ")
    assert problem.endswith(told)


def test_steps_and_ranks_that_there_are_not() -> None:
    assert problems(CPU, {"steps": [3, 11], "ranks": [0, 4]}, **SERVED) == [
        "profile.steps 11: the run has run.steps = 10; name steps from 1 to that",
        "profile.ranks 4: there is no such rank; name ranks from 0 to 3",
    ]
    assert problems(CPU, {"kind": "sglang", "ranks": [1, 2]}, **SERVED) == [
        "profile.ranks 2: there is no such rank; name ranks from 0 to 1"
    ]


def test_they_are_among_the_problems_of_a_config(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"profile\.kind: found 'nvprof'"):
        load({}, ["--profile.kind=nvprof"])
