"""Collecting, checking and resolving kernels."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.kernels import reference
from anygauge.kernels.linear_logprob import _Eager, linear_logprob
from anygauge.kernels.table import KernelTable, reference_kernel, resolve_kernels
from anygauge.plugins import Plugins, load_plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import DuplicateNameError, PluginError
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl
from anygauge_hooks.tiles import Sums, Tile
from anygauge_hooks.types import Availability, BackendSpec

BACKEND = BackendSpec(
    name="toy",
    device_type="cpu",
    dist_backend="gloo",
    probe=lambda: Availability(ok=True),
    scheduler_resource="GPU",
    local_device=lambda ids, environ: 0,
)


def silu(gate_up: torch.Tensor) -> torch.Tensor:
    return reference.swiglu(gate_up)


def kernel(fn: Any = silu, **fields: Any) -> KernelImpl:
    return KernelImpl(**{"op": "swiglu", "fn": fn, "source": "toy", **fields})


def delta(*tensors: Any) -> torch.Tensor:
    return reference.gated_delta_rule(*tensors)


def rule(fn: Any = delta, **fields: Any) -> KernelImpl:
    return KernelImpl(**{"op": "gated_delta_rule", "fn": fn, "source": "toy", **fields})


def plugin(*kernels: KernelImpl) -> object:
    def register_kernels(backend: BackendSpec) -> list[KernelImpl]:
        return list(kernels)

    return SimpleNamespace(register_kernels=hookimpl(register_kernels))


@pytest.fixture
def plugins() -> Plugins:
    return load_plugins(only=[])


def table(plugins: Plugins, *kernels: KernelImpl, **options: Any) -> KernelTable:
    plugins.register(plugin(*kernels), name="toy")
    return resolve_kernels(plugins, BACKEND, **options)


def test_without_a_plugin_every_op_is_the_reference_but_three(plugins: Plugins) -> None:
    """The reference of the loss has the logits of all tokens; the other ops are made of two."""
    kernels = resolve_kernels(plugins, BACKEND)
    for op in set(KERNEL_OPS) - {"add_rms_norm", "qk_norm_rotary"}:
        own = linear_logprob if op == "linear_logprob" else getattr(reference, op)
        assert kernels.resolve(op, dtype="float32") is own
    found = {(row.op, row.is_reference) for row in kernels.rows()}
    by_core = {"add_rms_norm", "linear_logprob", "qk_norm_rotary"}
    assert found == {(op, op not in by_core) for op in KERNEL_OPS}


def test_an_op_that_nobody_serves_is_made_of_what_serves_its_parts(plugins: Plugins) -> None:
    seen: list[str] = []

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        seen.append("norm")
        return reference.rms_norm(x, weight, eps)

    kernels = table(plugins, KernelImpl(op="rms_norm", fn=rms_norm, source="mine", dtypes=("float32",)))
    split = kernels.resolve("qk_norm_rotary", dtype="float32", head_dim=4, unit_angles=True)
    angles = torch.zeros(3, 4)
    query, key, value = split(torch.ones(3, 2, 5, 4), torch.ones(4), torch.ones(4), angles + 1, angles, 1e-6)
    assert (query.shape, key.shape, value.shape) == ((3, 6, 4), (3, 2, 4), (3, 2, 4))
    assert seen == ["norm"] * 2
    total, normed = kernels.resolve("add_rms_norm", dtype="float32")(key, torch.ones(4), 1e-6, value)
    assert total.equal(value + key)
    assert normed.equal(reference.rms_norm(total, torch.ones(4), 1e-6))
    assert seen == ["norm"] * 3


def test_a_kernel_serves_the_dtypes_that_it_declares(plugins: Plugins) -> None:
    kernels = table(plugins, kernel(dtypes=("bfloat16",)))
    assert kernels.resolve("swiglu", dtype=torch.bfloat16) is silu
    assert kernels.resolve("swiglu", dtype="bfloat16") is silu
    assert kernels.resolve("swiglu", dtype=torch.float32) is reference.swiglu


def test_limits_are_compared_with_the_facts_of_the_module(plugins: Plugins) -> None:
    kernels = table(plugins, rule(limits={"head_dim": (64, 128)}))
    assert kernels.resolve("gated_delta_rule", dtype="float32", head_dim=64) is delta
    assert kernels.resolve("gated_delta_rule", dtype="float32", head_dim=64, value_dim=8) is delta
    assert kernels.resolve("gated_delta_rule", dtype="float32", head_dim=72) is reference.gated_delta_rule
    assert kernels.resolve("gated_delta_rule", dtype="float32") is reference.gated_delta_rule


def test_a_limit_may_be_that_a_fact_is_absent(plugins: Plugins) -> None:
    def choose(logits: Any, topk: Any, **options: Any) -> Any:
        return reference.topk_router(logits, topk, **options)

    limits = {"num_groups": (None,), "score_function": ("softmax",), "topk": range(1, 9)}
    kernels = table(plugins, KernelImpl(op="topk_router", fn=choose, source="toy", limits=limits))
    facts = {"dtype": "float32", "topk": 8, "score_function": "softmax", "num_groups": None}
    assert kernels.resolve("topk_router", **facts) is choose
    for other in ({"num_groups": 4}, {"score_function": "sigmoid"}, {"topk": 9}):
        assert kernels.resolve("topk_router", **{**facts, **other}) is reference.topk_router


def test_a_limit_on_what_no_module_states_is_refused(plugins: Plugins) -> None:
    with pytest.raises(
        PluginError, match="'toy' of toy of gated_delta_rule limits head_size, which"
    ) as raised:
        table(plugins, rule(limits={"head_size": (64,)}))
    assert raised.value.hint == "The facts of gated_delta_rule are: head_dim, value_dim."


def test_the_highest_priority_that_accepts_is_taken(plugins: Plugins) -> None:
    def better(*tensors: Any) -> torch.Tensor:
        return reference.gated_delta_rule(*tensors)

    kernels = table(plugins, rule(), rule(better, priority=1, limits={"head_dim": (64,)}))
    assert kernels.resolve("gated_delta_rule", dtype="float32", head_dim=64) is better
    assert kernels.resolve("gated_delta_rule", dtype="float32", head_dim=65) is delta
    found = kernels.candidates("gated_delta_rule", dtype="float32", head_dim=64)
    assert [candidate.fn for candidate in found] == [better, delta]


def test_two_kernels_that_accept_the_same_facts_are_an_error(plugins: Plugins) -> None:
    plugins.register(plugin(kernel(source="other")), name="second")
    with pytest.raises(DuplicateNameError, match="'other' of second and 'toy' of toy both serve swiglu"):
        table(plugins, kernel())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"dtypes": ("float32",)}, {"dtypes": ("bfloat16",)}),
        ({"limits": {"head_dim": (64,)}}, {"limits": {"head_dim": (128,)}}),
        ({"priority": 1}, {}),
    ],
    ids=["dtypes", "limits", "priority"],
)
def test_kernels_that_do_not_overlap_live_together(
    plugins: Plugins, one: dict[str, Any], other: dict[str, Any]
) -> None:
    kernels = table(plugins, rule(**one), rule(**other))
    assert len([row for row in kernels.rows() if row.op == "gated_delta_rule" and not row.is_reference]) == 2


def test_limits_on_different_facts_overlap(plugins: Plugins) -> None:
    with pytest.raises(DuplicateNameError):
        table(plugins, rule(limits={"head_dim": (64,)}), rule(limits={"value_dim": (64,)}))


def test_an_unknown_op_is_refused(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match="Unknown kernel op 'swigloo'") as raised:
        table(plugins, kernel(op="swigloo"))
    assert raised.value.hint is not None
    assert "vocab_parallel_logprob" in raised.value.hint


def too_few() -> None:
    """Take nothing."""


def too_many(gate_up: Any, limit: Any) -> None:
    """Need something more."""


def swapped(weight: Any, x: Any, eps: float) -> None:
    """Have the arguments in another order."""


def no_keyword(q: Any, k: Any, v: Any, lengths: Any, scale: float) -> None:
    """Not know of causality."""


@pytest.mark.parametrize(
    ("op", "fn", "message"),
    [
        ("swiglu", too_few, "too many positional arguments"),
        ("swiglu", too_many, "missing a required argument: 'limit'"),
        ("rms_norm", swapped, "'weight' where 'x' belongs"),
        ("varlen_attention", no_keyword, "unexpected keyword argument 'causal'"),
        ("swiglu", torch.sigmoid, "cannot be read"),
    ],
)
def test_a_wrong_signature_is_refused(plugins: Plugins, op: str, fn: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message) as raised:
        table(plugins, kernel(fn, op=op))
    assert raised.value.hint is not None
    assert raised.value.hint.startswith("It takes (")


def test_extra_parameters_with_defaults_and_free_arguments_are_fine(plugins: Plugins) -> None:
    def tuned(gate_up: Any, block: int = 64) -> None: ...

    def free(*args: Any) -> None: ...

    kernels = table(plugins, kernel(tuned), kernel(free, priority=1))
    assert kernels.resolve("swiglu", dtype="float32") is free


def test_every_reference_has_the_signature_of_its_op(plugins: Plugins) -> None:
    kernels = table(plugins, *(reference_kernel(op) for op in KERNEL_OPS))
    assert all(kernels.resolve(op, dtype="float32") for op in KERNEL_OPS)


def test_rows_tell_who_serves_what_and_where_it_is() -> None:
    plugins = load_plugins(only=["cpu"])
    rows = resolve_kernels(plugins, plugins.get("register_backends", "cpu")).rows()
    assert {row.op for row in rows} == set(KERNEL_OPS)
    by_core = {"add_rms_norm", "linear_logprob", "qk_norm_rotary", "topk_router"}
    assert {row.op for row in rows if row.is_reference} == {"topk_router"}
    for row in rows:
        owner = "anygauge" if row.op in by_core else "cpu"
        assert (row.owner, row.package) == (owner, "anygauge")
        assert row.version
        path, _, line = row.location.rpartition(":")
        assert path.endswith(".py")
        assert int(line) > 0


def test_the_reference_row_lists_what_nothing_else_serves(plugins: Plugins) -> None:
    rows = table(plugins, kernel(dtypes=("float32",))).rows()
    found = [(row.dtypes, row.is_reference) for row in rows if row.op == "swiglu"]
    assert found == [(("float32",), False), (("bfloat16",), True)]


def test_a_kernel_with_limits_does_not_replace_the_reference(plugins: Plugins) -> None:
    rows = table(plugins, rule(limits={"head_dim": (8,)})).rows()
    found = [(row.dtypes, row.is_reference) for row in rows if row.op == "gated_delta_rule"]
    assert (("float32", "bfloat16"), True) in found


def test_a_plugin_without_a_distribution_has_no_package(plugins: Plugins) -> None:
    row = next(row for row in table(plugins, kernel()).rows() if row.op == "swiglu")
    assert (row.owner, row.package, row.version) == ("toy", None, None)


def test_passes_over_a_tile_become_a_whole_kernel(plugins: Plugins) -> None:
    seen: list[Tile] = []

    class Counting(_Eager):
        def summarize(self, tile: Tile, sums: Sums) -> None:
            seen.append(tile)
            super().summarize(tile, sums)

    budgets: list[int] = []
    passes = KernelImpl(op="linear_logprob", fn=Counting, source="toy", tiles=True)
    made = table(plugins, passes, loss_budget=lambda: budgets.append(1) or 0)
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    targets = torch.tensor([0, 6, 3, 1, 2])
    given = (hidden, weight, targets, 1.3, None)
    found = made.resolve("linear_logprob", dtype="float32")(*given, entropy_grad=False)
    torch.testing.assert_close(found, reference.linear_logprob(*given, entropy_grad=False))
    assert seen
    assert budgets


def test_no_other_op_is_made_of_tiles(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match="'toy' of swiglu is said to be made of tiles"):
        table(plugins, kernel(tiles=True))


def test_a_kernel_whose_library_is_missing_is_left_out_and_reported(plugins: Plugins) -> None:
    missing, there = "no_such_library", "torch"
    kernels = table(plugins, kernel(requires=(there, missing), priority=1), kernel(requires=(there,)))
    assert [one.priority for one in kernels.candidates("swiglu", dtype="float32")] == [0]
    (left_out,) = kernels.left_out
    assert (left_out.op, left_out.owner, left_out.missing) == ("swiglu", "toy", (missing,))


def test_a_kernel_whose_library_is_a_stand_in_is_left_out_too(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_stand_in", ModuleType("a_stand_in"))  # which has no spec
    kernels = table(plugins, kernel(requires=("a_stand_in",)))
    assert [each.missing for each in kernels.left_out] == [("a_stand_in",)]
