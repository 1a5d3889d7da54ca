"""Samples of an embedded engine, asked for prompts and seeds in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anygauge.serving.embedded.stopping import decode
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.rollout import GenerateRequest

__all__ = ["sample_all"]


def sample_all(
    engine: Any, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[Sequence[int]]
) -> list[list[Sample]]:
    """Return one sample per seed for each prompt, in order."""
    pairs = [(prompt, seed) for prompt, own in zip(prompts, seeds, strict=True) for seed in own]
    requests = [
        GenerateRequest(
            f"{prompt.index}-{seed}", prompt.tokens, params, seed, media=prompt.media, source=prompt.source
        )
        for prompt, seed in pairs
    ]
    answers = engine.answer(requests)
    texts = decode(engine._tokenizer, [each.tokens for each in answers], special=False)
    samples = iter(
        [
            Sample(
                prompt_index=prompt.index,
                prompt_tokens=prompt.tokens,
                response_tokens=said.tokens,
                log_probs=said.log_probs,
                loss_mask=(1,) * len(said.tokens),
                weight_versions=said.weight_versions,
                text=text,
                finish_reason=said.finish_reason,
                seed=seed,
                media=prompt.media,
            )
            for (prompt, seed), said, text in zip(pairs, answers, texts, strict=True)
        ]
    )
    return [[next(samples) for _ in own] for own in seeds]
