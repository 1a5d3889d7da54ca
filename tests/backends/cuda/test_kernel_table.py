"""Kernels that the CUDA backend declares, on a host with neither a GPU nor Triton."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from anygauge.kernels.table import resolve_kernels
from anygauge.plugins import Plugins, load_plugins
from anygauge_cuda.kernels import MODULES, kernels
from anygauge_cuda.plugin import CUDA
from anygauge_hooks.errors import KernelInputError
from anygauge_hooks.kernels import KERNEL_OPS, KernelOp


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins(only=("cuda",))


class StandIn(ModuleType):
    """A module that has whatever is asked of it, and whose decorators leave a function as it is."""

    def __getattr__(self, name: str) -> object:
        if name == "__path__":
            return []
        if name == "jit":
            return lambda fn=None, **options: fn or (lambda later: later)
        return MagicMock(name=f"{self.__name__}.{name}")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in for Triton, and forget what was imported with it."""
    for name in ("triton", "triton.language"):
        module = StandIn(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    before = set(sys.modules)
    for name in [n for n in before if n.startswith("anygauge_cuda.triton")]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [n for n in sys.modules if n.startswith("anygauge_cuda.triton")]:
        del sys.modules[name]


def test_every_op_is_served() -> None:
    served = {dtype: {k.op for k in kernels() if dtype in k.dtypes} for dtype in ("bfloat16", "float32")}
    assert served == {"bfloat16": set(KERNEL_OPS), "float32": set(KERNEL_OPS) - {"varlen_attention"}}


@pytest.mark.usefixtures("pretended")
def test_every_kernel_in_triton_has_the_signature_of_its_op(plugins: Plugins) -> None:
    table = resolve_kernels(plugins, CUDA)
    rows = [row for row in table.rows() if row.source.startswith("anygauge_cuda.triton.")]
    sources = {row.op: row.source for row in reversed(rows)}  # the first choice of each op
    assert {op: f"anygauge_cuda.triton.{module}.{op}" for op, module in MODULES.items()} == {
        op: source for op, source in sources.items() if op in MODULES
    }


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is here")
def test_without_triton_its_kernels_are_left_out_and_say_why(plugins: Plugins) -> None:
    left_out = {kernel.op: kernel.missing for kernel in resolve_kernels(plugins, CUDA).left_out}
    assert {op: ("triton",) for op in MODULES}.items() <= left_out.items()


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.ones(shape, dtype=dtype)


SOFTMAX = {"score_function": "softmax"}
REFUSED: list[tuple[KernelOp, tuple[Any, ...], Mapping[str, Any], str]] = [
    ("rms_norm", (ones(5, 8), ones(7), 1e-6), {}, "weight of shape [7], not [8]"),
    ("add_rms_norm", (ones(5, 8), ones(7), 1e-6), {}, "weight of shape [7], not [8]"),
    ("add_rms_norm", (ones(5, 8), ones(8), 1e-6, ones(4, 8)), {}, "residual of shape"),
    ("rotary_embedding", (ones(5, 4, 8), ones(4, 2, 8), ones(5, 8), ones(5, 8)), {}, "k of shape"),
    ("rotary_embedding", (ones(5, 4, 8), ones(5, 2, 8), ones(5, 8), ones(5, 6)), {}, "sin of shape"),
    ("rotary_embedding", (ones(5, 4, 8), ones(5, 2, 8), ones(5, 10), ones(5, 10)), {}, "10 angles"),
    ("rotary_embedding", (ones(5, 4, 8), ones(5, 2, 8), ones(5, 3), ones(5, 3)), {}, "3 angles"),
    *(
        ("qk_norm_rotary", (ones(5, 2, 3, 8), *(ones(*shape) for shape in shapes), 1e-6), {}, found)
        for shapes, found in [
            (((7,), (8,), (5, 8), (5, 8)), "q_weight of shape [7], not [8]"),
            (((8,), (7,), (5, 8), (5, 8)), "k_weight of shape"),
            (((8,), (8,), (4, 8), (4, 8)), "cos of shape [4, 8], not [5, 8]"),
            (((8,), (8,), (5, 8), (5, 6)), "sin of shape"),
            (((8,), (8,), (5, 10), (5, 10)), "10 angles"),
        ]
    ),
    ("swiglu", (ones(5, 7),), {}, "rows of 7"),
    (
        "token_permute",
        (ones(4, 8), ones(5, 6), ones(5, 6).bool(), 2),
        {},
        "tokens of shape [4, 8], not [5, 8]",
    ),
    ("token_permute", (ones(5, 8), ones(5, 7), ones(5, 6).bool(), 2), {}, "probs of shape"),
    ("token_permute", (ones(5, 8), ones(5, 6), ones(5, 6), 2), {}, "a map in torch.bfloat16"),
    ("token_unpermute", (ones(9, 8), ones(5, 2).int()), {}, "permuted of shape"),
    ("topk_router", (ones(5, 8), 9), SOFTMAX, "a topk of 9"),
    ("topk_router", (ones(5, 8), 2), {**SOFTMAX, "num_groups": 3, "group_topk": 1}, "1 of 3 groups"),
    ("topk_router", (ones(5, 8), 2), {**SOFTMAX, "expert_bias": ones(7)}, "expert_bias of shape"),
    (
        "vocab_parallel_logprob",
        (ones(5, 8), ones(4).long(), 1.0, None),
        {"entropy_grad": False},
        "targets of",
    ),
    ("causal_conv1d", (ones(5, 8), ones(7, 4), (5,)), {}, "weight of shape"),
    ("causal_conv1d", (ones(5, 8), ones(8, 4), (3, 3)), {}, "lengths that sum to 6, and 5 tokens"),
    ("causal_conv1d", (ones(5, 8), ones(8, 4), (6, -1)), {}, "lengths that sum to 5"),
    ("grouped_matmul", (ones(5, 8), ones(2, 4, 7), ones(2).long()), {}, "x of shape [5, 8], not [5, 7]"),
    ("grouped_matmul", (ones(5, 8), ones(2, 4, 8), ones(3).long()), {}, "tokens_per_expert of shape"),
    (
        "gated_delta_rule",
        (ones(5, 2, 8), ones(5, 2, 8), ones(5, 2, 4), ones(5, 2), ones(5, 1), (5,), 1.0),
        {},
        "beta of shape",
    ),
]


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize(
    ("op", "arguments", "options", "found"), REFUSED, ids=[f"{op}-{found}" for op, _, _, found in REFUSED]
)
def test_what_would_be_read_past_its_end_is_refused(
    op: KernelOp, arguments: tuple[Any, ...], options: Mapping[str, Any], found: str
) -> None:
    kernel = getattr(import_module(f"anygauge_cuda.triton.{MODULES[op]}"), op)
    with pytest.raises(KernelInputError) as error:
        kernel(*arguments, **options)
    assert str(error.value).startswith(f"{op} got {found}")


@pytest.mark.usefixtures("pretended")
def test_rows_are_read_where_they_are() -> None:
    """A part of a fused projection is not copied, and every row is found by its number."""
    from anygauge_cuda.triton.rows import rows_of

    fused = torch.arange(4 * 6 * 8).view(4, 6, 8)
    parts = [fused, fused[:, 2:5], fused[:, :, :5], fused[:, None, 1], fused[1:, 3:4, 2:], fused[::2]]
    for part in parts:
        rows = rows_of(part)
        memory = rows.memory.as_strided((fused.numel() - part.storage_offset(),), (1,))
        starts = [i // rows.inner * rows.outer_step + i % rows.inner * rows.step for i in range(rows.number)]
        assert memory.data_ptr() == part.data_ptr()
        assert torch.stack([memory[s : s + part.shape[-1]] for s in starts]).equal(part.flatten(0, -2))


@pytest.mark.usefixtures("pretended")
def test_rows_of_other_strides_are_copied() -> None:
    from anygauge_cuda.triton.rows import rows_of

    for x in (torch.ones(4, 6).t(), torch.ones(2, 3, 4, 5)[:, :2, :3]):
        assert rows_of(x).memory.is_contiguous()
