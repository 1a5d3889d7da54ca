"""ModelScope, through its client ``modelscope_hub``: ``pip install 'anygauge[modelscope]'``."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.hub.found import CODE, NOT_WANTED, WANTED, Found
from anygauge.hub.names import HubName
from anygauge_hooks.errors import HubError

if TYPE_CHECKING:
    from anygauge.config.schema import Hub

__all__ = ["ModelScope"]

DEFAULT_REVISION = "master"


class ModelScope:
    """Finds names in the cache of ``modelscope_hub`` and downloads into it.

    Its cache is by revision as written, so a name is pinned to its branch or tag, not to a commit.

    :param code: Whether Python files of a model are wanted.
    :raises HubError: The client is not installed.
    """

    def __init__(self, hub: Hub, *, code: bool) -> None:
        try:
            from modelscope_hub.config import get_default_config
        except ImportError as error:
            raise HubError(
                f'hub.source = "modelscope", and its client is not installed: {error}.',
                hint="pip install 'anygauge[modelscope]', or set hub.source = \"huggingface\".",
            ) from error
        default = get_default_config()
        self._endpoint = hub.endpoint
        self.host: str = hub.endpoint or default.endpoint
        self.cache = Path(hub.cache or default.cache_dir).expanduser().absolute()
        self.offline = "hub.offline = true" if hub.offline else None
        self._wanted = [*WANTED, *([CODE] if code else [])]

    def folder(self, name: HubName) -> Path:
        """Return where the cache keeps a repository."""
        return self.cache / f"{name.kind}s" / name.repository.replace("/", "--")

    def command(self, name: HubName) -> str:
        """Return the command that fills the cache of a connected host."""
        kind = "--dataset" if name.kind == "dataset" else "--model"
        revision = f" --revision {name.revision}" if name.revision else ""
        return f"modelscope download {kind} {name.repository}{f' {name.file}' if name.file else ''}{revision}"

    def cached(self, name: HubName) -> Found | None:
        """Return what the cache holds of a name, which may be less than all."""
        from modelscope_hub.errors import CacheError

        try:
            found = self._get(name, local_files_only=True)
        except CacheError:
            return None
        return found if found.path.exists() else None

    def download(self, name: HubName) -> Found:
        """Download a name, or what the cache lacks of it.

        :raises HubError: Says what the hub answered and what to do.
        """
        try:
            found = self._get(name, local_files_only=False)
        except Exception as error:  # whatever its HTTP client raises
            message, hint = self._explanation(name, error)
            raise HubError(f"{name.key} = {str(name)!r}: {message}.", hint=hint) from error
        if not found.path.exists():
            raise HubError(
                f"{name.key} = {str(name)!r}: the data set has no such file on {self.host}.",
                hint=f"Its files are listed on {self.host}/datasets/{name.repository}/files.",
            )
        return found

    def _get(self, name: HubName, *, local_files_only: bool) -> Found:
        from modelscope_hub import HubApi

        directory = HubApi(endpoint=self._endpoint).download_repo(
            name.repository,
            name.kind,
            revision=name.revision,
            cache_dir=self.cache,
            local_files_only=local_files_only,
            allow_patterns=self._wanted if name.file is None else [name.file],
            ignore_patterns=list(NOT_WANTED) if name.file is None else None,
        )
        path = Path(directory) if name.file is None else Path(directory, name.file)
        return Found(path, name.revision or DEFAULT_REVISION)

    def _explanation(self, name: HubName, error: Exception) -> tuple[str, str]:
        """Return what happened and what to do."""
        from modelscope_hub import errors

        cause = next(iter(getattr(error, "failed_files", {}).values()), error)
        page = f"{self.host}/{name.kind}s/{name.repository}"
        if isinstance(cause, errors.NotExistError):
            return (
                f"{self.host} has no such {name.kind} or revision, or it is private",
                f"Check the name on {page}; it may be a local path that does not exist here. For a private "
                "one run `modelscope login`.",
            )
        if isinstance(cause, errors.AuthenticationError | errors.PermissionDeniedError):
            return (
                f"{self.host} does not give this {name.kind} to you",
                f"Accept its licence on {page} if it has one, and run `modelscope login` with a valid token.",
            )
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            return (
                f"the disk of the cache {self.cache} is full",
                "Free space there, or set hub.cache to a directory on another disk; what is there is kept.",
            )
        if isinstance(cause, ConnectionError | TimeoutError | errors.NetworkError):
            return (
                f"{self.host} cannot be reached: {cause}",
                'Set hub.endpoint to a mirror, or hub.source = "huggingface"; or run '
                f"`{self.command(name)}` on a connected machine and copy {self.folder(name)} to this one.",
            )
        return f"the download failed: {type(cause).__name__}: {cause}", f"Try `{self.command(name)}`."
