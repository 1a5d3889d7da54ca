"""Evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from anygauge.config.schema.data import DataFiles
from anygauge.config.schema.reward import Reward
from anygauge.config.schema.section import Name, NonNegative, Positive, Probability, Section

__all__ = ["Eval", "EvalDataset"]


class EvalDataset(Section):
    """One evaluation data set.

    What is left out is taken from ``[data]``, ``[eval]`` and ``[rollout]``, the reward from ``[reward]``.
    ``None`` that is written out is what it is there: no label, no system prompt, no limit.
    """

    files: DataFiles
    """Data files."""
    reward: Reward | None = None
    """Reward of its samples."""
    input_key: str | None = None
    """As in ``[data]``."""
    label_key: str | None = None
    """As in ``[data]``."""
    metadata_key: str | None = None
    """As in ``[data]``."""
    tools_key: str | None = None
    """As in ``[data]``."""
    multimodal_keys: dict[Literal["image", "video", "audio"], str] | None = None
    """As in ``[data]``; replaces all of them, ``{}`` for rows of text."""
    apply_chat_template: bool | None = None
    """As in ``[data]``; ``false`` takes none of the template's settings from there."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As in ``[data]``; replaces all of them."""
    system_prompt: str | None = None
    """As in ``[data]``."""
    max_prompt_tokens: Positive | None = None
    """As in ``[data]``."""
    samples_per_prompt: Positive | None = None
    """Samples drawn for each prompt."""
    max_prompts: Positive | None = None
    """Only the first rows; ``None`` for all."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 decodes greedily."""
    top_p: Probability | None = None
    """Nucleus sampling; 1 is off."""
    top_k: NonNegative | None = None
    """Sample from the ``top_k`` most probable tokens; 0 keeps all."""
    max_new_tokens: Positive | None = None
    """Longest response, in tokens."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """Strings that end a response."""
    stop_token_ids: tuple[NonNegative, ...] | None = None
    """Tokens that end a response, in addition to the model's own."""

    @model_serializer(mode="wrap")
    def _written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was left out: written as null, it would mean something else when it is read."""
        return {key: value for key, value in dump(self).items() if key in self.model_fields_set}


class Eval(Section):
    """Evaluation: before the first step, every ``interval`` steps and after the last."""

    data: DataFiles = ()
    """Data files, each a data set under its name; empty for no evaluation."""
    datasets: dict[Name, EvalDataset] = {}
    """Further data sets by name, each with its own sampling and reward."""
    interval: Positive = 20
    """Steps between evaluations."""
    samples_per_prompt: Positive = 1
    """Samples drawn for each prompt."""
    max_prompts: Positive | None = None
    """Only the first rows; ``None`` for all."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 decodes greedily."""
    top_p: Probability = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegative = 0
    """Sample from the ``top_k`` most probable tokens; 0 keeps all."""
    max_new_tokens: Positive | None = None
    """``None`` takes ``rollout.max_new_tokens``."""
    wait: bool = False
    """Let training wait for an evaluation with every ``rollout.schedule``, not with ``"sync"`` alone."""
    concurrency: Positive | None = None
    """Concurrent evaluation samples during training; ``None`` for a fourth of the training samples in
    flight."""
