"""Samples and groups to score, and a scorer for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anygauge.config.schema import Reward
from anygauge.plugins import Plugins
from anygauge.rollout.rewards import Scorer, reward_functions
from anygauge_hooks import hookimpl
from anygauge_hooks.rl import Group, Prompt, Sample
from anygauge_hooks.types import NamedFunction

__all__ = ["errors", "group", "plugins_with", "rewards", "sample", "scorer"]


def sample(length: int = 1, **fields: Any) -> Sample:
    """Return a sample without a reward.

    :param length: Tokens of the response.
    :param fields: Fields of the sample that are not the plain ones.
    """
    plain = {
        "prompt_index": 0,
        "prompt_tokens": (1,),
        "response_tokens": (2,) * length,
        "log_probs": (-0.5,) * length,
        "loss_mask": (1,) * length,
        "weight_versions": (0,) * length,
        "text": "b",
        "finish_reason": "stop",
        "seed": 0,
    }
    return Sample(**{**plain, **fields})


def group(*texts: str, index: int = 0, label: Any = "4", length: int = 1, **metadata: Any) -> Group:
    """Return a group with one sample for each text.

    :param length: Tokens of each response.
    """
    source = f"t.jsonl:{index + 7}"
    prompt = Prompt(index=index, tokens=(1,), text="2+2=", label=label, source=source, metadata=metadata)
    return Group(
        prompt=prompt, samples=tuple(sample(length, prompt_index=index, text=text) for text in texts)
    )


def plugins_with(*functions: NamedFunction) -> Plugins:
    """Return plugins that register reward functions beside those of the core."""
    plugins = Plugins()
    plugins.register(
        SimpleNamespace(register_reward_functions=hookimpl(lambda: [*reward_functions(), *functions])),
        "rewards under test",
    )
    return plugins


@contextmanager
def scorer(
    reward: Mapping[str, Any], *functions: NamedFunction, limit: int = 8, log: Path | None = None
) -> Iterator[Scorer]:
    """Yield a scorer that lets every sample fail.

    :param reward: The table of the config.
    :param functions: Registered beside those of the core.
    :param limit: Longest response, in tokens.
    """
    table = Reward.model_validate({"max_failed_ratio": 1.0, **reward})
    with Scorer(table, plugins_with(*functions), max_new_tokens=limit, log=log) as made:
        yield made


def rewards(groups: Sequence[Group]) -> list[float | None]:
    """Return the reward of each sample."""
    return [sample.reward for group in groups for sample in group.samples]


def errors(groups: Sequence[Group]) -> list[str | None]:
    """Return why each sample has no reward."""
    return [sample.error for group in groups for sample in group.samples]
