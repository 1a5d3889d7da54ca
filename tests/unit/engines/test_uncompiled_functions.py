"""No function that Megatron compiles while it is imported is compiled where a backend does not ask for it.

A patch of Megatron for Ascend took the decorator from each of them: a row each in docs/npu-patches.md.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

import pytest

from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import find_backend, load_plugins

ROOT = Path(__file__).resolve().parents[3]

GEGLU = "fusions.fused_bias_geglu"
SWIGLU = "fusions.fused_bias_swiglu"
ENTROPY = "fusions.fused_cross_entropy"
SQUARED = "fusions.fused_weighted_squared_relu"
HUNKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "G1": ("activations", ("squared_relu", "quick_gelu", "fast_gelu")),
    "G2": (
        "fusions.fused_bias_dropout",
        ("bias_dropout_add_fused_train", "bias_dropout_add_fused_inference"),
    ),
    "G3": (GEGLU, ("geglu",)),
    "G4": (GEGLU, ("bias_geglu",)),
    "G5": (GEGLU, ("geglu_back",)),
    "G6": (GEGLU, ("bias_geglu_back",)),
    "G7": (GEGLU, ("quick_gelu", "quick_geglu")),
    "G8": (GEGLU, ("weighted_quick_geglu",)),
    "G9": (GEGLU, ("quick_geglu_back",)),
    "G10": (GEGLU, ("weighted_quick_geglu_back",)),
    "G11": (GEGLU, ("weighted_bias_quick_geglu",)),
    "G12": (GEGLU, ("weighted_bias_quick_geglu_back",)),
    "G13": ("fusions.fused_bias_gelu", ("bias_gelu",)),
    "G14": ("fusions.fused_bias_gelu", ("bias_gelu_back",)),
    "G15": (SWIGLU, ("swiglu",)),
    "G16": (SWIGLU, ("bias_swiglu",)),
    "G17": (SWIGLU, ("weighted_swiglu",)),
    "G18": (SWIGLU, ("swiglu_back",)),
    "G19": (SWIGLU, ("bias_swiglu_back",)),
    "G20": (SWIGLU, ("weighted_swiglu_back",)),
    "G21": (ENTROPY, ("calculate_logits_max",)),
    "G22": (ENTROPY, ("calculate_predicted_logits",)),
    "G23": (ENTROPY, ("calculate_cross_entropy_loss",)),
    "G24": (ENTROPY, ("calculate_gradients",)),
    "G25": ("fusions.fused_pad_routing_map", ("fused_pad_routing_map",)),
    "G26": (SQUARED, ("weighted_squared_relu",)),
    "G27": (SQUARED, ("_squared_relu_back",)),
    "G28": (SQUARED, ("weighted_squared_relu_back",)),
    "G30": ("ssm.gated_delta_net", ("_apply_gated_norm",)),
    "G31": ("transformer.attention", ("_apply_output_gate",)),
    "G33": ("transformer.moe.experts", ("glu",)),
    "G34": ("transformer.moe.experts", ("activation_func_with_probs",)),
    "G35": ("transformer.moe.router", ("_apply_expert_bias",)),
    "G36": ("transformer.moe.token_dispatcher", ("dispatch_preprocess",)),
    "G37": ("transformer.torch_norm", ("_norm",)),
    "G38": ("transformer.utils", ("gelu_impl",)),
    "G39": ("transformer.utils", ("erf_gelu",)),
}
"""Functions by row of the document: the module below ``megatron.core``, and its functions."""


def source(module: str) -> Path:
    """Return the file of a module of Megatron; nothing is imported."""
    root = metadata.distribution("megatron-core").locate_file("megatron/core")
    return Path(str(root)) / f"{module.replace('.', '/')}.py"


def decorated(path: Path) -> Iterator[str]:
    """Yield the functions of a file that Megatron decorates with its fuser."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and "jit_fuser" in map(ast.unparse, node.decorator_list):
            yield node.name


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    plugins = load_plugins(only=["cpu"])
    prepare_megatron(plugins, find_backend(plugins, plugins.named("register_backends"), "cpu"))


@pytest.mark.parametrize("hunk", HUNKS)
def test_no_function_of_a_hunk_is_compiled(hunk: str) -> None:
    name, functions = HUNKS[hunk]
    assert set(functions) <= set(decorated(source(name))), "Megatron no longer compiles it: the row can go"
    module = importlib.import_module(f"megatron.core.{name}")
    assert module.jit_fuser(print) is print
    found = [getattr(module, function) for function in functions if hasattr(module, function)]
    assert not [function for function in found if hasattr(function, "_torchdynamo_orig_callable")]


def test_every_function_that_megatron_compiles_has_a_hunk() -> None:
    root = source("jit").parent
    there = {(path, name) for path in root.rglob("*.py") for name in decorated(path)}
    listed = {(source(module), name) for module, names in HUNKS.values() for name in names}
    assert there == listed
    assert len(there) == 41
    for told in ("docs/seams.md", "core/anygauge/engines/megatron/prepare.py"):
        text = " ".join((ROOT / told).read_text(encoding="utf-8").split())
        assert re.search(r"\b41 functions", text), told


def test_the_legacy_tree_of_megatron_is_not_installed() -> None:
    assert importlib.util.find_spec("megatron.legacy") is None


def test_an_npu_asks_for_no_compiled_function() -> None:
    plugins = load_plugins(only=["npu"])
    backend = find_backend(plugins, plugins.named("register_backends"), "npu")
    assert plugins.first("make_jit_fuser", backend=backend) is None
