"""The kernels of the CUDA backend."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.tiles import TileMath

__all__ = ["kernels", "tile_math"]


def kernels() -> Iterable[KernelImpl]:
    """Return the kernels of this backend. Torch for CUDA comes with Triton, torch for the CPU without."""
    return [
        *_attention(),
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
    """Return cuDNN's attention where its frontend is installed, and before it torch's own."""
    from anygauge_cuda import attention

    for fn, source, sizes, requires, priority in (
        (attention.by_cudnn, "cudnn.pygraph.sdpa", attention.CUDNN_HEAD_SIZES, ("cudnn",), 10),
        (attention.by_flash, "torch.ops.aten._flash_attention_forward", attention.FLASH_HEAD_SIZES, (), 0),
    ):
        yield KernelImpl(
            op="varlen_attention",
            fn=fn,
            source=source,
            dtypes=("bfloat16", "float16"),
            limits={"head_dim": sizes, "value_dim": sizes},
            requires=requires,
            priority=priority,
        )


def tile_math() -> TileMath:
    """Return the passes over a tile of logits, each in one kernel."""
    from anygauge_cuda.triton.tile_math import TritonTileMath

    return TritonTileMath()
