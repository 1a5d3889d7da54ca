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

__all__ = ["TUNABLE", "config_fields", "option_problems", "unknown_values"]

_FILES = {
    "transformer": ("model_parallel_config.py", "transformer/transformer_config.py"),
    "ddp": ("distributed/distributed_data_parallel_config.py",),
    "optimizer": ("optimizer/optimizer_config.py",),
}
_CLASSES = {"ModelParallelConfig", "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"}

TUNABLE = frozenset({"moe_router_bias_update_rate", "moe_router_dtype"})
"""Fields that a family sets and a user may change: how it trains, not which model it is."""

_FAMILY = "The model family decides it."
_ENGINE = "The engine decides it."
_DROPOUT = "A policy is trained without dropout: its ratio to the policy that sampled would be noise."
_PRECISION = "Use train.dtype."
_PARALLEL = {
    "tensor_model_parallel_size": "tensor",
    "sequence_parallel": "sequence",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
    "expert_tensor_parallel_size": "expert_tensor",
}
_REPEATABLE = "Use run.deterministic."
_ROUTES = "Training would send tokens to other experts than the rollout did, or drop them."
_KERNELS = "Routers and permutations take the kernels that anygauge hooks shows."
_AUXILIARY = "The loss is a mean over the step's tokens, which an auxiliary loss would not be."
_SUM = "Gradients are summed: the loss carries each token's weight in the mean of the whole step."

_REFUSED = {
    "enable_autocast": "Megatron binds its autocast decorators to one vendor at import; use train.dtype.",
    **dict.fromkeys(("fp16", "bf16", "params_dtype", "pipeline_dtype", "autocast_dtype"), _PRECISION),
    **{name: f"Use train.{name}." for name in ("lr", "min_lr", "weight_decay", "adam_eps", "clip_grad")},
    **{field: f"Use train.parallel.{name}." for field, name in _PARALLEL.items()},
    "deterministic_mode": _REPEATABLE,
    **dict.fromkeys(("adam_beta1", "adam_beta2"), "Use train.adam_betas."),
    **dict.fromkeys(("recompute_granularity", "recompute_modules"), "Use train.recompute."),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), _DROPOUT),
    **dict.fromkeys(
        (
            *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
            *("kv_channels", "layernorm_epsilon", "layernorm_zero_centered_gamma", "normalization"),
            *("qk_layernorm", "gated_linear_unit", "add_bias_linear", "add_qkv_bias", "init_method_std"),
            *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
            *("linear_num_key_heads", "linear_num_value_heads", "attention_output_gate"),
            *("multi_latent_attention", "experimental_attention_variant", "linear_attention_freq"),
            *("softmax_scale", "softmax_type", "window_size", "window_attn_skip_freq", "activation_func"),
            *("activation_func_clamp_value", "glu_linear_offset", "qk_l2_norm", "no_rope_freq"),
            *("rotary_interleaved", "mrope_section", "apply_residual_connection_post_layernorm"),
            *("apply_query_key_layer_scaling", "heterogeneous_block_specs", "is_hybrid_model"),
            *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq"),
            *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_latent_size"),
            *("moe_router_load_balancing_type", "moe_router_score_function", "moe_router_pre_softmax"),
            *("moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk"),
            *("moe_router_topk_scaling_factor", "moe_router_topk_limited_devices"),
            "moe_apply_probs_on_input",
        ),
        _FAMILY,
    ),
    **dict.fromkeys(
        (
            *("moe_router_force_load_balancing", "moe_input_jitter_eps", "moe_token_dropping"),
            *("moe_token_drop_policy", "moe_pad_expert_input_to_capacity"),
            *("moe_router_padding_for_fp8", "moe_router_padding_for_quantization"),
        ),
        _ROUTES,
    ),
    **dict.fromkeys(("moe_router_fusion", "moe_permute_fusion"), _KERNELS),
    "moe_shared_expert_overlap": "Megatron overlaps them on streams of one vendor's devices alone.",
    "moe_expert_capacity_factor": "Dropped tokens have other log-probs than in the rollout.",
    **dict.fromkeys(("moe_aux_loss_coeff", "moe_z_loss_coeff"), _AUXILIARY),
    "moe_enable_routing_replay": "Use train.router_replay, which reads routes by layer and micro-batch.",
    "average_in_collective": _SUM,
    "num_distributed_optimizer_instances": "The optimizer is divided over all ranks that share weights.",
    **dict.fromkeys(("mtp_num_layers", "mtp_standalone"), "Heads of multi-token prediction are not trained."),
    **dict.fromkeys(
        ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        "Use num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage.",
    ),
    "fp32_residual_connection": "Matrices of another dtype would get float32.",
    "num_microbatches_with_partial_activation_checkpoints": "Use train.recompute.",
    "overlap_p2p_comm_warmup_flush": "Stages would wait for each other without end.",
    **dict.fromkeys(
        (
            *("use_te_activation_func", "use_cpu_initialization", "perform_initialization", "fp8", "fp4"),
            *("persist_layer_norm", "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
            *("masked_softmax_fusion", "gradient_accumulation_fusion", "transformer_impl", "timers"),
            *("finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func"),
            *("param_sync_func", "calculate_per_token_loss", "check_for_nan_in_grad", "use_megatron_fsdp"),
            *("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm", "moe_token_dispatcher_type"),
        ),
        _ENGINE,
    ),
}

_KNOWN_VALUES: Mapping[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "activation_func": ("silu",),
    "gated_linear_unit": (True,),
    "moe_router_load_balancing_type": ("none",),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "moe_aux_loss_coeff"), (0,)),
    "softmax_type": ("vanilla",),
    "glu_linear_offset": (0,),
    **dict.fromkeys(
        (
            *("window_size", "window_attn_skip_freq", "no_rope_freq", "activation_func_clamp_value"),
            *("mrope_section", "experimental_attention_variant", "linear_attention_freq", "moe_latent_size"),
            *("moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_input_jitter_eps", "mtp_num_layers"),
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            *("qk_l2_norm", "apply_residual_connection_post_layernorm", "apply_query_key_layer_scaling"),
            *("multi_latent_attention", "heterogeneous_block_specs", "is_hybrid_model", "mtp_standalone"),
            "moe_shared_expert_overlap",
            *("moe_apply_probs_on_input", "moe_token_dropping", "moe_pad_expert_input_to_capacity"),
            "moe_router_force_load_balancing",
        ),
        (False,),
    ),
}
"""Fields of an architecture of which the modules of the engine know these values, and disregard any other."""


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


def unknown_values(architecture: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of an architecture that the modules of the engine would disregard.

    :param architecture: Fields of ``TransformerConfig`` that a family sets.
    """
    for name, value in architecture.items():
        known = _KNOWN_VALUES.get(name)
        if known is not None and getattr(value, "__name__", value) not in known:
            yield f"{name} = {value!r}, not {' or '.join(map(repr, known))}"


def _hint(name: str, value: Any, known: list[str]) -> str | None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
        names = f"close names: {', '.join(close)}" if close else "no name is close"
        return f"Not a field of Megatron's configs; {names}."
    return _REFUSED.get(name)
