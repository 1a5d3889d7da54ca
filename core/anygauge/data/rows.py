"""Convert lines of JSON Lines files to rows for generation or for training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anygauge.config.schema import Data
from anygauge.data.conversations import TurnFinder
from anygauge.data.fields import RowFields
from anygauge.data.fingerprint import tokenizer_fingerprint
from anygauge.data.media.finder import FoundMedia, MediaFinder
from anygauge.data.problems import BadMediaError, BadRowError
from anygauge.data.template import (
    Message,
    TemplateRefusal,
    as_messages,
    kind,
    render,
    require_template,
    takes_parts,
)
from anygauge_hooks.errors import ConfigError, MediaError
from anygauge_hooks.media import Media

__all__ = ["Row", "RowReader"]

_NOT_OF_ROWS = {"train", "source", "shuffle", "cache"}
"""Settings of ``[data]`` that say nothing of a row."""
_IDS_ALONE = {"return_attention_mask": False, "return_token_type_ids": False}
"""Spares a third of the first pass."""
_TOKENIZED_CHARACTERS = 2**20
"""Characters of a row that are tokenized in any case: that takes some 150 MB."""
_CHARACTERS_PER_TOKEN = 16
"""More than any long text has; prose has 3 to 5."""
_EXCERPT = 60
"""Characters of a prompt that an error shows."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be used."""

    fields: dict[str, Any]
    text: str
    """The prompt as given to the policy."""
    tokens: tuple[int, ...]
    response: tuple[int, ...] = ()
    """For SFT, what follows ``tokens``."""
    loss_mask: tuple[int, ...] = ()
    """For SFT, one per token of ``response``."""
    media: tuple[Media, ...] = ()
    found: tuple[FoundMedia, ...] = ()
    """Location of each of ``media``."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.tokens) + len(self.response)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A row before it is tokenized."""

    fields: dict[str, Any]
    pieces: Sequence[str]
    """The prompt; for SFT then by turns what is trained on and what is not."""
    found: Sequence[FoundMedia] = ()
    """Its media, in order."""


class RowReader:
    """Reads rows according to a config.

    Each piece of a conversation is tokenized alone: the prompt has the tokens that it has in generation, and
    no token is half prompt and half response.

    :param tokenizer: A Hugging Face tokenizer.
    :param max_tokens: A prompt with more is bad, for SFT a conversation with more, unless
        ``max_prompt_tokens`` drops it; ``None`` for any number.
    :param stop_tokens: For SFT, the texts of the tokens that end a response; ``None`` for prompts to generate
        from.
    :param media: Finds the media of rows; ``None`` where they have none.
    :raises ConfigError: Tokenizer and settings do not go together.
    """

    def __init__(
        self,
        config: Data,
        tokenizer: Any,
        max_tokens: int | None,
        stop_tokens: Sequence[str] | None = None,
        media: MediaFinder | None = None,
    ) -> None:
        self.fields = RowFields(config, stop_tokens is not None, None if media is None else media.fields)
        self._config = config
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._stops = stop_tokens
        self._sft = stop_tokens is not None
        if config.apply_chat_template:
            require_template(tokenizer)
        elif self._sft and getattr(tokenizer, "eos_token_id", None) is None:
            raise ConfigError(
                "SFT ends each answer with the end-of-sequence token, but the tokenizer has none.",
                hint="Set eos_token in the model directory's tokenizer_config.json.",
            )
        chats = config.apply_chat_template
        sft_chats = chats and stop_tokens is not None
        self._finder = TurnFinder(tokenizer, config, stop_tokens or ()) if sft_chats else None
        self._media = media
        self._parts = False
        if media is not None and chats:
            known = media.marks.items()
            self._parts = all(takes_parts(tokenizer, config, {"type": name}, mark) for name, mark in known)

    def settings(self) -> dict[str, Any] | None:
        """Return all that decides which rows are usable, as JSON can write it; ``None`` if it is unknown."""
        tokenizer = tokenizer_fingerprint(self._tokenizer)
        if tokenizer is None:
            return None
        used = self._config.model_dump(mode="json", exclude=_NOT_OF_ROWS)
        stops = None if self._stops is None else list(self._stops)
        media = {} if self._media is None else {"media": self._media.facts()}
        return {"tokenizer": tokenizer, "max_tokens": self._max_tokens, "stop_tokens": stops, **used, **media}

    @property
    def drops_media(self) -> bool:
        """Whether rows whose media cannot be read are left out."""
        return self._media is not None and self._media.settings.on_error == "drop"

    def is_too_long(self, row: Row) -> bool:
        """Return whether a row has more tokens than ``max_prompt_tokens``."""
        limit = self._config.max_prompt_tokens
        return limit is not None and row.num_tokens > limit

    def read(
        self, contents: Sequence[bytes], folders: Iterable[Path] | None = None, *, keyed: bool = False
    ) -> list[Row | BadRowError]:
        """Return each row or its problem. Rows are tokenized together.

        :param folders: Folder of the file of each row, where relative paths of media start from.
        :param keyed: Whether the bytes of media are read, for their keys; else their headers alone.
        """
        places = [Path()] * len(contents) if folders is None else folders
        rendered = [
            self._try_render(content, folder, keyed) for content, folder in zip(contents, places, strict=True)
        ]
        good = [row for row in rendered if isinstance(row, _Rendered)]
        plain = not self._config.apply_chat_template
        field = self._config.input_key
        prompts = iter(self._tokenize([row.pieces[0] for row in good], field, special=plain))
        if plain and self._config.label_key is not None:
            field = self._config.label_key
        rest = iter(self._tokenize([piece for row in good for piece in row.pieces[1:]], field, special=False))
        return [
            self._row(row, [next(prompts), *(next(rest) for _ in row.pieces[1:])])
            if isinstance(row, _Rendered)
            else row
            for row in rendered
        ]

    # -------------------------------------------------------------------------
    # Text
    # -------------------------------------------------------------------------

    def _try_render(self, content: bytes, folder: Path, keyed: bool) -> _Rendered | Row | BadRowError:
        try:
            rendered = self._render(self.fields.read(content), folder, keyed)
            return self._oversize(rendered) or rendered
        except BadRowError as problem:
            return problem.with_traceback(None)
        except MediaError as error:
            return BadMediaError(str(error.args[0]).removesuffix("."), hint=error.hint)

    def _oversize(self, row: _Rendered) -> Row | None:
        """Return a row that is dropped because of its characters alone; ``None`` if it is not.

        A tokenizer takes some 150 MB for each MiB, and so 9 GB for a row of 60 MiB.

        :raises BadRowError: It has too many for the model, and rows are not dropped.
        """
        characters, drops = sum(map(len, row.pieces)), self._config.max_prompt_tokens
        limit = self._max_tokens if drops is None else drops
        if limit is None or characters <= max(_TOKENIZED_CHARACTERS, _CHARACTERS_PER_TOKEN * limit):
            return None
        if drops is None:
            raise self._bad_prompt(
                f" has {characters} characters; the model has room for {limit} tokens",
                hint="Set data.max_prompt_tokens to drop longer ones.",
            )
        return Row(row.fields, row.pieces[0], tokens=(0,) * (limit + 1))

    def _render(self, fields: dict[str, Any], folder: Path, keyed: bool) -> _Rendered:
        config = self._config
        value = fields[config.input_key]
        prompt = as_messages(value, config.system_prompt) if config.apply_chat_template else value
        media: Sequence[FoundMedia] = ()
        if self._media is not None:
            placed = self._media.locate(fields, prompt, parts=self._parts)
            prompt, media = placed.prompt, self._media.measure(placed.values, folder, keyed=keyed)
        return _Rendered(fields, self._pieces(fields, prompt), media)

    def _pieces(self, fields: dict[str, Any], prompt: Any) -> list[str]:
        """Return a row as text: the prompt; for SFT then by turns what is trained on and what is not.

        :param prompt: Text, or messages where there is a chat template.
        """
        config = self._config
        if not config.apply_chat_template:
            return [prompt, self._answer(fields)] if self._sft else [prompt]
        tools = fields.get(config.tools_key or "")
        try:
            if self._finder is None:
                return [render(prompt, self._tokenizer, config, tools=tools, generate=True)]
            return self._finder.split(self._with_answer(prompt, fields), tools)
        except BadRowError as error:
            raise self._bad_prompt(f" {error}", hint=error.hint) from error
        except TemplateRefusal as error:
            raise self._bad_prompt(
                f": the chat template refuses it: {error}",
                hint="The template's rules are in the model directory's chat_template.jinja.",
            ) from error

    def _with_answer(self, messages: list[Message], fields: Mapping[str, Any]) -> list[Message]:
        """Add the label as the last turn of a conversation that ends before it."""
        if messages[-1]["role"] == "assistant" or fields.get(self._config.label_key or "") is None:
            return messages
        return [*messages, {"role": "assistant", "content": self._answer(fields)}]

    def _answer(self, fields: Mapping[str, Any]) -> str:
        key = self._config.label_key
        if key is None:
            raise self._bad_prompt(" has no answer to train on", hint="Name its field in data.label_key.")
        answer = fields[key]
        if not isinstance(answer, str) or not answer:
            what = "empty" if answer == "" else f"{kind(answer)}, not a string"
            raise BadRowError(f"field {key!r} is {what}; SFT trains on it")
        return answer

    # -------------------------------------------------------------------------
    # Tokens
    # -------------------------------------------------------------------------

    def _tokenize(self, texts: list[str], field: str, *, special: bool) -> list[list[int] | BadRowError]:
        """Return token ids by text.

        :param special: Whether the tokenizer adds its own special tokens; a chat template writes them itself.
        """
        if not texts:
            return []
        try:
            return list(self._tokenizer(texts, add_special_tokens=special, **_IDS_ALONE)["input_ids"])
        except Exception as error:  # noqa: BLE001 - foreign code: a tokenizer
            if len(texts) > 1:
                return [ids for text in texts for ids in self._tokenize([text], field, special=special)]
            return [
                BadRowError(
                    f"field {field!r}: the tokenizer refuses {_excerpt(texts[0])}: {error}",
                    hint="Correct the rows, or use a tokenizer that knows all of their characters.",
                )
            ]

    def _row(self, row: _Rendered, pieces: list[list[int] | BadRowError]) -> Row | BadRowError:
        tokens: list[list[int]] = []
        for text, ids in zip(row.pieces, pieces, strict=True):
            if isinstance(ids, BadRowError):
                return ids
            if not ids:
                return self._bad_prompt(f": the tokenizer makes no token of {_excerpt(text)}")
            tokens.append(ids)
        if self._sft and self._finder is None:
            tokens[1] = [*tokens[1], self._tokenizer.eos_token_id]
        media: list[Media] = []
        if self._media is not None:
            try:
                tokens, media = self._expanded(self._media, tokens, row.found)
            except BadMediaError as error:
                return BadMediaError(f"field {self._config.input_key!r} {error}", hint=error.hint)
        response = tuple(token for ids in tokens[1:] for token in ids)
        mask = tuple(number % 2 for number, ids in enumerate(tokens[1:], 1) for _ in ids)
        candidate = Row(
            row.fields, row.pieces[0], tuple(tokens[0]), response, mask, tuple(media), tuple(row.found)
        )
        return (
            candidate
            if self.is_too_long(candidate)
            else self._length_problem(candidate.num_tokens) or candidate
        )

    def _expanded(
        self, finder: MediaFinder, pieces: list[list[int]], measured: Sequence[FoundMedia]
    ) -> tuple[list[list[int]], list[Media]]:
        """Return the tokens of each piece with room for its media, and these."""
        waiting = (each.measurement() for each in measured)
        expanded: list[list[int]] = []
        media: list[Media] = []
        for number, ids in enumerate(pieces):
            if number % 2 and finder.expander.has_mark(ids):
                raise BadMediaError("has media in a turn of the assistant, which is trained on")
            tokens, piece_media = finder.expander.expand(ids, waiting, start=sum(map(len, expanded)))
            expanded.append(tokens)
            media += piece_media
        if len(media) < len(measured):
            raise BadMediaError(
                f"has {len(measured)} media, of which the chat template writes {len(media)}",
                hint="Does the template leave out messages, or know no content parts?",
            )
        return expanded, media

    def _length_problem(self, num_tokens: int) -> BadRowError | None:
        limit = self._max_tokens
        if limit is None or num_tokens <= limit:
            return None
        if self._sft:
            return self._bad_prompt(
                f" has {num_tokens} tokens with its answer; the model takes {limit}",
                hint="Set data.max_prompt_tokens to drop longer conversations.",
            )
        return self._bad_prompt(
            f" has {num_tokens} tokens; the model has room for {limit} beside the response",
            hint="Set data.max_prompt_tokens to drop longer prompts, or let responses be shorter.",
        )

    def _bad_prompt(self, problem: str, *, hint: str | None = None) -> BadRowError:
        return BadRowError(f"field {self._config.input_key!r}{problem}", hint=hint)


def _excerpt(text: str) -> str:
    return repr(text[:_EXCERPT] + ("..." if len(text) > _EXCERPT else ""))
