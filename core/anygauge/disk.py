"""Directories that appear and disappear at once, and durable files."""

from __future__ import annotations

import fcntl
import itertools
import os
import re
import secrets
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from anygauge.strict_json import MAX_DEPTH, is_nested, parse_json, too_deep

__all__ = [
    "ABANDONED",
    "LONGEST_NAME",
    "appearing",
    "directory_to_disk",
    "free_name",
    "parse_toml",
    "publish",
    "read_json",
    "remove",
    "remove_abandoned",
    "replace_file",
    "stream_to_disk",
    "tree_to_disk",
    "why_impossible",
    "write_file",
]

LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes, on Linux."""
REPLACED = ".replaced"
ABANDONED = (".*.partial-*", ".*.new", ".*.removed", f".*{REPLACED}")
"""Names of directories that a process was about to publish, or to remove, when it was killed."""


def why_impossible(path: Path) -> str | None:
    """Return why a path is impossible on every file system, and a hint; ``None`` for a possible one.

    ``Path.is_dir`` and its like raise ``OSError`` on an impossible one.
    """
    if "\0" in str(path):
        return "has a null character; choose another one"
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        return f"has a part of more than {LONGEST_NAME} bytes; choose a shorter one"
    if len(os.fsencode(path)) > LONGEST_PATH:
        return f"has more than {LONGEST_PATH} bytes; choose a shorter one"
    return None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    :raises OSError: It cannot be read.
    :raises ValueError: It is not JSON, not UTF-8, or nested too deeply.
    """
    return parse_json(path.read_text(encoding="utf-8"), strict=False)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text.

    :raises ValueError: It is not TOML, or nested too deeply.
    """
    try:
        tables = tomllib.loads(text)
    except RecursionError as error:
        raise too_deep(MAX_DEPTH) from error
    if is_nested(tables, MAX_DEPTH):
        raise too_deep(MAX_DEPTH)
    return tables


def write_file(path: Path, content: bytes) -> None:
    """Write a file and see it to the disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream_to_disk(stream)


def replace_file(path: Path, text: str) -> None:
    """Write a file in one piece: a reader sees the old one or the new one."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def stream_to_disk(stream: IO[bytes]) -> None:
    """Flush a file to disk."""
    stream.flush()
    os.fsync(stream.fileno())


def directory_to_disk(path: Path) -> None:
    """See the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tree_to_disk(path: Path) -> None:
    """See a file, or all that is in a directory, to the disk."""
    if path.is_dir():
        for inner in path.iterdir():
            tree_to_disk(inner)
    directory_to_disk(path)  # which does the same for a file


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to a path, complete and on disk, when the block ends.

    Nothing stays if the block raises. What a block left that was killed is removed by the next one of the
    target: the kernel frees its lock.

    :param target: Is not there, or an empty directory.
    :raises OSError: A directory cannot be made, or ``target`` holds something by now.
    """
    if not target.parent.exists():
        target.parent.mkdir(parents=True)
    _remove_killed(target)
    partial, lock = _make_sibling(target)
    try:
        yield partial
        tree_to_disk(partial)
        partial.rename(target)
        directory_to_disk(target.parent)
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def _make_sibling(target: Path) -> tuple[Path, int]:
    """Return a new directory and the descriptor that locks it."""
    while True:
        path = target.with_name(f".{target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}")
        path.mkdir()
        lock = os.open(path, os.O_RDONLY)
        if _is_free(lock) is not False and path.exists():
            return path, lock
        os.close(lock)  # another process took it for one that was left, in the moment before


def _remove_killed(target: Path) -> None:
    pattern = re.compile(rf"\.{re.escape(target.name)}\.partial-\d+-[0-9a-f]{{8}}")
    for path in target.parent.iterdir():
        if not pattern.fullmatch(path.name) or path.is_symlink():
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        if _is_free(lock):
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _is_free(descriptor: int) -> bool | None:
    """Lock a directory until the descriptor is closed, and return whether it was unlocked.

    :returns: ``None`` on a file system that has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def publish(source: Path, target: Path) -> None:
    """Rename a complete directory, in place of an earlier one of the name.

    Whenever the process is killed, one of them is there, or comes back with :func:`remove_abandoned`.
    """
    earlier = target.with_name(f".{target.name}{REPLACED}")
    if target.exists():
        shutil.rmtree(earlier, ignore_errors=True)
        target.rename(earlier)
    source.rename(target)
    directory_to_disk(target.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a directory, after renaming it so that it is never taken for a complete one."""
    leaving = path.with_name(f".{path.name}.removed")
    shutil.rmtree(leaving, ignore_errors=True)
    path.rename(leaving)
    shutil.rmtree(leaving)


def remove_abandoned(directory: Path) -> None:
    """Remove the directories that a killed process had not published, or not quite removed.

    One that was to be replaced gets its name back, if the new one did not come to have it.
    """
    for pattern in ABANDONED:
        for path in directory.glob(pattern):
            if path.is_symlink() or not path.is_dir():
                continue
            name = path.name.removeprefix(".").removesuffix(REPLACED)
            if path.name.endswith(REPLACED) and not os.path.lexists(path.with_name(name)):
                path.rename(path.with_name(name))
            else:
                shutil.rmtree(path, ignore_errors=True)


def free_name(path: Path) -> Path:
    """Return a path, or the first of ``NAME-2``, ``NAME-3``, ... that is free; a suffix stays the last."""
    if not os.path.lexists(path):
        return path
    numbered = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
    return next(each for each in numbered if not os.path.lexists(each))
