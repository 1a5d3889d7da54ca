"""``anygauge parity``: sides that agree have no divergence; otherwise the first wrong op is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from anygauge.kernels.reference import rms_norm, swiglu
from anygauge.plugins import load_plugins
from anygauge.testing.parity.differences import Difference, conclusion, first_divergence, limits_of, table
from anygauge.testing.parity.sides import Side, parse_side
from anygauge.testing.parity.worker import ParityWorker
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.kernels import KernelImpl
from anygauge_tests.engine_config import engine_config

PROMPT = "12+34*5=7"
Compare = Callable[..., list[Difference]]


class Kernels:
    """A plugin with kernels that come first."""

    def __init__(self, **functions: Any) -> None:
        self.functions = functions

    @hookimpl
    def register_kernels(self) -> list[KernelImpl]:
        return [
            KernelImpl(op=op, fn=fn, source=f"{op} of the test", priority=500)  # type: ignore[arg-type]
            for op, fn in self.functions.items()
        ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), init_std=0.2)


@pytest.fixture
def compare(context: WorkerContext, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """Return a function that compares the backend's kernels with another side's."""

    def side(path: Path, package: Any = None, kernels: str | None = None, **train: Any) -> Any:
        plugins = load_plugins()
        if package is not None:
            plugins.register(package, "of_test")
        config = engine_config(path, train={"dtype": "float32", "clip_grad": 0.0, **train})
        return ParityWorker(
            config,
            replace(context, plugins=plugins),
            directory=str(tmp_path_factory.mktemp("side")),
            prompt=PROMPT,
            sequences=2,
            traces=True,
            kernels=kernels,
        )

    def compared(path: Path = model, **other: Any) -> list[Difference]:
        expected, actual = side(model), side(path, **other)
        expected.record()
        differences: list[Difference] = actual.compare(str(expected.directory), expected.dtype)
        return differences

    return compared


def names(differences: list[Difference], kind: str) -> set[str]:
    return {each.name for each in differences if each.kind == kind}


def test_sides_that_agree_have_every_op_module_layer_and_parameter_within_its_limit(compare: Compare) -> None:
    differences = compare(kernels="reference")
    assert first_divergence(differences) is None
    assert names(differences, "op") == {
        *("add_rms_norm", "linear_logprob", "qk_norm_rotary", "rms_norm", "rotary_embedding", "swiglu"),
        "varlen_attention",
    }
    assert {"mlp.linear_fc1", "self_attention.linear_qkv", "mlp"} <= names(differences, "module")
    assert [each.layer for each in differences if each.kind == "layer"] == [-1, 0, 1]
    assert len(names(differences, "parameter")) == 13
    assert all(each.gradient is not None for each in differences if each.kind in ("op", "parameter"))
    output = next(each for each in differences if each.name == "linear_logprob")
    assert (output.layer, output.place.partition(",")[0]) == (2, "outside of the layers")
    attention = next(each for each in differences if each.name == "varlen_attention")
    assert attention.sources == (
        "anygauge_cpu.attention.varlen_attention",
        "anygauge.kernels.reference.varlen_attention",
    )


@pytest.mark.parametrize("other", [{"engine": "fsdp"}, {"dtype": "bfloat16"}])
def test_another_engine_and_another_dtype_agree(compare: Compare, other: dict[str, Any]) -> None:
    differences = compare(**other)
    assert first_divergence(differences) is None
    assert names(differences, "module") == (set() if "engine" in other else names(differences, "module"))
    assert all(each.error > 1e-4 for each in differences if each.kind == "layer" and "dtype" in other)


def wrong_gradient(gate_up: torch.Tensor) -> torch.Tensor:
    output = swiglu(gate_up)
    return 2 * output.detach() - output


def wrong_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, factor: float) -> torch.Tensor:
    return rms_norm(x, weight, eps) * factor


def test_a_kernel_with_a_wrong_gradient_is_told(compare: Compare) -> None:
    first = first_divergence(compare(package=Kernels(swiglu=wrong_gradient)))
    assert first is not None
    assert (first.kind, first.name, first.layer, first.forward) == ("op", "swiglu", 0, 0.0)
    assert first.gradient == pytest.approx(2.0)
    assert str(first).endswith("limit 2.2e-05; anygauge_cpu.kernels.swiglu | swiglu of the test")


@pytest.mark.parametrize("factor", [1.0001, math.nan])
def test_a_kernel_with_a_wrong_result_is_told(compare: Compare, factor: float) -> None:
    differences = compare(package=Kernels(rms_norm=partial(wrong_norm, factor=factor)))
    first = first_divergence(differences)
    assert first is not None
    # The norms of queries and keys are a part of this op, which comes before the norm alone.
    assert first.name in ("add_rms_norm", "rms_norm")
    assert first.layer == 0
    assert not next(each for each in differences if each.name == "swiglu").diverges


def test_a_layer_with_other_weights_is_told_by_its_linear(
    compare: Compare, model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    differences = compare(other)
    first = first_divergence(differences)
    assert first is not None
    assert (first.kind, first.name, first.place) == ("module", "mlp.linear_fc1", "layer 0")
    assert {each.kind for each in differences if each.diverges} == {"module", "layer", "parameter"}
    # The next layer gets the inputs of the other side.
    assert {each.layer for each in differences if each.diverges and each.kind == "layer"} == {0}


def test_kernels_are_chosen_by_a_word_of_their_source(compare: Compare) -> None:
    differences = compare(package=Kernels(swiglu=swiglu), kernels="ANYGAUGE_cpu.kernels")
    assert {each.sources for each in differences if each.name == "swiglu"} == {
        ("anygauge_cpu.kernels.swiglu", "anygauge_cpu.kernels.swiglu")
    }
    with pytest.raises(ConfigError, match="No kernel of this backend has 'liger' in its source"):
        compare(kernels="liger")


def test_the_first_divergence_is_in_the_order_of_a_pass() -> None:
    def wrong(kind: Any, name: str, layer: int, **errors: float) -> Difference:
        return Difference(kind=kind, name=name, layer=layer, limit=0.1, **errors)

    norm, linear = wrong("op", "norm", 1, forward=1.0), wrong("module", "linear", 0, forward=1.0)
    later, earlier = (wrong("parameter", str(layer), layer, gradient=1.0) for layer in (3, 0))
    layer, log_probs = wrong("layer", "layer", 2, forward=1.0), wrong("log-probs", "", -1, forward=1.0)
    right = wrong("op", "right", 0, forward=0.1, gradient=0.1)
    assert first_divergence([right]) is None
    assert first_divergence([norm, linear, right]) is linear
    assert first_divergence([norm, wrong("module", "linear", 1, forward=1.0)]) is norm
    assert first_divergence([log_probs, layer, earlier]) is layer
    assert first_divergence([earlier, later]) is later
    assert first_divergence([earlier, log_probs]) is log_probs
    assert conclusion([right]) == "no difference is beyond its limit"
    assert conclusion([log_probs]) == "first divergence: log-probs: forward 1, limit 0.1"
    alone = wrong("layer", "layer", 2, forward=0.0)
    assert "; every op, module and layer is right by itself" in conclusion([alone, log_probs])


def test_the_table_has_the_largest_errors_of_each_name() -> None:
    calls = [
        Difference(kind="op", name="swiglu", forward=forward, gradient=0.5, limit=0.1, sources=("a", "b"))
        for forward in (0.01, 0.02)
    ]
    lines = list(table([*calls, Difference(kind="log-probs", name="", forward=0.0, limit=0.1)]))
    assert lines[1].split() == ["FAIL", "op", "swiglu", "2", "0.02", "0.5", "0.1", "a", "|", "b"]
    assert lines[2].split() == ["PASS", "log-probs", "1", "0", "-", "0.1"]


def test_limits_are_those_of_the_coarser_dtype() -> None:
    assert limits_of("float32", "bfloat16") is limits_of("bfloat16")
    assert limits_of("float32").log_probs == 1e-4


def test_a_side_is_a_backend_with_settings() -> None:
    assert parse_side("cpu") == Side("cpu", "cpu")
    side = parse_side("cuda:engine=fsdp,tensor=2,kernels=liger,train.fused_loss=false")
    settings = {"train.engine": "fsdp", "train.parallel.tensor": 2, "train.fused_loss": False}
    assert (side.backend, side.settings, side.kernels) == ("cuda", settings, "liger")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cpu:float32", "'cpu:float32' has 'float32' where KEY=VALUE belongs."),
        ("cpu:", "'cpu:' has '' where KEY=VALUE belongs."),
        ("cpu:engine=", "'cpu:engine=' has 'engine=' where KEY=VALUE belongs."),
        ("cpu:lr=1", "'cpu:lr=1' has the unknown key 'lr'."),
        ("cpu:data.train=x", "'cpu:data.train=x' has the unknown key 'data.train'."),
        (":engine=fsdp", "':engine=fsdp' names no backend."),
    ],
)
def test_a_side_of_another_form_is_refused(text: str, found: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_side(text)
    assert refused.value.args[0] == found
    assert "Write BACKEND or BACKEND:KEY=VALUE,KEY=VALUE." in str(refused.value)
