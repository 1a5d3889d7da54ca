"""Differences between the tested versions of SGLang: the only place that knows them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from anygauge_hooks.errors import RolloutError
from anygauge_hooks.sglang import WeightApi

__all__ = ["LISTED", "ServerApi", "find_api"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerApi:
    """How a server of one version is spoken to.

    Alike in every version listed: ``/generate``, ``/health``, ``/model_info``, ``/server_info``,
    ``/flush_cache``, ``/abort_request``, ``/pause_generation``, ``/continue_generation``,
    ``/weights_checker``, ``/v1/loads``, ``/update_weights_from_*`` and the ``routed_dp_rank`` of a request.
    """

    version: str
    begin_end: bool
    """Whether ``/begin_weight_update`` and ``/end_weight_update`` must enclose updates from tensors and from
    a process group; where not, there are no such endpoints. An update from disk never needs them."""
    version_spans: bool
    """Whether ``meta_info`` of a generation has ``weight_versions``, a list of ``{version, start, end}`` over
    its tokens; where not, there is ``weight_version`` alone, that of its end."""
    flush_kills_waiting: bool
    """Whether an update with ``flush_cache`` ends the server while requests wait that a pause retracted."""
    loads_adapters: bool
    """Whether adapters can be replaced. Where not, a request that is aborted in the waiting queue keeps its
    reference to its adapter (``lora_registry`` of the tokenizer manager), and ``/unload_lora_adapter`` waits
    for it without end."""

    def weights(self, device_type: str) -> WeightApi:
        """Return how a server on a device takes weights."""
        return WeightApi(
            has_session=self.begin_end,
            retracted_survive_flush=not self.flush_kills_waiting,
            checksums="sha256" if device_type == "cpu" else "none",
        )


LISTED: dict[str, ServerApi] = {
    api.version: api
    for api in (
        ServerApi(
            version="0.5.17",
            begin_end=False,
            version_spans=False,
            flush_kills_waiting=True,
            loads_adapters=False,
        ),
        ServerApi(
            version="0.5.23",
            begin_end=True,
            version_spans=True,
            flush_kills_waiting=False,
            loads_adapters=True,
        ),
    )
}
"""The versions that were tested, by name."""


def find_api(version: str, *, treat_as: str | None = None) -> ServerApi:
    """Return how to speak to a server.

    :param version: Its own, as its ``/server_info`` or the installed package says.
    :param treat_as: A listed version (``rollout.sglang_version``) that an unlisted one is taken for; it has
        no effect on a listed one.
    :raises RolloutError: The version is not listed and no listed one stands for it.
    """
    if (api := LISTED.get(_release(version))) is not None:
        return api
    if treat_as in LISTED:
        return LISTED[treat_as]
    raise RolloutError(
        f"SGLang {version} was not tested with this version of anygauge; listed: {_names(LISTED)}.",
        hint=f'To take it for one of them: rollout.sglang_version = "{_nearest(version)}".',
    )


def _release(version: str) -> str:
    """Return a version without what its maker or a builder appended."""
    return re.split(r"[+]|\.?post", version)[0]


def _names(versions: Iterable[str]) -> str:
    return ", ".join(sorted(versions, key=_numbers))


def _nearest(version: str) -> str:
    """Return the newest listed version that is no newer, else the oldest."""
    older = [name for name in LISTED if _numbers(name) <= _numbers(version)]
    return max(older, key=_numbers) if older else min(LISTED, key=_numbers)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))
