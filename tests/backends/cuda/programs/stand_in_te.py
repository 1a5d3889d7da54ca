"""Stand-in for Transformer Engine 2.11: its signatures, and host arithmetic for one rank.

A call that its signature would refuse is refused. Nothing here says how it computes, or how fast.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTRACT = Path(__file__).parents[4] / "backends/cuda/signatures/transformer_engine-2.11.0.json"
KNOWN = json.loads(CONTRACT.read_text())
CALLS: list[str] = []
"""Methods that were called, in order."""
ARGUMENTS: dict[str, list[dict[str, Any]]] = {}
"""Arguments that each call passed, by method."""


def signature(name: str) -> inspect.Signature:
    """Return the signature that the contract has of a method."""
    scope: dict[str, Any] = {}
    exec(f"def method({KNOWN['signatures'][name]}): ...", scope)
    return inspect.signature(scope["method"])


def bound(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a method take its arguments as the contract has them, by name, defaults filled in."""
    known = signature(name)

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = known.bind(self, *args, **kwargs)
            CALLS.append(name)
            ARGUMENTS.setdefault(name, []).append(dict(found.arguments))
            found.apply_defaults()
            return method(**found.arguments)

        return call

    return decorate


class Stateful(nn.Module):
    """State that every module of the library has besides its tensors."""

    def get_extra_state(self) -> Tensor:
        """Return the state of FP8: none."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""


def marked(weight: nn.Parameter, mode: str | None) -> nn.Parameter:
    """Return a weight with the marks that Megatron looks for."""
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    weight.partition_dim = 1 if mode == "row" else 0  # type: ignore[attr-defined]
    weight.partition_stride = 1  # type: ignore[attr-defined]
    return weight


class Linear(Stateful):
    """``x @ weight.T``."""

    @bound("Linear.__init__")
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        assert options["tp_size"] == 1
        self.parallel_mode = options["parallel_mode"]
        size = (out_features, in_features)
        weight = torch.empty(size, dtype=options["params_dtype"], device=options["device"])
        self.weight = marked(nn.Parameter(weight), self.parallel_mode)

    @bound("Linear.forward")
    def forward(self, inp: Tensor, **_: Any) -> Tensor:
        """Multiply."""
        return F.linear(inp, self.weight)


class GroupedLinear(Stateful):
    """The same with a weight for each expert."""

    @bound("GroupedLinear.__init__")
    def __init__(self, num_gemms: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__()
        assert options["tp_size"] == 1
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            size = (out_features, in_features)
            weight = torch.empty(size, dtype=options["params_dtype"], device=options["device"])
            setattr(self, f"weight{index}", marked(nn.Parameter(weight), options["parallel_mode"]))

    @bound("GroupedLinear.forward")
    def forward(self, inp: Tensor, m_splits: list[int], **_: Any) -> Tensor:
        """Multiply the rows of each expert."""
        parts = inp.split(m_splits)
        return torch.cat([F.linear(x, getattr(self, f"weight{i}")) for i, x in enumerate(parts)])


class FusedRmsNorm(nn.Module):
    """The operation that the norm is."""

    @bound("ops.RMSNorm.__init__")
    def __init__(self, normalized_shape: int, **options: Any) -> None:
        super().__init__()
        self.eps = options["eps"]
        weight = torch.ones(normalized_shape, dtype=options["dtype"], device=options["device"])
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class RMSNorm(FusedRmsNorm):
    """The norm under the names that Megatron gives its arguments."""

    @bound("RMSNorm.__init__")
    def __init__(self, **options: Any) -> None:
        shape = options.pop("normalized_shape") or options["hidden_size"]
        kept = {name: options[name] for name in ("eps", "zero_centered_gamma")}
        super().__init__(shape, dtype=options["params_dtype"], **kept, **options["kwargs"])
        self.weight.sequence_parallel = options["sequence_parallel"]  # type: ignore[attr-defined]


class DotProductAttention(Stateful):
    """Attention over packed sequences."""

    @bound("DotProductAttention.__init__")
    def __init__(self, num_attention_heads: int, num_gqa_groups: int, **options: Any) -> None:
        super().__init__()
        assert num_attention_heads % num_gqa_groups == 0
        self.scale = options["softmax_scale"]

    @bound("DotProductAttention.forward")
    def forward(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **options: Any) -> Tensor:
        """Attend, sequence by sequence; the result has one dimension for all heads."""
        assert options["qkv_format"] == "thd"
        edges = [options[f"cu_seqlens_{side}"] for side in ("q", "kv")]
        assert all(edge.dtype == torch.int32 for edge in edges)
        longest = [int(edge.diff().max()) for edge in edges]
        assert longest == [options["max_seqlen_q"], options["max_seqlen_kv"]]
        bounds = zip(*(pairwise(edge.tolist()) for edge in edges), strict=True)
        outputs = [
            self._one(query_layer[a:b], key_layer[c:d], value_layer[c:d], options["attn_mask_type"])
            for (a, b), (c, d) in bounds
        ]
        return torch.cat(outputs).flatten(1)

    def _one(self, q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        later = {"padding": len(k), "padding_causal": 0, "padding_causal_bottom_right": len(k) - len(q)}[kind]
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(later)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        output = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale, enable_gqa=True)
        return output[0].transpose(0, 1)


class SwiGLU(nn.Module):
    """The gated activation."""

    @bound("ops.SwiGLU.__init__")
    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Gate with the first half."""
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


def unused(*names: str) -> dict[str, type]:
    """Return classes that are named where Megatron is imported, and not called."""
    return {name: type(name, (nn.Module,), {}) for name in names}


def library(name: str, members: dict[str, Any], parts: Iterable[ModuleType] = ()) -> ModuleType:
    """Register a module of the library."""
    module = sys.modules[name] = ModuleType(name)
    module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    vars(module).update(members, **{part.__name__.rpartition(".")[2]: part for part in parts})
    return module


def install() -> None:
    """Let this process find the library; before Megatron is imported."""
    top = "transformer_engine"
    router = (
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
        "fused_topk_with_score_function",
    )
    parts = [
        library(f"{top}.pytorch.fp8", unused("FP8GlobalStateManager", "fp8_autocast")),
        library(f"{top}.pytorch.distributed", unused("CudaRNGStatesTracker", "activation_recompute_forward")),
        library(f"{top}.pytorch.tensor", unused("QuantizedTensor")),
        library(f"{top}.pytorch.router", unused(*router)),
        library(f"{top}.pytorch.ops", {"SwiGLU": SwiGLU, **unused("Sequential", "FusibleOperation")}),
    ]
    members = {each.__name__: each for each in (Linear, GroupedLinear, RMSNorm, DotProductAttention)}
    pytorch = library(f"{top}.pytorch", {**members, **unused("LayerNorm", "LayerNormLinear")}, parts)
    common = library(f"{top}.common", {}, [library(f"{top}.common.recipe", unused("DelayedScaling"))])
    library(top, {"__version__": KNOWN["version"]}, [pytorch, common])
