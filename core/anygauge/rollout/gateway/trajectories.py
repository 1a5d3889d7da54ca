"""From the turns of a session to samples: each sampled token is trained on in one of them."""

from __future__ import annotations

from collections.abc import Sequence

from anygauge.rollout.gateway.rendering import Renderer
from anygauge.rollout.gateway.turns import Turn
from anygauge_hooks.rl import NO_VERSION, Prompt, Sample

__all__ = ["trajectories"]


def trajectories(turns: Sequence[Turn], prompt: Prompt, seed: int, renderer: Renderer) -> list[Sample]:
    """Return one sample for each branch of the session.

    The response of a sample begins with the first turn that no sample before it holds: what two ways share is
    in the response of the first, and in the prompt of the others. What stands between turns has loss mask 0.

    :param turns: In the order in which they ended.
    """
    parents = {turn.plan.parent for turn in turns}
    trained: set[Turn] = set()
    samples = []
    for leaf in (turn for turn in turns if turn not in parents):
        fresh = [turn for turn in _path(leaf) if turn not in trained]
        trained.update(fresh)
        samples.append(_sample(fresh, prompt, seed, renderer))
    return [sample for sample in samples if any(sample.loss_mask)]


def _path(leaf: Turn) -> list[Turn]:
    """Return a turn and all that it goes on from, the first first."""
    path: list[Turn] = []
    turn: Turn | None = leaf
    while turn is not None:
        path.append(turn)
        turn = turn.plan.parent
    return path[::-1]


def _sample(turns: Sequence[Turn], prompt: Prompt, seed: int, renderer: Renderer) -> Sample:
    tokens: list[int] = []
    log_probs: list[float] = []
    loss_mask: list[int] = []
    versions: list[int] = []
    begin = len(turns[0].plan.tokens)
    for turn in turns:
        between = turn.plan.tokens[begin + len(tokens) :]
        tokens += between + turn.tokens
        log_probs += [0.0] * len(between) + list(turn.log_probs)
        loss_mask += [0] * len(between) + [1] * len(turn.tokens)
        versions += [NO_VERSION] * len(between) + list(turn.weight_versions)
    return Sample(
        prompt_index=prompt.index,
        prompt_tokens=turns[0].plan.tokens,
        response_tokens=tuple(tokens),
        log_probs=tuple(log_probs),
        loss_mask=tuple(loss_mask),
        weight_versions=tuple(versions),
        text=renderer.plain(tokens),
        finish_reason=turns[-1].finish_reason,
        seed=seed,
        metadata={"turns": len(turns)},
        media=turns[-1].plan.shown.media,
    )
