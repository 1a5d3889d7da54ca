"""Log-probabilities and gradients from tiles are those from all logits, in a part of the memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.algorithms.kl import top_k_kl
from anygauge.kernels import linear_logprob as module
from anygauge.kernels import reference
from anygauge.kernels.linear_logprob import linear_logprob, linear_topk
from anygauge.kernels.reference import vocab_parallel_logprob
from anygauge_hooks.tiles import Kept, Slopes, Sums, Tile
from anygauge_tests.largest_tensor import LargestTensor

TEMPERATURE = 0.7
Pair = tuple[Tensor, Tensor]


@pytest.fixture(params=[(3, 4), (5, 64), (64, 7), (256, 1024)], ids=str)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Set the shape of a tile: some do not divide what the tests use, and the last one holds it all."""
    monkeypatch.setattr(module, "HOST_TILE", request.param)
    monkeypatch.setattr(module, "SMALLEST_HOST_TILE", 1 << 20)
    shape: tuple[int, int] = request.param
    return shape


def make_inputs(
    tokens: int = 13, width: int = 8, vocab: int = 30, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def materialized(hidden: Tensor, weight: Tensor, targets: Tensor, *, entropy_grad: bool) -> Pair:
    return vocab_parallel_logprob(hidden @ weight.t(), targets, TEMPERATURE, None, entropy_grad=entropy_grad)


def gradients(found: Pair, inputs: Pair, *, entropy_grad: bool) -> tuple[Tensor, ...]:
    scale = torch.arange(1, found[0].numel() + 1, dtype=found[0].dtype).view_as(found[0])
    loss = (found[0] * scale).sum() + (found[1].square().sum() if entropy_grad else 0.0)
    return torch.autograd.grad(loss, inputs)


def assert_all_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        atol = tolerance * float(other.detach().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=atol)


# -------------------------------------------------------------------------
# Values and gradients
# -------------------------------------------------------------------------


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_is_what_all_logits_give(tile: tuple[int, int], entropy_grad: bool) -> None:
    hidden, weight, targets = make_inputs()
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=entropy_grad)
    expected = materialized(hidden, weight, targets, entropy_grad=entropy_grad)
    assert_all_close(found, expected, 1e-12)
    assert (found[0].requires_grad, found[1].requires_grad) == (True, entropy_grad)
    pairs = [gradients(pair, (hidden, weight), entropy_grad=entropy_grad) for pair in (found, expected)]
    assert_all_close(*pairs, 1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    hidden, weight, targets = make_inputs(tokens=3, width=4, vocab=6)

    def both(hidden: Tensor, weight: Tensor) -> Pair:
        return linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=True)

    assert torch.autograd.gradcheck(both, (hidden, weight))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1.6e-2)])
def test_rounds_no_more_than_all_logits(tile: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = make_inputs(tokens=20, width=16, vocab=50, dtype=dtype)
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=True)
    assert [out.dtype for out in found] == [torch.float32, torch.float32]
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = materialized(wide[0], wide[1], targets, entropy_grad=True)
    assert_all_close(found, expected, tolerance)
    assert_all_close(
        gradients(found, (hidden, weight), entropy_grad=True),
        gradients(expected, (wide[0], wide[1]), entropy_grad=True),
        2 * tolerance,
    )


def test_several_targets_of_a_token_share_its_row(tile: tuple[int, int]) -> None:
    hidden, weight, _ = make_inputs()
    targets = torch.randint(30, (13, 4), generator=torch.Generator().manual_seed(1))
    targets[2, :] = 7  # one token, several times
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=False)
    log_softmax = (hidden @ weight.t() / TEMPERATURE).log_softmax(-1)
    expected = (log_softmax.gather(1, targets), found[1])
    assert_all_close(found, expected, 1e-12)
    pairs = [gradients(pair, (hidden, weight), entropy_grad=False) for pair in (found, expected)]
    assert_all_close(*pairs, 1e-12)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_the_rest_is_all_but_the_targets(tile: tuple[int, int], entropy_grad: bool) -> None:
    hidden, weight, _ = make_inputs()
    targets = torch.randint(26, (13, 4), generator=torch.Generator().manual_seed(1))
    targets[2, :] = 7
    options: dict[str, Any] = {"entropy_grad": entropy_grad, "vocab_size": 26, "rest": True}
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, **options)
    expected = reference.linear_logprob(hidden, weight, targets, TEMPERATURE, None, **options)
    log_softmax = (hidden @ weight[:26].t() / TEMPERATURE).log_softmax(-1)
    rest = log_softmax.scatter(1, targets, -torch.inf).logsumexp(1)
    assert_all_close(expected[:1], (torch.cat((log_softmax.gather(1, targets), rest[:, None]), 1),), 1e-12)
    assert_all_close(found, expected, 1e-12)
    pairs = [gradients(pair, (hidden, weight), entropy_grad=entropy_grad) for pair in (found, expected)]
    assert_all_close(*pairs, 1e-12)
    plain = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=False, vocab_size=26)
    assert torch.equal(found[0][:, :-1], plain[0]), "the others change nothing"


@pytest.mark.parametrize("fn", [linear_logprob, reference.linear_logprob])
def test_the_rest_of_all_is_nothing(fn: Any, tile: tuple[int, int]) -> None:
    hidden, weight, _ = make_inputs(vocab=6, dtype=torch.float32)
    targets = torch.arange(6).expand(13, 6)
    found = fn(hidden, weight, targets, TEMPERATURE, None, entropy_grad=False, rest=True)[0]
    assert (found[:, -1] == -1e4).all()
    loss = (found * torch.arange(7.0)).sum()
    rows = (hidden @ weight.t() / TEMPERATURE).log_softmax(1)
    expected = torch.autograd.grad((rows * torch.arange(6.0)).sum(), (hidden, weight))
    assert_all_close(torch.autograd.grad(loss, (hidden, weight)), expected, 1e-5)


@pytest.mark.parametrize("teacher_margin", [0.0, 6.0, 12.0])
@pytest.mark.parametrize("margin", [5.0, 12.0, 20.0, 30.0, 40.0])
def test_a_policy_that_is_sure_learns_of_other_tokens(margin: float, teacher_margin: float) -> None:
    """The gradient of distillation in float32 is that in float64 of the logits of all tokens."""
    tokens, vocab, count = 32, 500, 8
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)
    logits[:, 0] += teacher_margin
    teacher, ids = logits.log_softmax(1).topk(count, dim=1)
    rest = logits.log_softmax(1).scatter(1, ids, -torch.inf).logsumexp(1)
    teacher = torch.cat((teacher, rest[:, None]), 1)

    policy = torch.randn(tokens, vocab, generator=generator).double() / 4
    policy.scatter_add_(1, ids[:, :1], torch.full((tokens, 1), margin, dtype=torch.float64))
    exact = policy.clone().requires_grad_()
    rows = exact.log_softmax(1)
    others = rows.scatter(1, ids, -torch.inf).logsumexp(1)
    kl = top_k_kl(torch.cat((rows.gather(1, ids), others[:, None]), 1), teacher)
    (wanted,) = torch.autograd.grad(kl.sum(), exact)

    weight, hidden = policy.t().float(), torch.eye(tokens).requires_grad_()  # logits of token t: row t
    weight.requires_grad_()
    found = linear_logprob(hidden, weight, ids, 1.0, None, entropy_grad=False, rest=True)[0]
    value = top_k_kl(found, teacher.float())
    torch.testing.assert_close(value.double(), kl, rtol=1e-5, atol=1e-6)
    (slope,) = torch.autograd.grad(value.sum(), weight)
    # a probability near 1 is rounded by 6e-8, and what the two agree on cancels
    assert float((slope.t().double() - wanted).norm()) < 5e-5 * float(wanted.norm())


def test_padding_takes_no_part(tile: tuple[int, int]) -> None:
    hidden, weight, targets = make_inputs()
    with torch.no_grad():
        weight[26:] = 100.0
    targets.clamp_(max=25)
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=True, vocab_size=26)
    expected = materialized(hidden, weight[:26], targets, entropy_grad=True)
    assert_all_close(found, expected, 1e-12)
    pairs = [gradients(pair, (hidden, weight), entropy_grad=True) for pair in (found, expected)]
    assert_all_close(*pairs, 1e-12)
    assert not pairs[0][1][26:].any()


@pytest.mark.parametrize("offset", [-300.0, 300.0])
def test_large_logits_stay_finite(tile: tuple[int, int], offset: float) -> None:
    hidden, weight, targets = make_inputs(dtype=torch.float32)
    with torch.no_grad():
        hidden[:, 0], weight[:, 0] = offset, torch.linspace(-1, 1, 30)
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=True)
    grads = gradients(found, (hidden, weight), entropy_grad=True)
    assert all(x.isfinite().all() for x in (*found, *grads))
    assert (found[1] >= 0).all()


def test_no_tokens_have_a_gradient_of_zero(tile: tuple[int, int]) -> None:
    hidden, weight, targets = make_inputs(tokens=0)
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=True)
    assert [x.shape for x in found] == [(0,), (0,)]
    grads = gradients(found, (hidden, weight), entropy_grad=True)
    assert grads[0].shape == (0, 8)
    assert not grads[1].any()


def test_what_is_frozen_gets_no_gradient() -> None:
    hidden, weight, targets = make_inputs()
    found = linear_logprob(hidden, weight.detach(), targets, TEMPERATURE, None, entropy_grad=False)
    found[0].sum().backward()
    assert hidden.grad is not None
    with torch.no_grad():
        silent = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=False)
    assert torch.equal(silent[0], found[0])


# -------------------------------------------------------------------------
# What is kept for backward
# -------------------------------------------------------------------------


class InPlace:
    """Passes that need no other memory than the logits', which ``summarize`` leaves as they are."""

    in_place = True

    def summarize(self, tile: Tile, sums: Sums) -> None:
        module._EAGER.summarize(self._copy(tile), sums)

    def derive(self, tile: Tile, slopes: Slopes) -> Tensor:
        factor = module._EAGER.derive(self._copy(tile), slopes)
        has_logits = tile.logits.shape[1] or tile.kept is None
        memory = tile.logits if has_logits else tile.kept.logits
        return memory.view(tile.dtype)[:, : factor.shape[1]].copy_(factor)

    def _copy(self, tile: Tile) -> Tile:
        assert tile.spare is None
        width = tile.rows.stop - tile.rows.start
        logits = tile.logits.new_empty(len(tile.logits), width)
        if tile.logits.shape[1]:
            logits.copy_(tile.logits)
        return replace(tile, logits=logits, spare=torch.empty_like(logits))


class Keeping(InPlace):
    """The same, which keep logits where there is memory."""

    def peaks(self, width: int) -> int:
        return 1

    def summarize(self, tile: Tile, sums: Sums) -> None:
        assert tile.kept is not None
        kept = tile.kept.logits
        assert not kept.shape[1] or kept.stride() == tile.logits.stride(), "a kernel has one stride for both"
        super().summarize(tile, sums)


TILES = 24
"""Tiles of 5 tokens by 7 rows, of 13 tokens and 50 rows: the last ones of each are smaller."""


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make small tiles; return a list that gets the number of each one whose logits are computed."""
    monkeypatch.setattr(module, "_tile_shape", lambda *_, **__: (5, 7))
    numbers: list[int] = []
    fill = module._Tiles.fill

    def counting(tiles: Any, number: int) -> Tile:
        numbers.append(number)
        return fill(tiles, number)

    monkeypatch.setattr(module._Tiles, "fill", counting)
    return numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("math", [None, InPlace(), Keeping()])
def test_the_budget_changes_no_bit(filled: list[int], math: Any, rest: bool, dtype: torch.dtype) -> None:
    """Nor does a second backward pass, which computes all logits again, or a pass without gradients."""
    hidden, weight, _ = make_inputs(vocab=55, dtype=dtype)
    targets = torch.randint(50, (13, 4), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"entropy_grad": True, "rest": rest, "vocab_size": 50, "math": math}
    ten_tiles = (8 * 3 + 2 * 5) * 32 * dtype.itemsize  # in which rows start at multiples of 32
    results, computed = [], []
    for budget in (0, ten_tiles - 1, ten_tiles, 1 << 30):
        filled.clear()
        options["budget"] = lambda bytes=budget: bytes
        outputs = linear_logprob(hidden, weight, targets, TEMPERATURE, None, **options)
        assert filled == [*range(TILES)]
        loss = outputs[0].sum() + outputs[1].sum()
        first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        computed.append(len(filled) - TILES)
        assert all(map(torch.equal, first, torch.autograd.grad(loss, (hidden, weight))))
        results.append((*outputs, *first))
    with torch.no_grad():
        results.append(linear_logprob(hidden, weight, targets, TEMPERATURE, None, **options))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
    if isinstance(math, Keeping):
        assert computed == [TILES - 1, TILES - 9, TILES - 10, 0]
    elif math is None:
        assert (computed[0], computed[-1]) == (TILES, 0)
    else:
        assert computed == [TILES - 1] * 4, "the last one is in the buffer"


def test_kept_logits_are_freed_one_by_one(filled: list[int]) -> None:
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Watching(Keeping):
        def derive(self, tile: Tile, slopes: Slopes) -> Tensor:
            assert tile.kept is not None
            seen.append(weakref.ref(tile.kept.logits))
            alive.append(sum(ref() is not None for ref in seen))
            return super().derive(tile, slopes)

    hidden, weight, targets = make_inputs(vocab=50)
    options: dict[str, Any] = {"entropy_grad": True, "math": Watching(), "budget": lambda: 1 << 30}
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, **options)
    context: Any = found[1].grad_fn
    assert context.memory.buffers is None, "the memory of a tile is not wanted"
    (found[0].sum() + found[1].sum()).backward()
    assert alive == [1] * TILES
    assert context.memory.buffers is None


def test_the_memory_of_a_tile_is_freed_after_backward() -> None:
    hidden, weight, targets = make_inputs()
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=True, math=InPlace())
    context: Any = found[1].grad_fn
    assert context.memory.buffers is not None, "backward begins with the last logits"
    found[0].sum().backward()
    assert context.memory.buffers is None


@pytest.mark.parametrize(
    ("recorded", "trained", "asked"), [(True, True, 1), (True, False, 0), (False, True, 0)]
)
def test_memory_is_wanted_for_gradients_alone(recorded: bool, trained: bool, asked: int) -> None:
    calls: list[int] = []
    hidden, weight, targets = make_inputs()
    with torch.set_grad_enabled(recorded):
        inputs = [x.detach().requires_grad_(trained) for x in (hidden, weight)]
        budget = lambda: calls.append(1) or 0  # noqa: E731
        linear_logprob(*inputs, targets, TEMPERATURE, None, entropy_grad=False, budget=budget)
    assert len(calls) == asked


def test_likely_tokens_are_kept_precisely() -> None:
    """A logit of 30 in bfloat16 is wrong by 0.06, which is 6 % of a probability."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    logits = 30 + torch.tensor([-1e5, -40.0, -9.0, -1.03, 0.0, -0.01, -0.3, -2.2])
    parts = slice(0, 1), slice(0, 8)
    kept = Kept(torch.empty(1, 1), torch.empty(1, 8, dtype=module._kept_dtype(hidden.dtype)))
    elsewhere, memory = torch.tensor([[8]]), torch.empty(1, 8)
    tile = Tile(*parts, 0, elsewhere, logits[None].clone(), memory, hidden.dtype, 1, kept)
    statistics = module._Statistics.start(hidden, 1, 1)
    module._EAGER.summarize(tile, statistics.sums(parts[0]))
    slopes = Slopes(statistics.base(), statistics.entropy(), torch.ones(1), torch.zeros(1), torch.empty(1, 1))
    tile.logits.fill_(torch.nan)
    probabilities = -module._EAGER.derive(tile, slopes)[0].double()
    expected = logits.double().softmax(0)
    bound = (logits.max() - logits).double() * 2**-11 + 2**-8
    assert ((probabilities - expected).abs() <= bound * expected).all()


@pytest.mark.parametrize("tokens", [1, 64, 512, 8200, 12_000, 131_072])
@pytest.mark.parametrize("rows", [100, 37_984, 151_936])
def test_a_tile_of_an_accelerator_is_bounded(tokens: int, rows: int) -> None:
    height, width = module._tile_shape(tokens, rows, torch.device("meta"), in_place=True)
    assert 0 < height <= tokens
    assert 0 < width <= rows
    smallest, largest = module.SMALLEST_DEVICE_TILE, math.prod(module.DEVICE_TILE)
    assert height * width <= min(largest, max(smallest, tokens * rows // module.DEVICE_SHARE))
    assert (height, width) == (tokens, rows) or height * width > smallest / 4, "no sliver"


# -------------------------------------------------------------------------
# Megatron's main gradient
# -------------------------------------------------------------------------


def with_main_grad(weight: Tensor) -> tuple[torch.nn.Parameter, list[Any]]:
    """Return a parameter as Megatron's DDP leaves it, and what its hook saw."""
    parameter: Any = torch.nn.Parameter(weight.detach().clone())
    parameter.main_grad = torch.ones(weight.shape, dtype=torch.float32)
    parameter.grad_added_to_main_grad = False
    seen: list[Any] = []

    def hook(*_: Any) -> None:
        assert parameter.grad is not None
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad.data)
        seen.append(parameter.grad.layout)
        parameter.grad = None

    parameter.seen = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    parameter.seen.register_hook(hook)
    return parameter, seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_main_gradient_is_added_to_once(tile: tuple[int, int], dtype: torch.dtype) -> None:
    hidden, weight, targets = make_inputs(dtype=dtype)
    parameter, seen = with_main_grad(weight)
    found = linear_logprob(hidden, parameter, targets, TEMPERATURE, None, entropy_grad=False)
    found[0].sum().backward()
    plain = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=False)
    (expected,) = torch.autograd.grad(plain[0].sum(), weight)
    assert_all_close((parameter.main_grad - 1,), (expected,), 1e-6 if dtype == torch.float32 else 1e-2)
    assert parameter.grad_added_to_main_grad is True
    assert seen == [torch.sparse_coo], "the gradient that lets the hook run has memory"


def test_a_second_call_adds_a_second_time() -> None:
    """Multi-token prediction has two losses of one output layer; the hook runs when both are through."""
    hidden, weight, targets = make_inputs(dtype=torch.float32)
    parameter, seen = with_main_grad(weight)
    losses = [
        linear_logprob(hidden * factor, parameter, targets, TEMPERATURE, None, entropy_grad=False)[0].sum()
        for factor in (1.0, 0.5)
    ]
    (losses[0] + losses[1]).backward()
    expected = sum(
        torch.autograd.grad(
            materialized(hidden * factor, weight, targets, entropy_grad=False)[0].sum(), weight
        )[0]
        for factor in (1.0, 0.5)
    )
    assert isinstance(expected, Tensor)
    assert_all_close((parameter.main_grad - 1,), (expected,), 1e-5)
    assert len(seen) == 1


@pytest.mark.parametrize("embedding_first", [False, True])
def test_an_embedding_that_shares_the_weight_keeps_its_gradient(embedding_first: bool) -> None:
    hidden, weight, targets = make_inputs(dtype=torch.float32)
    parameter, seen = with_main_grad(weight)
    parameter.zero_out_wgrad = True

    def loss(weight: Tensor, fn: Any) -> Tensor:
        embedded = torch.nn.functional.embedding(targets, weight)
        return fn(embedded * hidden.detach(), weight)

    def fused(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=False)[0].sum()

    def plain(hidden: Tensor, weight: Tensor) -> Tensor:
        return materialized(hidden, weight, targets, entropy_grad=False)[0].sum()

    extra = parameter.square().sum() if embedding_first else 0.0
    (extra + loss(parameter, fused)).backward()
    wanted = loss(weight, plain) + (weight.square().sum() if embedding_first else 0.0)
    (expected,) = torch.autograd.grad(wanted, weight)
    assert_all_close((parameter.main_grad - 1,), (expected,), 1e-5)
    assert seen == [torch.strided]


# -------------------------------------------------------------------------
# Top-k
# -------------------------------------------------------------------------


def test_topk_is_that_of_all_logits(tile: tuple[int, int]) -> None:
    hidden, weight, _ = make_inputs()
    ids = linear_topk(hidden, weight, 5, None, vocab_size=28)
    assert torch.equal(ids, (hidden @ weight[:28].t()).topk(5, dim=1).indices)


# -------------------------------------------------------------------------
# Memory
# -------------------------------------------------------------------------


@pytest.fixture
def largest() -> Iterator[LargestTensor]:
    with LargestTensor() as mode:
        yield mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_no_tensor_is_as_large_as_all_logits(
    largest: LargestTensor, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, entropy_grad: bool
) -> None:
    monkeypatch.setattr(module, "HOST_TILE", (64, 128))
    tokens, width, vocab = 512, 4, 512
    hidden, weight, targets = make_inputs(tokens, width, vocab, dtype)
    largest.elements = 0
    found = linear_logprob(hidden, weight, targets, TEMPERATURE, None, entropy_grad=entropy_grad)
    (found[0].sum() + (found[1].sum() if entropy_grad else 0.0)).backward()
    ids = linear_topk(hidden, weight, 3, None)
    found = linear_logprob(hidden, weight, ids, TEMPERATURE, None, entropy_grad=False, rest=True)
    found[0].sum().backward()
    assert largest.elements == 2 * 64 * 128, "the two buffers of a tile"
    materialized(hidden, weight, targets, entropy_grad=entropy_grad)
    assert largest.elements == tokens * vocab, "the count sees nothing"
