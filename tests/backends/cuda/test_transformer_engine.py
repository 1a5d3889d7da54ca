"""Transformer Engine as a provider. It is installed nowhere here: calls are held against its signatures.

The tests marked ``te`` are for a host that has it. None of them has ever run.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.kernels.table import reference_kernel, resolve_kernels
from anygauge.plugins import load_plugins
from anygauge_cuda import transformer_engine
from anygauge_cuda.plugin import CUDA, check_config, get_spec_provider
from anygauge_hooks.errors import PluginError, ProviderError
from anygauge_hooks.kernels import KernelImpl

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKINGS = [((3, 0, 5), None, True), ((2, 1, 4), (6, 1, 9), True), ((3, 5), (2, 7), False)]


def run_with(provider: str | None, **options: Any) -> Any:
    train = SimpleNamespace(provider=provider, provider_options=options)
    return SimpleNamespace(train=train, rollout=SimpleNamespace(engine="transformers"))


# -------------------------------------------------------------------------
# Whether it is there
# -------------------------------------------------------------------------


def test_without_the_library_the_choice_is_an_error_that_says_how_to_install_it() -> None:
    assert transformer_engine.NAME in CUDA.providers
    with pytest.raises(ProviderError, match=r"not installed(.|\n)*pip install 'transformer-engine\["):
        get_spec_provider(run_with("transformer_engine"))
    assert get_spec_provider(run_with(None)) is None
    (problem,) = transformer_engine.missing(run_with("transformer_engine"))
    assert "pip install" in problem.hint
    assert not list(transformer_engine.missing(run_with(None)))


def test_options_are_refused_where_there_are_none() -> None:
    (problem,) = check_config(run_with("transformer_engine", linears=True), CUDA) or ()
    assert problem.path == "train.provider_options.linears"


@pytest.mark.parametrize(
    ("release", "fits"), [("2.8.0", False), ("2.9.0", True), ("2.11.0+c188b53", True), ("2.12.0", False)]
)
def test_a_release_that_megatron_is_not_made_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, release: str, fits: bool
) -> None:
    monkeypatch.setattr(transformer_engine, "_is_installed", lambda: True)
    monkeypatch.setattr(transformer_engine, "version", lambda _: release)
    if fits:
        assert transformer_engine.provide()
    else:
        with pytest.raises(ProviderError, match=f"Transformer Engine {release} is not one"):
            transformer_engine.provide()


# -------------------------------------------------------------------------
# What is called
# -------------------------------------------------------------------------


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Let the attention alone find the library, in this process."""
    monkeypatch.syspath_prepend(str(HERE / "programs"))
    module = import_module("stand_in_te")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    transformer_engine._attention.cache_clear()
    yield module
    transformer_engine._attention.cache_clear()
    del sys.modules["stand_in_te"]


@pytest.mark.parametrize(("lengths", "key_lengths", "causal"), PACKINGS)
def test_attention_is_asked_for_what_the_op_means(
    stand_in: ModuleType, lengths: Sequence[int], key_lengths: Sequence[int] | None, causal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = sum(key_lengths or lengths)
    q = torch.randn(sum(lengths), 4, 8, generator=generator)
    k, v = torch.randn(rows, 2, 8, generator=generator), torch.randn(rows, 2, 16, generator=generator)
    options = {"causal": causal, "key_lengths": key_lengths}
    expected = reference_kernel("varlen_attention").fn(q, k, v, lengths, 0.3, **options)
    found = transformer_engine.attend(q, k, v, lengths, 0.3, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    assert stand_in.CALLS == ["DotProductAttention.__init__", "DotProductAttention.forward"]
    transformer_engine.attend(q, k, v, lengths, 0.3, **options)  # type: ignore[arg-type]
    assert stand_in.CALLS.count("DotProductAttention.__init__") == 1


def test_attention_of_nothing_calls_nothing(stand_in: ModuleType) -> None:
    empty = torch.zeros(0, 4, 8, requires_grad=True)
    output = transformer_engine.attend(empty, empty, empty, (), 1.0, causal=True)
    output.sum().backward()
    assert output.shape == (0, 4, 8)
    assert not stand_in.CALLS


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, run_with_torch: Callable[..., str]) -> dict[str, Any]:
    """Train in a process of its own: Megatron looks for the library when it is imported."""
    printed = run_with_torch(HERE / "programs/te_provider.py", str(tmp_path_factory.mktemp("te")))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def test_a_model_of_its_modules_reads_trains_and_writes_what_ours_does(report: dict[str, Any]) -> None:
    """Every call that Megatron makes of a module is bound to the signature of the release."""
    assert report["read"], "what was written is what was read"
    assert report["moved"]
    for ours, theirs in zip(*report["norms"], strict=True):
        assert theirs == pytest.approx(ours, rel=1e-5)
    assert report["difference"] < 1e-4  # of steps of 1e-3
    called = set(report["before bfloat16"])
    assert called >= {
        "Linear.forward",
        "GroupedLinear.forward",
        "ops.RMSNorm.__init__",
        "ops.SwiGLU.__init__",
    }
    classes = report["classes"]
    assert classes["self_attention.core_attention"] == "CoreAttention"
    assert classes["self_attention.linear_qkv"] == "TEColumnParallelLinear"
    assert classes["mlp.experts"] == "TEGroupedMLP"


def test_a_checkpoint_of_its_modules_goes_on_with_ours(report: dict[str, Any]) -> None:
    assert report["extra state"], "the modules have a state of FP8, which is in no file of ours"
    theirs, ours = report["continued"]
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_in_bfloat16_attention_is_its_too(report: dict[str, Any]) -> None:
    assert "DotProductAttention.forward" not in report["before bfloat16"]
    assert report["masks"] == ["padding_causal"]
    for ours, theirs in zip(*report["norms in bfloat16"], strict=True):
        assert theirs == pytest.approx(ours, rel=2e-2)


def test_preferred_kernels_come_before_any_priority() -> None:
    backend = load_plugins().get("register_backends", "cpu")
    table = resolve_kernels(load_plugins(), backend)
    chosen = table.preferring("transformer_engine", transformer_engine.Modules().preferred_kernels())
    absent = dict.fromkeys(transformer_engine.UNSERVED, False)
    facts = {"head_dim": 64, "value_dim": 64, "causal": True, **absent}
    assert chosen.resolve("varlen_attention", dtype="bfloat16", **facts) is transformer_engine.attend
    for other in ({"dtype": "float32"}, {"head_dim": 20}, *({each: True} for each in absent)):
        asked: dict[str, Any] = {"dtype": "bfloat16", **facts, **other}
        found = chosen.resolve("varlen_attention", **asked)
        assert found is table.resolve("varlen_attention", **asked)
    wrong = KernelImpl(op="swiglu", fn=lambda a, b: a, source="somebody's")
    with pytest.raises(PluginError, match="cannot serve swiglu"):
        table.preferring("somebody", [wrong])


# -------------------------------------------------------------------------
# Where it is installed
# -------------------------------------------------------------------------


@pytest.fixture
def installed() -> Any:
    if importlib.util.find_spec("transformer_engine") is None or not torch.cuda.is_available():
        pytest.fail("te tests need Transformer Engine and a GPU.", pytrace=False)
    return import_module("transformer_engine.pytorch")


@pytest.mark.te
def test_the_installed_release_takes_what_the_contract_has(installed: Any) -> None:
    text = (ROOT / "backends/cuda/signatures/transformer_engine-2.11.0.json").read_text()
    for name, parameters in json.loads(text)["signatures"].items():
        target: Any = installed
        for part in name.split("."):
            target = getattr(target, part)
        scope: dict[str, Any] = {}
        exec(f"def method({parameters}): ...", scope)
        assert set(inspect.signature(scope["method"]).parameters) <= set(inspect.signature(target).parameters)


@pytest.mark.te
@pytest.mark.parametrize(("lengths", "key_lengths", "causal"), PACKINGS)
def test_its_attention_is_the_references(
    installed: Any, lengths: Sequence[int], key_lengths: Sequence[int] | None, causal: bool
) -> None:
    rows = sum(key_lengths or lengths)
    shapes = ((sum(lengths), 4, 64), (rows, 2, 64), (rows, 2, 64))
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    options = {"causal": causal, "key_lengths": key_lengths}
    expected = reference_kernel("varlen_attention").fn(q, k, v, lengths, 0.125, **options)
    found = transformer_engine.attend(q, k, v, lengths, 0.125, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
