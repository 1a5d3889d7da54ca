"""Linears that add to the main gradient, and what is kept for them: against Megatron's own and autograd's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches
from anygauge_tests.engine_config import engine_config

VOCAB = 64
Seed = Callable[..., Tensor]


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    from anygauge.engines.megatron.prepare import prepare_megatron

    plugins = load_plugins()
    prepare_megatron(plugins, plugins.get("register_backends", "cpu"))


@pytest.fixture
def draw() -> Seed:
    generator = torch.Generator().manual_seed(3)

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return make


def test_without_a_main_gradient_it_is_an_ordinary_linear(draw: Seed) -> None:
    from anygauge.engines.megatron.layers.linear import linear

    x, weight, grad = draw(5, 1, 8).requires_grad_(), nn.Parameter(draw(6, 8)), draw(5, 1, 6)
    expected = torch.autograd.grad(torch.matmul(x, weight.t()), (x, weight), grad)
    output = linear(x, weight)
    assert output.equal(torch.matmul(x, weight.t()))
    for one, other in zip(torch.autograd.grad(output, (x, weight), grad), expected, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_product_replaces_and_others_add(draw: Seed, dtype: torch.dtype) -> None:
    from anygauge.engines.megatron.gradients import begin_gradients, complete_gradients, replace_first
    from anygauge.engines.megatron.layers.linear import linear

    weights = [nn.Parameter(draw(6, 8, dtype=dtype)) for _ in range(3)]
    used, unused, other = weights
    for weight in weights:
        weight.main_grad = torch.full((6, 8), torch.nan)  # type: ignore[attr-defined]
    replace_first(used)
    replace_first(unused)
    reset: list[str] = []
    group = SimpleNamespace(reset=lambda: reset.append("group"))
    chunk = SimpleNamespace(
        params_with_grad=weights, bucket_groups=[group], expert_parallel_bucket_groups=[group]
    )
    begin_gradients([chunk])
    assert reset == ["group", "group"]
    assert used.main_grad.isnan().all(), "nothing is written twice"
    assert other.main_grad.eq(0).all()
    expected = torch.zeros(6, 8)
    for _ in range(2):
        x, grad = draw(5, 1, 8, dtype=dtype), draw(5, 1, 6, dtype=dtype)
        linear(x, used).backward(grad)
        expected += grad.flatten(0, 1).t() @ x.flatten(0, 1)
        assert used.grad is not None
        assert used.grad.is_sparse
        assert used.grad._nnz() == 0, "what autograd has takes no memory"
        assert used.grad_added_to_main_grad
    complete_gradients([chunk])
    torch.testing.assert_close(used.main_grad, expected)
    assert unused.main_grad.eq(0).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_kept(draw: Seed, frozen: bool) -> None:
    """The input, or what it is made from; of a frozen weight's linear neither."""
    from anygauge.engines.megatron.layers.linear import linear
    from anygauge.engines.megatron.layers.recompute import can_be_made

    weight, source = nn.Parameter(draw(6, 8), requires_grad=not frozen), draw(5, 8).requires_grad_()
    grads, made = [], []

    def sine(x: Tensor) -> Tensor:
        made.append(x)
        return x.sin()

    for remade in (False, True):
        x = source.sin()
        x = can_be_made(x, sine, source) if remade else x
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = linear(x, weight)
        expected = [weight] if frozen else [weight, source if remade else x]
        assert [each.data_ptr() for each in kept] == [each.data_ptr() for each in expected]
        inputs = [source] if frozen else [source, weight]
        grads.append(torch.autograd.grad(output.sin().sum(), inputs))
    assert len(made) == (0 if frozen else 1)
    for one, other in zip(*grads, strict=True):
        assert one.equal(other)


def test_what_is_looked_at_alone_keeps_nothing(draw: Seed) -> None:
    from anygauge.engines.megatron.layers.recompute import can_be_made, recipe_of

    with torch.no_grad():
        assert recipe_of(can_be_made(draw(2), torch.sin, draw(2))) is None


# -------------------------------------------------------------------------
# In the engine
# -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=VOCAB, head_dim=32, init_std=0.2)


@pytest.fixture
def make_engine(context: WorkerContext, plugins: Plugins, checkpoint: Path) -> Callable[..., Any]:
    def make(**train: Any) -> Any:
        config = engine_config(
            checkpoint, train={"lr": 1e-3, "micro_batch_tokens": 48, "clip_grad": 0.0, **train}
        )
        return plugins.get("register_train_engines", "megatron").make(config, context)

    return make


def two_steps(engine: Any) -> dict[str, Tensor]:
    """Return the main gradients of the second step, of several micro-batches."""
    samples = batches.random_samples(((17, 15), (40, 38), (33, 31)), 18, VOCAB)
    for _ in range(2):
        batches.train_step(engine, samples)
    return {name: weight.main_grad.clone() for name, weight in engine.chunks[0].named_parameters()}


@pytest.fixture
def megatron_linears(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the engine take Megatron's own linears."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from anygauge.engines.megatron.layers.provider import SpecProvider

    with monkeypatch.context() as patch:
        patch.setattr(SpecProvider, "column_parallel_linear", lambda _: ColumnParallelLinear)
        patch.setattr(SpecProvider, "row_parallel_linear", lambda _: RowParallelLinear)
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_equal_those_of_megatrons_linears(
    make_engine: Callable[..., Any], request: pytest.FixtureRequest, dtype: str
) -> None:
    actual = two_steps(make_engine(dtype=dtype))
    remade = two_steps(make_engine(dtype=dtype, recompute="elementwise"))
    request.getfixturevalue("megatron_linears")
    expected = two_steps(make_engine(dtype=dtype))
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        assert grad.equal(remade[name]), f"{name}: made again, it is not the same"
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("dtype", "recompute"),
    [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "elementwise"), ("bfloat16", "full")],
)
def test_the_short_way_of_a_layer_gives_the_bits_of_megatrons(
    make_engine: Callable[..., Any], dtype: str, recompute: str
) -> None:
    found = []
    for is_short in (True, False):
        engine = make_engine(dtype=dtype, recompute=recompute)
        calls: list[Any] = []
        for layer in engine.policy.chunks[0].decoder.layers:
            assert layer.is_short
            layer.is_short = is_short
            for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
                norm.add = partial(noted, norm.add, calls)
        found.append(two_steps(engine))
        assert bool(calls) == is_short
    for name, grad in found[0].items():
        assert grad.equal(found[1][name]), name


def test_a_layer_that_a_provider_replaced_does_not_go_past_it(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    monkeypatch.setattr(TransformerLayer, "forward", lambda *_, **__: None)
    layers = make_engine().policy.chunks[0].decoder.layers
    assert not any(layer.is_short for layer in layers)


def test_an_embedding_that_a_provider_replaced_stays(
    make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    monkeypatch.setattr(VocabParallelEmbedding, "forward", lambda *_: None)
    found = make_engine().policy.chunks[0].embedding.word_embeddings
    assert type(found) is VocabParallelEmbedding


def test_an_output_is_made_again_by_the_op_that_made_it(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(dtype="bfloat16", recompute="elementwise")
    norm = engine.policy.chunks[0].decoder.layers[0].input_layernorm
    calls: list[str] = []
    for name in ("add", "kernel"):
        setattr(norm, name, partial(noted_name, name, getattr(norm, name), calls))
    two_steps(engine)
    assert set(calls) == {"add"}, "forward and backward"


def noted_name(name: str, fn: Callable[..., Any], calls: list[str], *arguments: Any) -> Any:
    calls.append(name)
    return fn(*arguments)


def noted(fn: Callable[..., Any], calls: list[Any], *arguments: Any) -> Any:
    calls.append(arguments)
    return fn(*arguments)


def test_norms_and_activations_are_kept_once(make_engine: Callable[..., Any]) -> None:
    """Each layer keeps 2 H + F numbers of a token less."""
    kept = {}
    for recompute in ("none", "elementwise"):
        engine = make_engine(recompute=recompute)
        found: dict[int, int] = {}

        def keep(tensor: Tensor, found: dict[int, int] = found) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        config = engine.policy.options.transformer
        layer = engine.policy.chunks[0].decoder.layers[0]
        hidden = torch.randn(7, 1, config.hidden_size, requires_grad=True)
        made: list[Any] = []
        for module in (layer.pre_mlp_layernorm, layer.mlp.activation_func):
            module.register_forward_hook(
                lambda _, inputs, output, made=made: made.append(weakref.ref(output))
            )
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = layer.mlp(layer.pre_mlp_layernorm(hidden))[0]
        kept[recompute] = sum(found.values())
        assert len(made) == 2
        assert all((each() is None) == (recompute == "elementwise") for each in made), "it is held elsewhere"
        output.sum().backward()
    assert kept["none"] - kept["elementwise"] == 7 * 4 * (config.hidden_size + config.ffn_hidden_size)
