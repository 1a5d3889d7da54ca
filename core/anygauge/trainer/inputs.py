"""Inputs of a run, created and checked before its directory exists."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from anygauge.config import Config
from anygauge.config.families import family
from anygauge.config.modalities import modalities
from anygauge.config.schema import Data, EvalDataset, Reward
from anygauge.data.balance import free
from anygauge.data.evaluation import eval_data, eval_datasets
from anygauge.data.media.finder import MediaFinder
from anygauge.hub import localized
from anygauge.observability.reward_parts import PartNames
from anygauge.plugins import Plugins
from anygauge_hooks.data import DataSource
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import CheckpointError, ConfigError
from anygauge_hooks.media import Media
from anygauge_hooks.models import ModelSpec, text_config
from anygauge_hooks.rl import Prompt

__all__ = ["EvalSet", "Inputs", "forbidden_tokens", "read_eval_sets", "read_inputs"]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """An evaluation data set that was read."""

    name: str
    settings: EvalDataset
    """With every field filled in but the reward's."""
    prompts: Sequence[Prompt]
    part_names: PartNames = field(default_factory=PartNames, compare=False)
    """Metric names of the parts of its rewards."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Data sources, tokenizer and model facts that the steps of a run use."""

    source: DataSource
    eval_sets: Sequence[EvalSet]
    flops_per_token: Callable[[int], float]
    """FLOPs per token of the model's forward pass, from the length of a sequence."""
    media_flops: Callable[[Media], float] = free
    """FLOPs of a tower's forward pass over a medium."""
    media: MediaFinder | None = None
    """Media of all data sets of the run; ``None`` for a text-only run."""


def read_inputs(config: Config, plugins: Plugins) -> Inputs:
    """Read the training and evaluation data of a run.

    :raises DataError: A file or row cannot be used.
    :raises HubError: A model or data file cannot be had by its name.
    """
    config = localized(config)
    tokenizer = load_tokenizer(config)
    media = media_finder(config, plugins, tokenizer)
    source = _make_source(config, plugins, tokenizer, config.data, config.rollout.max_new_tokens, media)
    eval_sets = read_eval_sets(config, plugins, tokenizer, media)
    hf, spec = read_model(config, plugins)
    return Inputs(
        source=source,
        eval_sets=eval_sets,
        flops_per_token=partial(spec.flops_per_token, hf),
        media_flops=free if spec.media is None else partial(spec.media.flops, hf),
        media=media,
    )


def read_model(config: Config, plugins: Plugins) -> tuple[Mapping[str, Any], ModelSpec]:
    """Return the Hugging Face config of the text model, and its family."""
    hf = text_config(json.loads((config.model.path / "config.json").read_text(encoding="utf-8")))
    return hf, family(plugins, hf, config.train.engine)


def forbidden_tokens(config: Config, plugins: Plugins) -> tuple[int, ...]:
    """Return the tokens that the policy may not sample: those that hold the places of media.

    They are its family's, also in a run of text; none of a family that takes only text.
    """
    hf, spec = read_model(localized(config, data=False), plugins)
    return () if spec.media is None else tuple(spec.media.forbidden(hf))


def rewards(config: Config) -> list[Reward]:
    """Return the rewards that a run needs, the training's first."""
    own = [dataset.reward for dataset in config.eval.datasets.values() if dataset.reward is not None]
    return [reward for reward in (config.reward, *own) if reward.function or reward.parts]


def read_eval_sets(
    config: Config, plugins: Plugins, tokenizer: Any = None, media: MediaFinder | None = None
) -> list[EvalSet]:
    """Read the evaluation data sets.

    :param tokenizer: ``None`` loads that of the model.
    :param media: Remembers the media of their rows; ``None`` for a run of text.
    """
    sets = []
    for name, dataset in eval_datasets(config).items():
        tokenizer = tokenizer or load_tokenizer(config)
        room = dataset.max_new_tokens or config.rollout.max_new_tokens
        source = _make_source(config, plugins, tokenizer, eval_data(config, dataset), room, media)
        sets.append(EvalSet(name, dataset, source.all(dataset.max_prompts)))
    return sets


def media_finder(config: Config, plugins: Plugins, tokenizer: Any) -> MediaFinder | None:
    """Return what reads the media of rows, and of tools; ``None`` for a run of text.

    :param config: Whose model is a directory.
    :raises ConfigError: The model takes none, or its processor's settings are another family's.
    """
    if not modalities(config):
        return None
    hf = json.loads((config.model.path / "config.json").read_text(encoding="utf-8"))
    _, spec = read_model(config, plugins)
    if spec.media is None:
        raise ConfigError(
            f"The run has {', '.join(sorted(modalities(config)))}, and the model's family takes only text.",
            hint="Leave out data.multimodal_keys and model.modalities, or take another model.",
        )
    processor = spec.media.make_processor(config.model.path, hf)
    return MediaFinder(config.media, config.data.multimodal_keys, processor, tokenizer, modalities(config))


def _make_source(
    config: Config,
    plugins: Plugins,
    tokenizer: Any,
    data: Data,
    max_new_tokens: int,
    media: MediaFinder | None = None,
) -> DataSource:
    make = plugins.get("register_data_sources", data.source).fn
    hf, _ = read_model(config, plugins)
    room = prompt_room(longest_context(config, plugins, hf), config.run.task, max_new_tokens)
    stops = stop_tokens(config.model.path, hf, tokenizer) if config.run.task == "sft" else None
    # A source of text that somebody wrote need not know of media.
    takes_media = media is not None and (data.multimodal_keys or data.source == "files")
    more = {"media": media.of(data.multimodal_keys)} if media is not None and takes_media else {}
    source: DataSource = make(data, tokenizer, config.run.seed, max_tokens=room, stop_tokens=stops, **more)
    return source


def stop_tokens(path: Path, hf: Mapping[str, Any], tokenizer: Any) -> list[str]:
    """Return the texts of the tokens that end a response: the tokenizer's own, and those of the model.

    :param path: Directory of the model.
    :param hf: Its Hugging Face config.
    """
    file = path / "generation_config.json"
    source = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else text_config(hf)
    ids = source.get("eos_token_id")
    known = [] if ids is None else tokenizer.convert_ids_to_tokens(ids if isinstance(ids, list) else [ids])
    return list(dict.fromkeys(filter(None, (tokenizer.eos_token, *known))))


def longest_context(config: Config, plugins: Plugins, hf: Mapping[str, Any]) -> int | None:
    """Return how many tokens the model takes, and the rollout engine where there is one; ``None`` for any.

    :param hf: The Hugging Face config.
    """
    length = hf.get("max_position_embeddings")
    context = length if isinstance(length, int) else None
    if config.run.task == "sft":
        return context
    engines: Mapping[str, RolloutEngineSpec] = plugins.named("register_rollout_engines")
    engine = engines.get(config.rollout.engine)  # what there is not is said when it is started
    return context if engine is None or engine.context is None else engine.context(config, context)


def prompt_room(context: int | None, task: str, max_new_tokens: int) -> int | None:
    """Return how many tokens of a context a row may take, if it has a limit.

    :param context: See :func:`longest_context`.
    """
    return context if context is None or task == "sft" else max(0, context - max_new_tokens)


def load_tokenizer(config: Config) -> Any:
    """Return the tokenizer of the model.

    :raises CheckpointError: It has none, or transformers cannot read it.
    """
    from transformers import AutoTokenizer

    directory: Path = config.model.path
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=config.model.trust_remote_code
        )
    except Exception as error:  # foreign code: transformers' classes read the files of the model
        raise CheckpointError(
            f"transformers cannot load a tokenizer from {directory}: {type(error).__name__}: {error}",
            hint="The directory needs tokenizer.json, tokenizer_config.json and config.json as they were "
            "published.",
        ) from error
