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
from anygauge_hooks.tiles import Kept, Slopes, Sums, Tile

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


def apart(tile: Tile, *, keeps: bool = False) -> Tile:
    """Return the same tile, whose rows do not touch, without spare memory, perhaps with some to keep it."""
    height, width = tile.logits.shape
    memory = torch.full((height, width + 3 + width % 2), torch.nan, device=DEVICE)
    memory[:, :width] = tile.logits
    dtype = torch.float32 if tile.dtype == torch.float32 else torch.float16
    kept = torch.full_like(memory, torch.nan, dtype=dtype)[:, : width if keeps else 0]
    peaks = torch.full((height, 9), torch.nan, device=DEVICE)
    return replace(tile, logits=memory[:, :width], spare=None, kept=Kept(peaks, kept))


def forgotten(tile: Tile) -> Tile:
    """Return the tile of a backward pass that has the kept logits alone."""
    return replace(tile, logits=tile.logits[:, :0])


def without_kept(tile: Tile) -> Tile:
    """Return the tile of a backward pass that computes the logits again."""
    assert tile.kept is not None
    return replace(tile, kept=replace(tile.kept, logits=tile.kept.logits[:, :0]))


def make_sums(height: int, count: int) -> Sums:
    generator = torch.Generator().manual_seed(1)
    rows = torch.rand(3, height, generator=generator)
    rows[0, ::2] = -1e30  # no tile so far
    rows[1:, ::2] = 0
    chosen = torch.zeros(height, count)
    return Sums(*rows.to(DEVICE), chosen.to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("scale", [1.0, 1.7])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tile_is_summarized_alike(
    shape: tuple[int, int], scale: float, count: int, dtype: torch.dtype
) -> None:
    from anygauge_cuda.triton.tile_math import TritonTileMath

    tile = make_tile(*shape, dtype, scale, count)
    found, expected, also = (make_sums(shape[0], count) for _ in range(3))
    given, keeping = apart(tile), apart(tile, keeps=True)
    TritonTileMath().summarize(given, found)
    assert torch.equal(given.logits, tile.logits), "the last tile is used again"
    TritonTileMath().summarize(keeping, also)
    assert_kept(keeping, make_sums(shape[0], count).peak)
    _EAGER.summarize(tile, expected)
    for name in ("peak", "total", "mean", "chosen"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5, msg=name
        )
        assert torch.equal(getattr(found, name), getattr(also, name)), f"{name} depends on what is kept"


def assert_kept(tile: Tile, before: torch.Tensor) -> None:
    """Check each logit, in 16 bits its difference from the largest one up to its block."""
    from anygauge_cuda.triton.tile_math import BLOCK

    assert tile.kept is not None
    for block, logits in enumerate(tile.logits.split(BLOCK, dim=1)):
        before = torch.maximum(before, logits.amax(1))
        assert torch.equal(tile.kept.peaks[:, block], before)
        differences = ((logits - before[:, None]) * tile.scale).half()
        kept = tile.kept.logits[:, block * BLOCK :][:, :BLOCK]
        assert torch.equal(kept, logits if kept.dtype == torch.float32 else differences)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("has_slope", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_derivatives_are_alike(
    shape: tuple[int, int], has_slope: bool, dtype: torch.dtype, tolerance: float
) -> None:
    from anygauge_cuda.triton.tile_math import BLOCK, TritonTileMath

    tile = make_tile(*shape, dtype, 0.7)
    generator = torch.Generator().manual_seed(1)
    base, entropy, total, slope = (torch.randn(shape[0], generator=generator).to(DEVICE) for _ in range(4))
    chosen = torch.arange(shape[0], device=DEVICE)[:, None].expand(-1, 3) * 7.0
    slopes = Slopes(base + 20, entropy, total, slope if has_slope else None, chosen.contiguous())
    kept = apart(tile, keeps=True)
    TritonTileMath().summarize(kept, make_sums(shape[0], 3))
    assert kept.kept is not None
    peaks = kept.kept.peaks.repeat_interleave(BLOCK, dim=1)[:, : shape[1]]
    logits = kept.kept.logits.clone()
    rounded = logits if dtype == torch.float32 else logits.float() / tile.scale + peaks
    expected = _EAGER.derive(replace(tile, logits=rounded), slopes)
    again = TritonTileMath().derive(without_kept(kept), slopes)
    found = TritonTileMath().derive(forgotten(kept), slopes)
    assert found.dtype == dtype
    assert torch.equal(found, again), "the gradient depends on what is kept"
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [False, True])
def test_the_whole_is_that_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, rest: bool, dtype: torch.dtype
) -> None:
    """Over several tiles, twice: what was kept the first time is computed again the second time."""
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
            options |= {"math": math, "budget": lambda: 1000}
            logprobs, entropy = linear_logprob(*leaves, targets, 0.7, None, **options)
        columns = torch.arange(1, logprobs.shape[1] + 1, device=DEVICE)
        loss = (logprobs.t() * columns[:, None]).sum() + entropy.square().sum()  # a gradient by columns
        first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
        assert all(map(torch.equal, first, second))
        values += [logprobs.detach(), entropy.detach(), *first]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(found, expected, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_memory(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Neither those of results nor of gradients, nor do those of a pass without gradients differ."""
    from anygauge_cuda.triton.tile_math import TritonTileMath

    size = (13, 8, 40) if INTERPRETED else (3000, 256, 20_000)
    tile = (5, 16) if INTERPRETED else (700, 4096)
    for name in ("HOST_TILE", "DEVICE_TILE"):
        monkeypatch.setattr(module, name, tile)
    for name in ("SMALLEST_HOST_TILE", "SMALLEST_DEVICE_TILE"):
        monkeypatch.setattr(module, name, 1)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, size[1], generator=generator) for n in (size[0], size[2]))
    targets = torch.randint(size[2], size[:1], generator=generator).to(DEVICE)
    results = []
    for budget, recorded in ((0, True), (size[0] * size[2], True), (1 << 40, True), (1 << 40, False)):
        leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (hidden, weight)]
        options = {"entropy_grad": True, "math": TritonTileMath(), "budget": lambda bytes=budget: bytes}
        with torch.set_grad_enabled(recorded):
            outputs = linear_logprob(*leaves, targets, 0.7, None, **options)
        loss = outputs[0].sum() + outputs[1].square().sum()
        results.append([*outputs, *(torch.autograd.grad(loss, leaves) if recorded else ())])
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))
