"""Rules of media: the modalities of a run's data, and those that its model takes."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anygauge.config.families import family
from anygauge.config.modalities import PARTS, TOWERS, media_fields, modalities, weight_expressions
from anygauge.config.schema import Config, Data, EvalDataset, Media
from anygauge_hooks.errors import AnygaugeError
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.plugins import Plugins

__all__ = ["media_mismatches", "media_rule", "model_media"]

Problems = Iterator[ConfigProblem]
WORD = re.compile(r"\w+")
_ALIKE = tuple(("vision_config", key) for key in ("patch_size", "spatial_merge_size", "temporal_patch_size"))
"""Keys that decide how many placeholders an image has."""


def media_rule(config: Config, user_keys: Collection[str]) -> Problems:
    """Yield keys of media that contradict each other, or have no effect."""
    kinds = modalities(config)
    yield from _fields(config)
    yield from _frozen_weights(config)
    if not kinds:
        yield from _without_media(config)
        return
    for path, keys in media_fields(config).items():
        if lacking := sorted(set(keys) - kinds):
            hint = f"lacks {', '.join(lacking)}, which {path} names; add it, or leave this out"
            yield ConfigProblem(path="model.modalities", found=sorted(kinds), hint=hint)
    for part, takes in TOWERS.items():
        if part in config.train.freeze and not takes & kinds:
            hint = f"there is no tower for {part}: the run has only {', '.join(sorted(kinds))}"
            yield ConfigProblem(path="train.freeze", found=list(config.train.freeze), hint=hint)
    least, most = config.media.min_pixels, config.media.max_pixels
    if least is not None and most is not None and least > most:
        hint = f"must be at most media.max_pixels = {most}"
        yield ConfigProblem(path="media.min_pixels", found=least, hint=hint)
    if config.media.store == "ray" and config.placement.launcher == "local":
        hint = 'there is no Ray with placement.launcher = "local"; leave this out'
        yield ConfigProblem(path="media.store", found="ray", hint=hint)


def model_media(config: Config, hf: Mapping[str, Any], plugins: Plugins) -> Problems:
    """Yield modalities that a run has and its model does not support.

    :param hf: The Hugging Face config of the policy.
    """
    kinds = modalities(config)
    if not kinds:
        return
    named = config.model.modalities is not None
    path = "model.modalities" if named else next(path for path, keys in media_fields(config).items() if keys)
    try:
        spec = family(plugins, hf, config.train.engine)
        taken = (
            set() if spec.media is None else {kind for each in spec.media.towers(hf) for kind in each.kinds}
        )
    except AnygaugeError:
        return  # a problem of the model, which is told there
    except KeyError as error:
        hint = f"its config.json lacks {error}: it is the text-only part of a model"
        yield ConfigProblem(path="model.path", found=str(config.model.path), hint=hint)
        return
    if lacking := sorted(kinds - taken):
        takes = f"{', '.join(sorted(taken))} and text" if taken else "only text"
        takes += f": {spec.refused_media}" if spec.refused_media else ""
        hint = f"the model's family takes {takes}; leave out {', '.join(lacking)}, or take another model"
        yield ConfigProblem(path=path, found=sorted(kinds), hint=hint)


def media_mismatches(
    config: Config, policy: Mapping[str, Any], other: Mapping[str, Any], plugins: Plugins
) -> Iterator[str]:
    """Yield why another model cannot take the media of the policy's samples.

    The samples have the policy's placeholders, and contents of its sizes.

    :param policy: Its Hugging Face config; ``other`` is that of the other model.
    """
    if not modalities(config):
        return
    try:
        specs = [family(plugins, hf, config.train.engine) for hf in (policy, other)]
    except AnygaugeError:
        return  # a problem of its own
    if specs[0].media != specs[1].media:
        yield f"a {specs[1].name} model has other media inputs than the policy, {specs[0].name}"
        return
    for part, key in _ALIKE:
        one, another = ((hf.get(part) or {}).get(key) for hf in (policy, other))
        if one != another:
            yield f"holds {part}.{key} = {another}; model.path holds {one}"


def _fields(config: Config) -> Problems:
    tables: dict[str, Data | EvalDataset] = {"data": config.data}
    tables |= {f"eval.datasets.{name}": dataset for name, dataset in config.eval.datasets.items()}
    keys = media_fields(config)
    for name, table in tables.items():
        path = f"{name}.multimodal_keys"
        if path not in keys:
            continue
        used = Counter(
            getattr(table if key in table.model_fields_set else config.data, key)
            for key in ("input_key", "label_key", "metadata_key", "tools_key")
        )
        used.update(keys[path].values())
        for kind, key in keys[path].items():
            if used[key] > 1:
                hint = f"another key names the field {key!r} too; give each its own"
                yield ConfigProblem(path=f"{path}.{kind}", found=key, hint=hint)


def _frozen_weights(config: Config) -> Problems:
    """Yield entries of ``train.freeze`` that are neither parts nor regular expressions."""
    for expression in weight_expressions(config):
        try:
            re.compile(expression)
        except re.error as error:
            hint = f"no part (vision, audio, language) and no regular expression: {error}"
            yield ConfigProblem(path="train.freeze", found=expression, hint=hint)
            continue
        if WORD.fullmatch(expression):
            close = difflib.get_close_matches(expression, PARTS, n=1) or PARTS
            hint = f"no part, and names of weights have dots in them; did you mean {' or '.join(close)}?"
            yield ConfigProblem(path="train.freeze", found=expression, hint=hint)


def _without_media(config: Config) -> Problems:
    """Yield keys of media in a text-only run."""
    hint = "has no effect without data.multimodal_keys or model.modalities; leave it out"
    default = Media()
    for name in Media.model_fields:
        value = getattr(config.media, name)
        if value != getattr(default, name):
            shown = value if isinstance(value, bool | int | float | str) else str(value)
            yield ConfigProblem(path=f"media.{name}", found=shown, hint=hint)
    if frozen := sorted(set(config.train.freeze) & set(TOWERS)):
        yield ConfigProblem(path="train.freeze", found=frozen, hint=hint)
