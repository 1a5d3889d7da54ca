"""Data of one RL step: prompts, samples and groups.

Legend of shape suffixes used across the project:
B batch, T token, D hidden, V vocabulary, H query head, K key/value head, S sequence.

Samples are made by the thousand in every step, so they are named tuples: a frozen dataclass takes several
times as long to make, and one with slots ten times as long to pickle. Name their fields when you make one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from anygauge_hooks.media import Media  # dumps are read by the annotations

__all__ = ["NO_VERSION", "FinishReason", "Group", "Prompt", "Sample", "SamplingParams"]

_NOTHING: Mapping[str, Any] = {}
NO_VERSION: Final = -1
"""Stands for the weight version of a token that no weights made: what a tool said."""
FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a rollout engine draws tokens."""

    max_new_tokens: int
    temperature: float = 1.0
    """Divides the logits. ``0`` decodes greedily; training needs a value above 0."""
    top_p: float = 1.0
    top_k: int = 0
    """Sample from the ``k`` most probable tokens; ``0`` keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; they stay part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    forbidden: tuple[int, ...] = ()
    """Tokens that are never drawn; log-probabilities are those of what is left."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a data source, tokenized for generation.

    Example::

        Prompt(index=7, tokens=(5, 11, 2), text="3+4=", label="7", source="train.jsonl")
    """

    index: int
    """Position in the data source; identifies the group."""
    tokens: tuple[int, ...]
    text: str
    label: Any = None
    source: str = ""
    """File and line."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    dataset: str = ""
    """Name of the data set, in metrics."""
    response: tuple[int, ...] = ()
    """For SFT: what follows ``tokens``, from the first assistant turn on."""
    loss_mask: tuple[int, ...] = ()
    """For SFT, one per token of ``response``: 1 in the assistant's turns."""
    media: tuple[Media, ...] = ()
    """Images, video and sound, in the order of their placeholders in ``tokens``."""


class Sample(NamedTuple):
    """One response to a prompt. All response fields have one entry per response token.

    Example::

        Sample(prompt_index=7, prompt_tokens=(5, 11, 2), response_tokens=(9, 1), log_probs=(-0.1, -0.02),
               loss_mask=(1, 1), weight_versions=(3, 3), text="7", finish_reason="stop", seed=1234)
    """

    prompt_index: int
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-probability of each response token under the engine, at the sampling temperature; 0.0 of a token
    that the policy did not sample, whose ``loss_mask`` is 0."""
    loss_mask: tuple[int, ...]
    """1 where the token was sampled by the policy and is trained on."""
    weight_versions: tuple[int, ...]
    """Version of the weights that made each token; :data:`NO_VERSION` of one that the policy did not
    sample."""
    text: str
    """Text that is scored."""
    finish_reason: FinishReason
    seed: int
    reward: float | None = None
    """Reward that is trained on; ``None`` before scoring, and for a sample that could not be scored."""
    metadata: Mapping[str, Any] = _NOTHING
    raw_reward: Any = None
    """Result of the reward functions: a number or a dict; for several functions, a dict by the name of
    each."""
    error: str | None = None
    """Why the sample could not be scored, or made."""
    rollout: int | None = None
    """Which rollout of its group it is a part of, where one became several samples; ``None`` if it is one by
    itself. The samples of a rollout share its reward, and its weight in the loss."""
    media: tuple[Media, ...] = ()
    """Media of the prompt and of tool results; spans count from the prompt's first token."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt and all samples drawn from it."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    def rollouts(self) -> list[list[Sample]]:
        """Return the samples of each rollout, in order."""
        rollouts: dict[tuple[bool, int], list[Sample]] = {}
        for place, sample in enumerate(self.samples):
            owner = (False, place) if sample.rollout is None else (True, sample.rollout)
            rollouts.setdefault(owner, []).append(sample)
        return list(rollouts.values())
