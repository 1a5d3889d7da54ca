"""``samples.jsonl``: a few scored samples of a few steps, to read what the policy writes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from anygauge.config import Config
from anygauge.hub import localized
from anygauge_hooks import hookimpl
from anygauge_hooks.rl import Group, Prompt, Sample
from anygauge_hooks.types import RunInfo

__all__ = ["SAMPLES_FILE", "SampleRecorder", "is_recorded", "shorten", "token_texts"]

SAMPLES_FILE = "samples.jsonl"
"""Name of the file in the run directory."""
RECORDED_STEPS = 200
"""About so many steps of a long run are recorded."""
RANDOM_SAMPLES = 2
MOST_TOKENS = 400
"""Tokens of a response that are recorded one by one."""

_LONGEST = {"prompt": 1000, "response": 3000, "label": 300, "error": 1000, "raw_reward": 1000}
"""Characters that are kept of a text."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
Decode = Callable[[Sequence[int]], str]
_log = logging.getLogger(__name__)


class SampleRecorder:
    """Appends the best, the worst and two random samples of a step, and one that could not be scored.

    Each line is one step; the last one of a step counts, where a resumed run has taken it again. What is
    recorded depends on nothing but the step and the samples. Where the file cannot be written, the run goes
    on without it. Tokens need the ``tokenizer.json`` of the model; the log-prob of one that the policy did
    not sample is ``null``, and one that is not finite is a text such as ``"nan"``.

    Example line, with one of the samples::

        {"step": 5, "samples": [{"chosen": "best", "prompt": "3+4=", "response": "7", "reward": 1.0,
         "raw_reward": 1.0, "error": null, "length": 2, "finish_reason": "stop", "dataset": "train",
         "label": "7", "weight_version": 4, "tokens": ["7", "<eos>"], "log_probs": [-0.25, -0.01]}]}
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()

    @hookimpl
    def after_rollout(self, run: RunInfo, groups: Sequence[Group]) -> None:
        """Record the samples of a step, if it is selected."""
        step = run.step + 1
        if run.directory in self._failed or not is_recorded(step, run.total_steps):
            return
        rows = sample_rows(groups, step, _decoder(run))
        line = json.dumps({"step": step, "samples": rows}, ensure_ascii=False)
        try:
            # A lone surrogate has no encoding.
            with open(Path(run.directory) / SAMPLES_FILE, "a", encoding="utf-8", errors="replace") as stream:
                stream.write(line + "\n")
        except OSError as error:
            self._failed.add(run.directory)
            _log.warning("samples are not recorded any more: %s", error)


def is_recorded(step: int, total: int) -> bool:
    """Return whether the samples of a step are recorded: the first, the last, and ever fewer in between.

    >>> [step for step in range(1, 2001) if is_recorded(step, 2000)][:7]
    [1, 2, 5, 10, 20, 30, 40]
    """
    every = max(1, total // RECORDED_STEPS)
    return step % every == 0 or step == total or str(step).rstrip("0") in ("1", "2", "5")


def sample_rows(groups: Sequence[Group], step: int, decode: Decode | None = None) -> list[dict[str, Any]]:
    """Return the chosen samples of a step as JSON types.

    :param decode: Decoder of their tokens; ``None`` leaves these out.
    """
    rewards = [sample.reward for group in groups for sample in group.samples]
    chosen = [(*_find(groups, index), why) for index, why in _chosen(rewards, Random(step)).items()]
    return [
        _row(sample, prompt, why) | ({} if decode is None else _tokens(sample, decode))
        for sample, prompt, why in chosen
    ]


def _decoder(run: RunInfo) -> Decode | None:
    if not isinstance(run.config, Config):
        return None
    return token_decoder(localized(run.config, download=False, data=False).model.path)


def _tokens(sample: Sample, decode: Decode) -> dict[str, Any]:
    """Return the first tokens of a response and their log-probs."""
    sampled = zip(sample.log_probs[:MOST_TOKENS], sample.loss_mask, strict=False)
    return {
        "tokens": token_texts(sample.response_tokens[:MOST_TOKENS], decode),
        "log_probs": [_plain(float(f"{value:.4g}")) if counts else None for value, counts in sampled],
    }


def _chosen(rewards: Sequence[float | None], random: Random) -> dict[int, str]:
    """Return why each of the chosen samples is, by position; none is chosen twice."""
    chosen: dict[int, str] = {}
    scored = [reward for reward in rewards if reward is not None]
    if scored:
        chosen[_any_of(rewards, max(scored), random)] = "best"
        chosen.setdefault(_any_of(rewards, min(scored), random), "worst")
    if len(scored) < len(rewards):
        chosen[_any_of(rewards, None, random)] = "failed"
    drawn = random.sample(range(len(rewards)), min(RANDOM_SAMPLES + len(chosen), len(rewards)))
    others = [index for index in drawn if index not in chosen][:RANDOM_SAMPLES]
    return chosen | dict.fromkeys(others, "random")


def _any_of(rewards: Sequence[float | None], wanted: float | None, random: Random) -> int:
    """Return the position of a sample with this reward: the next from a random one on."""
    try:
        return rewards.index(wanted, random.randrange(len(rewards)))
    except ValueError:
        return rewards.index(wanted)


def _find(groups: Sequence[Group], index: int) -> tuple[Sample, Prompt]:
    """Return the sample at a position among those of all groups, and its prompt."""
    for group in groups:
        if index < len(group.samples):
            return group.samples[index], group.prompt
        index -= len(group.samples)
    raise IndexError(index)


def _row(sample: Sample, prompt: Prompt, why: str) -> dict[str, Any]:
    row = {
        "chosen": why,
        "prompt": prompt.text,
        "response": sample.text,
        "reward": _plain(sample.reward),
        "raw_reward": _plain(sample.raw_reward),
        "error": sample.error,
        "length": len(sample.response_tokens),
        "finish_reason": sample.finish_reason,
        "dataset": prompt.dataset,
        "label": _plain(prompt.label),
        "weight_version": sample.weight_versions[-1] if sample.weight_versions else None,
    }
    return row | {key: shorten(row[key], most) for key, most in _LONGEST.items()}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; what it has not as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def shorten(value: Any, most: int) -> Any:
    """Return a text without its middle if it is longer than ``most`` characters, which it says.

    What is no text is returned as it is, unless it is as long when printed.
    """
    if isinstance(value, bool | int | float | None):
        return value
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= most:
        return value
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


@cache
def token_decoder(model: Path) -> Decode | None:
    """Return the decoder of a model's ``tokenizer.json``; ``None`` where there is none that can be read.

    :param model: Directory of the model.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception as error:  # noqa: BLE001 - foreign code: tokenizers raises nothing narrower
        _log.info("samples are recorded without their tokens: %s", error)
        return None
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False))


def token_texts(tokens: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds.

    A token is decoded behind the one before it, on which its leading space may depend. Tokens that end within
    a character add nothing, and the one that ends it adds it.
    """
    texts: list[str] = []
    start = end = 0
    for index in range(len(tokens)):
        before, now = decode(tokens[start:end]), decode(tokens[start : index + 1])
        is_whole = len(now) > len(before) and not now.endswith(_INCOMPLETE)
        texts.append(now[len(before) :] if is_whole else "")
        if is_whole:
            start, end = end, index + 1
    return texts
