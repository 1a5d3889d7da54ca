"""cuDNN graphs of packed sequences. The conformance suite checks their results, on a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.kernels.reference import varlen_attention
from anygauge.kernels.table import resolve_kernels
from anygauge.plugins import load_plugins
from anygauge_cuda import attention, cudnn_attention, kernels
from anygauge_cuda.cudnn_attention import (
    BATCH_STEP,
    GRAD,
    GRAD_K,
    GRAD_Q,
    GRAD_V,
    LENGTHS,
    OFFSETS,
    OUT,
    SUMS,
    K,
    Q,
    V,
    _backward_graph,
    _Case,
    _forward_graph,
    _offsets,
    _rounded,
)
from anygauge_cuda.packing import Mask, Packing


def make_case(packing: Packing, *, causal: bool = True, window: int | None = None) -> _Case:
    qkv = torch.empty(sum(packing.queries), 2, 6 * 8, dtype=torch.bfloat16)
    q = torch.empty(len(qkv), 8, 8, dtype=torch.bfloat16)
    k, v = (qkv.view(len(qkv), 2, 6, 8)[:, :, i] for i in (4, 5))
    return _Case.of(q, k, v, packing, 1.0, Mask(causal, window))


def test_lengths_within_a_step_share_a_graph() -> None:
    packings = [Packing.of(lengths, None) for lengths in ((100, 0, 30), (65, 1, 1, 1))]
    first, second = (make_case(Packing(*packing)) for packing in packings)
    assert first.sequences == second.sequences == 4
    assert first.longest == second.longest == 128


@pytest.mark.parametrize(
    ("tokens", "rounded"), [(1, 64), (65, 128), (2047, 2048), (2049, 4096), (16_384, 16_384)]
)
def test_numbers_of_tokens_are_rounded_up(tokens: int, rounded: int) -> None:
    assert _rounded(tokens) == rounded


def test_sequences_begin_where_their_strides_say() -> None:
    packing = Packing.of((3, 0, 2), None)
    offsets = _offsets(make_case(packing), packing)
    starts = [0, 3, 3, 5, 5]
    for name, step in ((Q, 64), (K, 96), (V, 96), (OUT, 64), (SUMS, 8), (GRAD_Q, 64)):
        assert offsets[name - 1] == [step * start for start in starts]


def test_heads_begin_where_several_elements_are_loaded_at_once() -> None:
    """A view of whole steps may begin anywhere, also one that torch calls contiguous."""
    wide = torch.randn(5, 2, 24).bfloat16()
    for x in (wide[..., 3:19], wide.flatten()[3:163].view(5, 2, 16), wide[..., :16].transpose(0, 2)):
        dense = attention._dense(x)
        assert dense.equal(x)
        assert dense.data_ptr() % 16 == 0
        assert dense.is_contiguous()
    for x in (wide[..., 8:], wide[1:, :, :16]):
        assert attention._dense(x) is x, "nothing is copied"


def test_a_part_of_a_sequence_is_not_square() -> None:
    assert Packing.of([3, 2], [3, 2]).is_square
    assert not Packing.of([3, 2], [4, 2]).is_square


def test_a_deterministic_run_has_graphs_of_its_own() -> None:
    packing = Packing.of((3,), None)
    torch.use_deterministic_algorithms(True)
    try:
        exact = make_case(packing)
    finally:
        torch.use_deterministic_algorithms(False)
    assert exact != make_case(packing)


# -------------------------------------------------------------------------
# Graphs
# -------------------------------------------------------------------------


class RecordedTensor:
    """Settings of one of a graph's tensors, by argument or by setter."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        def keep(value: Any) -> RecordedTensor:
            self.facts[name.removeprefix("set_")] = value
            return self

        return keep


class RecordedGraph:
    """A graph that is asked for; nothing is built."""

    def __init__(self, **_: Any) -> None:
        self.tensors: list[RecordedTensor] = []
        self.options: dict[str, Any] = {}
        self.pointers: dict[int, int] = {}

    def tensor(self, **facts: Any) -> RecordedTensor:
        self.tensors.append(RecordedTensor(**facts))
        return self.tensors[-1]

    def sdpa(self, **options: Any) -> list[RecordedTensor]:
        self.options = options
        return [self.tensor() for _ in range(2)]

    def sdpa_backward(self, **options: Any) -> list[RecordedTensor]:
        self.options = options
        return [self.tensor() for _ in range(3)]

    def execute(self, pointers: dict[int, int], workspace: int, handle: Any) -> None:
        self.pointers = pointers

    def facts(self, name: str) -> dict[int, Any]:
        return {tensor.facts["uid"]: tensor.facts.get(name) for tensor in self.tensors}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = SimpleNamespace(FLOAT="float", INT32="int32", INT64="int64", BFLOAT16="bfloat16", HALF="half")
    monkeypatch.setitem(sys.modules, "cudnn", SimpleNamespace(pygraph=RecordedGraph, data_type=kinds))
    monkeypatch.setattr(cudnn_attention, "_handle", lambda device: None)
    monkeypatch.setattr(cudnn_attention, "_built", lambda graph: (graph, 0))
    monkeypatch.setattr(cudnn_attention, "_forward_graph", _forward_graph.__wrapped__)
    monkeypatch.setattr(cudnn_attention, "_backward_graph", _backward_graph.__wrapped__)


RAGGED_OPTIONS = {
    "use_padding_mask",
    "seq_len_q",
    "seq_len_kv",
    "max_total_seq_len_q",
    "max_total_seq_len_kv",
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.usefixtures("recorded")
def test_sequences_of_one_length_are_a_plain_batch(causal: bool) -> None:
    case = make_case(Packing.of((1536,) * 3, None), causal=causal)
    forward, backward = (
        make(case)[0] for make in (cudnn_attention._forward_graph, cudnn_attention._backward_graph)
    )
    for graph in (forward, backward):
        assert not set(graph.facts("ragged_offset").values()) - {None}
        assert not RAGGED_OPTIONS & set(graph.options)
        assert graph.options["use_causal_mask"] is causal
        assert graph.options["use_causal_mask_bottom_right"] is False
    queries, keys, sums = (3, 8, 1536, 8), (3, 2, 1536, 8), (3, 8, 1536, 1)
    assert forward.facts("dim") == {Q: queries, K: keys, V: keys, OUT: queries, SUMS: sums}
    whole, shared = (1536 * 64, 8, 64, 1), (1536 * 96, 48, 96, 1)  # keys and values lie among queries
    by_head = (8 * 1536, 1536, 1, 1)
    assert forward.facts("stride") == {Q: whole, K: shared, V: shared, OUT: whole, SUMS: by_head}
    own = (1536 * 16, 8, 16, 1)
    grads = {GRAD: whole, GRAD_Q: whole, GRAD_K: own, GRAD_V: own}
    assert backward.facts("stride") == {**forward.facts("stride"), **grads}
    assert forward.facts("data_type")[SUMS] == backward.facts("data_type")[SUMS] == "float"
    assert backward.options["use_deterministic_algorithm"] is False
    names = ("q", "k", "v", "o", "dO", "stats")
    given = [backward.options[name].facts["uid"] for name in names]
    assert given == [Q, K, V, OUT, GRAD, SUMS]


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("window", [None, 7])
def test_only_a_window_is_an_option_of_its_own(window: int | None) -> None:
    case = make_case(Packing.of((3, 9), (5, 9)), window=window)
    for make in (cudnn_attention._forward_graph, cudnn_attention._backward_graph):
        options = make(case)[0].options
        assert options.get("sliding_window_length") == window
        assert options["use_causal_mask_bottom_right"] is True


def test_a_window_that_hides_nothing_is_none() -> None:
    packing = Packing.of((3, 9), (5, 12))
    assert [Mask.of(packing, True, window).window for window in (11, 12, 13, None)] == [11, None, None, None]


def test_flash_attention_counts_the_tokens_before_a_token() -> None:
    assert attention._flash_window(Mask(True, 4)) == {"window_size_left": 3, "window_size_right": 0}
    assert attention._flash_window(Mask(True)) == {}


def test_sinks_are_added_to_what_a_kernel_without_them_returns() -> None:
    """The backward kernel is given output and log-sum-exp with the sinks in them."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(12, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    given = {"lengths": (5, 7), "scale": 0.3, "causal": True, "return_lse": True, "window": 3}
    expected, total = varlen_attention(q, k, v, **given, sinks=sinks)
    (slope,) = torch.autograd.grad(expected, sinks, grad)
    output, sums = attention._with_sinks(*varlen_attention(q, k, v, **given), sinks.detach())
    torch.testing.assert_close((output, sums), (expected.detach(), total), rtol=1e-6, atol=1e-6)
    found = attention._sink_gradient(grad, output, sums, sinks.detach())
    torch.testing.assert_close(found, slope, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 4), (2, 4, 3)])
def test_a_log_sum_exp_goes_back_to_the_form_that_cudnn_has(shape: tuple[int, ...]) -> None:
    sums = torch.randn(shape)
    by_token = cudnn_attention.by_token(sums)
    assert by_token.shape == (6, 4)
    assert torch.equal(cudnn_attention.as_stored(by_token, sums), sums)


@pytest.mark.usefixtures("recorded")
def test_other_sequences_are_ragged() -> None:
    case = make_case(Packing.of((1536, 1536, 1024), None))
    forward, backward = (
        make(case)[0] for make in (cudnn_attention._forward_graph, cudnn_attention._backward_graph)
    )
    for graph in (forward, backward):
        names = [name for name in graph.facts("dim") if name < LENGTHS]
        offsets = graph.facts("ragged_offset")
        assert [offsets[name].facts["uid"] for name in names] == [OFFSETS + name for name in names]
        assert graph.options["use_padding_mask"] is True
        assert graph.facts("dim")[Q] == (4, 8, 2048, 8)
        assert graph.facts("stride")[SUMS] == (8 * 2048, 1, 8, 1)
    assert set(backward.options) >= RAGGED_OPTIONS
    assert backward.options["max_total_seq_len_q"] == 4096


@pytest.mark.parametrize(
    ("lengths", "key_lengths", "is_batch"),
    [
        ((BATCH_STEP,), None, True),
        ((2 * BATCH_STEP,) * 3, None, True),
        ((BATCH_STEP,) * 16, None, True),
        ((BATCH_STEP,) * 15, None, False),
        ((BATCH_STEP + 1,) * 2, None, False),
        ((BATCH_STEP // 2,) * 2, None, False),
        ((BATCH_STEP, 2 * BATCH_STEP), None, False),
        ((BATCH_STEP, 0), None, False),
        ((BATCH_STEP,), (2 * BATCH_STEP,), False),
        ((BATCH_STEP, BATCH_STEP), (2 * BATCH_STEP, BATCH_STEP), False),
    ],
)
def test_a_batch_is_of_sizes_that_come_again(
    lengths: tuple[int, ...], key_lengths: tuple[int, ...] | None, is_batch: bool
) -> None:
    assert make_case(Packing.of(lengths, key_lengths)).is_batch is is_batch


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.usefixtures("recorded")
def test_the_log_sum_exp_of_a_batch_is_handed_out_by_token(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = count * BATCH_STEP
    seen: list[dict[int, int]] = []

    def run(built: Any, tensors: dict[int, torch.Tensor], case: _Case, packing: Packing) -> None:
        seen.append({name: tensor.data_ptr() for name, tensor in tensors.items()})
        if SUMS in tensors and GRAD not in tensors:
            tensors[SUMS].copy_(torch.arange(tokens * 2.0).view(count, BATCH_STEP, 2).transpose(1, 2))

    monkeypatch.setattr(cudnn_attention, "_run", run)
    q, k, v = (torch.ones(tokens, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    output, sums = attention.by_cudnn(q, k, v, (BATCH_STEP,) * count, 1.0, causal=True, return_lse=True)
    assert torch.equal(sums, torch.arange(tokens * 2.0).view(tokens, 2))
    output.sum().backward()
    forward, backward = seen
    assert backward[SUMS] == forward[SUMS], "backward reads what forward wrote"


@pytest.mark.usefixtures("recorded")
def test_a_batch_brings_nothing_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_attention, "_on_device", None)
    packing = Packing.of((BATCH_STEP,), None)
    case, graph = make_case(packing), RecordedGraph()
    tensors = {name: torch.empty(1) for name in (Q, K, V, OUT, SUMS)}
    cudnn_attention._run((graph, 0), tensors, case, packing)
    assert graph.pointers == {name: tensor.data_ptr() for name, tensor in tensors.items()}


# -------------------------------------------------------------------------
# Choice
# -------------------------------------------------------------------------


@pytest.mark.parametrize(("installed", "found"), [(True, attention.by_cudnn), (False, attention.by_flash)])
def test_cudnn_serves_where_its_frontend_is_installed(
    installed: bool, found: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "anygauge.kernels.table._is_installed", lambda module: installed and module == "cudnn"
    )
    monkeypatch.setattr(kernels, "tile_math", lambda: None)
    plugins = load_plugins()
    table = resolve_kernels(plugins, plugins.get("register_backends", "cuda"))
    for extras in ((), ("return_lse",), ("has_window",), ("has_sinks",), ("has_window", "has_sinks")):
        has = {extra: extra in extras for extra in ("return_lse", "has_window", "has_sinks")}
        facts: dict[str, Any] = {"head_dim": 128, "value_dim": 128, "causal": True, **has}
        assert table.resolve("varlen_attention", dtype=torch.bfloat16, **facts) is found
        in_float32 = table.resolve("varlen_attention", dtype=torch.float32, **facts)
        assert in_float32.__module__.endswith("reference")


@pytest.mark.parametrize(("capability", "is_for_it"), [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_older_gpus_take_torchs_attention(
    capability: tuple[int, int], is_for_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    sources = {kernel.source for kernel in kernels._attention()}
    assert ("cudnn.pygraph.sdpa" in sources) is is_for_it
    assert "torch.ops.aten._flash_attention_forward" in sources
