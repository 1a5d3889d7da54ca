"""Choice of the media store that the processes of a run share."""

from __future__ import annotations

from pathlib import Path

from anygauge.config.modalities import modalities
from anygauge.config.schema import Config
from anygauge_hooks.media import MediaStore

__all__ = ["open_store", "own_store"]

_LINK = "media"
"""In the run's directory."""


def own_store(config: Config, run_directory: Path) -> MediaStore:
    """Return the store of a run, for its driver, which closes it."""
    run_directory = run_directory.resolve()
    if _is_of_files(config):
        from anygauge.data.media.store import FileStore

        return FileStore(run_directory / _LINK)
    from anygauge.runtime.ray_media import RayStore, ray_name

    return RayStore(ray_name(run_directory / _LINK), owns=True)


def open_store(config: Config, run_directory: Path) -> MediaStore | None:
    """Return the media store of a run, for its workers; ``None`` for a text-only run.

    :param run_directory: As the driver resolves it: stores are found by its name.
    """
    if not modalities(config):
        return None
    if _is_of_files(config):
        from anygauge.data.media.store import MappedFiles

        return MappedFiles(run_directory / _LINK)
    from anygauge.runtime.ray_media import RayStore, ray_name

    return RayStore(ray_name(run_directory / _LINK))


def _is_of_files(config: Config) -> bool:
    chosen = config.media.store
    return chosen == "files" or (chosen == "auto" and config.placement.launcher == "local")
