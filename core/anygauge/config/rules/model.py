"""Checks of the models that a config names, and of the keys that depend on them."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config.families import family
from anygauge.config.modalities import modalities
from anygauge.config.model_files import missing_parts, other_tokens, read_model
from anygauge.config.rules.algorithm import compares
from anygauge.config.rules.architecture import architecture_hints
from anygauge.config.rules.file import no_directory
from anygauge.config.rules.media import media_mismatches, model_media
from anygauge.config.same_model import differing_keys
from anygauge.config.schema import Config, Data, EvalDataset, Rollout
from anygauge.disk import read_json
from anygauge.hub.names import model_name
from anygauge.hub.quantization import quantization
from anygauge_hooks.errors import AnygaugeError
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins
    from anygauge_hooks.engines import RolloutEngineSpec, TrainEngineSpec
    from anygauge_hooks.media import MediaKind
    from anygauge_hooks.models import ModelSpec

__all__ = ["chat_template_rule", "division_rule", "model_rules", "other_models_rule", "policy_rule"]

Problems = Iterator[ConfigProblem]


def policy_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield what is missing of the policy and of the models of rollout groups, without importing torch."""
    yield from _missing("model.path", config.model.path)
    for index, group in enumerate(config.rollout.groups):
        if group.path is not None and not os.path.isdir(group.path):
            path = f"rollout.groups[{index}].path"
            yield ConfigProblem(path=path, found=str(group.path), hint=no_directory(group.path))


def other_models_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield what is missing of the models that a training needs beside the policy."""
    for path, directory in _other_models(config):
        yield from _missing(path, directory)


def _missing(path: str, directory: Path) -> Problems:
    if model_name(path, directory) is None:  # a name is looked up once nothing else is wrong
        for hint in missing_parts(directory):
            yield ConfigProblem(path=path, found=str(directory), hint=hint)


def model_rules(config: Config, plugins: Plugins, *, trains: bool) -> Problems:
    """Yield problems of the policy and, for training, of the other models, beside what they lack.

    :param trains: As of :func:`~anygauge.config.check.check`.
    """
    policy, problems = _read_model("model.path", config.model.path, plugins, config)
    yield from problems
    if policy is not None:
        yield from _context(config, policy)
        yield from _architecture("model.path", config, policy, plugins)
        yield from _stop_tokens(config, policy)
        yield from model_media(config, policy, plugins)
        yield from _rollout_engine(config, policy, plugins)
    for path, directory in _other_models(config) if trains else ():
        other, problems = _read_model(path, directory, plugins, config)
        yield from problems
        if other is not None:
            yield from _architecture(path, config, other, plugins)
        if policy is None or other is None:
            continue
        hints = list(other_tokens(directory, config.model.path))
        engine = _train_engine(config, plugins)
        unlike = _unlike(path, policy, other, plugins, engine, modalities(config))
        for key in unlike:
            one, another = _apart(other.get(key), policy.get(key))
            hints.append(f"holds {key} = {one}; model.path holds {another}")
        hints += [] if unlike else media_mismatches(config, policy, other, plugins)
        yield from (ConfigProblem(path=path, found=str(directory), hint=hint) for hint in hints)


def _apart(one: Any, other: Any) -> tuple[Any, Any]:
    """Return two different values of ``config.json``; of parts, what differs in them."""
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return one, other
    keys = [key for key in sorted({*one, *other}) if one.get(key) != other.get(key)]
    return {key: one.get(key) for key in keys}, {key: other.get(key) for key in keys}


def _unlike(
    path: str,
    policy: Mapping[str, Any],
    other: Mapping[str, Any],
    plugins: Plugins,
    engine: TrainEngineSpec | None,
    kinds: Collection[MediaKind],
) -> Sequence[str]:
    """Return the keys of ``config.json`` that another model must have in common with the policy, and has not.

    The weights of a reference take turns with the policy's in the policy's modules.
    """
    key = "architectures" if path == "reference.path" else "vocab_size"
    if policy.get(key) != other.get(key):
        return [key]
    if path != "reference.path" or engine is None:
        return []
    try:
        spec = family(plugins, policy, engine.name)
    except AnygaugeError:
        return []  # a problem of its own
    if any(architecture_hints(spec, hf, engine) for hf in (policy, other)):
        return []  # problems of their own
    return differing_keys(spec, policy, other, engine, kinds)


def _other_models(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield key and directory of each model beside the policy; unused keys are a problem of their own."""
    paths = {
        "reference.path": config.reference.path if compares(config) else None,
        "teacher.path": config.teacher.path,
        "critic.path": config.critic.path,
    }
    yield from ((key, path) for key, path in paths.items() if path is not None)


def _read_model(
    path: str, directory: Path, plugins: Plugins, config: Config
) -> tuple[dict[str, Any] | None, list[ConfigProblem]]:
    """Return a Hugging Face config, if it can be read, and the problems of its directory."""
    if not os.path.isdir(directory):
        return None, []  # a problem of its own, or a name
    is_critic = path == "critic.path"
    trusted = config.model.trust_remote_code
    hf, hints = read_model(
        directory, plugins, engine=config.train.engine, trust_remote_code=trusted, is_critic=is_critic
    )
    return hf, [ConfigProblem(path=path, found=str(directory), hint=hint) for hint in hints]


def _stop_tokens(config: Config, hf: Mapping[str, Any]) -> Problems:
    size = hf.get("vocab_size")
    tables: dict[str, Rollout | EvalDataset] = {"rollout": config.rollout}
    tables |= {f"eval.datasets.{name}": dataset for name, dataset in config.eval.datasets.items()}
    for path, table in tables.items():
        for index, token in enumerate(table.stop_token_ids or ()):
            if isinstance(size, int) and token >= size:
                hint = f"the model's vocab_size is {size}"
                yield ConfigProblem(path=f"{path}.stop_token_ids[{index}]", found=token, hint=hint)


def _context(config: Config, hf: Mapping[str, Any]) -> Problems:
    limit = hf.get("max_position_embeddings")
    longest = (config.data.max_prompt_tokens or 1) + config.rollout.max_new_tokens
    if isinstance(limit, int) and longest > limit:
        hint = (
            f"a prompt and its response may have {longest} tokens; the model takes {limit} "
            "(data.max_prompt_tokens + rollout.max_new_tokens must fit)"
        )
        yield ConfigProblem(path="rollout.max_new_tokens", found=config.rollout.max_new_tokens, hint=hint)


def _architecture(path: str, config: Config, hf: Mapping[str, Any], plugins: Plugins) -> Problems:
    """Yield problems of a model, and of keys that do not fit it in its train engine."""
    try:
        spec = family(plugins, hf, config.train.engine)
    except AnygaugeError:
        return  # a problem of its own
    engine = _train_engine(config, plugins)
    hints = architecture_hints(spec, hf, engine)
    value = getattr(config, path.split(".")[0]).path
    yield from (ConfigProblem(path=path, found=str(value), hint=hint) for hint in hints)
    if not hints and engine is not None and engine.check_model is not None:
        yield from engine.check_model(config, path, spec, hf)


def division_rule(path: str, config: Config, hf: Mapping[str, Any], plugins: Plugins) -> Problems:
    """Yield keys that do not fit a model in its train engine, without importing torch.

    Nothing is said about a model that the engine cannot build: :func:`model_rules` tells why.
    """
    try:
        spec = family(plugins, hf, config.train.engine)
        engine = _train_engine(config, plugins)
        if engine is None or engine.check_model is None or architecture_hints(spec, hf):
            return
        problems = list(engine.check_model(config, path, spec, hf))
    except (AnygaugeError, KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        return
    yield from problems


def _train_engine(config: Config, plugins: Plugins) -> TrainEngineSpec | None:
    """Return the train engine; a name that no plugin provides is a problem of its own."""
    engine: TrainEngineSpec | None = plugins.find("register_train_engines", config.train.engine)
    return engine


def _rollout_engine(config: Config, hf: Mapping[str, Any], plugins: Plugins) -> Problems:
    """Yield an engine that has no model for the policy's family, where something is to be generated."""
    if not config.samples or config.debug.mode == "train_only":
        return
    try:
        spec = family(plugins, hf, config.train.engine)
    except AnygaugeError:
        return  # a problem of its own
    engine = config.rollout.engine
    if spec.rollout_engines is not None and engine not in spec.rollout_engines:
        fit = f"these have: {', '.join(spec.rollout_engines)}" if spec.rollout_engines else "none has one yet"
        hint = f'has no model for the {spec.name} family; {fit}; run.task = "sft" without rewards needs none'
        yield ConfigProblem(path="rollout.engine", found=engine, hint=hint)
        return
    yield from _served_quantized(config, hf, plugins)
    yield from _served_media(config, spec, plugins)


def _served_quantized(config: Config, hf: Mapping[str, Any], plugins: Plugins) -> Problems:
    """Yield a quantized model that servers would load as it is, and then get other weights for."""
    if quantization(hf) is None or config.rollout.external:
        return
    engine = config.rollout.engine
    spec: RolloutEngineSpec | None = plugins.find("register_rollout_engines", engine)
    if spec is not None and spec.serve is not None:
        hint = (
            f"servers of {engine} would load its FP8 weights as they are, and get updates in bfloat16; write "
            "it in bfloat16 first, with anygauge convert --to-bfloat16 DIR OUT, or write "
            'rollout.engine = "transformers"'
        )
        yield ConfigProblem(path="model.path", found=str(config.model.path), hint=hint)


def _served_media(config: Config, spec: ModelSpec, plugins: Plugins) -> Problems:
    """Yield kinds of media that servers of the engine do not see as the trainer does."""
    engine = config.rollout.engine
    if spec.media is None or plugins.get("register_rollout_engines", engine).serve is None:
        return
    taken = spec.media.served.get(engine, frozenset({"image"}))
    if unserved := sorted(modalities(config) - taken):
        hint = f"servers of {engine} take {', '.join(sorted(taken))} of the {spec.name} family; write "
        hint += f'rollout.engine = "transformers", or leave out {", ".join(unserved)}'
        yield ConfigProblem(path="model.modalities", found=unserved, hint=hint)


def chat_template_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield keys that need a chat template which the policy's tokenizer lacks."""
    directory = config.model.path
    if not os.path.isdir(directory):
        return  # a problem of its own, or a name
    tables: dict[str, Data | EvalDataset] = {"data": config.data}
    tables |= {f"eval.datasets.{name}": dataset for name, dataset in config.eval.datasets.items()}
    paths = [f"{path}.apply_chat_template" for path, table in tables.items() if table.apply_chat_template]
    needed: dict[str, tuple[Any, str]] = dict.fromkeys(paths, (True, "write false, or add"))
    if config.rollout.function == "agent":
        needed["rollout.function"] = "agent", "add"
    if not needed or (directory / "chat_template.jinja").is_file():
        return
    try:
        tokenizer = read_json(directory / "tokenizer_config.json")
    except (OSError, ValueError):
        tokenizer = {}
    if not tokenizer.get("chat_template"):
        for path, (value, advice) in needed.items():
            hint = f"the tokenizer of {directory} has no chat template; {advice} chat_template.jinja"
            yield ConfigProblem(path=path, found=value, hint=hint)
