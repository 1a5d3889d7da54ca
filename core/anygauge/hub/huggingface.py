"""The Hugging Face hub and its mirrors, through ``huggingface_hub``."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.hub.found import CODE, NOT_WANTED, WANTED, Found
from anygauge.hub.names import HubName
from anygauge_hooks.errors import HubError

if TYPE_CHECKING:
    from anygauge.config.schema import Hub

__all__ = ["HuggingFace"]

CONNECT_S = 15.0
"""Longest wait for the hub's first answer."""
FULL = (errno.ENOSPC, errno.EDQUOT)
UNAUTHORIZED = (401, 403)


class HuggingFace:
    """Finds names in the cache of ``huggingface_hub`` and downloads into it.

    :param code: Whether Python files of a model are wanted.
    """

    def __init__(self, hub: Hub, *, code: bool) -> None:
        from huggingface_hub import constants

        self._endpoint = hub.endpoint
        self.host: str = hub.endpoint or constants.ENDPOINT
        self.cache = Path(hub.cache or constants.HF_HUB_CACHE).expanduser().absolute()
        self.offline: str | None = None
        """What forbids a download, if anything does."""
        if hub.offline:
            self.offline = "hub.offline = true"
        elif constants.is_offline_mode():
            self.offline = "HF_HUB_OFFLINE=1"
        self._wanted = [*WANTED, *([CODE] if code else [])]

    def folder(self, name: HubName) -> Path:
        """Return where the cache keeps a repository."""
        return self.cache / f"{name.kind}s--{name.repository.replace('/', '--')}"

    def command(self, name: HubName) -> str:
        """Return the command that fills the cache of a connected host."""
        kind = " --repo-type dataset" if name.kind == "dataset" else ""
        revision = f" --revision {name.revision}" if name.revision else ""
        return f"hf download {name.repository}{f' {name.file}' if name.file else ''}{kind}{revision}"

    def cached(self, name: HubName) -> Found | None:
        """Return what the cache holds of a name, which may be less than all."""
        from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

        try:
            return self._get(name, local_files_only=True)
        except IncompleteSnapshotError as error:
            path = Path(error.snapshot_path)
            return Found(path, path.name, complete=False)
        except LocalEntryNotFoundError:
            return None

    def download(self, name: HubName) -> Found:
        """Download a name, or what the cache lacks of it.

        :raises HubError: Says what the hub answered and what to do.
        """
        from huggingface_hub import HfApi

        try:
            # Also what gives a hub that cannot be reached a deadline: a download waits for ever to connect.
            HfApi(endpoint=self._endpoint).repo_info(
                name.repository, repo_type=name.kind, revision=name.revision, timeout=CONNECT_S
            )
            return self._get(name, local_files_only=False)
        except Exception as error:  # whatever its HTTP client or its native downloader raises
            raise self._explained(name, error) from error

    def _get(self, name: HubName, *, local_files_only: bool) -> Found:
        from huggingface_hub import hf_hub_download, snapshot_download

        options: dict[str, Any] = {
            "repo_type": name.kind,
            "revision": name.revision,
            "cache_dir": self.cache,
            "endpoint": self._endpoint,
            "local_files_only": local_files_only,
        }
        if name.file is None:
            path = Path(
                snapshot_download(
                    name.repository,
                    allow_patterns=self._wanted,
                    ignore_patterns=list(NOT_WANTED),
                    **options,
                )
            )
            return Found(path, path.name)
        path = Path(hf_hub_download(name.repository, name.file, **options))
        return Found(path, path.parts[-len(Path(name.file).parts) - 1])

    def _explained(self, name: HubName, error: Exception) -> HubError:
        message, hint = self._explanation(name, _root(error))
        return HubError(f"{name.key} = {str(name)!r}: {message}.", hint=hint)

    def _explanation(self, name: HubName, error: BaseException) -> tuple[str, str]:
        """Return what happened and what to do."""
        from huggingface_hub import errors

        page = f"{self.host}/{'datasets/' if name.kind == 'dataset' else ''}{name.repository}"
        if isinstance(error, errors.GatedRepoError):
            return (
                f"{self.host} gives this {name.kind} only to those who accepted its licence",
                f"Accept the licence on {page} and run `hf auth login`, or set HF_TOKEN to a token of yours.",
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"{self.host} has no such {name.kind}, or it is private",
                f"Check the name on {page}; it may be a "
                f"{'model' if name.kind == 'dataset' else 'data set'} or a local path that does not exist "
                "here. For a private one run `hf auth login` or set HF_TOKEN.",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            where = "model.revision" if name.key == "model.path" else "the revision behind @"
            return (
                f"{self.host} has this {name.kind}, but no revision {name.revision!r} of it",
                f"Correct {where}: a branch, tag or commit of {page}.",
            )
        if isinstance(error, errors.EntryNotFoundError) and isinstance(error, errors.HfHubHTTPError):
            return (
                f"the data set has no such file on {self.host}",
                f"Its files are listed on {page}/tree/main.",
            )
        if isinstance(error, errors.HfHubHTTPError):
            return self._refusal(name, error)
        if isinstance(error, OSError) and error.errno in FULL:
            return (
                f"the disk of the cache {self.cache} is full",
                "Free space there, or set hub.cache to a directory on another disk; what is there is kept.",
            )
        if isinstance(error, errors.HTTPError | ConnectionError | TimeoutError):
            return (
                f"{self.host} cannot be reached: {type(error).__name__}: {error}",
                'Set hub.endpoint (or HF_ENDPOINT) to a mirror, or hub.source = "modelscope"; or run '
                f"`{self.command(name)}` on a connected machine and copy {self.folder(name)} to this one.",
            )
        if isinstance(error, OSError):
            return (
                f"the cache {self.cache} cannot be written: {error}",
                "Set hub.cache to a directory that is writable.",
            )
        return f"the download failed: {type(error).__name__}: {error}", f"Try `{self.command(name)}`."

    def _refusal(self, name: HubName, error: Any) -> tuple[str, str]:
        status = error.response.status_code
        if status in UNAUTHORIZED:
            return (
                f"{self.host} refused the access token (status {status})",
                "Run `hf auth login`, or set HF_TOKEN to a valid token that may read this "
                f"{name.kind}; a public one needs none (unset HF_TOKEN).",
            )
        return (
            f"{self.host} answered with status {status}",
            "Try again later, or set hub.endpoint (HF_ENDPOINT) to a mirror.",
        )


def _root(error: Exception) -> BaseException:
    """Return the cause of an error by which ``huggingface_hub`` only says that the cache cannot help."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    wrapped = isinstance(error, LocalEntryNotFoundError)
    return error.__cause__ or error if wrapped else error
