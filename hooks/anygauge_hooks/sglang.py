"""SGLang's annex of the contract: facts about a version of its servers, and their keys.

Nothing neutral imports this module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["NO_KEYS", "ServerKeys", "WeightApi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightApi:
    """Endpoints and formats of weight updates of one version of SGLang."""

    has_session: bool = True
    """An update from memory is opened and closed: ``/begin_weight_update`` and ``/end_weight_update``."""
    has_flattened_broadcast: bool = True
    """A bucket can be broadcast as one tensor; otherwise its tensors are, one by one."""
    retracted_survive_flush: bool = True
    """Whether requests that a pause has sent back to the queue survive that the cache is dropped; where not,
    a pause ends them with what they have."""
    checksums: Literal["sha256", "none"] = "none"
    """Checksums that ``/weights_checker`` returns for each parameter: ``sha256`` is the first 64 bits of
    SHA-256 where parameters are in host memory; ``none`` is for values that cannot be compared with anything
    else."""
    info_path: str = "/model_info"
    """Answers with the ``weight_version``."""


_GENERATES = (
    *("/generate", "/v1/", "/model_info", "/server_info"),
    *("/get_model_info", "/get_server_info"),  # their older names
)
"""Paths, or their beginnings, that SGLang has for whoever generates; the others manage the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerKeys:
    """API key and admin key of a server; errors and logs show neither."""

    api: str = field(default="", repr=False)
    """For generation and what describes the model; empty if the server asks for none."""
    admin: str = field(default="", repr=False)
    """For what changes the server: weights, cache, memory, pauses; empty if it asks for ``api`` there too."""

    def headers(self, path: str) -> dict[str, str]:
        """Return the headers that a request for a path of the server needs."""
        key = self.api if path.startswith(_GENERATES) else self.admin or self.api
        return {"authorization": f"Bearer {key}"} if key else {}


NO_KEYS = ServerKeys()
"""Keys for a server that requires none."""
