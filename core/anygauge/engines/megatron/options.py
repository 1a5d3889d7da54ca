"""Megatron's configs from ours: settings that a run fixes, passes through, or refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from anygauge.config import Config
from anygauge.config.schema import Parallel
from anygauge.engines.base import torch_dtype
from anygauge.engines.megatron.config_fields import TUNABLE, config_fields
from anygauge.engines.megatron.layers.activation import activation_function
from anygauge_hooks.errors import ConfigError

__all__ = ["MegatronOptions", "megatron_options", "refusal"]

_CLASSES = {
    "transformer": TransformerConfig,
    "ddp": DistributedDataParallelConfig,
    "optimizer": OptimizerConfig,
}


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """The three configs of a run."""

    transformer: TransformerConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig


def megatron_options(config: Config, architecture: Mapping[str, Any]) -> MegatronOptions:
    """Return Megatron's configs.

    :param architecture: Fields of ``TransformerConfig`` that the model fixes.
    :raises ConfigError: A key would make it another model, or Megatron refuses the combination.
    """
    _check_same_model(config.train.megatron, architecture)
    dtype = torch_dtype(config)
    ours: dict[str, dict[str, Any]] = {
        "transformer": _transformer(config, architecture, dtype),
        "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
        "optimizer": {**_optimizer(config), "bf16": dtype == torch.bfloat16, "params_dtype": dtype},
    }
    for name, value in config.train.megatron.items():
        for part in _CLASSES:
            if name in config_fields()[part]:
                ours[part][name] = value
    try:
        kinds = {**_CLASSES, "transformer": _transformer_class(architecture)}
        options = MegatronOptions(**{part: kind(**ours[part]) for part, kind in kinds.items()})
    except (TypeError, ValueError, AssertionError) as error:
        raise refusal(error) from error
    # Megatron refuses, with that seam, what a library of one vendor has no module for.
    options.transformer.activation_func = activation_function(architecture.get("activation_func", "silu"))
    _check_parts(options.transformer, config.train.parallel)
    return options


def _check_same_model(options: Mapping[str, Any], architecture: Mapping[str, Any]) -> None:
    """Refuse what would change a field that the model fixes, such as one that a plugin's family sets."""
    if changed := sorted((options.keys() & architecture.keys()) - TUNABLE):
        raise ConfigError(
            f"train.megatron.{changed[0]} = {options[changed[0]]!r} would train another model than the "
            f"checkpoint's, whose {changed[0]} is {architecture[changed[0]]!r}.",
            hint=f"Remove {', '.join(changed)} from [train.megatron]: the model family decides them.",
        )


def _check_parts(transformer: TransformerConfig, sizes: Parallel) -> None:
    """Refuse a pipeline layout from which Megatron takes another number of parts than ranks are told."""
    parts = transformer.virtual_pipeline_model_parallel_size or 1
    if parts != sizes.virtual_pipeline:
        raise ConfigError(
            f"train.megatron.pipeline_model_parallel_layout has {parts} parts for each pipeline rank; "
            f"train.parallel.virtual_pipeline = {sizes.virtual_pipeline}.",
            hint=f"Set train.parallel.virtual_pipeline = {parts}.",
        )


def _transformer_class(architecture: Mapping[str, Any]) -> type[TransformerConfig]:
    """Return the class that has the fields of latent attention where the model has it."""
    return MLATransformerConfig if "kv_lora_rank" in architecture else TransformerConfig


def refusal(error: Exception) -> ConfigError:
    """Return the error for a combination that Megatron refuses."""
    reason = str(error) or f"{type(error).__name__} without a message"
    return ConfigError(
        f"Megatron refuses the config of the train engine: {reason}",
        hint="Change the keys of [train.megatron].",
    )


def _transformer(config: Config, architecture: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "elementwise": {},  # the layers' own
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return {
        "moe_token_dispatcher_type": "alltoall",  # the only one for micro-batches of different lengths
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **architecture,
        "activation_func": F.silu,
        "use_te_activation_func": True,  # Megatron's seam for an activation that is a module of the spec
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "use_cpu_initialization": True,
        "perform_initialization": False,  # every weight is loaded
        "persist_layer_norm": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "calculate_per_token_loss": True,
        "deterministic_mode": config.run.deterministic,
        **recompute[config.train.recompute],
        **_parallel(config.train.parallel),
    }


def _parallel(sizes: Parallel) -> dict[str, Any]:
    interleaved = sizes.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": sizes.tensor,
        "sequence_parallel": sizes.tensor > 1 if sizes.sequence is None else sizes.sequence,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline
        if sizes.virtual_pipeline > 1
        else None,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        # Packed micro-batches differ in length, so a stage tells the next one how long each is.
        "variable_seq_lengths": sizes.pipeline > 1,
        # In one batch of messages two ranks could not tell forward from backward.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
    }


def _optimizer(config: Config) -> dict[str, Any]:
    train = config.train
    return {
        "optimizer": "adam",
        "lr": train.lr,
        "min_lr": train.min_lr,
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_betas[0],
        "adam_beta2": train.adam_betas[1],
        "adam_eps": train.adam_eps,
        "clip_grad": train.clip_grad,
        "use_distributed_optimizer": True,
    }
