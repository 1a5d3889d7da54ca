"""Media store that every process of a host can map: one file per content, in memory where there is room."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import struct
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anygauge_hooks.errors import OutOfMemoryError
from anygauge_hooks.media import Content

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FileStore", "MappedFiles"]

logger = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
_PREFIX = "anygauge-media-"
_OWNER = "owner"
"""In each directory; whoever fills it holds a lock on this file."""
_YOUNG_S = 60.0
"""A directory without an owner may be one that is being made."""
_OURS_ALONE = 0o700
"""Mode of directories, from their creation on: /dev/shm is open to every user of the host."""
_ROOM = 2**30
"""Bytes that must be free for a directory in memory."""
_LENGTH = struct.Struct("<Q")
_ALIGNED = 64


class MappedFiles:
    """Contents in a shared-memory directory that another process fills, and on disk.

    :param directory: A link to it, or itself.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._disk = directory.with_name(f"{directory.name}-on-disk")
        """Overflow directory on disk, for contents that the first has no room for."""

    def put(self, key: str, content: Content) -> None:
        """Keep a content. One that is there already stays.

        :raises OutOfMemoryError: There is no room for it.
        """
        if self.has(key):
            return
        try:
            _put(self._directory / key, content)
        except OSError as error:
            if self._directory.is_symlink():  # to memory
                self._put_on_disk(key, content, error)
            else:
                raise self._full(content, error) from error

    def _put_on_disk(self, key: str, content: Content, problem: OSError) -> None:
        if not self._disk.exists():
            logger.warning(
                "no room in %s (%s): further decoded media are kept in %s",
                self._directory.resolve(),
                problem.strerror,
                self._disk,
            )
        try:
            self._disk.mkdir(_OURS_ALONE, exist_ok=True)
            _put(self._disk / key, content)
        except OSError as error:
            raise self._full(content, error) from error

    def _full(self, content: Content, problem: OSError) -> OutOfMemoryError:
        folders = dict.fromkeys(str(folder.resolve()) for folder in self._folders if folder.exists())
        return OutOfMemoryError(
            f"There is no room for {content.data.nbytes} bytes of a decoded {content.kind}: "
            f"{problem.strerror}. {' and '.join(folders)} hold {self.bytes()} bytes.",
            hint="Give the host more shared memory (docker run --shm-size) or disk, keep fewer prompts in "
            "flight (rollout.prompts_per_step), or set a smaller media.max_pixels.",
        )

    def has(self, key: str) -> bool:
        """Return whether the content is there."""
        return any((folder / key).exists() for folder in self._folders)

    def get(self, key: str) -> Content:
        """Return a content, mapped read-only.

        :raises KeyError: It is not there.
        """
        for folder in self._folders:
            with suppress(FileNotFoundError):
                return _map(folder / key)
        raise KeyError(key)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget contents; existing mappings stay valid."""
        for key in keys:
            for folder in self._folders:
                (folder / key).unlink(missing_ok=True)

    def bytes(self) -> int:
        """Return how many bytes of contents there are."""
        folders = [folder for folder in self._folders if folder.exists()]
        return sum(_data_bytes(path) for folder in folders for path in folder.iterdir() if _is_content(path))

    def close(self) -> None:
        """Do nothing: the files belong to their owner."""

    @property
    def _folders(self) -> tuple[Path, Path]:
        return self._directory, self._disk


class FileStore(MappedFiles):
    """The directory of a run, removed when it is closed.

    It is in memory, and ``link`` leads to it; or ``link`` itself, on disk, where memory has no room. What
    fills the memory later goes to disk.

    :param link: Path by which the run's other processes on this host know it.
    """

    def __init__(self, link: Path) -> None:
        sweep(MEMORY)
        super().__init__(link)
        _unlink(link)
        _unlink(self._disk)
        self._link = link
        self._own = _in_memory() or link
        self._own.parent.mkdir(parents=True, exist_ok=True)
        self._own.mkdir(_OURS_ALONE)  # a new one: another user may have foreseen the name
        self._lock = os.open(self._own / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if self._own != link:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(self._own)

    def close(self) -> None:
        """Remove the directory."""
        if self._lock >= 0:
            shutil.rmtree(self._own, ignore_errors=True)
            _unlink(self._link)
            _unlink(self._disk)
            os.close(self._lock)
            self._lock = -1


def sweep(folder: Path) -> None:
    """Remove directories whose owner was killed."""
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path / _OWNER, os.O_RDWR)
        except OSError:
            if _age_s(path) > _YOUNG_S:
                shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed %s, which a run that was killed has left", path)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(lock)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _in_memory() -> Path | None:
    """Return a directory of shared memory to make, if there is room."""
    try:
        free = shutil.disk_usage(MEMORY).free
    except OSError:
        free = 0
    if free < _ROOM or not os.access(MEMORY, os.W_OK):
        logger.warning(
            "%s has %d MiB: decoded media are kept on disk, in the run's directory", MEMORY, free >> 20
        )
        return None
    return MEMORY / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"


def _unlink(link: Path) -> None:
    if link.is_symlink():
        link.unlink()
    elif link.is_dir():
        shutil.rmtree(link, ignore_errors=True)


# -------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------


def _is_content(path: Path) -> bool:
    return path.name != _OWNER and not path.name.startswith(".")


def _put(path: Path, content: Content) -> None:
    """Write a content atomically."""
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        _write(temporary, content)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _write(path: Path, content: Content) -> None:
    """Write a content: the length of a JSON object, the object, zeros, and the array."""
    data = np.ascontiguousarray(content.data)
    facts = {
        "kind": content.kind,
        "seconds": content.seconds,
        "shape": data.shape,
        "dtype": data.dtype.str,
        "bytes": data.nbytes,
    }
    text = json.dumps(facts).encode()
    text += b" " * (-(_LENGTH.size + len(text)) % _ALIGNED)
    with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
        file.write(_LENGTH.pack(len(text)) + text)
        file.write(data.data)


def _map(path: Path) -> Content:
    with path.open("rb") as file:
        facts, offset = _read_facts(file)
        data: NDArray[Any] = np.memmap(file, facts["dtype"], "r", offset, tuple(facts["shape"]))
    return Content(facts["kind"], data.view(np.ndarray), facts["seconds"])


def _read_facts(file: Any) -> tuple[Mapping[str, Any], int]:
    length = _LENGTH.unpack(file.read(_LENGTH.size))[0]
    return json.loads(file.read(length)), _LENGTH.size + length


def _data_bytes(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return int(_read_facts(file)[0]["bytes"])
    except FileNotFoundError:  # dropped meanwhile
        return 0
