"""Checks of generations and samples: one of each value per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from anygauge.rollout.answer_limits import LARGEST_LOG_PROB, MOST_TOKENS, stray_token
from anygauge.rollout.rewards.call import plain, refusal
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Prompt, Sample
from anygauge_hooks.rollout import Generation

__all__ = ["check_generation", "check_sample", "failed_sample"]

_PER_TOKEN = ("log_probs", "loss_mask", "weight_versions")


def failed_sample(prompt: Prompt, seed: int, why: str) -> Sample:
    """Return what stands for a rollout whose function failed: no token, and the reason."""
    return Sample(
        prompt_index=prompt.index,
        prompt_tokens=prompt.tokens,
        response_tokens=(),
        log_probs=(),
        loss_mask=(),
        weight_versions=(),
        text="",
        finish_reason="abort",
        seed=seed,
        error=why,
        media=prompt.media,
    )


def check_generation(said: Generation, limit: int, vocab_size: int | None = None) -> None:
    """Check what an engine returned.

    :param limit: Tokens that it was asked for.
    :param vocab_size: Size of the model's vocabulary; ``None`` if it is not known.
    :raises RolloutError: It has not one of each value per token, too many tokens, a token that the model does
        not have, or a log-prob that is none.
    """
    count = len(said.tokens)
    if not count == len(said.log_probs) == len(said.weight_versions):
        wrong = [
            f"{len(values)} {name}"
            for name, values in (("log_probs", said.log_probs), ("weight_versions", said.weight_versions))
            if len(values) != count
        ]
        raise RolloutError(
            f"The engine returned {count} tokens with {' and '.join(wrong)}.",
            hint="It must return one of each per token; this is an error of the engine.",
        )
    if count > limit:
        raise RolloutError(
            f"The engine returned {count} tokens where at most {limit} were asked for.",
            hint="It must keep max_new_tokens; this is an error of the engine.",
        )
    if (odd := _no_number(said.log_probs)) is not None:
        raise RolloutError(
            f"The engine returned the log-prob {said.log_probs[odd]} of token {odd} of {count}.",
            hint="It computed a NaN or an infinity: check its weights and whether its dtype is wide enough.",
        )
    # The trainer looks ids up on the device, where one that is not there ends the process without a word.
    if (stray := stray_token(said.tokens, vocab_size)) is not None:
        size = vocab_size or MOST_TOKENS
        raise RolloutError(
            f"The engine returned the token {said.tokens[stray]!r} as number {stray} of {count}, "
            "which the model does not have.",
            hint=f"Ids are integers from 0 to {size - 1}; does the engine serve the run's model?",
        )
    if max(said.log_probs, default=0.0) > LARGEST_LOG_PROB:
        raise RolloutError(
            f"The engine returned the log-prob {max(said.log_probs)}, which is not a valid log-prob.",
            hint="A log-prob is at most 0; this is an error of the engine.",
        )


def _no_number(values: Sequence[Any]) -> int | None:
    """Return the place of the first value that is no number, such as NaN, which JSON tells as null."""
    try:
        if not math.isnan(sum(values)):
            return None
    except TypeError:
        pass
    odd = (place for place, each in enumerate(values) if not isinstance(each, Real) or each != each)
    return next(odd, None)


def check_sample(sample: Any, prompt: Prompt) -> Sample:
    """Return a sample that a function made, having checked that it can be trained on.

    :raises RolloutError: It is none, or its values do not go together; all that is wrong is listed.
    """
    if not isinstance(sample, Sample):
        raise RolloutError(
            f"A {type(sample).__name__} was returned, not a Sample.",
            hint="Return draft.sample(), or a list of such samples.",
        )
    if problems := _problems(sample, prompt):
        raise RolloutError(
            f"A sample is incomplete: {'; '.join(problems)}.",
            hint="rollout.draft() keeps one of each value per token.",
        )
    return sample if sample.raw_reward is None else sample._replace(raw_reward=plain(sample.raw_reward))


def _problems(sample: Sample, prompt: Prompt) -> list[str]:
    count = len(sample.response_tokens)
    problems = [
        f"{count} response_tokens with {len(values)} {name}"
        for name in _PER_TOKEN
        if len(values := getattr(sample, name)) != count
    ]
    if (odd := _no_number(sample.log_probs)) is not None:
        problems.append(f"log_probs[{odd}] is {sample.log_probs[odd]!r}")
    if sample.reward is not None and (refused := refusal(sample.reward)):
        problems.append(f"reward is {refused}")
    if not sample.prompt_tokens:
        problems.append("prompt_tokens is empty")
    if sample.prompt_index != prompt.index:
        problems.append(f"prompt_index is {sample.prompt_index}, and the prompt's {prompt.index}")
    ends = [start + size for medium in sample.media for start, size in medium.spans]
    if ends and (end := max(ends)) > (length := len(sample.prompt_tokens) + count):
        problems.append(f"media end at token {end} of {length}")
    if not set(sample.loss_mask) <= {0, 1}:
        problems.append("loss_mask has other values than 0 and 1")
    pairs = zip(sample.loss_mask, sample.weight_versions, strict=False)
    if min(sample.weight_versions, default=0) < 0 and any(mask for mask, made in pairs if made < 0):
        problems.append("a token that no weights made has a loss mask of 1")
    return problems
