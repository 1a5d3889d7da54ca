"""Where indexes are kept from one start to the next."""

from __future__ import annotations

import hashlib
import json
import logging
import os
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
_ABANDONED_S = 86_400.0
"""A workspace that nobody wrote to for so long is of a run that was killed."""


def cache_directory(configured: Path | None) -> Path:
    """Return where indexes are kept.

    :param configured: ``data.cache``; ``None`` takes the environment variable ``ANYGAUGE_CACHE``, else
        ``~/.cache/anygauge``.
    """
    root = configured or Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/anygauge")
    return Path(os.path.expanduser(root)) / "index"


class IndexCache:
    """Directories by key, each complete or absent.

    A cache that cannot be written costs time, never a run: what is made then lies in the system's directory
    for temporary files until the process ends.

    :param root: Need not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._temporary: list[Path] = []
        weakref.finalize(self, _remove_all, self._temporary, os.getpid())

    def find(self, key: Mapping[str, Any]) -> Path | None:
        """Return the directory that was kept under a key."""
        path = self._path(key)
        return path if path.is_dir() else None

    def workspace(self) -> Path:
        """Return a new directory, to be given to :meth:`keep` once it is filled.

        :raises OSError: The cache cannot be written.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        _sweep(self._root)
        path = self._root / f"{_WORKSPACE}{uuid.uuid4().hex}"
        path.mkdir()
        self._temporary.append(path)
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
        """Take a directory away that is of no use."""
        try:
            # Others see all of it or nothing.
            path = path.rename(self._root / f"{_WORKSPACE}{uuid.uuid4().hex}")
        except OSError as error:
            logger.warning("the index cache %s cannot be written: %s", self._root, error)
        shutil.rmtree(path, ignore_errors=True)

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True)
        return self._root / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def no_place(error: OSError) -> DataError:
    """Return the error of a host on which nothing can be written."""
    return DataError(
        f"There is no place for the index of the data: {error}.",
        hint="Name a directory that can be written: data.cache, or ANYGAUGE_CACHE.",
    )


def _remove_all(paths: list[Path], owner: int) -> None:
    if os.getpid() == owner:  # and not in a fork
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)


def _sweep(root: Path) -> None:
    for path in root.glob(f"{_WORKSPACE}*"):
        if _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(workspace: Path) -> bool:
    try:
        newest = max(path.stat().st_mtime for path in (workspace, *workspace.iterdir()))
    except OSError:  # another run removed it meanwhile
        return False
    return time.time() - newest > _ABANDONED_S
