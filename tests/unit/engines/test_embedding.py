"""The embedding that adds rows to the main gradient. In the engine it is in ``test_output_layer.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anygauge.kernels import main_grad
from anygauge.kernels.main_grad import FIRST, add_rows
from anygauge.plugins import load_plugins


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    from anygauge.engines.megatron.prepare import prepare_megatron

    plugins = load_plugins()
    prepare_megatron(plugins, plugins.get("register_backends", "cpu"))


def integers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers whose sums no type here has to round."""
    return torch.randint(-64, 64, shape, generator=torch.Generator().manual_seed(5)).to(dtype)


def make_weight(rows: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    weight: Any = nn.Parameter(integers(rows, width, dtype=dtype))
    weight.main_grad = 3 * integers(rows, width)
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 7), (5, 400), (300, 400), (300, 1), (300, 0)])
def test_rows_are_added_to_the_bit(
    rows: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_grad, "ROWS", 64)
    ids = torch.randint(0, rows, (tokens,), generator=torch.Generator().manual_seed(1))
    grad, weight = integers(tokens, 24, dtype=dtype), make_weight(rows, 24, dtype)
    expected = weight.main_grad.double().index_add(0, ids, grad.double())
    add_rows(weight, ids, grad)
    assert weight.main_grad.dtype == torch.float32
    assert weight.main_grad.double().equal(expected)


def test_rows_are_not_rounded_on_the_way() -> None:
    """One in bfloat16 and 1/256 of it is not a number of bfloat16."""
    weight = make_weight(2, 1)
    weight.main_grad.zero_()
    add_rows(weight, torch.tensor([1, 1]), torch.tensor([[1.0], [2.0**-8]], dtype=torch.bfloat16))
    assert weight.main_grad.flatten().tolist() == [0.0, 1 + 2.0**-8]


def test_the_first_gradient_of_a_step_replaces() -> None:
    """It may be that of the embedding, on a stage without the output layer or where no token is asked for."""
    weight, grad = make_weight(3, 2), torch.ones(2, 2)
    weight.main_grad.fill_(torch.nan)
    setattr(weight, FIRST, True)
    add_rows(weight, torch.tensor([2, 2]), grad)
    assert weight.main_grad.tolist() == [[0, 0], [0, 0], [2, 2]]
    add_rows(weight, torch.tensor([0, 2]), grad)
    assert weight.main_grad.tolist() == [[1, 1], [0, 0], [3, 3]]


def test_nothing_is_as_large_as_the_weight() -> None:
    from anygauge.engines.megatron.layers.embedding import embedding

    weight, ids = make_weight(500, 16), torch.tensor([[7, 3, 7]])
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            made = [x for x in tree_leaves(found) if isinstance(x, Tensor) and not x.is_sparse]
            known = {weight.data_ptr(), weight.main_grad.data_ptr()}
            sizes.extend(x.numel() for x in made if x.data_ptr() not in known)
            return found

    output = embedding(ids, weight)
    with Sizes():
        output.sum().backward()
    assert sizes
    assert max(sizes) == 500, "the places of ids, one number for a row"
    assert weight.grad_added_to_main_grad
    assert weight.grad.is_sparse
    assert weight.grad._nnz() == 0


@pytest.mark.parametrize("frozen", [False, True])
def test_without_a_main_gradient_it_is_torchs(frozen: bool) -> None:
    from anygauge.engines.megatron.layers.embedding import embedding

    weight, ids = nn.Parameter(integers(9, 4), requires_grad=not frozen), torch.tensor([[1, 8], [1, 0]])
    found = embedding(ids, weight)
    assert found.equal(F.embedding(ids, weight))
    assert found.requires_grad is not frozen
    if not frozen:
        (expected,) = torch.autograd.grad(F.embedding(ids, weight).sum(), weight)
        assert torch.autograd.grad(found.sum(), weight)[0].equal(expected)
