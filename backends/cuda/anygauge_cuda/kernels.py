"""The kernels of the CUDA backend: Triton's where they are faster than what torch brings or nothing else is.

``bench/kernels.py --backend cuda`` measures each beside every other source that is installed. Torch for CUDA
comes with Triton, torch for the CPU without: nothing here imports it before it is known to be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from anygauge_hooks.kernels import KernelImpl, KernelOp
from anygauge_hooks.tiles import TileMath

__all__ = ["kernels", "layer_norm", "tile_math"]

MODULES: Mapping[KernelOp, str] = {
    "add_rms_norm": "norms",
    "causal_conv1d": "convolution",
    "gated_delta_rule": "delta_rule",
    "grouped_matmul": "grouped",
    "qk_norm_rotary": "qkv",
    "rms_norm": "norms",
    "rotary_embedding": "rotary",
    "swiglu": "swiglu",
    "token_permute": "tokens",
    "token_unpermute": "tokens",
    "topk_router": "router",
    "vocab_parallel_logprob": "logprob",
}
"""Where each kernel in Triton is, below ``anygauge_cuda.triton``."""

LIMITS: Mapping[KernelOp, Mapping[str, Sequence[Any]]] = {
    "gated_delta_rule": {"head_dim": range(1, 129)},  # what a multiprocessor has memory for
}


def kernels() -> Iterable[KernelImpl]:
    """Return the kernels of this backend."""
    return [
        *_attention(),
        *_by_torch(),
        *(_in_triton(op, module) for op, module in MODULES.items()),
        KernelImpl(
            op="linear_logprob",
            fn=tile_math,
            source="anygauge_cuda.triton.tile_math",
            dtypes=("float32", "bfloat16", "float16"),
            requires=("triton",),
            tiles=True,
        ),
    ]


def _attention() -> Iterable[KernelImpl]:
    """Return cuDNN's attention where it is the faster one and its frontend is there, and torch's own."""
    from anygauge_cuda import attention

    flash = "torch.ops.aten._flash_attention_forward"
    yield _of_heads(attention.by_flash, flash, attention.FLASH_HEAD_SIZES)
    if attention.is_for_cudnn():
        cudnn = _of_heads(attention.by_cudnn, "cudnn.pygraph.sdpa", attention.CUDNN_HEAD_SIZES)
        yield replace(cudnn, requires=("cudnn",), priority=10)


def _of_heads(fn: Callable[..., Any], source: str, sizes: range) -> KernelImpl:
    limits = {"head_dim": sizes, "value_dim": sizes}
    return KernelImpl(
        op="varlen_attention", fn=fn, source=source, dtypes=("bfloat16", "float16"), limits=limits
    )


def _by_torch() -> Iterable[KernelImpl]:
    """Return torch's own fused operators."""
    from anygauge_cuda import experts

    if experts.has_grouped():
        yield KernelImpl(
            op="grouped_matmul",
            fn=experts.grouped_matmul,
            source="torch.nn.functional.grouped_mm",
            dtypes=("bfloat16",),
            priority=10,
            requires=("triton",),
        )
    yield KernelImpl(op="layer_norm", fn=layer_norm, source="torch.nn.functional.layer_norm")


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return the layer norm of ``x``; torch's kernel keeps mean and variance in float32.

    See :class:`anygauge_hooks.kernels.LayerNorm`.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _in_triton(op: KernelOp, module: str) -> KernelImpl:
    """Return a kernel whose function is there only if Triton is; it is left out otherwise."""
    name = f"anygauge_cuda.triton.{module}"
    fn: Callable[..., Any] = _absent if find_spec("triton") is None else getattr(import_module(name), op)
    return KernelImpl(op=op, fn=fn, source=f"{name}.{op}", limits=LIMITS.get(op), requires=("triton",))


def _absent() -> None:
    """Stand for a kernel that is left out."""


def tile_math() -> TileMath:
    """Return the passes over a tile of logits, each in one kernel."""
    from anygauge_cuda.triton.tile_math import TritonTileMath

    return TritonTileMath()
