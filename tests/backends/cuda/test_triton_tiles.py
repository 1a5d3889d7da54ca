"""The Triton passes over a tile give what torch's operators give, on a GPU or in Triton's interpreter.

``TRITON_INTERPRET=1 pytest tests/backends/cuda/test_triton_tiles.py`` needs no GPU.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from anygauge.kernels import linear_logprob as module
from anygauge.kernels import reference
from anygauge.kernels.linear_logprob import _EAGER, linear_logprob
from anygauge_hooks.tiles import Slopes, Sums, Tile

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.usefixtures("interpreter_loops") if INTERPRETED else pytest.mark.cuda

SHAPES = [(1, 1), (3, 100), (5, 4096), (4, 4097), (2, 9000), (0, 7)]
FIRST = 50
"""First of a tile's rows in the vocabulary."""


def make_tile(height: int, width: int, dtype: torch.dtype, scale: float, count: int = 3) -> Tile:
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(height, width, generator=generator)
    targets = torch.randint(2 * FIRST + width, (height, count), generator=generator)
    targets[:1] = FIRST + width - 1  # the same one several times
    logits, targets = logits.to(DEVICE), targets.to(DEVICE)
    parts = slice(0, height), slice(0, width)
    return Tile(*parts, FIRST, targets, logits, torch.empty_like(logits), dtype, scale)


def apart(tile: Tile) -> Tile:
    """Return the same tile, whose rows do not touch, without spare memory."""
    height, width = tile.logits.shape
    memory = torch.full((height, width + 3 + width % 2), torch.nan, device=DEVICE)
    memory[:, :width] = tile.logits
    return replace(tile, logits=memory[:, :width], spare=None)


def make_sums(height: int, count: int) -> Sums:
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(3, height, generator=generator)
    rows[0, ::2] = -1e30  # no tile so far
    rows[1:, ::2] = 0
    chosen = torch.zeros(height, count)
    return Sums(*rows.to(DEVICE), chosen.to(DEVICE))


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("scale", [1.0, 1.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tile_is_summarised_alike(shape: tuple[int, int], scale: float, count: int) -> None:
    from anygauge_cuda.triton.tile_math import TritonTileMath

    tile = make_tile(*shape, torch.float32, scale, count)
    found, expected = (make_sums(shape[0], count) for _ in range(2))
    given = apart(tile)
    TritonTileMath().summarise(given, found)
    assert torch.equal(given.logits, tile.logits), "the last tile is used again"
    _EAGER.summarise(tile, expected)
    for name in ("peak", "total", "mean", "chosen"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5, msg=name
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("has_slope", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_derivatives_are_alike(
    shape: tuple[int, int], has_slope: bool, dtype: torch.dtype, tolerance: float
) -> None:
    from anygauge_cuda.triton.tile_math import TritonTileMath

    tile = make_tile(*shape, dtype, 0.7)
    generator = torch.Generator().manual_seed(1)
    base, entropy, total, slope = (torch.randn(shape[0], generator=generator).to(DEVICE) for _ in range(4))
    chosen = torch.arange(shape[0], device=DEVICE)[:, None].expand(-1, 3) * 7.0
    slopes = Slopes(base + 20, entropy, total, slope if has_slope else None, chosen.contiguous())
    found, expected = TritonTileMath().derive(apart(tile), slopes), _EAGER.derive(tile, slopes)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [False, True])
def test_the_whole_is_that_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, rest: bool, dtype: torch.dtype
) -> None:
    """Over several tiles, of which the last is kept for backward, twice."""
    from anygauge_cuda.triton.tile_math import TritonTileMath

    for name in ("HOST_TILE", "DEVICE_TILE"):
        monkeypatch.setattr(module, name, (5, 16))
    for name in ("SMALLEST_HOST_TILE", "SMALLEST_DEVICE_TILE"):
        monkeypatch.setattr(module, name, 1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 8, generator=generator).to(DEVICE, dtype) for size in (13, 40))
    targets = torch.randint(37, (13, 4), generator=generator).to(DEVICE)
    found, expected = [], []
    for math, values in ((TritonTileMath(), found), (None, expected)):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        options = {"entropy_grad": True, "vocab_size": 37, "rest": rest}
        if math is None:
            leaves = [x.double().detach().requires_grad_() for x in leaves]
            logprobs, entropy = reference.linear_logprob(*leaves, targets, 0.7, None, **options)
        else:
            logprobs, entropy = linear_logprob(*leaves, targets, 0.7, None, math=math, **options)
        columns = torch.arange(1, logprobs.shape[1] + 1, device=DEVICE)
        loss = (logprobs.t() * columns[:, None]).sum() + entropy.square().sum()  # a gradient by columns
        first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        values += [logprobs.detach(), entropy.detach(), *first]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance * scale)
