"""Megatron's DDP and DistributedOptimizer around an AdamW that the backend chooses, and the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from anygauge.config import Config
from anygauge.distributed.all_gather import plain_objects
from anygauge.engines.megatron.gradients import complete_gradients
from anygauge.engines.megatron.options import MegatronOptions, refusal
from anygauge.engines.schedule import decay_steps
from anygauge_hooks.types import BackendSpec, LoadedPlugins

__all__ = ["make_optimizer", "make_schedule", "optimizer_state", "wrap_model"]


def wrap_model(chunks: Sequence[GPTModel], options: MegatronOptions) -> list[DistributedDataParallel]:
    """Wrap the chunks of this rank for data parallelism.

    Gradients are summed over ranks and micro-batches, never averaged: the loss carries each token's weight
    in the mean of the whole step.

    :raises ConfigError: Megatron refuses the options; its reason is kept.
    """
    config = options.transformer
    try:
        # Gradients of the other chunks are sent while those of the first are computed: they need no buckets.
        wrapped = [
            DistributedDataParallel(config, options.ddp, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
    except AssertionError as error:
        raise refusal(error) from error
    config.finalize_model_grads_func = _sum_gradients
    if options.ddp.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in wrapped])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in wrapped])
    if options.ddp.overlap_param_gather:
        config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def _one_or_all(functions: Sequence[Any]) -> Any:
    """Return what Megatron's schedules take: a list only where there are several chunks."""
    return functions if len(functions) > 1 else functions[0]


def _sum_gradients(model: list[Any], num_tokens: Any, **options: Any) -> None:
    complete_gradients(model)
    finalize_model_grads(model, None, **options)


def make_optimizer(
    chunks: Sequence[DistributedDataParallel],
    options: MegatronOptions,
    plugins: LoadedPlugins,
    backend: BackendSpec,
) -> MegatronOptimizer:
    """Return Megatron's optimizer, with the inner AdamW of the backend where it makes one.

    :raises ConfigError: Megatron refuses the options; its reason is kept.
    """
    try:
        with plain_objects():  # ranks send each other the settings of their parameter groups, pickled
            optimizer = get_megatron_optimizer(options.optimizer, list(chunks), use_gloo_process_groups=False)
    except Exception as error:  # foreign code: Megatron
        # Megatron raises Exception itself for an optimizer that it does not know. Other kinds, such as a
        # device without memory or a rank that is gone, say nothing about the config.
        if type(error) in (Exception, AssertionError, ValueError, TypeError):
            raise refusal(error) from error
        raise
    options.transformer.grad_scale_func = optimizer.scale_loss
    if _is_plain_adamw(options):
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            _replace_inner(part, options, partial(plugins.first, "make_optimizer", backend=backend))
    return optimizer


def _is_plain_adamw(options: MegatronOptions) -> bool:
    """Return whether the optimizer is the default: only then may the backend's replace it."""
    config = options.optimizer
    return config.optimizer == "adam" and config.decoupled_weight_decay


def _replace_inner(part: Any, options: MegatronOptions, make: Callable[..., Any]) -> None:
    config = options.optimizer
    groups = part.optimizer.param_groups
    inner = make(
        param_groups=[_bare(group, part.optimizer.defaults) for group in groups],
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )
    if inner is None:
        return
    # Gradients arrive on Megatron's own tensors, so those are what the optimizer must hold.
    for ours, theirs in zip(inner.param_groups, groups, strict=True):
        ours["params"] = theirs["params"]
    part.optimizer = inner


def _bare(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without the settings of torch's own AdamW, for another to take its place.

    Megatron's shards of float32 weights are views, which torch refuses; their detached twins are leaves.
    """
    own = {name: value for name, value in group.items() if name not in defaults}
    return own | {"params": [shard.detach() for shard in group["params"]]}


def make_schedule(optimizer: MegatronOptimizer, config: Config) -> OptimizerParamScheduler:
    """Return the learning-rate schedule, in optimizer steps; it is advanced before each of them."""
    train = config.train
    total = decay_steps(config)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if train.warmup_steps else train.lr,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=train.warmup_steps,
        lr_decay_steps=total,
        lr_decay_style=train.lr_schedule,
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=total,
        wd_incr_style="constant",
    )


def optimizer_state(optimizer: Any) -> Iterator[Tensor]:
    """Yield the weights and states of a Megatron optimizer."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            yield from group["params"]
        for state in part.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
