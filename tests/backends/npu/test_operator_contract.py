"""Operators that the NPU backend calls exist, with those arguments, in every supported torch-npu version."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.kernels import reference
from anygauge.testing.conformance.kernel_cases import CASES, Case
from anygauge.testing.conformance.kernel_checks import call
from anygauge_hooks.kernels import KernelImpl
from anygauge_npu.kernels import npu_kernels
from contract import read as contract
from contract.standin import declared
from simulation import operators

VERSIONS = contract.contracts()
NEWEST = "2.13.0"
HAS_TORCH_NPU = importlib.util.find_spec("torch_npu") is not None

without_torch_npu = pytest.mark.skipif(HAS_TORCH_NPU, reason="torch-npu itself declares the operators here")


def test_contracts_are_kept_of_what_the_simulation_and_the_hardware_use() -> None:
    assert NEWEST in VERSIONS
    assert any(version.startswith("2.10.0") for version in VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_everything_the_backend_names_is_in_the_contract(version: str) -> None:
    called, named = contract.used()
    assert called
    assert named
    assert called <= set(VERSIONS[version]["operators"])
    assert named == set(VERSIONS[version]["functions"])


def test_the_versions_differ_as_written() -> None:
    assert json.loads(contract.DIFFERENCES.read_text()) == contract.differences()


DISTINCT = {json.dumps(kept["operators"]): version for version, kept in VERSIONS.items()}.values()
"""Versions that differ in an operator: one of those that do not."""


@pytest.fixture(params=DISTINCT)
def simulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Declare a version's operators, run by their host versions."""
    schemas = VERSIONS[request.param]["operators"]
    known = {name: schema for name, schema in schemas.items() if name in operators.OPERATORS}
    with declared(known, operators.OPERATORS.__getitem__):
        yield


def serving(case: Case) -> list[KernelImpl]:
    """Return the kernels that call a fused operator for this case."""
    served = [kernel for kernel in npu_kernels() if kernel.op == case.op and "npu_" in kernel.source]
    return [
        kernel
        for kernel in served
        if all(case.facts.get(name) in values for name, values in (kernel.limits or {}).items())
    ]


def arguments(case: Case) -> list[Tensor]:
    torch.manual_seed(0)
    return [x.float() if x.is_floating_point() else x for x in case.tensors()]


@without_torch_npu
@pytest.mark.parametrize("case", [case for case in CASES if serving(case) and not case.in_one_dtype], ids=str)
def test_every_kernel_calls_its_operator_as_declared(simulated: None, case: Case) -> None:
    tensors = arguments(case)
    (kernel,) = serving(case)
    with torch.no_grad():
        found = call(kernel.fn, case, tensors)
        expected = call(getattr(reference, case.op), case, tensors)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", operators.OPERATORS)
def test_the_host_versions_have_the_arguments_of_the_schema(name: str) -> None:
    schema = torch._C.parse_schema(VERSIONS[NEWEST]["operators"][name])
    given = inspect.signature(operators.OPERATORS[name]).parameters
    rest = any(p.kind is p.VAR_KEYWORD for p in given.values())
    declared_ = {a.name: a for a in schema.arguments if a.name in given or not rest}
    names = [p.name for p in given.values() if p.kind is not p.VAR_KEYWORD]
    assert names == list(declared_)
    for argument in declared_.values():
        parameter = given[argument.name]
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        if argument.has_default_value():
            assert parameter.default == argument.default_value, argument.name


# -------------------------------------------------------------------------
# Drift is named
# -------------------------------------------------------------------------

OLD = "npu::op(Tensor x, float eps=1.) -> Tensor"
DRIFT: list[tuple[dict[str, str], list[str]]] = [
    ({"op": OLD}, []),
    ({}, ["op: removed"]),
    ({"po": OLD.replace("op", "po")}, ["op: removed, perhaps renamed to po"]),
    ({"op": "npu::op(Tensor x) -> Tensor"}, ["op: argument eps removed"]),
    ({"op": "npu::op(Tensor x, float eps=1., *, int k=0) -> Tensor"}, ["op: argument k added"]),
    ({"op": "npu::op(float eps=1., *, Tensor x) -> Tensor"}, [
        "op: argument x changed from 'Tensor = None, False' to 'Tensor = None, True'",
        "op: arguments have another order",
    ]),
    ({"op": "npu::op(Tensor x, float eps=2.) -> Tensor"}, [
        "op: argument eps changed from 'float = 1.0, False' to 'float = 2.0, False'"
    ]),
    ({"op": "npu::op(Tensor x, float eps=1.) -> (Tensor, Tensor)"}, [
        "op: returns (Tensor, Tensor) where it returned Tensor"
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("new", "lines"), DRIFT)
def test_drift_of_an_operator_is_named(new: dict[str, str], lines: list[str]) -> None:
    assert contract.compare({"op": OLD}, new) == lines


def test_drift_of_a_function_is_named() -> None:
    old: dict[str, Any] = {"f": "(device=None)", "g": "(x)"}
    new = {"f": "(index=None)", "g": "(x, *, y=1)"}
    assert contract.compare(old, new) == [
        "f: argument device removed",
        "f: argument index added",
        "g: argument y added",
    ]
