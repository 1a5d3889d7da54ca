"""Cache directory of the indexes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anygauge_hooks.errors import DataError

__all__ = ["IndexCache", "cache_directory", "no_place"]

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "ANYGAUGE_CACHE"
_WORKSPACE = ".making-"
_ENTRY = re.compile(r"[0-9a-f]{32}")
_USE = "use"
"""In each directory. Who reads it shares a lock on this file, whose time is that of the last start."""
_ABANDONED_S = 86_400.0
"""A workspace that nobody wrote to for so long is of a run that was killed."""
_UNUSED_S = 30 * 86_400.0
"""A kept directory with which nothing started for so long is deleted."""


def cache_directory(configured: Path | None) -> Path:
    """Return where indexes are kept.

    :param configured: ``data.cache``; ``None`` takes the environment variable ``ANYGAUGE_CACHE``, else
        ``~/.cache/anygauge``.
    """
    root = configured or Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/anygauge")
    return Path(os.path.expanduser(root)) / "index"


class IndexCache:
    """Directories by key, each complete or absent.

    What was not used for long is deleted when something new is made, but nothing that a living cache, of
    whatever process, has returned. A directory that is found damaged is of use to none of them and goes at
    once; who reads in it nevertheless gets an error of the row.

    A cache that cannot be written costs time, never a run: what is made then lies in the system's directory
    for temporary files until the process ends.

    :param root: Need not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._temporary: list[Path] = []
        self._pinned: list[int] = []
        weakref.finalize(self, _remove_all, self._temporary, os.getpid())
        weakref.finalize(self, _close_all, self._pinned)

    def find(self, key: Mapping[str, Any]) -> Path | None:
        """Return the directory that was kept under a key."""
        path = self._path(key)
        return path if path.is_dir() and self._pin(path) else None

    def workspace(self) -> Path:
        """Return a new directory for :meth:`keep`.

        :raises OSError: The cache cannot be written.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        _sweep(self._root)
        path = self._root / f"{_WORKSPACE}{uuid.uuid4().hex}"
        path.mkdir()
        self._temporary.append(path)
        self._pin(path)
        return path

    def temporary(self, why: OSError) -> Path:
        """Return a new directory outside of the cache.

        :param why: The cache cannot be used.
        :raises DataError: Neither can another place.
        """
        logger.warning("the index cache %s cannot be written: %s", self._root, why.strerror)
        try:
            path = Path(tempfile.mkdtemp(prefix="anygauge-index-"))
        except OSError as error:
            raise no_place(error) from error
        self._temporary.append(path)
        return path

    def keep(self, workspace: Path, key: Mapping[str, Any]) -> Path:
        """Move a complete workspace to its key and return where it is now: one outside of the cache stays."""
        if workspace.parent != self._root:
            return workspace
        path = self._path(key)
        try:
            workspace.rename(path)
        except OSError:
            return workspace  # another run was faster
        self._temporary.remove(workspace)
        return path

    def remove(self, path: Path) -> None:
        """Take a damaged directory away, whoever has it."""
        try:
            _delete(path)
        except OSError as error:
            logger.warning("the index cache %s cannot be written: %s", self._root, error)
            shutil.rmtree(path, ignore_errors=True)

    def _pin(self, path: Path) -> bool:
        """Keep a directory from being deleted as long as this cache lives; return whether it is there."""
        try:
            use = _open_use(path)
        except OSError:
            return path.is_dir()
        self._pinned.append(use)
        try:
            fcntl.flock(use, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.utime(use)
        except BlockingIOError:
            return False  # another run deletes it
        except OSError:
            pass  # where nothing can be locked, nothing is deleted; the time is for those who may write
        return (path / _USE).exists()

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True)
        return self._root / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def no_place(error: OSError) -> DataError:
    """Return the error for a host without a writable cache directory."""
    return DataError(
        f"The data index cannot be written: {error}.",
        hint="Name a directory that can be written: data.cache, or ANYGAUGE_CACHE.",
    )


def _remove_all(paths: list[Path], owner: int) -> None:
    if os.getpid() == owner:  # and not in a fork
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _open_use(path: Path) -> int:
    """Open the file whose lock says that a directory is in use; old directories have none yet."""
    try:
        return os.open(path / _USE, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        raise
    except OSError:  # the directory of another user
        return os.open(path / _USE, os.O_RDONLY)


def _sweep(root: Path) -> None:
    """Delete unused cache entries; other files stay."""
    for path in root.iterdir():
        is_workspace = path.name.startswith(_WORKSPACE)
        allowed_s = _ABANDONED_S if is_workspace else _UNUSED_S
        if (is_workspace or _ENTRY.fullmatch(path.name)) and _idle_s(path) > allowed_s:
            _delete_unused(path)


def _idle_s(directory: Path) -> float:
    """Return the seconds since a directory was last written to, or used."""
    try:
        newest = max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:  # another run removed it meanwhile
        return 0.0
    return time.time() - newest


def _delete_unused(path: Path) -> None:
    try:
        use = _open_use(path)
    except OSError:
        return
    try:
        fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _delete(path)
    except OSError as error:
        logger.debug("%s stays: %s", path, error)
    finally:
        os.close(use)


def _delete(path: Path) -> None:
    """Delete a directory so that others see all of it or nothing.

    :raises OSError: Its parent cannot be written.
    """
    path = path.rename(path.with_name(f"{_WORKSPACE}{uuid.uuid4().hex}"))
    shutil.rmtree(path, ignore_errors=True)
