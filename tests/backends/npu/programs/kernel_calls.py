"""Call every kernel of the NPU backend where nothing is computed, and write what happened as JSON.

    python backends/npu/simulation -- python kernel_calls.py fake OUT
    python backends/npu/simulation --record FILE -- python kernel_calls.py record OUT
    python backends/npu/simulation --record FILE -- python kernel_calls.py refuse OUT

``fake`` runs on tensors without data: torch-npu's own shapes, dtypes and gradients. ``record`` finds which of
CANN's kernels each call reaches, on a SIMULATED device. ``refuse`` makes calls that must not reach any.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anygauge.kernels import reference
from anygauge.kernels.table import KernelTable, reference_kernel, resolve_kernels
from anygauge.plugins import load_plugins, select_backend
from anygauge.testing.conformance.kernel_cases import CASES, Case
from anygauge.testing.conformance.kernel_checks import contiguous, inputs_of
from anygauge_hooks.errors import KernelInputError
from anygauge_hooks.kernels import KernelImpl

DTYPES = ("bfloat16", "float32")
PICKED = (
    "causal_conv1d-ragged",
    "gated_delta_rule-one",
    "grouped_matmul-ragged",
    "layer_norm-7x64-0.3-1-0",
    "linear_logprob-37x24x50-1.6-0-0-plain",
    "linear_logprob-37x24x50-0.7-0-0-grad",
    "rms_norm-7x64-0.3-1",
    "rotary_embedding-19-4-2-32-32-1",
    "rotary_embedding-19-4-4-24-16-1",
    "swiglu-7x66-2",
    "token_permute-37x16-3of8-0-wide",
    "token_unpermute-37x16-2-int64",
    "topk_router-softmax-60",
    "topk_router-pre-softmax-60",
    "topk_router-sigmoid-60",
    "topk_router-bias-60",
    "topk_router-groups-60",
    "varlen_attention-ragged-causal",
    "varlen_attention-ragged-full",
    "varlen_attention-ragged-causal-lse",
    "varlen_attention-prefix-causal",
    "varlen_attention-window-causal",
    "varlen_attention-window-causal-sinks",
    "vocab_parallel_logprob-37x50-1.6-0-0-3-plain",
)


def main(mode: str, out: str) -> None:
    """Run one of the modes."""
    plugins = load_plugins()
    backend, _ = select_backend(plugins, "npu")
    plugins.prepare_worker(backend, "conformance", "before_vendor_import")
    device = plugins.make_device(backend, 0)
    kernels = resolve_kernels(plugins, backend)
    found = {
        "fake": lambda: faked(kernels),
        "record": lambda: recorded(kernels, device),
        "refuse": refused,
    }[mode]()
    Path(out).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def cases() -> Iterator[Case]:
    """Yield a case for each way that a kernel goes."""
    named = {str(case): case for case in CASES}
    yield from (named[name] for name in PICKED)


def serving(kernels: KernelTable, case: Case, dtype: str) -> KernelImpl:
    """Return the kernel that a module would take."""
    return next(iter(kernels.candidates(case.op, dtype=dtype, **case.facts)), reference_kernel(case.op))


def outputs_of(fn: Callable[..., Any], case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    named = {} if case.keyword is None else {case.keyword: tensors[-1]}
    given = tensors[: len(tensors) - len(named)]
    found = fn(*given, *case.arguments, **case.options, **named)
    return list(found) if isinstance(found, tuple) else [found]


def differentiated(
    case: Case, tensors: list[torch.Tensor], outputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    wanted = [out for out in outputs if out.requires_grad]
    ones = [torch.ones_like(out) for out in wanted]
    return list(torch.autograd.grad(wanted, tensors[: case.differentiable], ones))


# -------------------------------------------------------------------------
# Tensors without data
# -------------------------------------------------------------------------


def faked(kernels: KernelTable) -> dict[str, list[str]]:
    """Return what is wrong with shapes, dtypes and devices of each case, which should be nothing."""
    mode = FakeTensorMode()  # one for all: kernels keep a mask
    return {
        f"{case} {dtype}": list(problems(serving(kernels, case, dtype), case, dtype, mode))
        for case in cases()
        for dtype in DTYPES
    }


def problems(kernel: KernelImpl, case: Case, dtype: str, mode: FakeTensorMode) -> Iterator[str]:
    """Yield how tensors on the device differ from those of the reference on the host."""
    host = host_tensors(case, dtype)
    expected = outputs_of(getattr(reference, case.op), case, host)
    with mode:
        tensors = [
            torch.empty(x.shape, dtype=x.dtype, device="npu:0").requires_grad_(x.requires_grad) for x in host
        ]
        outputs = outputs_of(kernel.fn, case, tensors)
        gradients = differentiated(case, tensors, outputs)
    pairs = [*zip(outputs, expected, strict=True), *zip(gradients, host, strict=False)]
    for index, (found, wanted) in enumerate(pairs):
        integers = not wanted.is_floating_point()
        if found.shape != wanted.shape or (found.dtype != wanted.dtype and not integers):
            yield f"{kernel.source}, {index}: {described(found)}, not {described(wanted)}"
        if str(found.device) != "npu:0":
            yield f"{kernel.source}, {index}: on {found.device}"


def host_tensors(case: Case, dtype: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = []
    for index, x in enumerate(case.tensors()):
        kind = torch.float32 if index in case.wide or index >= case.differentiable else getattr(torch, dtype)
        tensor = x.to(kind) if x.is_floating_point() else x
        made.append(tensor.requires_grad_(index < case.differentiable))
    return made


def described(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}"


# -------------------------------------------------------------------------
# Kernels that are written down
# -------------------------------------------------------------------------


class Record:
    """The kernels that were reached since the last look."""

    def __init__(self) -> None:
        self.path = Path(os.environ["SIMULATED_NPU_RECORD"])
        self.seen = 0

    def __call__(self) -> dict[str, int]:
        """Return how often each was reached."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        new, self.seen = lines[self.seen :], len(lines)
        return dict(Counter(json.loads(line)["kernel"] for line in new))


def recorded(kernels: KernelTable, device: Any) -> dict[str, Any]:
    """Return which of CANN's kernels each case is made of, forward and backward."""
    return {str(case): reached(serving(kernels, case, "bfloat16"), case, device) for case in cases()}


def reached(kernel: KernelImpl, case: Case, device: Any) -> dict[str, Any]:
    record = Record()
    tensors = [x.detach() for x in inputs_of(case, "bfloat16", contiguous, device)]
    for x in tensors[: case.differentiable]:
        x.requires_grad_()
    outputs_of(kernel.fn, case, tensors)  # makes what is kept: masks, products that are tried
    record()
    outputs = outputs_of(kernel.fn, case, tensors)
    forward = record()
    wanted = [out for out in outputs if out.requires_grad]
    ones = [torch.ones_like(out) for out in wanted]
    record()
    torch.autograd.grad(wanted, tensors[: case.differentiable], ones)
    return {"kernel": kernel.source, "forward": forward, "backward": record()}


def refused() -> dict[str, list[str]]:
    """Return for each wrong call what it reached beside the kernels that make its tensors: nothing."""
    path = Path(__file__).parents[1] / "test_kernel_guards.py"
    spec = importlib.util.spec_from_file_location("test_kernel_guards", path)
    assert spec is not None
    assert spec.loader is not None
    guards = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guards)
    record = Record()
    found: dict[str, list[str]] = {}
    with torch.device("npu:0"):
        for name, (call, _) in guards.BAD.items():
            record()
            try:
                call()
                found[name] = ["no error"]
            except KernelInputError:
                found[name] = sorted(set(record()) - {"aclnnInplaceOne", "aclnnArange"})
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
    # The device's autograd thread may only now drop the last gradients, for which it takes Python's lock.
    # Torch aborts if Python is being torn down then.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
