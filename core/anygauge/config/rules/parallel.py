"""Rules of ``[train.parallel]``: which sizes fit each other, the workers, and a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from anygauge.config.roles import critic_config, teacher_config
from anygauge.config.schema import Config, Parallel
from anygauge_hooks.types import ConfigProblem

__all__ = [
    "data_parallel_size",
    "divided",
    "model_problems",
    "of_role",
    "parallel_rule",
    "role_rule",
    "size_problems",
]

ROLES = ("critic", "teacher")
"""Models beside the policy that may be divided in another way."""

_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_LAYOUT = "pipeline_model_parallel_layout"
UNEVEN = (*_ENDS, _LAYOUT)
"""Options of Megatron that divide layers otherwise than evenly."""

_SPLIT = (
    (("tensor",), "num_attention_heads", "attention heads"),
    (("tensor",), "ffn_hidden_size", "rows of its MLP"),
    (("tensor",), "moe_shared_expert_intermediate_size", "rows of its shared expert"),
    (("tensor", "context"), "linear_num_key_heads", "key heads of linear attention"),
    (("tensor", "context"), "linear_num_value_heads", "value heads of linear attention"),
    (("expert",), "num_moe_experts", "experts"),
    (("expert_tensor",), "moe_ffn_hidden_size", "rows of each expert"),
)
"""Keys of ``[train.parallel]``, field of Megatron's config that they divide together, and what that is."""


def data_parallel_size(config: Config) -> int:
    """Return the data-parallel size, which the samples of a step are divided by; 1 where sizes do not fit."""
    sizes = config.train.parallel
    return max(1, config.placement.train_workers // (sizes.tensor * sizes.pipeline * sizes.context))


def parallel_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield the sizes that do not fit each other or the workers."""
    yield from size_problems(config.placement.train_workers, config.train.parallel)


def role_rule(config: Config, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield the sizes of critic and teacher that do not fit each other, the workers, or the policy's.

    Samples stay where they are: each rank has the same ones of the policy and of what stands beside it.
    """
    for role in ROLES:
        sizes = getattr(config, role).parallel
        if sizes is None:
            continue
        problems = list(size_problems(config.placement.train_workers, sizes))
        yield from (of_role(problem, config, role) for problem in problems)
        ours = config.train.parallel
        share = ours.tensor * ours.context
        if not problems and (sizes.tensor * sizes.context, sizes.pipeline) != (share, ours.pipeline):
            hint = (
                f"must leave every rank its samples: tensor * context = {share}, pipeline = {ours.pipeline}"
            )
            yield ConfigProblem(
                path=f"{role}.parallel", found=_written(sizes), hint=f"{hint}, as train.parallel"
            )


def divided(config: Config, role: str) -> Config:
    """Return the config of critic or teacher."""
    return critic_config(config) if role == "critic" else teacher_config(config)


def of_role(problem: ConfigProblem, config: Config, role: str) -> ConfigProblem:
    """Rewrite a problem of ``[train]`` for the role's own key, if it has one."""
    key = problem.path.split(".")[1]
    if getattr(getattr(config, role), key, None) is None:
        return problem
    return replace(problem, path=problem.path.replace("train.", f"{role}.", 1))


def _written(sizes: Parallel) -> str:
    given = sizes.model_dump(exclude_defaults=True)
    return ", ".join(f"{name} = {value}" for name, value in given.items()) or "one rank"


def size_problems(num_ranks: int, sizes: Parallel) -> Iterator[ConfigProblem]:
    """Yield the sizes that do not fit each other or the number of ranks."""
    model = sizes.tensor * sizes.pipeline * sizes.context
    stage = num_ranks // sizes.pipeline
    if num_ranks % model:
        hint = (
            f"placement.train_workers = {num_ranks} must be a multiple of "
            f"tensor * pipeline * context = {model}"
        )
        yield _problem(sizes, _largest(sizes, ("tensor", "pipeline", "context")), hint)
    elif stage % (sizes.expert * sizes.expert_tensor):
        hint = f"expert * expert_tensor must divide the {stage} workers of a pipeline stage"
        yield _problem(sizes, _largest(sizes, ("expert", "expert_tensor")), hint)
    if sizes.virtual_pipeline > 1 and sizes.pipeline == 1:
        yield _problem(sizes, "virtual_pipeline", "needs train.parallel.pipeline above 1")
    if sizes.sequence and sizes.tensor == 1:
        yield _problem(sizes, "sequence", "needs train.parallel.tensor above 1")


def model_problems(
    sizes: Parallel, architecture: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    """Yield sizes that do not divide the model's dimensions.

    :param architecture: Fields of Megatron's ``TransformerConfig`` that the model fixes.
    :param options: ``[train.megatron]``.
    """
    for keys, field, what in _SPLIT:
        count, size = architecture.get(field), prod(getattr(sizes, key) for key in keys)
        if count and count % size:
            product = f"{' * '.join(keys)} = {size} " if len(keys) > 1 else ""
            yield _problem(sizes, _largest(sizes, keys), f"{product}must divide the model's {count} {what}")
    groups = architecture.get("num_query_groups")
    if groups and groups % sizes.tensor and sizes.tensor % groups:
        hint = f"must divide the model's {groups} query groups, or be a multiple of them"
        yield _problem(sizes, "tensor", hint)
    if sizes.expert > 1 and not architecture.get("num_moe_experts"):
        yield _problem(sizes, "expert", "the model has no experts to divide")
    if sizes.tensor > 1 and sizes.sequence is False and architecture.get("num_moe_experts"):
        yield _problem(sizes, "sequence", "Megatron trains experts under tensor > 1 with it alone; remove it")
    layers, stages = architecture["num_layers"], sizes.pipeline * sizes.virtual_pipeline
    if layers % stages and not any(options.get(name) for name in UNEVEN):
        key = "pipeline" if layers % sizes.pipeline else "virtual_pipeline"
        hint = f"pipeline * virtual_pipeline = {stages} must divide the model's {layers} layers"
        yield _problem(sizes, key, f"{hint}, or set train.megatron.{UNEVEN[0]}")
    if _LAYOUT in options:
        yield from _layout(sizes, layers, options)
    else:
        yield from _uneven(sizes, layers, {name: options[name] for name in _ENDS if name in options})


def _layout(sizes: Parallel, layers: int, options: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield problems of a pipeline layout, before Megatron reads it in the workers."""
    layout, stages = options[_LAYOUT], sizes.pipeline * sizes.virtual_pipeline
    parts = _unrolled(layout).split("|") if isinstance(layout, str) else []
    has, hint = "".join(parts), None
    if not re.fullmatch("Et*L", has):
        hint = f"must be a string such as 'Et*{layers - layers // 2}|t*{layers // 2}L'"
    elif (count := has.count("t")) != layers:
        hint = f"has {count} layers (t), the model {layers}"
    elif len(parts) != stages:
        hint = f"has {len(parts)} parts (|), pipeline * virtual_pipeline is {stages}"
    elif others := [name for name in _ENDS if name in options]:
        hint = f"already decides this: remove {' and '.join(others)}"
    if hint:
        yield ConfigProblem(path=f"train.megatron.{_LAYOUT}", found=layout, hint=hint)


def _unrolled(layout: str) -> str:
    """Return a layout with its products written out, as Megatron's ``parse_str_to_list`` does."""
    layout = layout.replace(",", "")
    for product in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(product, lambda match: match[1] * int(match[2]), layout)
    return layout


def _uneven(sizes: Parallel, layers: int, ends: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    """Yield problems of the numbers of layers in the first, the last and the middle stages.

    :param ends: How many layers each has, by the option that says so.
    """
    parts, bad = sizes.virtual_pipeline, False
    for name, count in ends.items():
        if type(count) is not int or count < 1 or count % parts:
            bad = True
            wanted = f"a positive multiple of virtual_pipeline = {parts}" if parts > 1 else "at least one"
            yield ConfigProblem(path=f"train.megatron.{name}", found=count, hint=f"must be {wanted}")
    if bad or not ends:
        return
    rest, stages = layers - sum(ends.values()), sizes.pipeline - len(ends)
    fits = rest == 0 if stages == 0 else stages > 0 and rest > 0 and rest % (stages * parts) == 0
    if not fits:
        hint = f"leaves {rest} of the model's {layers} layers to {stages} pipeline stages"
        hint += f" of {parts} parts" if parts > 1 else ""
        name = next(iter(ends))
        yield ConfigProblem(
            path=f"train.megatron.{name}", found=ends[name], hint=f"{hint}: choose a number that they divide"
        )


def _largest(sizes: Parallel, names: Sequence[str]) -> str:
    return max(names, key=lambda name: int(getattr(sizes, name)))


def _problem(sizes: Parallel, key: str, hint: str) -> ConfigProblem:
    return ConfigProblem(path=f"train.parallel.{key}", found=getattr(sizes, key), hint=hint)
