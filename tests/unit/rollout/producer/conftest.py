"""A producer on a scripted engine, whose tokens are letters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from anygauge.config.schema import Data, Rollout
from anygauge.rollout.context import ProducerContext, RolloutContext
from anygauge.rollout.functions import UserFunction, UserFunctions, single_turn
from anygauge.rollout.producer import Producer
from anygauge.rollout.scoring import ScoringQueue
from anygauge.rollout.text import TextTools
from anygauge.testing.tiny import tiny_tokenizer
from anygauge_hooks.rl import Group, Prompt, SamplingParams
from anygauge_tests.scripted_engine import ListSource, ScriptedEngine

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=<>/ :.-*()"
MakeProducer = Callable[..., Producer]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextTools:
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"), alphabet=ALPHABET)
    return TextTools(tokenizer, Data.model_validate({"train": ["data.jsonl"]}))


@pytest.fixture(scope="session")
def prompts(text: TextTools) -> list[Prompt]:
    """Sixteen prompts, a single letter each."""
    return [
        Prompt(index=index, tokens=text.encode(letter), text=letter, label=letter, source=f"data:{index}")
        for index, letter in enumerate(ALPHABET[:16])
    ]


def by_length(groups: Sequence[Group]) -> list[Group]:
    """Score each response by its length."""
    return [
        Group(
            prompt=group.prompt,
            samples=tuple(
                sample._replace(reward=float(len(sample.response_tokens)), raw_reward=0.0)
                for sample in group.samples
            ),
        )
        for group in groups
    ]


@pytest.fixture
def make_producer(text: TextTools, prompts: list[Prompt]) -> MakeProducer:
    """Return what makes a producer; it takes an engine, and keys of ``[rollout]``."""

    def make(
        engine: ScriptedEngine,
        *,
        function: Any = single_turn,
        filters: Sequence[Any] = (),
        after_sample: Sequence[Any] = (),
        epochs: int | None = None,
        score: Any = by_length,
        version: int = 0,
        max_unscored_ratio: float = 0.0,
        source: Any = None,
        tools: TextTools = text,
        forbidden: tuple[int, ...] = (),
        vocab_size: int | None = None,
        **keys: Any,
    ) -> Producer:
        settings = {
            "prompts_per_step": 4,
            "samples_per_prompt": 2,
            "max_new_tokens": 8,
            "max_failed_ratio": 0.0,
        }
        config = Rollout.model_validate({**settings, **keys})

        def named(function: Any) -> UserFunction:
            return UserFunction(function.__name__, function)

        context = ProducerContext(
            config=config,
            rollout_context=RolloutContext(
                config=config,
                generator=engine,
                functions=UserFunctions(
                    named(function), [named(each) for each in after_sample], [named(each) for each in filters]
                ),
                text=tools,
                vocab_size=vocab_size,
            ),
            source=source or ListSource(prompts, epochs),
            seeds=lambda number: [1000 * number + k for k in range(config.samples_per_prompt)],
            params=SamplingParams(
                max_new_tokens=config.max_new_tokens, stop=config.stop, forbidden=forbidden
            ),
            scorer=None if score is None else ScoringQueue(score),
            max_unscored_ratio=max_unscored_ratio,
        )
        return Producer(context, version=version)

    return make
