"""SGLang's server as other processes know it, and weight updates in its protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anygauge.serving.sglang.client import EngineClient
from anygauge.weight_sync.buckets import dtype_of
from anygauge.weight_sync.control import EXCERPT, EngineControl, RefusedError
from anygauge.weight_sync.watchdog import describe
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.serving import ServerPeer
from anygauge_hooks.sglang import NO_KEYS, ServerKeys, WeightApi
from anygauge_hooks.weights import WeightTarget

if TYPE_CHECKING:
    from anygauge_hooks.serving import ClientLimits, ImageEncoder
    from anygauge_hooks.weights import BroadcastGroup, PauseMode, WeightBucket, WeightUpdate

__all__ = ["SGLangPeer", "SGLangTarget"]

FLATTENED = "flattened_bucket"
"""Format of a bucket that is sent as one tensor."""
NO_ADAPTER = "does not exist"
"""SGLang's words where there is no adapter to unload: before the first update, and after a restart."""


@dataclass(frozen=True, kw_only=True)
class SGLangPeer(ServerPeer):
    """An SGLang server, as processes know it that send weights or requests."""

    api: WeightApi = field(default_factory=WeightApi)
    keys: ServerKeys = NO_KEYS
    """Shown to the server."""
    bootstrap: str = ""
    """``host:port`` at which one that only reads prompts hands them over."""
    adapter: str = ""
    """Name of the adapter that it gets, and that its requests ask for; empty if it gets whole weights."""

    @property
    def keeps_requests(self) -> bool:
        """Whether its requests survive a pause in mode ``retract``."""
        # An adapter is unloaded once no request uses it, and a request keeps the one that it began with.
        return self.api.retracted_survive_flush and not self.adapter

    @property
    def has_checksums(self) -> bool:
        """Whether it tells checksums that can be compared."""
        return self.api.checksums != "none" and not self.adapter  # /weights_checker leaves out adapters

    @property
    def takes_whole_buckets(self) -> bool:
        """Whether a bucket can be broadcast to it as one tensor."""
        return self.api.has_flattened_broadcast

    def target(self, *, deadline_s: float) -> SGLangTarget:
        """Return how it takes an update."""
        return SGLangTarget(self, deadline_s=deadline_s)

    def client(self, limits: ClientLimits, *, name: str, images: ImageEncoder | None) -> EngineClient:
        """Return a client of the server."""
        return EngineClient(
            self.address,
            limits,
            name=name,
            image_encoder=images,
            keys=self.keys,
            bootstrap=self.bootstrap,
            adapter=self.adapter,
        )


class SGLangTarget(EngineControl, WeightTarget):
    """Takes an update in SGLang's protocol.

    :param deadline_s: Longest wait for one answer, in seconds.
    """

    def __init__(self, peer: SGLangPeer, *, deadline_s: float) -> None:
        super().__init__(peer.address, peer.keys.headers, deadline_s=deadline_s)
        self._peer = peer

    def pause(self, mode: PauseMode) -> None:
        """Let the server make no more tokens."""
        if mode == "retract" and not self._peer.keeps_requests:
            mode = "abort"
        self.post("/pause_generation", {"mode": mode}, what="a pause")

    def resume(self) -> None:
        """Let the server go on."""
        self.post("/continue_generation", {}, what="going on")

    def begin(self) -> None:
        """Open an update.

        One that was left open, by a sender that died, is closed first: what it has loaded is overwritten.

        :raises RefusedError: The server takes none; it has the weights that it had.
        """
        if not self._peer.api.has_session:
            return
        try:
            self.post("/begin_weight_update", {}, what="the begin of an update")
        except RefusedError:
            self._close_left_open()
            self.post("/begin_weight_update", {}, what="the begin of an update")

    def _close_left_open(self) -> None:
        try:
            self.end()
        except RefusedError:  # none is open
            return

    def end(self) -> None:
        """Close the update."""
        if self._peer.api.has_session:
            self.post("/end_weight_update", {}, what="the end of an update")

    def load_memory(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Load a bucket from memory that the server's processes map."""
        body = _memory_request(bucket, update, processes=self._peer.tensor_parallel)
        self.post("/update_weights_from_tensor", body, what=describe(bucket, update.version))

    def load_broadcast(self, bucket: WeightBucket, update: WeightUpdate, group: str, *, whole: bool) -> None:
        """Receive a bucket in a group."""
        body = {
            "names": [each.name for each in bucket.tensors],
            "dtypes": [each.dtype for each in bucket.tensors],
            "shapes": [list(each.shape) for each in bucket.tensors],
            "group_name": group,
            **({"load_format": FLATTENED} if whole else {}),
            **_completion(bucket, update),
        }
        self.post("/update_weights_from_distributed", body, what=describe(bucket, update.version))

    def load_directory(self, path: str, update: WeightUpdate) -> None:
        """Load a Hugging Face directory."""
        body = {
            "model_path": path,
            "weight_version": str(update.version),
            "flush_cache": update.flushes,
            "load_format": "safetensors",
        }
        self.post("/update_weights_from_disk", body, what=describe(None, update.version))

    def load_adapter(self, path: str, update: WeightUpdate) -> None:
        """Load an adapter under the name that requests ask for, in the place of the one before.

        The server gives it an id of its own, which is a part of the keys of the KV cache.
        """
        name, what = self._peer.adapter, f"the adapter of version {update.version}"
        try:
            self.post("/unload_lora_adapter", {"lora_name": name}, what="the end of an adapter")
        except RefusedError as error:
            if NO_ADAPTER not in str(error):
                raise
        self.post("/load_lora_adapter", {"lora_name": name, "lora_path": path}, what=what)
        version = {"new_version": str(update.version), "abort_all_requests": False}
        self.post("/update_weight_version", version, what=what)

    def join_group(self, group: BroadcastGroup) -> None:
        """Join a group."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": group.first_rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        self.post("/init_weights_update_group", body, what="the group for weights")

    def leave_group(self, name: str) -> None:
        """Leave a group."""
        self.post("/destroy_weights_update_group", {"group_name": name}, what="leaving a group")

    def version(self) -> str:
        """Return the weight version that the server reports."""
        return str(self.get(self._peer.api.info_path, what="its weight version").get("weight_version"))

    def checksums(self) -> list[dict[str, str]]:
        """Return, for each process of the server, the checksums of its parameters by name.

        :raises RolloutError: It tells none, so that nothing can be compared.
        """
        reply = self.post("/weights_checker", {"action": "checksum"}, what="checksums")
        try:
            checksums = [dict(rank["checksums"]) for rank in reply["ranks"]]
        except (LookupError, TypeError, ValueError):
            checksums = []
        if not checksums or not all(checksums):
            raise RolloutError(
                f"{self.address}/weights_checker told no checksums: {str(reply)[:EXCERPT]}.",
                hint='An engine that cannot tell them: weight_sync.verify = "none".',
            )
        return checksums


def _memory_request(bucket: WeightBucket, update: WeightUpdate, *, processes: int) -> dict[str, Any]:
    """Return the body of a request to load a bucket from memory.

    A process takes its own handle of an accelerator's memory, so each gets a payload of its own.
    """
    # The server reads attributes, and unpickles a class of its own or a namespace; only it has the class.
    places = [
        SimpleNamespace(
            name=tensor.name,
            shape=tensor.shape,
            dtype=dtype_of(tensor.dtype),
            start_idx=tensor.start,
            end_idx=tensor.end,
            numel=tensor.end - tensor.start,
        )
        for tensor in bucket.tensors
    ]
    from anygauge.weight_sync.sharing import serialized

    value = {"flattened_tensor": bucket.data, "metadata": places}
    return {
        "serialized_named_tensors": [serialized(value) for _ in range(processes)],
        "load_format": FLATTENED,
        **_completion(bucket, update),
    }


def _completion(bucket: WeightBucket, update: WeightUpdate) -> dict[str, Any]:
    """Return what the last bucket of an update tells beside its tensors."""
    if not bucket.last:
        return {"flush_cache": False}
    return {"flush_cache": update.flushes, "weight_version": str(update.version)}
