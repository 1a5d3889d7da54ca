"""Kernels on a GPU give the same bits each time; the host waits for none but what brings lengths there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from anygauge.kernels.main_grad import ROWS, add_rows
from anygauge.testing.conformance.kernel_cases import CASES, Case
from anygauge.testing.conformance.kernel_cases.attention import attention_case, with_lse
from anygauge.testing.conformance.kernel_checks import Result, assert_close, contiguous, evaluate, inputs_of
from anygauge.testing.conformance.tolerances import TOLERANCES
from anygauge_cuda import cudnn_attention
from anygauge_cuda.attention import by_cudnn
from anygauge_cuda.kernels import kernels
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl
from anygauge_hooks.types import Device

pytestmark = pytest.mark.cuda

GPU = cast(Device, SimpleNamespace(torch_device=torch.device("cuda")))
OPS = sorted(set(KERNEL_OPS) - {"linear_logprob", "varlen_attention"})
"""Those whose function is the whole of the op, in every dtype."""
LENGTHS = {"causal_conv1d", "gated_delta_rule"}
"""Ops that are given lengths on the host."""
PARTS = {"long", "wide-values", "wide-heads"}
"""Cases of the gated delta rule that have many chunks, or many columns in a state."""


def biggest_case(op: str) -> Case:
    return max((case for case in CASES if case.op == op), key=lambda case: case.tensors()[0].numel())


KERNELS = [
    pytest.param(kernel, id=kernel.source)
    for kernel in kernels()
    if kernel.op in OPS and all(map(find_spec, kernel.requires))
]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """Fail where the host waits for the GPU."""
    with warnings.catch_warnings(action="ignore"):  # torch says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("width", [128, 1024, 2560, 4096, 8192])
def test_a_sum_and_its_norm_have_the_bits_of_two_steps(width: int) -> None:
    """A linear that makes its input again has the norm alone."""
    found = {kernel.op: kernel.fn for kernel in kernels()}
    generator = torch.Generator("cuda").manual_seed(0)
    x, residual, weight = (
        torch.randn(shape, device="cuda", generator=generator).bfloat16()
        for shape in ((300, 1, width), (300, 1, width), (width,))
    )
    total, normed = found["add_rms_norm"](x, weight, 1e-6, residual)
    assert total.equal(residual + x)
    assert normed.equal(found["rms_norm"](total, weight, 1e-6))


def repeated() -> Iterator[Any]:
    """Yield kernels, cases and dtypes: the biggest case of an op; of the delta rule, those in ``PARTS``."""
    for kernel in (each.values[0] for each in KERNELS):
        if kernel.op != "gated_delta_rule":
            yield pytest.param(kernel, biggest_case(kernel.op), "bfloat16", id=kernel.source)
            continue
        for case in (each for each in CASES if each.op == kernel.op and each.name in PARTS):
            for dtype in ("bfloat16", "float32"):
                yield pytest.param(kernel, case, dtype, id=f"{kernel.source}-{case.name}-{dtype}")


@pytest.mark.parametrize(("kernel", "case", "dtype"), list(repeated()))
def test_the_same_bits_each_time(kernel: KernelImpl, case: Case, dtype: str) -> None:
    """A race shows in some runs only."""
    inputs = inputs_of(case, dtype, contiguous, GPU)
    results = [evaluate(kernel.fn, case, [x.clone() for x in inputs]) for _ in range(10)]
    first = [*results[0].outputs, *results[0].gradients]
    for other in results[1:]:
        assert all(map(torch.equal, first, [*other.outputs, *other.gradients]))


@pytest.mark.parametrize("kernel", [each for each in KERNELS if each.values[0].op not in LENGTHS])
def test_the_host_does_not_wait(kernel: KernelImpl, request: pytest.FixtureRequest) -> None:
    case = biggest_case(kernel.op)
    inputs = inputs_of(case, "bfloat16", contiguous, GPU)
    leaves = [x.detach().requires_grad_() for x in inputs[: case.differentiable]]
    given = [*leaves, *inputs[case.differentiable :]]
    named = {} if case.keyword is None else {case.keyword: given.pop()}
    request.getfixturevalue("no_waiting")
    found = kernel.fn(*given, *case.arguments, **case.options, **named)
    outputs = [x for x in (found if isinstance(found, tuple) else (found,)) if x.requires_grad]
    torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("lengths", "heads", "key_heads", "width"),
    [((2048,) * 2, 32, 8, 128), ((1536,) * 3, 4, 4, 64), ((4096,), 8, 1, 256), ((512,) * 16, 4, 2, 80)],
)
def test_attention_of_a_batch_is_that_of_ragged_sequences(
    lengths: tuple[int, ...],
    heads: int,
    key_heads: int,
    width: int,
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("cudnn")
    case = with_lse(attention_case("batch", lengths, heads, key_heads, width, causal=causal))
    inputs = inputs_of(case, "bfloat16", contiguous, GPU)

    def attend() -> Result:
        return evaluate(by_cudnn, case, [x.clone() for x in inputs])

    batch = attend()
    monkeypatch.setattr(cudnn_attention, "BATCH_STEP", 1 << 30)
    ragged = attend()
    for found, wanted in zip(batch.outputs + batch.gradients, ragged.outputs + ragged.gradients, strict=True):
        assert_close(found, wanted, TOLERANCES["bfloat16"], str(case))


@pytest.mark.parametrize("lengths", [(512, 512), (512, 3, 500)], ids=["batch", "ragged"])
def test_the_host_does_not_wait_for_attention(
    lengths: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("cudnn")
    leaves = [torch.ones(sum(lengths), 2, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3)]

    def attend() -> None:
        found = by_cudnn(*leaves, lengths, 0.1, causal=True)
        torch.autograd.grad(found, leaves, torch.ones_like(found))

    attend()  # builds graphs
    request.getfixturevalue("no_waiting")
    attend()


def test_rows_of_a_main_gradient(request: pytest.FixtureRequest) -> None:
    """To the bit, twice the same where sums are rounded, and without a wait; in two pieces."""
    tokens, rows, width = ROWS + 1000, 151_936, 512
    torch.manual_seed(0)
    ids = torch.randint(0, rows, (tokens,), device="cuda")
    ids[: tokens // 2] %= 50  # which come often
    weight = torch.nn.Parameter(torch.zeros(rows, width, device="cuda", dtype=torch.bfloat16))
    exact = torch.randint(-64, 64, (tokens, width), device="cuda").bfloat16()
    rounded = torch.randn(tokens, width, device="cuda").bfloat16()

    def added(grad: torch.Tensor) -> torch.Tensor:
        weight.main_grad = torch.zeros(rows, width, device="cuda")  # type: ignore[attr-defined]  # Megatron's
        add_rows(weight, ids, grad)
        return cast(torch.Tensor, weight.main_grad)

    expected = torch.zeros(rows, width, device="cuda", dtype=torch.float64).index_add_(0, ids, exact.double())
    assert torch.equal(added(exact).double(), expected)
    request.getfixturevalue("no_waiting")
    one, other = added(rounded), added(rounded)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(one, other)
