"""The Hugging Face hub and its mirrors, through ``huggingface_hub``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.hub.client import Client, Explanation
from anygauge.hub.files import NOT_WANTED, HubFiles
from anygauge.hub.names import HubName

if TYPE_CHECKING:
    from anygauge.config.schema import Hub

__all__ = ["HuggingFace"]

CONNECT_S = 15.0
"""Longest wait for the hub's first answer."""
UNAUTHORIZED = (401, 403)


class HuggingFace(Client):
    """Finds names in the cache of ``huggingface_hub`` and downloads into it.

    :param code: Whether Python files of a model are wanted.
    """

    mirror_setting = "hub.endpoint (or HF_ENDPOINT)"
    other_source = "modelscope"

    def __init__(self, hub: Hub, *, code: bool) -> None:
        from huggingface_hub import constants

        super().__init__(hub, host=constants.ENDPOINT, cache=constants.HF_HUB_CACHE, code=code)
        if self.offline is None and constants.is_offline_mode():
            self.offline = "HF_HUB_OFFLINE=1"

    def folder(self, name: HubName) -> Path:
        """Return where the cache keeps a repository."""
        return self.cache / f"{name.kind}s--{name.repository.replace('/', '--')}"

    def command(self, name: HubName) -> str:
        """Return the command that fills the cache of a connected host."""
        kind = " --repo-type dataset" if name.kind == "dataset" else ""
        revision = f" --revision {name.revision}" if name.revision else ""
        return f"hf download {name.repository}{f' {name.file}' if name.file else ''}{kind}{revision}"

    def cached(self, name: HubName) -> HubFiles | None:
        """Return the cached files of a name, which may be incomplete."""
        from huggingface_hub.errors import IncompleteSnapshotError, LocalEntryNotFoundError

        try:
            return self._get(name, local_files_only=True)
        except IncompleteSnapshotError as error:
            path = Path(error.snapshot_path)
            return HubFiles(path, path.name, complete=False)
        except LocalEntryNotFoundError:
            return None

    def download(self, name: HubName) -> HubFiles:
        """Download a name; cached files are kept.

        :raises HubError: Says what the hub answered and what to do.
        """
        from huggingface_hub import HfApi

        try:
            # Also what gives a hub that cannot be reached a deadline: a download waits for ever to connect.
            HfApi(endpoint=self._endpoint).repo_info(
                name.repository, repo_type=name.kind, revision=name.revision, timeout=CONNECT_S
            )
            return self._get(name, local_files_only=False)
        except Exception as error:  # foreign code: a hub's HTTP client and native downloader
            raise self._error(name, self._explanation(name, _root(error))) from error

    def _get(self, name: HubName, *, local_files_only: bool) -> HubFiles:
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
            return HubFiles(path, path.name)
        path = Path(hf_hub_download(name.repository, name.file, **options))
        return HubFiles(path, path.parts[-len(Path(name.file).parts) - 1])

    def _explanation(self, name: HubName, error: BaseException) -> Explanation:
        from huggingface_hub import errors

        page = f"{self.host}/{'datasets/' if name.kind == 'dataset' else ''}{name.repository}"
        if isinstance(error, errors.GatedRepoError):
            return (
                f"{self.host} gives this {name.kind} only to those who accepted its license",
                f"Accept the license on {page} and run `hf auth login`, or set HF_TOKEN to a token of yours.",
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
        if full := self._disk_is_full(error):
            return full
        if isinstance(error, errors.HTTPError | ConnectionError | TimeoutError):
            return self._unreachable(name, f"{type(error).__name__}: {error}")
        if isinstance(error, OSError):
            return (
                f"the cache {self.cache} cannot be written: {error}",
                "Set hub.cache to a directory that is writable.",
            )
        return self._failed(name, error)

    def _refusal(self, name: HubName, error: Any) -> Explanation:
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
