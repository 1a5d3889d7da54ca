"""Rules of ``[train.parallel]``: which sizes fit each other and the workers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from anygauge.config.roles import critic_config, teacher_config
from anygauge.config.schema import Config, Parallel
from anygauge_hooks.types import ConfigProblem

__all__ = [
    "data_parallel_size",
    "divided",
    "of_role",
    "parallel_rule",
    "role_rule",
    "size_problems",
]

ROLES = ("critic", "teacher")
"""Models beside the policy that may be divided in another way."""


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
        yield size_problem(sizes, largest(sizes, ("tensor", "pipeline", "context")), hint)
    elif stage % (sizes.expert * sizes.expert_tensor):
        hint = f"expert * expert_tensor must divide the {stage} workers of a pipeline stage"
        yield size_problem(sizes, largest(sizes, ("expert", "expert_tensor")), hint)
    if sizes.virtual_pipeline > 1 and sizes.pipeline == 1:
        yield size_problem(sizes, "virtual_pipeline", "needs train.parallel.pipeline above 1")
    if sizes.sequence and sizes.tensor == 1:
        yield size_problem(sizes, "sequence", "needs train.parallel.tensor above 1")


def largest(sizes: Parallel, names: Sequence[str]) -> str:
    return max(names, key=lambda name: int(getattr(sizes, name)))


def size_problem(sizes: Parallel, key: str, hint: str) -> ConfigProblem:
    return ConfigProblem(path=f"train.parallel.{key}", found=getattr(sizes, key), hint=hint)
