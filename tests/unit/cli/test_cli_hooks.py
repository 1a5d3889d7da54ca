"""``anygauge hooks``: the capability table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import anygauge.plugins
from anygauge.cli import main
from anygauge.cli.hooks import columns
from anygauge.plugins import Plugins, load_plugins
from anygauge_hooks import CONTRACT_VERSION, hookimpl
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl
from anygauge_hooks.types import Availability, BackendSpec, PluginInfo


class Bare:
    """A backend without a kernel."""

    @hookimpl
    def register_backends(self) -> list[BackendSpec]:
        spec = BackendSpec(
            name="cpu",
            device_type="cpu",
            dist_backend="gloo",
            probe=lambda: Availability(ok=True),
            scheduler_resource="GPU",
            local_device=lambda ids, env: 0,
        )
        return [spec]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plugins]:
    """Replace the installed plugins by one without kernels."""
    plugins = Plugins()
    plugins.register(Bare(), "bare")
    plugins.load_errors["other"] = ImportError("libx.so")
    monkeypatch.setattr(anygauge.plugins, "load_plugins", lambda: plugins)
    return lambda: plugins


def test_every_hook_and_every_op_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", "--backend", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {row["hook"] for row in report["hooks"]} == set(load_plugins(only=[]).hooks())
    assert {row["op"] for row in report["kernels"]} == set(KERNEL_OPS)
    (models,) = [row for row in report["hooks"] if row["hook"] == "register_models"]
    assert (models["plugin"], models["package"]) == ("models", "anygauge")
    path, _, line = models["location"].rpartition(":")
    assert Path(path).name == "plugin.py"
    assert int(line) > 0


def test_words_choose_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", "--backend", "cpu", "policy", "GSPO"]) == 0
    title, _, row = capsys.readouterr().out.splitlines()
    assert title == "Registered names"
    assert "gspo" in row
    assert main(["hooks", "--backend", "cpu", "rms_nrom"]) == 1
    assert capsys.readouterr().out == "Nothing has rms_nrom in its names; did you mean rms_norm?\n"


def test_a_hook_that_nobody_implements_is_shown_as_such(
    bare: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hooks", "--backend", "cpu"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["make_optimizer", "-", "-", "-"] in lines
    assert ["Plugin", "'other'", "failed", "to", "load:", "ImportError('libx.so')"] in lines
    assert any(line[:3] == ["register_backends", "bare", "-"] for line in lines if line)


def test_strict_fails_where_the_reference_serves(bare: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks", "--strict"]) == 1
    printed = capsys.readouterr()
    assert "reference (" in printed.out
    assert "on cpu the reference serves " in printed.err
    # the loss is served by the core itself: its reference has the logits of all tokens
    by_core = {"add_rms_norm", "linear_logprob", "qk_norm_rotary"}
    assert all((op in printed.err) == (op not in by_core) for op in KERNEL_OPS)


def test_columns_are_aligned() -> None:
    assert columns([("a", "bb", "c"), ("aaa", "b", "c")], indent=1) == " a    bb  c\n aaa  b   c"


def test_a_kernel_that_is_left_out_is_named_with_what_is_missing(
    bare: Callable[..., Plugins], capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = KernelImpl(op="swiglu", fn=print, source="x.swiglu", requires=("no_such_library",))
    answer = hookimpl(lambda backend: [kernel])
    bare().register(SimpleNamespace(register_kernels=answer), "tiles")
    assert main(["hooks", "--backend", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "Left out: x.swiglu for swiglu; not installed: no_such_library" in printed


def test_a_tolerance_is_printed_with_its_reason(
    bare: Callable[..., Plugins], capsys: pytest.CaptureFixture[str]
) -> None:
    declared = {"tolerance": {"float32": (1e-3, 5e-4)}, "tolerance_reason": "has 10 bits"}
    kernel = KernelImpl(op="swiglu", fn=lambda gate_up: gate_up, source="x.swiglu", priority=1, **declared)
    answer = hookimpl(lambda backend: [kernel])
    bare().register(SimpleNamespace(register_kernels=answer), "coarse")
    assert main(["hooks", "--backend", "cpu"]) == 0
    line = "Tolerance: x.swiglu for swiglu: 0.001 relative, 0.0005 absolute in float32; has 10 bits\n"
    assert line in capsys.readouterr().out


def test_a_plugin_for_an_unknown_backend_is_named(
    bare: Callable[..., Plugins], capsys: pytest.CaptureFixture[str]
) -> None:
    info = PluginInfo(contract_version=CONTRACT_VERSION, backends=("cpuu", "cpu"))
    bare().register(SimpleNamespace(describe_plugin=hookimpl(lambda: info)), "misspelled")
    assert main(["hooks", "--backend", "cpu"]) == 0
    assert "Plugin 'misspelled' is for unknown backends: cpuu\n" in capsys.readouterr().out
