"""Untrusted texts in a page: samples and the config."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anygauge.config.schema import Section
from anygauge.config.validate import NONE, keys
from anygauge.observability.control_characters import visible
from anygauge.observability.report.scale import format_number
from anygauge.observability.samples import shorten

__all__ = ["ConfigLine", "SampleStep", "SampleView", "config_tables", "sample_steps"]

MOST_CHARACTERS = 1_000_000
"""Most characters of all samples in a page; above that, steps are left out evenly."""

_LONGEST = 6000
"""Characters of one text in a page. The recorder keeps fewer; the file may come from elsewhere."""
_HEADER = re.compile(r"\[+([^\[\]]+)\]+")
_ENTRY = re.compile(r'([\w-]+|"[^"]*") = ')


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """A sample as it is shown."""

    chosen: str
    prompt: str
    response: str
    reward: str
    share: float | None
    """Position between the lowest and the highest reward shown, in percent; ``None`` without a reward."""
    details: Sequence[tuple[str, str]]
    error: str
    tokens: Sequence[tuple[str, float | str | None]]
    """First tokens of the response with their log-probs.

    ``None`` is for one that the policy did not sample, a text for a log-prob that is not finite.
    """


@dataclass(frozen=True, slots=True)
class SampleStep:
    """The samples of a step."""

    step: int
    samples: Sequence[SampleView]


def sample_steps(samples: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[SampleStep]:
    """Return the samples of as many steps as a page may hold, evenly chosen, the last one among them."""
    rewards = [
        r for rows in samples.values() for row in rows if (r := _number(row.get("reward"))) is not None
    ]
    ends = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
    steps = list(samples)
    size = sum(
        len(_text(row.get(key)))
        for rows in samples.values()
        for row in rows
        for key in ("prompt", "response", "tokens", "log_probs")
    )
    stride = -(-size // MOST_CHARACTERS) or 1
    shown = steps[(len(steps) - 1) % stride :: stride]
    return [SampleStep(step, [_view(row, ends) for row in samples[step]]) for step in shown]


def _view(row: Mapping[str, Any], ends: tuple[float, float]) -> SampleView:
    reward = _number(row.get("reward"))
    share = None
    if reward is not None:
        share = 100 * (reward - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 100.0
    named = ("raw_reward", "label", "length", "finish_reason", "dataset", "weight_version")
    return SampleView(
        chosen=_text(row.get("chosen")),
        prompt=_text(row.get("prompt")),
        response=_text(row.get("response")),
        reward="not scored" if reward is None else format_number(reward),
        share=share,
        details=[
            (name.replace("_", " "), _text(row[name])) for name in named if row.get(name) not in (None, "")
        ],
        error=_text(row.get("error")),
        tokens=list(_tokens(row)),
    )


def _tokens(row: Mapping[str, Any]) -> Iterator[tuple[str, float | str | None]]:
    texts, log_probs = row.get("tokens"), row.get("log_probs")
    if isinstance(texts, list) and isinstance(log_probs, list):
        for text, log_prob in zip(texts, log_probs, strict=False):
            number = _number(log_prob)
            yield _text(text), _text(log_prob) or None if number is None else number


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e308 else None


def _text(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return visible(str(shorten(text, _LONGEST)))


@dataclass(frozen=True, slots=True)
class ConfigLine:
    """A line of the resolved config."""

    text: str
    is_header: bool
    is_changed: bool
    """Whether it belongs to a key whose value is not the default."""


def config_tables(text: str, config: Mapping[str, Any]) -> list[list[ConfigLine]]:
    """Return the tables of ``config.toml``, each as its lines, with what is not the default marked."""
    changed = set(_changed(config))
    tables: list[list[ConfigLine]] = [[]]
    table = key = ""
    for line in filter(str.strip, text.splitlines()):
        header, entry = _HEADER.fullmatch(line), _ENTRY.match(line)
        if header:
            table, key = header[1], ""
            tables.append([])
        elif entry:
            key = entry[1]
        path = ".".join(f"{table}.{key}".split(".")[:2])
        tables[-1].append(ConfigLine(visible(line), header is not None, header is None and path in changed))
    return [lines for lines in tables if lines]


def _changed(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted path of each key whose value is not the default."""
    for path, field in keys():
        section, _, key = path.partition(".")
        table = config.get(section)
        if isinstance(table, Mapping) and key in table:
            default = field.get_default(call_default_factory=True, validated_data={})
            if isinstance(default, Section):
                default = default.model_dump(exclude_none=True)
            if field.is_required() or _toml(table[key]) != _toml(NONE if default is None else default):
                yield path


def _toml(value: Any) -> str:
    return json.dumps(value, default=str, sort_keys=True)
