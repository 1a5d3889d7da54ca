"""The registered ``BackendSpec`` says what the core relies on before any vendor library is imported."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import get_args, get_type_hints

import pytest
import torch

from anygauge.plugins import Plugins
from anygauge.runtime.placement import DETECTED_BY_RAY, actor_options
from anygauge.runtime.worker import local_accelerator_id
from anygauge.testing.conformance.process_state import rng_untouched, state_untouched
from anygauge_hooks.types import Availability, BackendSpec, Device, HostCheck

pytestmark = pytest.mark.conformance

HOST = "cpu"
STATUSES = get_args(get_type_hints(HostCheck)["status"])
OWNED_BY_RAY = ("CPU", "memory", "object_store_memory")
LISTS = ("0", "0,1,2", "1,0", "3,5,4", " 2 , 0 ", "7,")
"""Values of a variable that lists devices by their numbers."""
WITHOUT_TORCH = """
import json, sys
from anygauge.plugins import load_plugins
plugins = load_plugins()
spec = plugins.named("register_backends")[sys.argv[1]]
plugins.named("register_weight_transports")
plugins.environment()
checks = spec.host_checks() if spec.host_checks else ()
print()
print(json.dumps([name for name in sys.modules if name.startswith("torch") and "." not in name]))
"""


def is_text(*values: object) -> bool:
    return all(isinstance(value, str) for value in values)


def test_facts_are_of_the_declared_types(backend: BackendSpec) -> None:
    assert is_text(backend.name, backend.device_type, backend.dist_backend, backend.scheduler_resource)
    assert backend.name.isidentifier()
    assert torch.device(backend.device_type).type == backend.device_type
    assert not isinstance(backend.providers, str)
    assert is_text(*backend.providers)
    assert is_text(*backend.hidden_env, *backend.hidden_env.values())
    assert is_text(*backend.engine_installs.values())
    assert backend.master_weight_bytes in (2, 4)
    assert all(name == name.upper() and size > 0 for name, size in backend.device_memory.items())
    assert backend.visible_devices_env is None or backend.visible_devices_env.isidentifier()


def test_a_spec_can_be_sent_to_another_process(backend: BackendSpec) -> None:
    assert pickle.dumps(backend)


def test_installs_are_of_engines_that_exist(backend: BackendSpec, plugins: Plugins) -> None:
    assert set(backend.engine_installs) <= set(plugins.named("register_rollout_engines"))
    assert all(backend.engine_installs.values())


def test_the_probe_answers_and_changes_nothing(backend: BackendSpec, device: Device) -> None:
    with rng_untouched(device), state_untouched():
        answers = [backend.probe(), backend.probe()]
    assert answers[0] == answers[1]
    for answer in answers:
        assert isinstance(answer, Availability)
        assert answer.ok is True
        assert isinstance(answer.reason, str)
        assert answer.hint is None or isinstance(answer.hint, str)


# -------------------------------------------------------------------------
# Devices of a worker
# -------------------------------------------------------------------------


def test_a_scheduler_can_count_the_devices(backend: BackendSpec) -> None:
    resource = backend.scheduler_resource
    assert resource.strip() == resource != ""
    assert resource not in OWNED_BY_RAY, "Ray has another use for this name"
    assert actor_options({resource: 1})
    if resource in DETECTED_BY_RAY:  # it gives each worker ids, by way of the vendor's variable
        assert backend.visible_devices_env is not None


@pytest.mark.parametrize("text", LISTS)
def test_each_listed_device_is_found_where_it_is(backend: BackendSpec, text: str) -> None:
    name = backend.visible_devices_env
    if name is None:
        return
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    assert list(backend.visible_devices(text)) == entries
    for index, entry in enumerate(entries):
        assert found(backend, [entry], {name: text}) == index
        assert found(backend, [entry, *entries[::-1]], {name: text}) == index, "the first id counts"
        assert found(backend, [entry], {name: entry}) == 0, "the launcher lists the worker's own alone"
        assert local_accelerator_id(backend, index, {name: text}) == entry


def found(backend: BackendSpec, ids: Sequence[str], environ: Mapping[str, str]) -> int:
    index = backend.local_device(ids, MappingProxyType(dict(environ)))
    assert type(index) is int
    return index


@pytest.mark.parametrize("ids", [["9"], []], ids=["hidden", "none"])
def test_a_device_that_the_process_does_not_see_is_refused(backend: BackendSpec, ids: list[str]) -> None:
    name = backend.visible_devices_env
    if name is None:
        return
    assert list(backend.visible_devices("")) == []
    with pytest.raises(Exception, match=r"."):
        backend.local_device(ids, {name: "0,1"})


@pytest.mark.parametrize("number", [0, 1, 5])
def test_without_a_list_the_number_is_the_index(backend: BackendSpec, number: int) -> None:
    index = found(backend, [str(number)], {"PATH": os.environ.get("PATH", "")})
    is_one = backend.device_type == HOST and index == 0  # every worker has the whole host
    assert index == number or is_one


def test_workers_of_other_backends_see_no_device(backend: BackendSpec) -> None:
    if (name := backend.visible_devices_env) is not None:
        assert name in backend.hidden_env
        assert list(backend.visible_devices(backend.hidden_env[name])) == []


# -------------------------------------------------------------------------
# The host
# -------------------------------------------------------------------------


@pytest.mark.parametrize("is_bare", [False, True], ids=["as it is", "no environment"])
def test_host_checks_give_findings(
    backend: BackendSpec, device: Device, monkeypatch: pytest.MonkeyPatch, is_bare: bool
) -> None:
    if backend.host_checks is None:
        return
    if is_bare:
        monkeypatch.setattr(os, "environ", {})
    with rng_untouched(device), state_untouched():
        checks, again = list(backend.host_checks()), list(backend.host_checks())
    assert checks
    assert [(check.name, check.status) for check in checks] == [(each.name, each.status) for each in again]
    for check in checks:
        assert isinstance(check, HostCheck)
        assert check.status in STATUSES
        assert check.name
        assert isinstance(check.found, str)
        assert check.fix or check.status not in ("FAIL", "NOT INSTALLED"), check


def test_facts_of_the_host_are_text(plugins: Plugins, device: Device) -> None:
    """``report_environment`` of every plugin."""
    with rng_untouched(device), state_untouched():
        facts = plugins.environment()
    assert is_text(*facts, *facts.values())
    assert all(name.strip() for name in facts)


def test_what_is_asked_on_every_host_imports_no_torch(backend: BackendSpec) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, backend.name],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []
