"""Interface of data sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from anygauge_hooks.rl import Prompt

__all__ = ["DataSource", "MediaDataSource"]


class DataSource(Protocol):
    """Prompts, drawn epoch after epoch; for SFT, conversations."""

    def __len__(self) -> int:
        """Return the number of rows that can be drawn."""

    def next(self, num_prompts: int) -> Sequence[Prompt]:
        """Return the next prompts. At the end of an epoch the next one begins."""

    def all(self, limit: int | None = None) -> Sequence[Prompt]:
        """Return every prompt once, in the order of the files, or only the first ``limit``."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return where the source stands, as JSON can write it; later draws do not change it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another source of the same files stood when it returned ``state``.

        :raises DataError: The files are not the same any more.
        """


@runtime_checkable
class MediaDataSource(DataSource, Protocol):
    """A data source whose prompts may have media, and which finds these again after a resume."""

    def recall(self, prompts: Sequence[Prompt]) -> None:
        """Find the media of prompts again that another source of the same files has drawn.

        Called after a resume for prompts whose groups were open, which are not drawn again. A medium that is
        not found with the key that it had ends the run (AG303).
        """
