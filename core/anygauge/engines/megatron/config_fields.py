"""The fields of Megatron's configs, read from its source without importing it.

A config is checked on the driver, where Megatron would cost seconds and would be imported before it is
prepared for the backend.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib.util
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, NonNegativeFloat, PositiveInt, TypeAdapter, ValidationError

from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.config.schema import Train

__all__ = ["PASSED", "TUNABLE", "config_fields", "option_problems", "unknown_values"]

_FILES = {
    "transformer": ("model_parallel_config.py", "transformer/transformer_config.py"),
    "ddp": ("distributed/distributed_data_parallel_config.py",),
    "optimizer": ("optimizer/optimizer_config.py",),
}
_CLASSES = {"ModelParallelConfig", "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"}

TUNABLE = frozenset({"moe_router_bias_update_rate", "moe_router_dtype"})
"""Fields that a family sets and a user may change: how it trains, not which model it is."""

PASSED = TUNABLE | {
    *("deallocate_pipeline_outputs", "num_layers_in_first_pipeline_stage", "pipeline_model_parallel_layout"),
    *("num_layers_in_last_pipeline_stage", "microbatch_group_size_per_vp_stage"),
    *("recompute_method", "recompute_num_layers", "disable_bf16_reduced_precision_matmul"),
    *("overlap_grad_reduce", "overlap_param_gather", "bucket_size", "pad_buckets_for_high_nccl_busbw"),
    *("grad_reduce_in_fp32", "use_distributed_optimizer"),
    *("optimizer", "decoupled_weight_decay", "sgd_momentum", "decoupled_lr", "decoupled_min_lr"),
    "apply_wd_to_qk_layernorm",
}
"""Fields that a user may set. ``tests/unit/engines/test_passed_fields.py`` shows what each changes."""

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
_UNREAD = "No part of the engine reads it, so it would change nothing."
_ATTENTION = "Attention takes the kernel that anygauge hooks shows."
_CONTEXT = "Context parallelism is the engine's own, which gathers keys and values: train.parallel.context."
_OFFLOAD = (
    "No checkpoint finds weights that Megatron offloads. More workers divide the optimizer's state, and "
    "placement.colocated moves it to the host while the rollout engines work."
)
_PRECISE = (
    "No checkpoint finds weights that such an optimizer keeps. A fused AdamW of the backend can do without "
    "copies of them: anygauge hooks shows it."
)
_GRAPHS = "Micro-batches differ in length, so no recorded graph fits the next one."
_FP8 = "Training in FP8 or FP4 is not supported; use train.dtype."
_FP16 = "It is for float16, which train.dtype does not have."
_LOADED = "Every weight is loaded from the checkpoint."
_INFERENCE = "It is for inference, which rollout engines do."
_LOSS = "The engine takes the loss from log-probs of its own; use train.fused_loss."
_RECOMPUTE = "Use train.recompute."
_METRICS = "The engine records its own metrics: docs/metrics.md."
_TENSOR_OVERLAP = "It needs buffers of Transformer Engine, which the engine does not set up."
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
    **dict.fromkeys(
        (
            *("cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations"),
            *("cpu_offloading_weights", "cpu_offloading_double_buffering"),
            *("fine_grained_activation_offloading", "offload_modules", "min_offloaded_tensor_size"),
            *("num_microbatches_with_partial_activation_checkpoints", "moe_layer_recompute"),
        ),
        _RECOMPUTE,
    ),
    "distribute_saved_activations": "train.parallel.sequence divides activations over the same ranks.",
    **dict.fromkeys(
        (
            *("cp_comm_type", "hybrid_context_parallel", "hierarchical_context_parallel_sizes"),
            "max_seqlen_per_dp_cp_rank",
        ),
        _CONTEXT,
    ),
    **dict.fromkeys(
        (
            *("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"),
            *("use_torch_optimizer_for_cpu_offload", "pin_cpu_grads", "pin_cpu_params"),
        ),
        _OFFLOAD,
    ),
    **dict.fromkeys(
        (
            *("use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype"),
            *("exp_avg_sq_dtype", "store_param_remainders"),
        ),
        _PRECISE,
    ),
    **dict.fromkeys(
        (
            *("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl", "cuda_graph_scope"),
            *("cuda_graph_retain_backward_graph", "cuda_graph_use_single_mempool", "cuda_graph_warmup_steps"),
        ),
        _GRAPHS,
    ),
    "nccl_ub": "It needs buffers from NCCL's allocator, which sleeping and checkpoints do not know.",
    **dict.fromkeys(
        (
            *("attention_backend", "attention_softmax_in_fp32", "batch_invariant_mode", "flash_decode"),
            *("fused_single_qkv_rope", "use_kitchen", "use_kitchen_attention", "kitchen_attention_backend"),
        ),
        _ATTENTION,
    ),
    **dict.fromkeys(("moe_grouped_gemm", "moe_use_legacy_grouped_gemm"), _KERNELS),
    **dict.fromkeys(
        (
            *("fp8_recipe", "fp8_param", "fp8_margin", "fp8_interval", "fp8_amax_history_len"),
            *("fp8_amax_compute_algo", "fp8_wgrad", "fp8_dot_product_attention", "fp8_multi_head_attention"),
            *("fp8_quantizer_factory", "fp8_param_gather", "fp4_param", "fp4_recipe"),
            *("fp4_quantizer_factory", "keep_fp8_transpose_cache", "reuse_grad_buf_for_mxfp8_param_ag"),
            *("activation_func_fp8_input_store", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
            *("num_layers_at_end_in_bf16", "tp_only_amax_red", "quant_recipe"),
        ),
        _FP8,
    ),
    **dict.fromkeys(
        ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"), _FP16
    ),
    **dict.fromkeys(
        (
            *("init_method", "output_layer_init_method", "embedding_init_method"),
            *("embedding_init_method_std", "init_model_with_meta_device"),
        ),
        _LOADED,
    ),
    **dict.fromkeys(
        (
            *("inference_fuse_tp_communication", "inference_rng_tracker", "inference_sampling_seed"),
            *("use_inference_optimized_layers", "mlp_chunks_for_prefill"),
        ),
        _INFERENCE,
    ),
    **dict.fromkeys(("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"), _LOSS),
    **dict.fromkeys(
        (
            *("barrier_with_L1_time", "config_logger_dir", "log_num_zeros_in_grad", "check_for_large_grads"),
            *("log_max_attention_logit", "moe_per_layer_logging"),
        ),
        _METRICS,
    ),
    **dict.fromkeys(
        (
            *("tp_comm_overlap", "tp_comm_overlap_ag", "tp_comm_overlap_rs", "tp_comm_overlap_rs_dgrad"),
            *("tp_comm_overlap_disable_fc1", "tp_comm_overlap_disable_qkv", "tp_comm_bootstrap_backend"),
            *("tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad", "tp_comm_split_ag", "tp_comm_split_rs"),
            *("tp_comm_atomic_ag", "tp_comm_atomic_rs"),
        ),
        _TENSOR_OVERLAP,
    ),
    "reduce_scatter_with_fp32_accumulation": "Gradients are sent in float32: grad_reduce_in_fp32.",
    "mtp_loss_scaling_factor": "Heads of multi-token prediction are not trained.",
    "overlap_p2p_comm_warmup_flush": "Stages would wait for each other without end.",
    **dict.fromkeys(
        (
            *("use_te_activation_func", "use_cpu_initialization", "perform_initialization", "fp8", "fp4"),
            *("persist_layer_norm", "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
            *("masked_softmax_fusion", "gradient_accumulation_fusion", "transformer_impl", "timers"),
            *("finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func"),
            *("param_sync_func", "calculate_per_token_loss", "check_for_nan_in_grad", "use_megatron_fsdp"),
            *("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm", "moe_token_dispatcher_type"),
            *("batch_p2p_sync", "use_ring_exchange_p2p", "align_param_gather", "test_mode"),
            *("moe_enable_deepep", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
            *("moe_flex_dispatcher_backend", "overlap_moe_expert_parallel_comm"),
            *("overlap_param_gather_with_optimizer_step", "defer_embedding_wgrad_compute"),
            *("delay_wgrad_compute", "clone_scatter_output_in_embedding", "_cpu_offloading_context"),
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


_ALONE = "It changes nothing alone: it needs {}."
_NEEDS: Mapping[str, tuple[str, Callable[[Train], object]]] = {
    **dict.fromkeys(
        ("recompute_method", "recompute_num_layers"),
        (_ALONE.format('train.recompute = "full"'), lambda train: train.recompute == "full"),
    ),
    "microbatch_group_size_per_vp_stage": (
        _ALONE.format("train.parallel.virtual_pipeline above 1"),
        lambda train: train.parallel.virtual_pipeline > 1,
    ),
    "bucket_size": (
        _ALONE.format("overlap_grad_reduce"),
        lambda train: train.megatron.get("overlap_grad_reduce"),
    ),
    "decoupled_min_lr": (_ALONE.format("decoupled_lr"), lambda train: "decoupled_lr" in train.megatron),
    "sgd_momentum": (
        _ALONE.format('optimizer = "sgd"'),
        lambda train: train.megatron.get("optimizer") == "sgd",
    ),
    "overlap_param_gather": (
        "Without the distributed optimizer nothing is gathered: leave out use_distributed_optimizer = false.",
        lambda train: not train.megatron["overlap_param_gather"] or _divides_optimizer(train),
    ),
    "optimizer": (
        "The distributed optimizer takes Adam alone: add use_distributed_optimizer = false.",
        lambda train: train.megatron["optimizer"] == "adam" or not _divides_optimizer(train),
    ),
}
"""Fields that need another key: what is wrong without it, and whether it is there."""

_KINDS: Mapping[str, Any] = {"int": PositiveInt, "float": NonNegativeFloat}
"""How numbers are read: those of the fields that pass are counts, rates and shares, none below zero."""
_NARROWER: Mapping[str, Any] = {"optimizer": Literal["adam", "sgd"]}
"""Fields whose annotation takes more than Megatron does."""


@cache
def config_fields() -> Mapping[str, frozenset[str]]:
    """Return the field names of ``TransformerConfig``, the DDP config and ``OptimizerConfig``.

    :returns: By ``"transformer"``, ``"ddp"`` and ``"optimizer"``.
    """
    return {part: frozenset(fields) for part, fields in _annotations().items()}


@cache
def _annotations() -> Mapping[str, Mapping[str, str]]:
    """Return what Megatron's source says of the type of each field, by class."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None, "megatron-core is a dependency"
    assert spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations))) / "core"
    return {
        part: {name: kind for file in files for name, kind in _fields(root / file)}
        for part, files in _FILES.items()
    }


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield statement.target.id, ast.unparse(statement.annotation)


def option_problems(train: Train, role: str = "train") -> Iterator[ConfigProblem]:
    """Yield what is wrong with the table ``[train.megatron]``.

    :param train: Of a role, whose table it is.
    """
    known = sorted(frozenset().union(*config_fields().values()))
    for name, value in train.megatron.items():
        hint = _hint(name, known) or _misfit(name, value) or _unmet(name, train)
        if hint:
            yield ConfigProblem(path=f"{role}.megatron.{name}", found=value, hint=hint)


def unknown_values(architecture: Mapping[str, Any]) -> Iterator[str]:
    """Yield the fields of an architecture that the modules of the engine would disregard.

    :param architecture: Fields of ``TransformerConfig`` that a family sets.
    """
    for name, value in architecture.items():
        known = _KNOWN_VALUES.get(name)
        if known is not None and getattr(value, "__name__", value) not in known:
            yield f"{name} = {value!r}, not {' or '.join(map(repr, known))}"


def _hint(name: str, known: list[str]) -> str | None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
        names = f"close names: {', '.join(close)}" if close else "no name is close"
        return f"Not a field of Megatron's configs; {names}."
    return None if name in PASSED else _REFUSED.get(name, _UNREAD)


class _Names(dict[str, Any]):
    """Names that annotations resolve to; a class that TOML has no value of stands for any other name."""

    def __missing__(self, name: str) -> type:
        return type(name, (), {})


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    """Return what checks the value of a field."""
    annotation = next(fields[name] for fields in _annotations().values() if name in fields)
    names = _Names(vars(builtins) | vars(typing) | dict(_KINDS))
    kind = _NARROWER[name] if name in _NARROWER else eval(annotation, {}, names)
    strict = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    return TypeAdapter(kind, config=strict)


def _misfit(name: str, value: Any) -> str | None:
    """Return why a value is not of the type that Megatron annotates its field with."""
    try:
        _adapter(name).validate_python(value)
    except ValidationError as error:
        kinds = dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in error.errors())
        return f"Megatron cannot take it: it must be {' or '.join(kinds)}."
    return None


def _unmet(name: str, train: Train) -> str | None:
    hint, is_met = _NEEDS.get(name, ("", lambda train: True))
    return None if is_met(train) else hint


def _divides_optimizer(train: Train) -> bool:
    return bool(train.megatron.get("use_distributed_optimizer", True))
