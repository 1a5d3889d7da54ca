"""A request of a fake engine: how far it is, and what it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from anygauge_tests.fake_engine.lengths import Lengths
from anygauge_tests.fake_engine.tokens import EOS, Source, Tokens

__all__ = ["ActiveRequest"]

QUEUED_INTERVAL = 50
"""The real scheduler hands on the tokens of a request this many at a time; what it has not handed on is lost
if the request is aborted while it waits in the queue."""


class ActiveRequest:
    """One response in the making.

    :param rid: As the client named it.
    :param source: Where its tokens come from.
    :param params: SGLang's sampling parameters.
    """

    def __init__(
        self,
        rid: str,
        prompt_length: int,
        source: Source,
        params: Mapping[str, Any],
        lengths: Lengths,
        rank: int,
        *,
        log_probs: bool = False,
    ) -> None:
        self.rid, self.prompt_length, self.source, self.rank = rid, prompt_length, source, rank
        self.wants_log_probs = log_probs
        self.params = params
        given = params.get("max_new_tokens")
        self.budget = 128 if given is None else int(given)
        self.own_length = lengths(source.unit()) - source.done
        self.done = 0
        """Tokens that exist by now."""
        self.end = 0
        """Tokens that will exist when it finishes."""
        self.spans: list[tuple[str, int]] = []
        """Versions that no longer make tokens, with the count of tokens when each ended."""
        self.planned = Tokens(np.zeros(0, np.int64), np.zeros(0))
        self.reason: dict[str, Any] | None = None
        """Set when it is finished."""
        self.retractions = 0
        self.moved = asyncio.Event()
        """Set when it is finished."""
        self._ends_with: dict[str, Any] = {}

    def plan(self, version: str) -> None:
        """Decide what comes after the tokens that exist, under weights of a version."""
        limit = self.budget
        if not self.params.get("ignore_eos"):
            limit = max(min(limit, self.own_length), self.done)
        fresh = self.source.tokens(version, self.done, limit)
        kept = self.planned
        ids = np.concatenate([kept.ids[: self.done], self._allowed(fresh.ids)])
        self.planned = Tokens(ids, np.concatenate([kept.log_probs[: self.done], fresh.log_probs]))
        self.end, self._ends_with = limit, {"type": "length", "length": limit}
        if not self.params.get("ignore_eos") and limit == self.own_length and limit > self.done:
            ids[-1] = EOS
            self._ends_with = {"type": "stop", "matched": EOS}
        self._stop_at_tokens(ids)
        self._stop_at_strings(ids)

    def _allowed(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return tokens with others in the place of those that a request's biases rule out."""
        ruled_out = [int(token) for token, bias in (self.params.get("logit_bias") or {}).items() if bias < 0]
        allowed = ids
        while len(places := np.flatnonzero(np.isin(allowed, ruled_out))):
            allowed = allowed.copy()
            allowed[places] -= 1
        return allowed

    def _stop_at_tokens(self, ids: np.ndarray[Any, Any]) -> None:
        wanted = [token for token in self.params.get("stop_token_ids") or () if token is not None]
        hits = np.flatnonzero(np.isin(ids[self.done :], wanted))
        if len(hits):
            self.end = self.done + int(hits[0]) + 1
            self._ends_with = {"type": "stop", "matched": int(ids[self.end - 1])}

    def _stop_at_strings(self, ids: np.ndarray[Any, Any]) -> None:
        wanted = self.params.get("stop") or ()
        if not wanted:
            return
        for text in [wanted] if isinstance(wanted, str) else wanted:
            response = text_of(ids[: self.end].tolist())
            at = response.find(text)
            if at >= 0:
                self.end = max(self.done, response[: at + len(text) - 1].count("<"), 1)
                self._ends_with = {"type": "stop", "matched": text}

    def change_version(self, old: str, new: str) -> None:
        """Let weights of another version make what is still to come."""
        if self.done:
            self.spans.append((old, self.done))
        if len(self.planned.ids):
            self.plan(new)

    def finish(self) -> None:
        """End as it was planned."""
        self.done, self.reason = self.end, dict(self._ends_with)
        self.moved.set()

    def abort(self, *, queued: bool) -> None:
        """End now, with the tokens that exist; from the queue, with those that were handed on."""
        if queued:
            self.done -= self.done % QUEUED_INTERVAL
        message = "Abort in waiting queue" if queued else "Aborted"
        self.reason = {"type": "abort", "message": message}
        if not queued:
            self.reason.update(status_code=None, err_type=None)
        self.moved.set()

    def answer(self, version: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the client is sent.

        :param facts: Of the engine: ``spans`` and ``text`` say what the version and the options add.
        """
        ids = self.planned.ids[: self.done].tolist()
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.reason,
            "prompt_tokens": self.prompt_length,
            "weight_version": version,
            "num_retractions": self.retractions,
            "completion_tokens": self.done,
            "cached_tokens": 0,
            "dp_rank": self.rank,
        }
        if self.wants_log_probs:
            values = self.planned.log_probs[: self.done].tolist()
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [(value, id, None) for value, id in zip(values, ids, strict=True)]
            meta["output_token_logprobs_length"] = self.done
        if self.reason is not None and facts["spans"]:
            meta["weight_versions"] = self._version_spans(version)
            meta["weight_version"] = meta["weight_versions"][-1]["version"]
        text = {"text": text_of(ids)} if facts["text"] else {}
        return {**text, "output_ids": ids, "meta_info": meta}

    def _version_spans(self, version: str) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for name, count in [*self.spans, (version, self.done)]:
            end = min(count, self.done)
            if spans and end <= spans[-1]["end"]:
                continue
            if spans and spans[-1]["version"] == name:
                spans[-1]["end"] = end
            else:
                spans.append({"version": name, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans


def text_of(ids: list[int]) -> str:
    """Return the text that stands for tokens: ``<17><4>``."""
    return "".join([f"<{id}>" for id in ids])
