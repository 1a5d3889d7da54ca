"""Prefix sharing: forward passes of a batch that compute each distinct sequence once.

Samples of one prompt are the same sequence until they draw different tokens. So the batch is a set of
*prefixes*, one cache row each: first the prompts, then, after every token, the distinct continuations. Rows
are split where samples part, and dropped when all their samples have ended.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from anygauge.serving.embedded.cache import make_cache, select_rows
from anygauge.serving.embedded.decoding import RecordedStep, Recorder, covers

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge.serving.embedded.multimodal import MultimodalTowers
    from anygauge.serving.embedded.sampling import PendingSample

__all__ = ["Prefixes"]

_STEADY = 4
"""Tokens after which rows that were neither split nor dropped are taken to stay, and a step is recorded."""
_KEEP_SHARE = 0.75
"""Ended rows stay in the cache while at least this share is alive: dropping them copies the others."""


class Prefixes:
    """The distinct sequences of a batch and their cache.

    Prompts of different lengths are padded on the left; padding is masked, and positions count without it.

    :param model: A causal language model of transformers, in eval mode.
    :param rows: One for each prompt.
    :param max_new_tokens: Tokens that can follow a prompt.
    :param recorder: Records the pass of a token where the rows stay the same from one to the next.
    :param towers: Towers of a model that is shown media.
    """

    def __init__(
        self,
        model: Any,
        rows: Sequence[PendingSample],
        max_new_tokens: int,
        recorder: Recorder,
        towers: MultimodalTowers | None = None,
    ) -> None:
        self._model = model
        self._recorder = recorder
        self._recorded: RecordedStep | None = None
        self._kept = 0
        self._apart = False
        self._rows = rows
        self._towers = towers if any(row.media for row in rows) else None
        self._length = max(len(row.tokens) for row in rows)
        capacity = self._length + max_new_tokens
        self._cache = make_cache(model.config, capacity)
        lengths = torch.tensor([len(row.tokens) for row in rows])
        padding = self._length - lengths
        self._positions = lengths.to(model.device)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._last_position = sys.maxsize if context is None else context - 1
        self._mask = None
        if bool(padding.any()):
            self._mask = (torch.arange(capacity) >= padding[:, None]).to(model.device)

    def prefill(self) -> Tensor:
        """Run the prompts.

        :returns: Logits of the next token ``[P, V]``, one row per prompt.
        """
        width = self._length
        padded = [[0] * (width - len(row.tokens)) + list(row.tokens) for row in self._rows]
        ids = torch.tensor(padded).to(self._model.device)
        if self._towers is not None:
            return self._look(self._towers, ids)
        steps = torch.arange(-width, 0, device=self._model.device)
        return self._forward(ids, (self._positions[:, None] + steps).clamp(min=0))

    def _look(self, towers: MultimodalTowers, ids: Tensor) -> Tensor:
        """Run prompts with media; what follows counts on from the largest of their positions."""
        positions = torch.zeros(3, *ids.shape, dtype=torch.int64)
        for number, row in enumerate(self._rows):
            positions[:, number, self._length - len(row.tokens) :] = towers.positions(row)
        self._positions = (positions.amax((0, 2)) + 1).to(ids.device)
        return towers.logits(
            self._rows,
            ids,
            position_ids=positions.to(ids.device),
            attention_mask=self._visible(),
            past_key_values=self._cache,
        )

    def extend(self, prefix: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Append a token to every unfinished sample.

        :param prefix: ``[A]``, int64: the row of the last logits that each sample drew from.
        :param tokens: ``[A]``, int64: what it drew.
        :returns: Logits of the next token ``[P', V]``, and the row ``[A]`` of each sample in them.
        """
        apart = self._apart
        parents, inputs, branch = self._branches(prefix, tokens)
        if len(parents) >= _KEEP_SHARE * len(self._positions) and (apart or _ascends(parents)):
            inputs = torch.zeros_like(self._positions).index_copy_(0, parents, inputs)
            branch = prefix if apart else parents[branch]
            self._kept += 1
        else:
            self._select(parents)
            self._kept = 0
        self._length += 1
        logits = self._step(inputs)
        # rows that have ended, and are read no more, stay within what the model has positions for
        self._positions = (self._positions + 1).clamp_(max=self._last_position)
        return logits, branch

    def _branches(self, prefix: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return row and token of each distinct continuation, and which of them each sample has."""
        if self._apart:
            return prefix, tokens, torch.arange(len(prefix), device=prefix.device)
        vocab_size = self._model.config.get_text_config().vocab_size
        branches, branch = torch.unique(prefix * vocab_size + tokens, return_inverse=True)
        # samples that have parted never meet again, and are not compared again, for which the host would wait
        self._apart = len(branches) == len(prefix)
        return branches // vocab_size, branches % vocab_size, branch

    def _select(self, rows: Tensor) -> None:
        self._forget_recording(self._length)
        select_rows(self._cache, rows)
        self._positions = self._positions[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _step(self, inputs: Tensor) -> Tensor:
        """Run one token of each row."""
        if self._recorded is not None and self._length > self._recorded.width:
            self._forget_recording(self._length - 1)
        if self._recorded is None:
            self._recorded = self._record(inputs)
        if self._recorded is None:
            return self._forward(inputs[:, None], self._positions[:, None])
        self._recorded.load(inputs, self._positions, self._length)
        return self._recorded.replay()

    def _record(self, inputs: Tensor) -> RecordedStep | None:
        """Return a recording that goes from here, if the rows are steady and the device can make one."""
        if self._kept < _STEADY or not self._recorder.able or not covers(self._cache):
            return None
        step = RecordedStep(self._model, self._cache, self._mask, len(inputs), self._length)
        step.load(inputs, self._positions, self._length)
        return step if self._recorder.record(step) else None

    def _forget_recording(self, length: int) -> None:
        """Give a recording back, and let the cache count the tokens that it wrote."""
        if self._recorded is not None:
            self._recorded = None
            for layer in self._cache.layers:
                layer.set_length(length)

    def _visible(self) -> Tensor | None:
        return None if self._mask is None else self._mask[:, : self._length]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids,
            attention_mask=self._visible(),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _ascends(parents: Tensor) -> bool:
    """Return whether each row, of sorted ones, goes on at most once. The host waits for the answer."""
    return bool((parents[1:] > parents[:-1]).all())
