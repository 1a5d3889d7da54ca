"""Media loader: decodes the media of open prompts once, and drops them with the last such prompt."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from anygauge.data.media.expand import Measurement
from anygauge.data.media.finder import MediaFinder
from anygauge.data.media.placeholders import find_placeholders
from anygauge.data.media.problems import check_number
from anygauge.data.problems import BadMediaError
from anygauge_hooks.data import DataSource, MediaDataSource
from anygauge_hooks.errors import MediaError
from anygauge_hooks.media import Content, Media, MediaKind, MediaStore
from anygauge_hooks.rl import Prompt

__all__ = ["LoadedSource", "MediaLoader", "windows"]

logger = logging.getLogger(__name__)


class MediaLoader:
    """Decodes the media of prompts into a store, in threads.

    A content lives as long as one of the prompts that show it: nobody has to say that a group is done, was
    filtered out or failed.

    :param store: Media store of the run; the loader closes it.
    :param finder: Knows where the media of drawn prompts are.
    """

    def __init__(self, store: MediaStore, finder: MediaFinder) -> None:
        self.store = store
        self.finder = finder
        self._pool = ThreadPoolExecutor(finder.settings.threads, "media")
        self._lock = threading.Lock()
        self._holders: Counter[str] = Counter()
        self._under_way: dict[str, Future[None]] = {}
        self._let_go: deque[Sequence[str]] = deque()
        self._late: deque[str] = deque()
        """Keys that were let go while they were being decoded."""
        self._closed = False
        self._counts = threading.Lock()
        self._seconds = 0.0

    def load(self, prompts: Iterable[Prompt]) -> list[MediaError | None]:
        """Decode the media of prompts and keep it as long as they live; return failures by prompt."""
        held = [(prompt, self._acquire(_keys(prompt.media), prompt)) for prompt in prompts]
        return [_failure(futures) for _, futures in held]

    @contextmanager
    def held(self, prompts: Sequence[Prompt]) -> Iterator[None]:
        """Decode the media of prompts and keep it during the block.

        :raises MediaError: Something cannot be decoded.
        """
        keys = [key for prompt in prompts for key in _keys(prompt.media)]
        futures = self._acquire(keys, None)
        try:
            if (failed := _failure(futures)) is not None:
                raise failed
            yield
        finally:
            self._release(keys)

    def show(
        self,
        messages: Sequence[Mapping[str, Any]],
        prompt: Prompt,
        render: Callable[[Sequence[Mapping[str, Any]]], tuple[int, ...]],
    ) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        """Return the tokens of messages with media in content parts, and these; see :meth:`look`.

        :param render: From messages whose contents are texts with the template's marks to tokens.
        :raises MediaError: A medium cannot be used.
        """
        try:
            placed = find_placeholders(messages, {}, self.finder.marks, parts=False)
        except BadMediaError as error:
            raise MediaError(f"A message {error}.", hint=error.hint) from error
        return self.look(render(placed.prompt), placed.values, prompt)

    def look(
        self, tokens: Sequence[int], values: Sequence[tuple[MediaKind, Any]], prompt: Prompt
    ) -> tuple[tuple[int, ...], tuple[Media, ...]]:
        """Return tokens with room for media that a tool shows, and these, held as long as the prompt.

        :param tokens: Tokens of a text in which each medium has the template's mark.
        :param values: Kind and value of each, as a row would hold it.
        :returns: Spans count from the first of ``tokens``.
        :raises MediaError: One cannot be used, they are more than ``media.max_per_sample``, or they and the
            marks differ.
        """
        check_number(len(values), self.finder.settings.max_per_sample)
        measured = self.finder.measure(values, None, keyed=True)
        waiting: Iterator[Measurement] = (each.measurement() for each in measured)
        try:
            expanded, media = self.finder.expander.expand(tokens, waiting)
        except BadMediaError as error:
            raise MediaError(f"A message {error}.", hint=error.hint) from error
        if len(media) < len(measured):
            raise MediaError(f"A message has {len(measured)} media, of which the text shows {len(media)}.")
        new = {each.key: each for each in measured if each.key not in self.finder.drawn}
        self.finder.drawn.update(new)
        failed = _failure(self._acquire(list({each.key: None for each in measured}), prompt))
        for key in new:
            self.finder.drawn.pop(key, None)  # a tool shows it again if it is wanted again
        if failed is not None:
            raise failed
        return tuple(expanded), tuple(media)

    def metrics(self) -> dict[str, float]:
        """Return the size of the store, and counts of decoding since the last call."""
        with self._counts:
            seconds, self._seconds = self._seconds, 0.0
        dropped = len(self.finder.left_out)
        del self.finder.left_out[:dropped]  # the readers of all data sets have this list
        held = {"data/media_bytes": float(self.store.bytes()), "data/media_dropped": float(dropped)}
        return {**held, "data/media_decode_s": seconds}

    def close(self) -> None:
        """End the threads and close the store."""
        self._pool.shutdown(cancel_futures=True)
        self._closed = True  # prompts may live longer
        self.store.close()

    # -------------------------------------------------------------------------
    # Holding
    # -------------------------------------------------------------------------

    def _acquire(self, keys: Sequence[str], prompt: Prompt | None) -> list[Future[None]]:
        """Count a holder of each key, and decode what is not there yet.

        :param prompt: Lets go when it is gone.
        """
        if not keys:
            return []
        self._forget()
        with self._lock:
            self._holders.update(keys)
            futures = [self._loading(key) for key in keys]
        self._forget()
        if prompt is not None:
            weakref.finalize(prompt, self._release, keys).atexit = False
        return futures

    def _loading(self, key: str) -> Future[None]:
        """Return the future of a content. The caller holds the lock."""
        if key not in self._under_way:
            self._under_way[key] = self._pool.submit(self._decode, key)
        return self._under_way[key]

    def _decode(self, key: str) -> None:
        if self.store.has(key):
            return
        started = time.perf_counter()
        content: Content = self.finder.content(key)
        self.store.put(key, content)
        with self._counts:
            self._seconds += time.perf_counter() - started

    def _release(self, keys: Sequence[str]) -> None:
        """Let go of keys; also where the end of a prompt interrupts a thread that has the lock."""
        self._let_go.append(keys)
        self._forget()

    def _forget(self) -> None:
        """Drop unreferenced contents, unless another thread does so."""
        while (self._let_go or self._late) and self._lock.acquire(blocking=False):
            try:
                self._drop_released()
            finally:
                self._lock.release()

    def _drop_released(self) -> None:
        """Count the holders that have gone, and drop what has none. The lock is held."""
        while self._let_go:
            for key in self._let_go.popleft():
                self._holders[key] -= 1
                if self._holders[key]:
                    continue
                del self._holders[key]
                # At once if it is decoded; a thread that is at it brings it back here.
                self._under_way.pop(key).add_done_callback(partial(self._ended, key))
        while self._late:
            if (key := self._late.popleft()) not in self._holders and not self._closed:
                self.store.drop([key])

    def _ended(self, key: str, _: Future[None]) -> None:
        self._late.append(key)
        self._forget()


def windows(loader: MediaLoader | None, prompts: Sequence[Prompt], size: int) -> Generator[Sequence[Prompt]]:
    """Yield prompts, those with media in windows, and keep their contents meanwhile.

    :param loader: ``None`` in a run of text.
    :param size: Prompts in a part.
    :raises MediaError: Something cannot be decoded.
    """
    if loader is None or not any(prompt.media for prompt in prompts):
        yield prompts
        return
    for start in range(0, len(prompts), size):
        with loader.held(part := prompts[start : start + size]):
            yield part


class LoadedSource:
    """A data source whose prompts have their contents in a store when they are drawn."""

    def __init__(self, source: DataSource, loader: MediaLoader) -> None:
        self._source = source
        self._loader = loader

    def __len__(self) -> int:
        return len(self._source)

    def next(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts; ``media.on_error = "drop"`` replaces those that cannot be read.

        :raises MediaError: One of them cannot be decoded, or none is left that can.
        """
        prompts: list[Prompt] = []
        in_a_row = 0
        while len(prompts) < num_prompts and (drawn := self._source.next(num_prompts - len(prompts))):
            usable = self._usable(drawn)
            prompts += usable
            in_a_row = 0 if usable else in_a_row + len(drawn)
            if in_a_row > len(self):
                raise MediaError("No row has media that can be decoded.", hint="The log names them.")
        return prompts

    def _usable(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        failures = self._loader.load(prompts)
        if self._loader.finder.settings.on_error == "stop":
            for failure in failures:
                if failure is not None:
                    raise failure
        usable = [prompt for prompt, failure in zip(prompts, failures, strict=True) if failure is None]
        for failure in filter(None, failures):
            logger.warning("left out: %s", failure.args[0])
            self._loader.finder.left_out.append(failure.args[0])
        return usable

    def all(self, limit: int | None = None) -> Sequence[Prompt]:
        """Return every prompt once, without decoding anything."""
        return self._source.all(limit)

    def state_dict(self) -> Mapping[str, Any]:
        """Return where the source stands."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another source stood."""
        self._source.load_state_dict(state)

    def adopt(self, prompts: Sequence[Prompt]) -> None:
        """Decode the media of prompts that were drawn before a resume.

        :raises MediaError: Something cannot be found again or decoded.
        """
        shown = [prompt for prompt in prompts if prompt.media]
        if shown and isinstance(self._source, MediaDataSource):
            self._source.recall(shown)
        for prompt in shown:
            for medium in prompt.media:
                if medium.key not in self._loader.finder.drawn:
                    raise self._lost(prompt, medium)
        for failure in self._loader.load(shown):
            if failure is not None:
                raise failure

    def _lost(self, prompt: Prompt, medium: Media) -> MediaError:
        """Return the error of a medium that was not found again."""
        what = f"{prompt.source}: {medium.kind} ({medium.source})"
        if isinstance(self._source, MediaDataSource):
            return MediaError(
                f"{what} has changed since the prompt was drawn.",
                hint="Restore the file, or start a new run.",
            )
        return MediaError(
            f"{what} cannot be found again: the data source {type(self._source).__name__} has no recall().",
            hint="Make it an anygauge_hooks.data.MediaDataSource to resume, or start a new run.",
        )


def _keys(media: Iterable[Media]) -> list[str]:
    return list(dict.fromkeys(each.key for each in media))


def _failure(futures: Iterable[Future[None]]) -> MediaError | None:
    """Wait for contents and return the first failure.

    :raises Exception: It is none of media.
    """
    first: MediaError | None = None
    for future in futures:
        error = future.exception()
        if error is not None and not isinstance(error, MediaError):
            raise error
        first = first or error
    return first
