"""Code shared by the clients of all hubs."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from anygauge.hub.files import CODE, WANTED, HubFiles
from anygauge.hub.names import HubName
from anygauge_hooks.errors import HubError

if TYPE_CHECKING:
    from anygauge.config.schema import Hub

__all__ = ["Client", "Explanation"]

Explanation = tuple[str, str]
"""Cause, as a clause, and action."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class Client:
    """Finds names in the cache of a hub's own library and downloads into it.

    :param host: The hub's address, if the config names no mirror.
    :param cache: Where that library keeps downloads, if the config names no directory.
    :param code: Whether Python files of a model are wanted.
    """

    mirror_setting: ClassVar[str]
    """How an address is set."""
    other_source: ClassVar[str]
    """The value of ``hub.source`` that names the other hub."""

    def __init__(self, hub: Hub, *, host: str, cache: str | Path, code: bool) -> None:
        self._endpoint = hub.endpoint
        self.host: str = hub.endpoint or host
        self.cache = Path(hub.cache or cache).expanduser().absolute()
        self.offline: str | None = "hub.offline = true" if hub.offline else None
        """Setting that forbids downloads, if one does."""
        self._wanted = [*WANTED, *([CODE] if code else [])]

    def folder(self, name: HubName) -> Path:
        """Return where the cache keeps a repository."""
        raise NotImplementedError

    def command(self, name: HubName) -> str:
        """Return the command that fills the cache of a connected host."""
        raise NotImplementedError

    def cached(self, name: HubName) -> HubFiles | None:
        """Return the cached files of a name, which may be incomplete."""
        raise NotImplementedError

    def download(self, name: HubName) -> HubFiles:
        """Download a name; cached files are kept.

        :raises HubError: Says what the hub answered and what to do.
        """
        raise NotImplementedError

    def _error(self, name: HubName, explanation: Explanation) -> HubError:
        message, hint = explanation
        local = name.local_clause()
        local = f"\n  For a path: {local}" if local else ""
        return HubError(f"{name.key} = {str(name)!r}: {message}.{local}", hint=hint)

    def _disk_is_full(self, error: BaseException) -> Explanation | None:
        if not (isinstance(error, OSError) and error.errno in FULL):
            return None
        return (
            f"the disk of the cache {self.cache} is full",
            "Free space there, or set hub.cache to a directory on another disk; what is there is kept.",
        )

    def _unreachable(self, name: HubName, why: str) -> Explanation:
        return (
            f"{self.host} cannot be reached: {why}",
            f'Set {self.mirror_setting} to a mirror, or hub.source = "{self.other_source}"; or run '
            f"`{self.command(name)}` on a connected machine and copy {self.folder(name)} to this one.",
        )

    def _failed(self, name: HubName, error: BaseException) -> Explanation:
        return f"the download failed: {type(error).__name__}: {error}", f"Try `{self.command(name)}`."
