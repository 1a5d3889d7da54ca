"""Batch arithmetic: from prompts of a step to the tokens of a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from anygauge.planning.layout import Layout

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["Batches", "make_batches"]

PROMPT_TOKENS = 512
"""Assumed length of a prompt where neither ``data.max_prompt_tokens`` nor the context bounds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Sizes of a step in which every sample is as long as the config allows."""

    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    """Longest response; in SFT, 0: any token of a row may count."""
    rank_samples: int
    """Samples of the fullest data-parallel rank."""
    mini_batches: int
    """Optimizer steps of a rollout."""
    mini_batch_samples: int
    """Samples of a rank in one of them."""
    micro_batches: int
    """Micro-batches of a mini-batch, on each rank."""
    micro_batch_tokens: int
    """Most tokens of a micro-batch, before context parallelism divides them."""

    @property
    def sample_tokens(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.samples * self.sample_tokens

    @property
    def rank_tokens(self) -> int:
        """Tokens of a data-parallel rank in a step."""
        return self.rank_samples * self.sample_tokens

    @property
    def loss_tokens(self) -> int:
        """Tokens of a micro-batch for which the output layer computes log-probs; in SFT, all."""
        own = self.response_tokens or self.sample_tokens
        return ceil(self.micro_batch_tokens * own / self.sample_tokens)


def make_batches(config: Config, layout: Layout, context: int | None) -> Batches:
    """Return the batch arithmetic of a config.

    :param context: Longest sequence that the model takes; ``None`` for any.
    """
    response = 0 if config.run.task == "sft" else config.rollout.max_new_tokens
    room = PROMPT_TOKENS if context is None else max(1, context - response)
    prompt = config.data.max_prompt_tokens or min(PROMPT_TOKENS, room)
    samples, steps = config.rollout_samples, config.optimizer_steps
    in_mini_batch = ceil(ceil(samples / steps) / layout.data)
    longest, limit = prompt + response, config.train.micro_batch_tokens
    return Batches(
        prompts=config.rollout.prompts_per_step,
        samples=samples,
        prompt_tokens=prompt,
        response_tokens=response,
        rank_samples=in_mini_batch * steps,
        mini_batches=steps,
        mini_batch_samples=in_mini_batch,
        micro_batches=ceil(in_mini_batch / max(1, limit // longest)),
        # shorter samples fill a micro-batch up to its limit
        micro_batch_tokens=min(max(limit, longest), in_mini_batch * longest),
    )
