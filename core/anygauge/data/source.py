"""Prompts and conversations from data files."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from anygauge.config.data_files import dataset_name, split_slice
from anygauge.config.schema import Data
from anygauge.data.cache import IndexCache, cache_directory
from anygauge.data.index import FileIndex, open_index
from anygauge.data.media.finder import MediaFinder
from anygauge.data.media.sources import Source
from anygauge.data.order import Epochs, Mixture, Order
from anygauge.data.problems import BadMediaError, BadRowError, Problems
from anygauge.data.rows import Row, RowReader
from anygauge_hooks.errors import ConfigError, DataError, MediaError
from anygauge_hooks.rl import Prompt

__all__ = ["FileSource"]

logger = logging.getLogger(__name__)


class FileSource:
    """Draws prompts from JSONL, Parquet and CSV files, epoch after epoch.

    Two sources with the same files, settings and seed draw the same prompts. Without weights, each row is
    drawn once an epoch. With weights, each draw picks a file by weight, and each file has its own epochs.

    :param config: Files and how to read them.
    :param tokenizer: A Hugging Face tokenizer.
    :param seed: Seeds the order of each epoch, and the choice among files.
    :param max_tokens: Longest prompt that the model can take, for SFT of a conversation; ``None`` for any
        number. Unlike one longer than ``max_prompt_tokens``, which is dropped, a longer one is bad.
    :param stop_tokens: For SFT, the texts of the tokens that end a response; ``None`` for prompts to generate
        from.
    :param media: Finds the media of rows, and remembers those that were drawn; ``None`` for rows without.
    :raises DataError: A file cannot be read, a row is bad, or no row is left; lists the first bad rows.
    :raises ConfigError: A slice cannot be read, or tokenizer and settings do not go together.
    """

    def __init__(
        self,
        config: Data,
        tokenizer: Any,
        seed: int = 0,
        *,
        max_tokens: int | None = None,
        stop_tokens: Sequence[str] | None = None,
        media: MediaFinder | None = None,
    ) -> None:
        if not config.train:
            raise DataError("No data file is given.", hint="List at least one in data.train.")
        self._config = config
        self._seed = seed
        self._media = media
        self._reader = RowReader(config, tokenizer, max_tokens, stop_tokens, media)
        self._names = [dataset_name(file) for file in config.train]
        # Kept with the source: it removes what it made outside of the cache.
        self._cache = IndexCache(cache_directory(config.cache))
        self._files = self._open_files()
        self._starts = np.cumsum([0, *(len(file) for file in self._files)])
        self._report_dropped()
        self._order = self._make_order()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def num_unreadable(self) -> int:
        """Rows that are left out because the headers of their media cannot be read."""
        return sum(file.num_unreadable for file in self._files)

    @property
    def num_dropped(self) -> int:
        """Rows that are longer than ``max_prompt_tokens``."""
        return sum(file.num_dropped for file in self._files)

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts. At the end of an epoch the next one begins, in a new order."""
        prompts: list[Prompt] = []
        left_out = 0
        while (missing := num_prompts - len(prompts)) > 0:
            drawn = self._read(self._order.next(missing).tolist())
            prompts += drawn
            left_out = 0 if drawn else left_out + missing
            if left_out > len(self):
                raise MediaError("No row has media that can be read.", hint="The log names them.")
        return prompts

    def recall(self, prompts: Iterable[Prompt]) -> None:
        """Find the media of prompts again that another source of the same files has drawn."""
        self._read([prompt.index for prompt in prompts])

    def all(self, limit: int | None = None) -> list[Prompt]:
        """Return every prompt once, in the order of the files.

        :param limit: Only the first prompts; ``None`` for all.
        """
        return self._read(range(len(self))[:limit])

    def state_dict(self) -> dict[str, Any]:
        """Return where the source stands, as JSON can write it."""
        return {"of": self._identity(), "at": self._order.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another source of the same rows, seed and settings stood.

        :param state: From :meth:`state_dict`.
        :raises DataError: The rows or their order are not the same.
        """
        try:
            saved, position = state["of"], state["at"]
            difference = _difference(saved, self._identity())
            if difference is None:
                self._order.restore(position)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            difference = f"its state cannot be read ({error!r})"
        if difference:
            raise DataError(
                f"The data has changed since the run was saved: {difference}.",
                hint="Restore the files and settings of [data], then continue with --resume. To continue "
                "with the new data, add --run.accept_changes '[\"data\"]'; or start a new run from the "
                "saved model.",
            )

    # -------------------------------------------------------------------------
    # Files
    # -------------------------------------------------------------------------

    def _open_files(self) -> list[FileIndex]:
        files = [self._open_file(file.path) for file in self._config.train]
        problems = Problems()
        for file in files:
            problems.extend(file.problems)
        if problems.count:
            problems.report(sum(file.num_rows for file in files))
        return files

    def _open_file(self, path: str) -> FileIndex:
        try:
            name, rows = split_slice(path)
        except ValueError as error:
            raise ConfigError(f"Data file {path}: {error}.") from error
        return open_index(Path(name), rows, self._reader, self._cache)

    def _report_dropped(self) -> None:
        empty = [file for file in self._files if not len(file)]
        weighted = any(file.weight is not None for file in self._config.train)
        if len(empty) == len(self._files) or (weighted and empty):
            which = f" of {empty[0].path}" if weighted else ""
            num_rows = empty[0].num_rows if weighted else sum(file.num_rows for file in self._files)
            raise DataError(
                f"All {num_rows} prompts{which} are longer than data.max_prompt_tokens = "
                f"{self._config.max_prompt_tokens}.",
                hint="Raise data.max_prompt_tokens.",
            )
        for name, file in zip(self._names, self._files, strict=True):
            if file.num_dropped:
                logger.warning(
                    "dropped %d of %d prompts of %s for their length", file.num_dropped, file.num_rows, name
                )

    def _make_order(self) -> Order:
        weights = [file.weight for file in self._config.train]
        known = [weight for weight in weights if weight is not None]
        if not known:
            return Epochs(len(self), self._seed, shuffle=self._config.shuffle)
        if len(known) < len(weights):
            raise ConfigError(
                f"{len(known)} of {len(weights)} data files have a weight.",
                hint="Give every file of data.train a weight, or none.",
            )
        sizes = [len(file) for file in self._files]
        return Mixture(sizes, known, self._seed, shuffle=self._config.shuffle)

    def _identity(self) -> dict[str, Any]:
        """Return all that a position depends on."""
        return {
            "seed": self._seed,
            "shuffle": self._config.shuffle,
            "weighted": isinstance(self._order, Mixture),
            "files": [
                {"name": name, "rows": len(file), "digest": file.digest}
                for name, file in zip(self._names, self._files, strict=True)
            ],
        }

    # -------------------------------------------------------------------------
    # Rows
    # -------------------------------------------------------------------------

    def _read(self, positions: Sequence[int]) -> list[Prompt]:
        """Return the prompts of rows, tokenized together."""
        owners = (np.searchsorted(self._starts, positions, side="right") - 1).tolist()
        local = [
            position - int(self._starts[owner]) for position, owner in zip(positions, owners, strict=True)
        ]
        contents: dict[int, bytes] = {}
        for number in sorted(set(owners)):
            places = [place for place, owner in enumerate(owners) if owner == number]
            lines = self._files[number].contents([local[place] for place in places])
            contents |= zip(places, lines, strict=True)
        folders = [self._files[owner].path.parent for owner in owners]
        rows = self._reader.read([contents[place] for place in range(len(owners))], folders, keyed=True)
        drawn = zip(positions, owners, local, rows, strict=True)
        return [self._prompt(*each) for each in drawn if not self._is_left_out(*each[1:])]

    def _is_left_out(self, owner: int, position: int, row: Row | BadRowError) -> bool:
        """Return whether the media of a row cannot be read any more, and such rows are dropped.

        :raises MediaError: They are not.
        """
        if not isinstance(row, BadMediaError):
            return False
        error = MediaError(f"{self._files[owner].place(position)}: {row}.", hint=row.hint)
        if self._media is None or not self._reader.drops_media:
            raise error
        logger.warning("left out: %s", error.args[0])
        self._media.left_out.append(error.args[0])
        return True

    def _remember(self, row: Row, owner: int, position: int) -> None:
        """Tell the reader of media where those of a row are."""
        if self._media is None:
            return
        place = self._files[owner].place(position)
        for number, medium in enumerate(row.found):
            self._media.remember(medium, place, partial(self._source_again, owner, position, number))

    def _source_again(self, owner: int, position: int, number: int) -> Source:
        """Read a row once more, and return where one of its media is."""
        file = self._files[owner]
        row = self._reader.read(file.contents([position]), [file.path.parent])[0]
        if isinstance(row, BadRowError) or (source := row.found[number].source) is None:
            raise file.changed(position, str(row))
        return source

    def _prompt(self, index: int, owner: int, position: int, row: Row | BadRowError) -> Prompt:
        config, file = self._config, self._files[owner]
        if isinstance(row, BadRowError):
            raise file.changed(position, str(row))
        if row.media and self._reader.is_too_long(row):
            raise file.changed(position, f"has {len(row.tokens)} tokens with its media, and had fewer")
        self._remember(row, owner, position)
        return Prompt(
            index=index,
            tokens=row.tokens,
            text=row.text,
            label=None if config.label_key is None else row.fields.get(config.label_key),
            source=file.place(position),
            metadata=self._reader.fields.metadata(row.fields),
            dataset=self._names[owner],
            response=row.response,
            loss_mask=row.loss_mask,
            media=row.media,
        )


def _difference(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first thing in which two identities differ, as a clause."""
    for key in ("seed", "shuffle", "weighted"):
        if saved[key] != now[key]:
            return f"{key} was {saved[key]}, and is {now[key]}"
    if len(saved["files"]) != len(now["files"]):
        return f"there were {len(saved['files'])} files, and there are {len(now['files'])}"
    for before, after in zip(saved["files"], now["files"], strict=True):
        if before["rows"] != after["rows"]:
            return f"{after['name']} had {before['rows']} usable rows, and has {after['rows']}"
        if before["digest"] != after["digest"]:
            return f"rows of {after['name']} have changed"
    return None
