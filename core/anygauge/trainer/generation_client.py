"""Generation client: sends single requests to engines from an event loop beside the driver's thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from anygauge.config import Config
from anygauge.data.media.loader import MediaLoader
from anygauge.hub import localized
from anygauge.plugins import Plugins
from anygauge.rollout.control import RolloutContext, TextTools, resolve_functions, sample_all
from anygauge.trainer.event_loop import EventLoop
from anygauge.trainer.inputs import load_tokenizer, longest_context
from anygauge_hooks.models import text_config
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.rollout import Generator

__all__ = ["GenerationClient", "SampleMaker", "Wait", "open_maker"]

Wait = Callable[[Coroutine[Any, Any, Any], str], Any]
"""Function that runs a coroutine, described by a text, and returns its result."""


@dataclass(frozen=True, slots=True)
class GenerationClient:
    """How requests get to the engines of a run."""

    generator: Generator
    loop: EventLoop
    """Event loop that the generator belongs to."""
    wait: Wait
    """For what runs in the loop, with an eye on the engines."""
    others: Mapping[str, Generator] = field(default_factory=dict)
    """Engines of other models than the one that is trained, by its name."""


@dataclass(frozen=True, slots=True)
class SampleMaker:
    """Makes the samples of a run, for training and for evaluation."""

    client: GenerationClient
    context: RolloutContext

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int]]
    ) -> list[list[Sample]]:
        """Return one sample per seed for each prompt, in order, beside what is under way for training."""
        samples: list[list[Sample]] = self.client.wait(
            sample_all(self.context, prompts, params, seeds), "samples"
        )
        return samples


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
