"""Batching: which samples are generated together, and the loop that generates them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from anygauge.serving.embedded.prefixes import Prefixes
from anygauge.serving.embedded.sampling import PendingSample, PromptKey, draw, seed_tensor, uniforms
from anygauge_hooks.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge.serving.embedded.decoding import Recorder
    from anygauge.serving.embedded.multimodal import MultimodalTowers
    from anygauge.serving.embedded.stopping import Stopper
    from anygauge_hooks.rl import FinishReason, SamplingParams

__all__ = ["PendingSample", "Response", "generate_batch", "plan_batches"]

_BLOCK = 64
"""Positions for which random numbers are made at once: thirty operations, however few the numbers."""


@dataclass(frozen=True, slots=True)
class Response:
    """Response of one sample; the default is one that was aborted before its first token."""

    tokens: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    finish_reason: FinishReason = "abort"


def plan_batches(
    rows: Sequence[PendingSample], max_new_tokens: int, max_batch_tokens: int
) -> Iterator[list[PendingSample]]:
    """Divide rows into batches whose padded KV cache fits in a number of tokens.

    The longest prompts come first, so that a batch that does not fit in memory fails at once. Samples of one
    prompt stay next to each other, so that it is run once.

    :param max_new_tokens: Tokens reserved behind each prompt.
    :param max_batch_tokens: A row that exceeds it alone gets a batch of its own.
    """
    batch: list[PendingSample] = []
    for row in sorted(rows, key=lambda row: len(row.tokens), reverse=True):
        if batch and (len(batch) + 1) * (len(batch[0].tokens) + max_new_tokens) > max_batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def generate_batch(
    model: Any,
    rows: Sequence[PendingSample],
    params: SamplingParams,
    stopper: Stopper,
    aborted: Callable[[], bool],
    recorder: Recorder,
    towers: MultimodalTowers | None = None,
) -> list[Response]:
    """Generate a batch of samples, one forward pass for each token position.

    :param model: A causal language model of transformers, in eval mode.
    :param aborted: Asked once per position; when it says so, the responses so far are returned.
    :param recorder: Recorder of the passes, where that is possible.
    :param towers: Towers of a model that is shown media.
    :returns: One response per row.
    """
    device = model.device
    firsts: dict[PromptKey, PendingSample] = {}
    for row in rows:
        firsts.setdefault(row.prompt, row)
    prompts = {key: index for index, key in enumerate(firsts)}
    forbidden = torch.tensor(params.forbidden, device=device) if params.forbidden else None
    output = _Output(rows, params.max_new_tokens, device)
    seeds = seed_tensor([row.seed for row in rows], device)
    active = torch.arange(len(rows), device=device)
    prefix = torch.tensor([prompts[row.prompt] for row in rows], device=device)
    prefixes = Prefixes(model, list(firsts.values()), params.max_new_tokens, recorder, towers)
    logits = prefixes.prefill()
    for position in range(params.max_new_tokens):
        if position % _BLOCK == 0:
            numbers = uniforms(seeds, position, _BLOCK)
        own = numbers[position % _BLOCK].index_select(0, active)
        drawn, log_probs = draw(logits, prefix, own, params, forbidden)
        going = output.append(active, drawn, log_probs, position, stopper)
        if len(going) == 0 or aborted():
            break
        if len(going) < len(active):
            active, prefix, drawn = (kept.index_select(0, going) for kept in (active, prefix, drawn))
        logits, prefix = prefixes.extend(prefix, drawn)
    return output.responses()


class _Output:
    """The responses of a batch while they grow."""

    def __init__(self, rows: Sequence[PendingSample], width: int, device: torch.device) -> None:
        self._limits = torch.tensor([row.max_new_tokens for row in rows], device=device)
        self._tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        self._log_probs = torch.zeros(len(rows), width, dtype=torch.float32, device=device)
        self._lengths = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self._stopped = torch.zeros(len(rows), dtype=torch.bool, device=device)

    def append(
        self, active: Tensor, drawn: Tensor, log_probs: Tensor, position: int, stopper: Stopper
    ) -> Tensor:
        """Record a token of each active row and return the indices into ``active`` that go on."""
        self._tokens[:, position].index_copy_(0, active, drawn)
        self._log_probs[:, position].index_copy_(0, active, log_probs)
        self._lengths.index_fill_(0, active, position + 1)
        stopped = stopper.ended(self._tokens, active, position + 1)
        self._stopped.index_copy_(0, active, stopped)
        return (~stopped & (self._limits.index_select(0, active) > position + 1)).nonzero()[:, 0]

    def responses(self) -> list[Response]:
        if not bool(torch.isfinite(self._log_probs).all()):
            raise RolloutError(
                "The model's log-probabilities are not finite.",
                hint="Its weights are damaged or have diverged; look at train/grad_norm of the steps before.",
            )
        full = (self._lengths == self._limits).tolist()
        return [
            Response(tuple(tokens[:length]), tuple(log_probs[:length]), _finish_reason(stop, at_limit))
            for tokens, log_probs, length, stop, at_limit in zip(
                self._tokens.tolist(),
                self._log_probs.tolist(),
                self._lengths.tolist(),
                self._stopped.tolist(),
                full,
                strict=True,
            )
        ]


def _finish_reason(stopped: bool, at_limit: bool) -> FinishReason:
    if stopped:
        return "stop"
    return "length" if at_limit else "abort"
