"""What cuDNN is told of packed sequences. What it makes of that the conformance suite looks at, on a GPU."""

from __future__ import annotations

import pytest
import torch

from anygauge.kernels.table import resolve_kernels
from anygauge.plugins import load_plugins
from anygauge_cuda import attention, kernels
from anygauge_cuda.cudnn_attention import GRAD_Q, OUT, SUMS, K, Q, V, _Case, _offsets, _rounded
from anygauge_cuda.packing import Packing


def make_case(packing: Packing, *, causal: bool = True) -> _Case:
    qkv = torch.empty(sum(packing.queries), 2, 6 * 8, dtype=torch.bfloat16)
    q = torch.empty(len(qkv), 8, 8, dtype=torch.bfloat16)
    k, v = (qkv.view(len(qkv), 2, 6, 8)[:, :, i] for i in (4, 5))
    return _Case.of(q, k, v, packing, 1.0, causal)


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
    facts = {"head_dim": 128, "value_dim": 128, "causal": True, "return_lse": False}
    assert table.resolve("varlen_attention", dtype=torch.bfloat16, **facts) is found
    assert table.resolve("varlen_attention", dtype=torch.float32, **facts).__module__.endswith("reference")


@pytest.mark.parametrize(("capability", "is_for_it"), [((8, 0), False), ((9, 0), True), ((10, 0), True)])
def test_older_gpus_take_torchs_attention(
    capability: tuple[int, int], is_for_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    sources = {kernel.source for kernel in kernels._attention()}
    assert ("cudnn.pygraph.sdpa" in sources) is is_for_it
    assert "torch.ops.aten._flash_attention_forward" in sources
