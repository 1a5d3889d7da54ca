"""The fields of Megatron's configs, read from its source without importing it.

A config is checked on the driver, where Megatron would cost seconds and would be imported before it is
prepared for the backend.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from anygauge_hooks.types import ConfigProblem

__all__ = ["config_fields", "option_problems"]

_FILES = {
    "transformer": ("model_parallel_config.py", "transformer/transformer_config.py"),
    "ddp": ("distributed/distributed_data_parallel_config.py",),
    "optimizer": ("optimizer/optimizer_config.py",),
}
_CLASSES = {"ModelParallelConfig", "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"}

_FAMILY = "The model family decides it."
_ENGINE = "The engine decides it."
_DROPOUT = "A policy is trained without dropout: its ratio to the policy that sampled would be noise."
_PRECISION = "Use train.dtype."
_REPEATABLE = "Use run.deterministic."

_REFUSED = {
    "enable_autocast": "Megatron binds its autocast decorators to one vendor at import; use train.dtype.",
    **dict.fromkeys(("fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype"), _PRECISION),
    **{name: f"Use train.{name}." for name in ("lr", "min_lr", "weight_decay", "adam_eps", "clip_grad")},
    "deterministic_mode": _REPEATABLE,
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "Use train.adam_betas."),
    **dict.fromkeys(("recompute_granularity", "recompute_modules"), "Use train.recompute."),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), _DROPOUT),
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
            *("kv_channels", "layernorm_epsilon", "layernorm_zero_centered_gamma", "normalization"),
            *("qk_layernorm", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "init_method_std"),
            *("softmax_scale", "softmax_type", "window_size", "activation_func"),
        ),
        _FAMILY,
    ),
    **dict.fromkeys(
        (
            *("use_te_activation_func", "use_cpu_initialization", "perform_initialization", "fp8", "fp4"),
            *("persist_layer_norm", "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
            *("masked_softmax_fusion", "gradient_accumulation_fusion", "transformer_impl", "timers"),
            *("finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func"),
            *("param_sync_func", "calculate_per_token_loss", "check_for_nan_in_grad", "use_megatron_fsdp"),
        ),
        _ENGINE,
    ),
}
_PARALLEL_SIZES = {
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
}


@cache
def config_fields() -> Mapping[str, frozenset[str]]:
    """Return the field names of ``TransformerConfig``, the DDP config and ``OptimizerConfig``.

    :returns: By ``"transformer"``, ``"ddp"`` and ``"optimizer"``.
    """
    spec = importlib.util.find_spec("megatron")
    assert spec is not None, "megatron-core is a dependency"
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))) / "core"
    return {
        part: frozenset(name for file in files for name in _fields(root / file))
        for part, files in _FILES.items()
    }


def _fields(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id


def option_problems(options: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield what is wrong with the ``[train.megatron]`` table."""
    known = sorted(frozenset().union(*config_fields().values()))
    for name, value in options.items():
        hint = _hint(name, value, known)
        if hint:
            yield ConfigProblem(path=f"train.megatron.{name}", found=value, hint=hint)


def _hint(name: str, value: Any, known: list[str]) -> str | None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
        names = f"close names: {', '.join(close)}" if close else "no name is close"
        return f"Not a field of Megatron's configs; {names}."
    if name in _PARALLEL_SIZES and value != 1:
        return "Only data parallelism is built so far; write 1, and use placement.num_workers."
    return _REFUSED.get(name)
