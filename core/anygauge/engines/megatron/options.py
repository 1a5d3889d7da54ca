"""Megatron's own configs, from ours: what a run fixes, what the user passes through, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from anygauge.config import Config
from anygauge.engines.megatron.fields import config_fields
from anygauge_hooks.errors import ConfigError

__all__ = ["MegatronOptions", "megatron_options", "refusal", "torch_dtype"]

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
    :raises ConfigError: Megatron refuses the combination; its reason is kept.
    """
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
        return MegatronOptions(**{part: kind(**ours[part]) for part, kind in _CLASSES.items()})
    except (TypeError, ValueError, AssertionError) as error:
        raise refusal(error) from error


def refusal(error: Exception) -> ConfigError:
    """Return the error for a combination that Megatron refuses."""
    reason = str(error) or f"{type(error).__name__} without a message"
    return ConfigError(
        f"Megatron refuses the config of the train engine: {reason}",
        hint="Change the keys of [train.megatron].",
    )


def torch_dtype(config: Config) -> torch.dtype:
    """Return the dtype of the weights."""
    dtype: torch.dtype = getattr(torch, config.train.dtype or "float32")
    return dtype


def _transformer(config: Config, architecture: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return {
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
