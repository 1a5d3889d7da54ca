"""Incremental detokenizer: text of tokens that arrive one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from anygauge.rollout.gateway.rendering import Renderer

__all__ = ["PARTIAL", "Detokenizer"]

PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""How a part of a character is decoded."""


class Detokenizer:
    """Decodes a growing sequence without decoding all of it at each step."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._text = ""
        self._context = 0
        """Start of the decoded window: the text of a token depends on the one before it."""
        self._read = 0

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text so far; an unfinished character is left out.

        :param tokens: All tokens so far, without the one that ends the turn.
        """
        known = self._renderer.decode(tokens[self._context : self._read])
        whole = self._renderer.decode(tokens[self._context :])
        if len(whole) > len(known) and not whole.endswith(PARTIAL):
            self._text += whole[len(known) :]
            self._context, self._read = self._read, len(tokens)
        return self._text
