"""Device of a fake engine's weights, and its process groups."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from anygauge.plugins import load_plugins

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from anygauge.weight_sync.broadcast import Membership

__all__ = ["WeightDevice", "weight_device"]

_ROLE = "sglang"
_GROUP_S = 30.0
"""Longest time for a group to form, and for one broadcast."""


class WeightDevice:
    """The first visible device of a type, prepared by the backend that has it.

    :param device_type: Of torch, such as ``"cpu"``.
    """

    def __init__(self, device_type: str) -> None:
        self._plugins = plugins = load_plugins()
        backends = plugins.named("register_backends").values()
        self._backend = next(each for each in backends if each.device_type == device_type)
        plugins.prepare_worker(self._backend, _ROLE, "before_vendor_import")
        device = plugins.make_device(self._backend, 0)
        plugins.prepare_worker(self._backend, _ROLE, "after_config")
        self.torch_device: torch.device = device.torch_device

    def join(self, body: Mapping[str, Any], rank: int) -> Membership:
        """Join the group that a trainer asks for, as ``/init_weights_update_group`` has it.

        Torch registers a group once per process, and here all ranks of an engine are threads of one; so the
        communicator is made by itself, with the store that torch would give it.

        :raises ValueError: The group is to be over another library than this device's.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # not listed

        from anygauge.weight_sync.broadcast import Membership

        asked, own = body["backend"], self._backend.dist_backend
        if asked != own:
            raise ValueError(
                f"asked for a group over {asked}; on {self._backend.device_type} it is over {own}"
            )
        name, world, timeout = body["group_name"], int(body["world_size"]), timedelta(seconds=_GROUP_S)
        address = urlsplit(f"tcp://{body['master_address']}:{body['master_port']}")
        assert address.hostname is not None
        assert address.port is not None
        store: Any = TCPStore(address.hostname, address.port, world, timeout=timeout)
        for prefix in (name, f"{name}/", f"{self._backend.device_type}/"):
            store = PrefixStore(prefix, store)
        options = SimpleNamespace(
            store=store,
            group_rank=int(body["rank_offset"]) + rank,
            group_size=world,
            timeout=timeout,
            group_id=name,
            global_ranks_in_group=[],
        )
        made = self._plugins.first(
            "make_communicator", backend=self._backend, options=options, group_options=None
        )
        return Membership(made, _GROUP_S)


weight_device = cache(WeightDevice)
"""One for each type of device that this process uses."""
