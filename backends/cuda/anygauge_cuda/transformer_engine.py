"""Transformer Engine, where a run chooses it: its norms, linears and experts, and its attention as a kernel.

The modules are those that Megatron derives from Transformer Engine's. Attention is Transformer Engine's own:
rotary embedding, packing and context parallelism stay with the engine, and what Megatron derives from it
would do them once more. Names and signatures are those of release 2.11 (``signatures/`` beside this package);
it has never run here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anygauge_hooks.errors import ProviderError
from anygauge_hooks.kernels import KernelImpl
from anygauge_hooks.settings import RunConfig
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NAME", "Modules", "attend", "missing", "option_problems", "provide"]

NAME = "transformer_engine"
PACKAGE = "transformer-engine"
"""The distribution that has the version."""
SINCE, BEFORE = (2, 9), (2, 12)
"""The releases that megatron-core 0.16.1 is made for."""
INSTALL = (
    "pip install 'transformer-engine[pytorch,core_cu13]==2.11.0' --no-build-isolation; core_cu12 for CUDA 12"
)
EXTENSION = "megatron.core.extensions.transformer_engine"
EXPERTS = "megatron.core.transformer.moe.experts"
HEAD_SIZES = range(8, 257, 8)
UNSERVED = ("return_lse", "has_window", "has_sinks")
"""Facts of an attention that this one is not taken for; another kernel of the table is."""


def provide() -> Modules:
    """Return the modules.

    :raises ProviderError: It is not installed, or in a version that Megatron is not made for.
    """
    if not _is_installed():
        raise ProviderError(
            f"train.provider is {NAME!r}, which is not installed in this environment.",
            hint=f"{INSTALL}. Without the key the backend's own kernels are used.",
        )
    installed = _version()
    if installed is not None and not SINCE <= installed < BEFORE:
        raise ProviderError(
            f"Transformer Engine {version(PACKAGE)} is not one that megatron-core 0.16.1 is made for.",
            hint=f"{INSTALL}.",
        )
    return Modules()


def option_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield each of ``train.provider_options``: there are none."""
    if config.train.provider != NAME:
        return
    for name, value in config.train.provider_options.items():
        hint = f"{NAME} takes no options; its environment variables begin with NVTE_"
        yield ConfigProblem(path=f"train.provider_options.{name}", found=value, hint=hint)


def missing(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield a problem if the library is chosen but not installed, without importing it."""
    if config.train.provider == NAME and not _is_installed():
        yield ConfigProblem(path="train.provider", found=NAME, hint=f"it is not installed: {INSTALL}")


class Modules:
    """Transformer Engine's modules, by the part of a layer. All other parts stay as they are."""

    def norm(self) -> Any:
        """Return the norm of hidden states, queries and keys."""
        return _megatrons(EXTENSION, "TENorm")

    def column_parallel_linear(self) -> Any:
        """Return the linear whose output is split."""
        return _megatrons(EXTENSION, "TEColumnParallelLinear")

    def row_parallel_linear(self) -> Any:
        """Return the linear whose input is split."""
        return _megatrons(EXTENSION, "TERowParallelLinear")

    def experts(self) -> Any:
        """Return the builder of the experts of a rank: grouped linears, one weight for each expert."""
        submodules = SimpleNamespace(
            linear_fc1=_megatrons(EXTENSION, "TEColumnParallelGroupedLinear"),
            linear_fc2=_megatrons(EXTENSION, "TERowParallelGroupedLinear"),
            activation_func=_megatrons(EXTENSION, "TEActivationOp"),
        )
        return SimpleNamespace(module=_megatrons(EXPERTS, "TEGroupedMLP"), submodules=submodules, params={})

    def preferred_kernels(self) -> Iterable[KernelImpl]:
        """Return the attention."""
        yield KernelImpl(
            op="varlen_attention",
            fn=attend,
            source="transformer_engine.pytorch.DotProductAttention",
            dtypes=("bfloat16", "float16"),
            limits={"head_dim": HEAD_SIZES, "value_dim": HEAD_SIZES, **dict.fromkeys(UNSERVED, (False,))},
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    scale: float,
    *,
    causal: bool,
    key_lengths: Sequence[int] | None = None,
    return_lse: bool = False,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within each packed sequence; see :class:`anygauge_hooks.kernels.VarlenAttention`.

    Transformer Engine chooses among flash-attn, cuDNN and its own (``NVTE_FLASH_ATTN``, ``NVTE_FUSED_ATTN``).

    :param q: ``[T, H, D]``.
    :param k: ``[S, K, D]``.
    :param v: ``[S, K, E]``.
    :param return_lse: Refused by the limits above, as are the next two.
    :returns: ``[T, H, E]``.
    """
    from anygauge_cuda.attention import cumulative

    assert (return_lse, window, sinks) == (False, None, None)
    (tokens, heads, width), (_, groups, size) = q.shape, v.shape
    if not tokens:
        return q.new_zeros(0, heads, size) + 0 * (q.sum() + k.sum() + v.sum())
    queries, keys = tuple(lengths), tuple(lengths if key_lengths is None else key_lengths)
    mask = "padding" if not causal else "padding_causal" if queries == keys else "padding_causal_bottom_right"
    output = _attention(heads, groups, width, size, scale)(
        q,
        k,
        v,
        qkv_format="thd",
        cu_seqlens_q=cumulative(queries, q.device),
        cu_seqlens_kv=cumulative(keys, q.device),
        max_seqlen_q=max(queries),
        max_seqlen_kv=max(keys),
        attn_mask_type=mask,
    )
    result: Tensor = output.view(tokens, heads, size)
    return result


@cache
def _attention(heads: int, groups: int, width: int, size: int, scale: float) -> Any:
    """Return the module, which holds no weights: one serves all layers of a shape."""
    return importlib.import_module("transformer_engine.pytorch").DotProductAttention(
        num_attention_heads=heads,
        kv_channels=(width, size),
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        softmax_scale=scale,
    )


def _megatrons(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _is_installed() -> bool:
    return importlib.util.find_spec(NAME) is not None


def _version() -> tuple[int, ...] | None:
    """Return the first two numbers of the version; a build of one's own may have none."""
    try:
        return tuple(int(part) for part in version(PACKAGE).split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return None
