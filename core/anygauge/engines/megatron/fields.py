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

_REFUSED = {
    "enable_autocast": "Megatron binds its autocast decorators to one vendor at import; use train.dtype.",
    "fp16": "Use train.dtype.",
    "bf16": "Use train.dtype.",
    "params_dtype": "Use train.dtype.",
    "pipeline_dtype": "Use train.dtype.",
    "autocast_dtype": "Use train.dtype.",
    "lr": "Use train.lr.",
    "min_lr": "Use train.min_lr.",
    "weight_decay": "Use train.weight_decay.",
    "adam_beta1": "Use train.adam_betas.",
    "adam_beta2": "Use train.adam_betas.",
    "adam_eps": "Use train.adam_eps.",
    "clip_grad": "Use train.clip_grad.",
    "recompute_granularity": "Use train.recompute.",
    "calculate_per_token_loss": "The loss is always weighted per token.",
    "check_for_nan_in_grad": "Every step is checked, before any weight changes.",
    **dict.fromkeys(
        (
            "attention_dropout",
            "normalization",
            "layernorm_zero_centered_gamma",
            "qk_layernorm",
            "window_size",
        ),
        "The model family decides it.",
    ),
    **dict.fromkeys(
        (
            "softmax_type",
            "window_size",
            "fp8",
            "fp4",
            "activation_func",
            "use_te_activation_func",
            "transformer_impl",
        ),
        "The layers of this engine do not have it.",
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
