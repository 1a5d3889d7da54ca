"""ModelScope, through its client ``modelscope_hub``: ``pip install 'anygauge[modelscope]'``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.extras import install_extra
from anygauge.hub.client import Client, Explanation
from anygauge.hub.files import NOT_WANTED, HubFiles
from anygauge.hub.names import HubName
from anygauge_hooks.errors import HubError

if TYPE_CHECKING:
    from anygauge.config.schema import Hub

__all__ = ["ModelScope"]

DEFAULT_REVISION = "master"


class ModelScope(Client):
    """Finds names in the cache of ``modelscope_hub`` and downloads into it.

    A name is pinned to its branch or tag, not to a commit: the client tells no commit of them, and its cache
    is by revision as written.

    :param code: Whether Python files of a model are wanted.
    :raises HubError: The client is not installed.
    """

    mirror_setting = "hub.endpoint"
    other_source = "huggingface"

    def __init__(self, hub: Hub, *, code: bool) -> None:
        try:
            from modelscope_hub.config import get_default_config
        except ImportError as error:
            raise HubError(
                f'hub.source = "modelscope", and its client is not installed: {error}.',
                hint=f'Set hub.source = "huggingface", or {install_extra("modelscope")}',
            ) from error
        default = get_default_config()
        super().__init__(hub, host=default.endpoint, cache=default.cache_dir, code=code)

    def folder(self, name: HubName) -> Path:
        """Return where the cache keeps a repository."""
        return self.cache / f"{name.kind}s" / name.repository.replace("/", "--")

    def command(self, name: HubName) -> str:
        """Return the command that fills the cache of a connected host."""
        kind = "--dataset" if name.kind == "dataset" else "--model"
        revision = f" --revision {name.revision}" if name.revision else ""
        return f"modelscope download {kind} {name.repository}{f' {name.file}' if name.file else ''}{revision}"

    def cached(self, name: HubName) -> HubFiles | None:
        """Return the cached files of a name, which may be incomplete."""
        from modelscope_hub.errors import CacheError

        try:
            files = self._get(name, local_files_only=True)
        except CacheError:
            return None
        return files if files.path.exists() else None

    def download(self, name: HubName) -> HubFiles:
        """Download a name; cached files are kept.

        :raises HubError: Says what the hub answered and what to do.
        """
        try:
            files = self._get(name, local_files_only=False)
        except Exception as error:  # foreign code: a hub's HTTP client
            raise self._error(name, self._explanation(name, error)) from error
        if not files.path.exists():
            listed = f"Its files are listed on {self.host}/datasets/{name.repository}/files."
            raise self._error(name, (f"the data set has no such file on {self.host}", listed))
        return files

    def _get(self, name: HubName, *, local_files_only: bool) -> HubFiles:
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
        return HubFiles(path, name.revision or DEFAULT_REVISION)

    def _explanation(self, name: HubName, error: Exception) -> Explanation:
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
                f"Accept its license on {page} if it has one, and run `modelscope login` with a valid token.",
            )
        if full := self._disk_is_full(cause):
            return full
        if isinstance(cause, ConnectionError | TimeoutError | errors.NetworkError):
            return self._unreachable(name, str(cause))
        return self._failed(name, cause)
