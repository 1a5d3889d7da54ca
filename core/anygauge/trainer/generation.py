"""Generation of training and evaluation samples: seeds, sampling parameters and the context of rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from anygauge.config import Config
from anygauge.config.schema import EvalDataset
from anygauge.data.media.loader import MediaLoader
from anygauge.hub import localized
from anygauge.plugins import Plugins
from anygauge.rollout.context import RolloutContext
from anygauge.rollout.evaluation import sample_groups
from anygauge.rollout.functions import resolve_functions
from anygauge.rollout.text import TextTools
from anygauge.serving.generation_client import GenerationClient
from anygauge.trainer.inputs import load_tokenizer, longest_context
from anygauge.trainer.plan import sample_seeds
from anygauge_hooks.models import text_config
from anygauge_hooks.rl import Group, Prompt, SamplingParams

__all__ = [
    "SampleMaker",
    "eval_params",
    "eval_seeds",
    "group_seeds",
    "open_maker",
    "rollout_params",
]

TRAIN_STREAM, EVAL_STREAM = 0, 1
"""Streams of random numbers."""


def group_seeds(config: Config, number: int) -> list[int]:
    """Return the seeds of a group, from how many prompts were drawn before it in the run."""
    step, place = divmod(number, config.rollout.prompts_per_step)
    samples = config.rollout.samples_per_prompt
    return sample_seeds(config.run.seed, TRAIN_STREAM, step + 1, 1, samples, first_prompt=place)[0]


def eval_seeds(config: Config, num_prompts: int, num_samples: int) -> list[list[int]]:
    """Return the seeds of an evaluation: the same each time, so that only the policy changes in between."""
    return sample_seeds(config.run.seed, EVAL_STREAM, 0, num_prompts, num_samples)


def rollout_params(config: Config, forbidden: tuple[int, ...] = ()) -> SamplingParams:
    """Return how training samples are drawn.

    :param forbidden: Tokens that are never drawn; see :func:`anygauge.trainer.inputs.forbidden_tokens`.
    """
    rollout = config.rollout
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
        forbidden=forbidden,
    )


def eval_params(dataset: EvalDataset, forbidden: tuple[int, ...] = ()) -> SamplingParams:
    """Return how the samples of an evaluation data set are drawn.

    :param dataset: With every field filled in but the reward's.
    :param forbidden: As in :func:`rollout_params`.
    """
    assert dataset.max_new_tokens is not None
    assert dataset.temperature is not None
    assert dataset.top_p is not None
    assert dataset.top_k is not None
    assert dataset.stop is not None
    assert dataset.stop_token_ids is not None
    return SamplingParams(
        max_new_tokens=dataset.max_new_tokens,
        temperature=dataset.temperature,
        top_p=dataset.top_p,
        top_k=dataset.top_k,
        stop=dataset.stop,
        stop_token_ids=dataset.stop_token_ids,
        forbidden=forbidden,
    )


@dataclass(frozen=True, slots=True)
class SampleMaker:
    """Makes the samples of a run, for training and for evaluation."""

    client: GenerationClient
    context: RolloutContext

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int]]
    ) -> list[Group]:
        """Return the group of each prompt, with one sample for each seed and no reward."""
        groups: list[Group] = self.client.wait(sample_groups(self.context, prompts, params, seeds), "samples")
        return groups


def open_maker(
    config: Config, plugins: Plugins, client: GenerationClient, media: MediaLoader | None = None
) -> SampleMaker:
    """Return what makes the samples of a run on its engines.

    :param media: Takes what tools show; ``None`` in a run of text.
    """
    local = localized(config, data=False)
    hf = text_config(json.loads((local.model.path / "config.json").read_text(encoding="utf-8")))
    context = RolloutContext(
        config=config.rollout,
        generator=client.generator,
        engines=client.others,
        vocab_size=hf.get("vocab_size"),
        functions=resolve_functions(config.rollout, plugins),
        text=TextTools(
            load_tokenizer(local),
            config.data,
            longest_context(config, plugins, hf),
            None if media is None else media.show,
            config.media.max_per_sample,
        ),
    )
    return SampleMaker(client, context)
