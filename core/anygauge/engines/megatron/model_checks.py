"""Checks of a model against ``[train.parallel]``, ``[train.megatron]`` and other keys of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from anygauge.config.modalities import modalities
from anygauge.config.rules.parallel import divided, largest, of_role, size_problem
from anygauge.config.schema import Config, Parallel
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge_hooks.megatron import LayerKind
    from anygauge_hooks.models import ModelSpec

__all__ = ["check_model", "model_problems"]

_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_LAYOUT = "pipeline_model_parallel_layout"
_UNEVEN = (*_ENDS, _LAYOUT)
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
_EXPERTS = "moe_"
"""Begins the names of Megatron's options that experts alone read."""
_BIAS_RATE = "moe_router_bias_update_rate"
"""Option of Megatron: how far the bias of an expert moves after a step."""

Problems = Iterator[ConfigProblem]


def check_model(config: Any, key: str, spec: ModelSpec, hf: Mapping[str, Any]) -> Problems:
    """Yield keys that do not fit a model which the engine can build.

    :param key: Config key that names the model; a reference is divided as the policy.
    """
    if key == "reference.path":
        return
    role = key.split(".")[0]
    architecture = megatron_model(spec).transformer_config(hf)
    train = config.train if role == "model" else divided(config, role).train
    kinds = megatron_model(spec).layers(hf)
    sizes = model_problems(train.parallel, architecture, train.megatron)
    for problem in chain(sizes, _wide_norms(train.parallel, kinds)):
        yield problem if role == "model" else of_role(problem, config, role)
    for table, options in _tables(config, role):
        yield from _expert_options(table, options, key, architecture)
    if role == "model":
        yield from _router_replay(config, architecture)
        yield from _lora(config, key, spec, hf)
        yield from _prefix_packing(config, spec, hf)
        yield from _levels(config, spec, hf)


def model_problems(sizes: Parallel, architecture: Mapping[str, Any], options: Mapping[str, Any]) -> Problems:
    """Yield sizes that do not divide the model's dimensions.

    :param architecture: Fields of Megatron's ``TransformerConfig`` that the model fixes.
    :param options: ``[train.megatron]``.
    """
    for keys, field, what in _SPLIT:
        count, size = architecture.get(field), prod(getattr(sizes, key) for key in keys)
        if count and count % size:
            product = f"{' * '.join(keys)} = {size} " if len(keys) > 1 else ""
            hint = f"{product}must divide the model's {count} {what}"
            yield size_problem(sizes, largest(sizes, keys), hint)
    groups = architecture.get("num_query_groups")
    if groups and groups % sizes.tensor and sizes.tensor % groups:
        hint = f"must divide the model's {groups} query groups, or be a multiple of them"
        yield size_problem(sizes, "tensor", hint)
    if sizes.expert > 1 and not architecture.get("num_moe_experts"):
        yield size_problem(sizes, "expert", "the model has no experts to divide")
    if sizes.tensor > 1 and sizes.sequence is False and architecture.get("num_moe_experts"):
        hint = "Megatron trains experts under tensor > 1 with it alone; remove it"
        yield size_problem(sizes, "sequence", hint)
    layers, stages = architecture["num_layers"], sizes.pipeline * sizes.virtual_pipeline
    if layers % stages and not any(options.get(name) for name in _UNEVEN):
        key = "pipeline" if layers % sizes.pipeline else "virtual_pipeline"
        hint = f"pipeline * virtual_pipeline = {stages} must divide the model's {layers} layers"
        yield size_problem(sizes, key, f"{hint}, or set train.megatron.{_UNEVEN[0]}")
    if _LAYOUT in options:
        yield from _layout(sizes, layers, options)
    else:
        yield from _uneven(sizes, layers, {name: options[name] for name in _ENDS if name in options})


def _wide_norms(sizes: Parallel, kinds: Sequence[LayerKind]) -> Problems:
    """Yield a division of heads that are normalized as one."""
    if sizes.tensor > 1 and any(kind.wide_qk_norm for kind in kinds):
        hint = (
            "the model normalizes queries and keys over all heads, which tensor parallelism would divide; "
            "leave it at 1 and use pipeline, context or data parallelism"
        )
        yield size_problem(sizes, "tensor", hint)


def _lora(config: Config, key: str, spec: ModelSpec, hf: Mapping[str, Any]) -> Problems:
    """Yield a model that cannot have adapters, and what would change the weights below them."""
    if not config.train.lora.is_on:
        return
    if spec.media is not None and (towers := spec.media.towers(hf)):
        names = ", ".join(tower.name for tower in towers)
        hint = (
            f"train.engine = 'megatron' has adapters for models of text, and this has towers ({names}): "
            "leave train.lora out, or set train.engine = 'fsdp'"
        )
        yield ConfigProblem(path=key, found=str(config.model.path), hint=hint)
    if rate := config.train.megatron.get(_BIAS_RATE):
        hint = "would change the weights below the adapters; leave it out"
        yield ConfigProblem(path=f"train.megatron.{_BIAS_RATE}", found=rate, hint=hint)


def _prefix_packing(config: Config, spec: ModelSpec, hf: Mapping[str, Any]) -> Problems:
    """Yield why samples cannot share a prompt."""
    if not config.train.prefix_packing:
        return
    kinds = megatron_model(spec).layers(hf)
    reasons = {
        "context parallelism divides whole samples": config.train.parallel.context > 1,
        "train.router_replay has the routes of whole samples": config.train.router_replay,
        "layers of train.provider need not take keys of other rows": config.train.provider is not None,
        "prompts with media are not shared": bool(modalities(config)),
        "layers of this model keep a state from token to token, or are built by its family": any(
            kind.attention == "gated_delta" or kind.build is not None for kind in kinds
        ),
    }
    for reason in (reason for reason, applies in reasons.items() if applies):
        yield ConfigProblem(path="train.prefix_packing", found=True, hint=f"{reason}; leave it out")


def _layout(sizes: Parallel, layers: int, options: Mapping[str, Any]) -> Problems:
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


def _uneven(sizes: Parallel, layers: int, ends: Mapping[str, Any]) -> Problems:
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


def _tables(config: Config, role: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tables of options of Megatron that are for the model of a role, with their names."""
    if role == "model":
        yield "train", config.train.megatron
    for other in ("critic", "teacher"):
        table = getattr(config, other)
        if table.megatron is not None and role == (other if table.path is not None else "model"):
            yield other, table.megatron


def _expert_options(
    table: str, options: Mapping[str, Any], path: str, architecture: Mapping[str, Any]
) -> Problems:
    """Yield settings of experts or router biases that the model does not have.

    :param path: Path of the key that names the model.
    """
    for name in (name for name in options if name.startswith(_EXPERTS)):
        hint = None
        if not architecture.get("num_moe_experts"):
            hint = f"has no effect: the model of {path} has no experts; leave it out"
        elif name == _BIAS_RATE and options[name] and not architecture.get("moe_router_enable_expert_bias"):
            hint = f"has no effect: the model of {path} has no routers with biases; leave it out"
        if hint:
            yield ConfigProblem(path=f"{table}.megatron.{name}", found=options[name], hint=hint)


def _router_replay(config: Config, architecture: Mapping[str, Any]) -> Problems:
    if config.train.router_replay and not architecture.get("num_moe_experts"):
        hint = "the model has no experts whose choice could be replayed; leave it out"
        yield ConfigProblem(path="train.router_replay", found=True, hint=hint)


def _levels(config: Config, spec: ModelSpec, hf: Mapping[str, Any]) -> Problems:
    """Yield a layout whose first part lacks layers that get features, unless it names every part."""
    kinds, sizes, options = modalities(config), config.train.parallel, config.train.megatron
    try:
        towers = spec.media.towers(hf) if spec.media is not None and kinds else ()
    except KeyError:
        return  # of the text-only part of a model: a problem of its own
    if kinds - {kind for tower in towers for kind in tower.kinds}:
        return  # takes other media: a problem of its own
    levels = max((tower.levels(hf) for tower in towers if tower.kinds & kinds), default=0)
    own = options.get("num_layers_in_first_pipeline_stage")
    depth = (own or len(megatron_model(spec).layers(hf)) // sizes.pipeline) // sizes.virtual_pipeline
    if levels > depth and "pipeline_model_parallel_layout" not in options:
        hint = (
            f"the first {levels} layers get features and must be in the first part, which has {depth}; "
            "lower it, or see train.megatron.num_layers_in_first_pipeline_stage"
        )
        key, value = (
            ("virtual_pipeline", sizes.virtual_pipeline)
            if sizes.virtual_pipeline > 1
            else ("pipeline", sizes.pipeline)
        )
        yield ConfigProblem(path=f"train.parallel.{key}", found=value, hint=hint)
