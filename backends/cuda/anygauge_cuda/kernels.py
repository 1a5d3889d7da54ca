"""The kernels of the CUDA backend."""

from __future__ import annotations

from collections.abc import Iterable

from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.tiles import TileMath

__all__ = ["kernels", "tile_math"]


def kernels() -> Iterable[KernelImpl]:
    """Return the kernels of this backend. Torch for CUDA comes with Triton, torch for the CPU without."""
    return [
        KernelImpl(
            op="linear_logprob",
            fn=tile_math,
            source="anygauge_cuda.triton.tile_math",
            dtypes=("float32", "bfloat16", "float16"),
            requires=("triton",),
            tiles=True,
        )
    ]


def tile_math() -> TileMath:
    """Return the passes over a tile of logits, each in one kernel."""
    from anygauge_cuda.triton.tile_math import TritonTileMath

    return TritonTileMath()
