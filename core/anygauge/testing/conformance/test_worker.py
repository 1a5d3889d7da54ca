"""Hooks that prepare a worker process and its process groups."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]  # not listed

from anygauge.device import DETERMINISTIC_ENV
from anygauge.distributed.process_groups import HOST_BACKEND
from anygauge.distributed.reloadable import ReloadableGroup
from anygauge.plugins import BACKENDS_GROUP, Plugins
from anygauge.runtime.launch import worker_environment
from anygauge.testing.conformance.process_state import (
    rng_untouched,
    settings,
    state_untouched,
    unusual_settings,
)
from anygauge.testing.conformance.recipes import RECIPES, adjusted
from anygauge.testing.plugin import ROLE
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

ROLES = ("actor", "critic", "rollout", "sglang", ROLE)
PLATFORMS_GROUP = "sglang.srt.platforms"
"""Entry points of functions by which SGLang finds devices; each names a class, or nothing."""
INTERFACE = "conformance0"
LIMIT = timedelta(seconds=47)
TIMEOUTS = (0.5, 60.0, 1800.0, 90_000.0)


def environment(
    plugins: Plugins,
    backend: BackendSpec,
    *,
    role: str = "actor",
    deterministic: bool = False,
    interface: str | None = None,
    ip_version: str = "any",
    timeout_s: float = 60.0,
) -> Mapping[str, str]:
    return plugins.worker_env(
        backend,
        role=role,
        deterministic=deterministic,
        interface=interface,
        ip_version=ip_version,
        timeout_s=timeout_s,
    )


# -------------------------------------------------------------------------
# worker_env
# -------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_the_environment_of_a_worker_is_text(
    plugins: Plugins, backend: BackendSpec, device: Device, role: str
) -> None:
    for timeout_s in TIMEOUTS:
        for deterministic in (False, True):
            with rng_untouched(device), state_untouched():
                given: list[Any] = [
                    environment(plugins, backend, role=role, deterministic=deterministic, timeout_s=timeout_s)
                    for _ in range(2)
                ]
            assert given[0] == given[1]
            assert all(re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) for name in given[0])
            assert all(isinstance(value, str) and "\0" not in value for value in given[0].values())
            assert backend.visible_devices_env not in given[0], "the launcher says which devices a worker has"


def test_devices_of_other_backends_are_hidden(plugins: Plugins, backend: BackendSpec) -> None:
    given = environment(plugins, backend)
    for other in plugins.named("register_backends").values():
        if other.name != backend.name:
            assert other.hidden_env.items() <= given.items()


def test_variables_of_the_core_are_left_to_it(plugins: Plugins, backend: BackendSpec) -> None:
    tables = {"run": {"deterministic": True}, "cluster": {"interface": INTERFACE}}
    config = adjusted(tables, backend, plugins)
    given = worker_environment(config, backend, plugins, "actor")
    assert DETERMINISTIC_ENV.items() <= given.items()
    assert given["GLOO_SOCKET_IFNAME"] == INTERFACE
    assert not {"PATH", "HOME", "PYTHONPATH"} & given.keys()


@pytest.mark.parametrize(
    ("key", "choices"), [("interface", (None, INTERFACE, "other0")), ("ip_version", ("4", "6"))]
)
def test_the_users_network_is_taken_or_refused(
    plugins: Plugins, backend: BackendSpec, key: str, choices: tuple[Any, ...]
) -> None:
    if backend.dist_backend == HOST_BACKEND:
        return  # the core tells Gloo
    given = [tuple(sorted(environment(plugins, backend, **{key: choice}).items())) for choice in choices]
    if len({*given}) == len(choices):
        return
    config = adjusted({"cluster": {key: choices[-1]}}, backend, plugins)
    problems = plugins.collect("check_config", config=config, backend=backend)
    assert f"cluster.{key}" in {problem.path for problem in problems}


def test_what_answers_a_hook_answers_something(plugins: Plugins, backend: BackendSpec) -> None:
    network = {"interface": INTERFACE, "ip_version": "4", "timeout_s": 60.0}
    arguments: dict[str, Any] = {"backend": backend, "deterministic": True, "train_engine": None, **network}
    if plugins.implementations("worker_env", backend):
        assert any(plugins.collect("worker_env", role=role, **arguments) for role in ROLES)


@pytest.mark.parametrize("role", ["actor", "sglang"])
def test_a_platform_of_sglang_is_that_of_its_servers_alone(
    plugins: Plugins, backend: BackendSpec, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    packages = {
        entry.module.partition(".")[0]
        for owner, spec in plugins.answers("register_backends")
        for entry in entry_points(group=BACKENDS_GROUP, name=owner)
        if spec.name == backend.name
    }
    for name, value in environment(plugins, backend, role=role).items():
        monkeypatch.setenv(name, value)
    for entry in entry_points(group=PLATFORMS_GROUP):
        if entry.module.partition(".")[0] in packages:
            assert bool(entry.load()()) == (role == "sglang")


# -------------------------------------------------------------------------
# prepare_worker
# -------------------------------------------------------------------------


@pytest.fixture
def kept_process() -> Iterator[None]:
    """Put back what preparing a worker may change: the environment, and the cores of the process."""
    before, cores = dict(os.environ), os.sched_getaffinity(0)
    yield
    os.environ.clear()
    os.environ.update(before)
    os.sched_setaffinity(0, cores)


@pytest.mark.parametrize("role", ROLES)
def test_preparing_a_worker_twice_is_preparing_it_once(
    plugins: Plugins, backend: BackendSpec, device: Device, kept_process: None, tmp_path: Path, role: str
) -> None:
    of_run: dict[str, Any] = {
        "config": adjusted(RECIPES["rl"], backend, plugins),
        "log": str(tmp_path / "actor-0.log"),
    }
    states: list[Any] = []
    with unusual_settings(tmp_path):
        before = settings()
        for arguments in ({}, of_run, of_run):  # a process of no run or of a server has no config
            with rng_untouched(device):
                plugins.prepare_worker(backend, role, "before_vendor_import", **arguments)
                plugins.prepare_worker(backend, role, "after_config", **arguments)
            states.append((settings(), dict(os.environ)))
    assert states[1] == states[2]
    assert {str(state) for state, _ in states} == {str(before)}
    assert torch.ones(4, device=device.torch_device).sum().item() == 4


# -------------------------------------------------------------------------
# Process groups
# -------------------------------------------------------------------------


def group_options(plugins: Plugins, backend: BackendSpec, timeout_s: float, name: str = "default") -> Any:
    return plugins.first("make_process_group_options", backend=backend, group_name=name, timeout_s=timeout_s)


@pytest.mark.parametrize("name", ["default", "another"])
def test_options_of_a_group_have_its_timeout(plugins: Plugins, backend: BackendSpec, name: str) -> None:
    made = [group_options(plugins, backend, seconds, name) for seconds in (60.0, 90.5, 60.0)]
    if made[0] is None:
        assert made == [None] * 3
        return
    limits = [timedelta(seconds=seconds) for seconds in (60.0, 90.5, 60.0)]
    assert [options._timeout for options in made] == limits
    assert len({*map(id, made)}) == 3, "groups change their options: each gets its own"


def test_a_communicator_is_released_and_made_again(
    plugins: Plugins, backend: BackendSpec, device: Device
) -> None:
    if not plugins.implementations("make_communicator", backend):
        return  # groups keep their memory
    made: list[Any] = []

    def make(options: Any, group_options: Any) -> Any:
        made.append(
            plugins.first("make_communicator", backend=backend, options=options, group_options=group_options)
        )
        return made[-1]

    options: Any = _DistributedBackendOptions()
    options.store, options.group_id = PrefixStore("conformance/", HashStore()), "conformance"
    options.group_rank, options.group_size, options.global_ranks_in_group = 0, 1, [0]
    options.timeout = LIMIT
    own = group_options(plugins, backend, LIMIT.total_seconds())
    group = ReloadableGroup(make, options, own, device_type=backend.device_type, backend=backend.dist_backend)
    for _ in range(2):
        numbers = torch.arange(8.0, device=device.torch_device)
        group.reload()
        group.allreduce([numbers], dist.AllreduceOptions()).wait()
        assert torch.equal(numbers.cpu(), torch.arange(8.0))
        group.release()
    assert len({*map(id, made)}) == len(made) == 2
    for communicator in made:
        assert (communicator.rank(), communicator.size()) == (0, 1)
        assert communicator.options._timeout == LIMIT
