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
from contextlib import suppress
from pathlib import Path
from typing import Any

from anygauge_hooks.errors import DataError

__all__ = ["IndexCache", "cache_directory", "no_place"]

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "ANYGAUGE_CACHE"
_WORKSPACE = ".making-"
_ENTRY = re.compile(r"[0-9a-f]{32}")
_ABANDONED_S = 86_400.0
"""Age of a workspace that was left by a killed run."""
_UNUSED_S = 30 * 86_400.0
"""Seconds since the last start with a kept directory after which it is deleted."""


def cache_directory(configured: Path | None) -> Path:
    """Return where indexes are kept.

    :param configured: ``data.cache``; ``None`` takes the environment variable ``ANYGAUGE_CACHE``, else
        ``~/.cache/anygauge``.
    """
    root = configured or Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/anygauge")
    return Path(os.path.expanduser(root)) / "index"


class IndexCache:
    """Directories by key, each complete or absent.

    A living cache, of whatever process, shares a lock on each directory that it returned; each start sets
    the time of the directory. New indexes make room: they delete the directories without a lock that no run
    has started with for long. A damaged directory is of use to nobody and goes at once; who reads in it
    nevertheless gets an error of the row.

    A cache that cannot be written costs time, never a run: what is made then lies in the system's directory
    for temporary files until the process ends.

    :param root: Need not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._temporary: list[Path] = []
        self._locks: list[int] = []
        weakref.finalize(self, _release, self._temporary, self._locks, os.getpid())

    def find(self, key: Mapping[str, Any]) -> Path | None:
        """Return the directory that was kept under a key."""
        path = self._path(key)
        return path if self._pin(path) else None

    def workspace(self) -> Path:
        """Return a new directory, to be given to :meth:`keep` once it is filled.

        :raises OSError: The cache cannot be written.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        _sweep(self._root)
        path = _new_workspace(self._root / "any")
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
            self._locks.append(lock := os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        except OSError:
            return False
        with suppress(OSError):  # the directory of another user, who alone deletes it
            os.utime(path)
        return _lock(lock, fcntl.LOCK_SH) is not False and path.exists()

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True)
        return self._root / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def no_place(error: OSError) -> DataError:
    """Return the error of a host on which nothing can be written."""
    return DataError(
        f"There is no place for the index of the data: {error}.",
        hint="Name a directory that can be written: data.cache, or ANYGAUGE_CACHE.",
    )


def _release(temporary: list[Path], locks: list[int], owner: int) -> None:
    for path in temporary if os.getpid() == owner else ():  # and not in a fork
        shutil.rmtree(path, ignore_errors=True)
    for lock in locks:
        os.close(lock)


def _sweep(root: Path) -> None:
    """Delete what nobody will miss; whatever is not of the cache stays."""
    for path in root.iterdir():
        is_workspace = path.name.startswith(_WORKSPACE)
        if is_workspace or _ENTRY.fullmatch(path.name):
            with suppress(OSError):  # another run removed it meanwhile, or it is of another user
                if time.time() - path.stat().st_mtime > (_ABANDONED_S if is_workspace else _UNUSED_S):
                    _delete_unused(path)


def _delete_unused(path: Path) -> None:
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if _lock(lock, fcntl.LOCK_EX):
            _delete(path)
    finally:
        os.close(lock)


def _lock(descriptor: int, kind: int) -> bool | None:
    """Lock a directory and return whether nobody else had; ``None`` on a file system that has no locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _delete(path: Path) -> None:
    """Delete a directory so that others see all of it or nothing.

    :raises OSError: Its parent cannot be written.
    """
    path = path.rename(_new_workspace(path))
    shutil.rmtree(path, ignore_errors=True)


def _new_workspace(path: Path) -> Path:
    return path.with_name(f"{_WORKSPACE}{uuid.uuid4().hex}")
