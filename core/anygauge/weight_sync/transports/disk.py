"""Disk transport: writes each version as a complete checkpoint that the servers can read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.disk import appearing, remove
from anygauge.hub.weight_files import copy_other_files, write_index
from anygauge.weight_sync.buckets import unpack
from anygauge_hooks.weights import WeightTransport

if TYPE_CHECKING:
    from anygauge_hooks.weights import WeightBucket, WeightTarget, WeightUpdate

__all__ = ["DiskTransport"]

_VERSION = re.compile(r"version-(\d+)")


class DiskTransport(WeightTransport):
    """Writes ``version-N`` in a directory, lets the servers load it, and removes the previous version.

    :param directory: Directory that the servers see under the same path.
    :param model: Whose config and tokenizer go with the weights.
    """

    stages = True
    opens_session = False

    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory.absolute()
        self._model = model
        self._writing = ExitStack()
        self._partial: Path | None = None
        self._places: dict[str, str] = {}
        self._size = 0

    def send(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Write a bucket as a file; with the last one the directory gets its name."""
        from safetensors.torch import save_file

        if self._partial is None:
            self._partial = self._writing.enter_context(self._appearing(update))
            if self._model.is_dir():
                copy_other_files(self._model, self._partial)
        name = f"model-{bucket.index:05d}.safetensors"
        save_file(dict(unpack(bucket.tensors, bucket.data)), self._partial / name, {"format": "pt"})
        self._places |= {each.name: name for each in bucket.tensors}
        self._size += bucket.data.numel()
        if bucket.last:
            self._publish()

    def _appearing(self, update: WeightUpdate) -> AbstractContextManager[Path]:
        """Return a directory that becomes that of the version."""
        target = self._directory / f"version-{update.version}"
        if target.exists():
            remove(target)
        return appearing(target)

    def _publish(self) -> None:
        assert self._partial is not None
        write_index(self._partial, self._places, self._size)
        self._forget()
        self._writing.close()

    def commit(self, update: WeightUpdate) -> None:
        """Let the servers load the directory, and remove earlier ones that no server needs."""
        path = str(self._directory / f"version-{update.version}")
        update.load(lambda target: self._load(target, path, update))
        for version, other in _versions(self._directory).items():
            if version != update.version:
                remove(other)

    def _load(self, target: WeightTarget, path: str, update: WeightUpdate) -> None:
        target.load_directory(path, update)

    def abandon(self) -> None:
        """Remove unpublished files."""
        if self._partial is not None:
            # The block that writes is left as by an error, so that the directory does not get its name.
            self._writing.__exit__(RuntimeError, RuntimeError("given up"), None)
            self._forget()

    def _forget(self) -> None:
        self._partial, self._places, self._size = None, {}, 0

    def close(self) -> None:
        """Remove unpublished files; the last version stays, for restarted servers."""
        self.abandon()


def _versions(directory: Path) -> Mapping[int, Path]:
    if not directory.is_dir():
        return {}
    matches = ((_VERSION.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(match[1]): path for match, path in matches if match}
