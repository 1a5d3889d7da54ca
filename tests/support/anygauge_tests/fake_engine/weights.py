"""The weights of a fake engine: named tensors with a version, changed as SGLang's are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from anygauge.weight_sync.checksum import checksum
from anygauge_tests.fake_engine.options import Options
from anygauge_tests.fake_engine.weight_store import WeightStore

__all__ = ["Answer", "Weights"]

_SLOTS = (".qkv_proj", ".o_proj", ".gate_up_proj", ".down_proj")
"""Ends of the layers that an adapter may have beside those that are fused."""


class Answer(NamedTuple):
    """Answer of a weight endpoint."""

    success: bool
    message: str
    more: Mapping[str, Any] = {}
    """Further fields of the answer."""


class Weights:
    """Weights in which only names, bytes and the version count.

    Every method gets the body of its endpoint, and is called while no request generates or all are paused.

    :param changed: Called with the new version once an update has set it.
    """

    def __init__(self, options: Options, changed: Callable[[str], None]) -> None:
        self.version = options.weight_version
        self._needs_session = options.sglang != "0.5.17"
        self._session = False
        self._changed = changed
        self._adapter_name = options.adapter
        self.adapters: dict[str, dict[str, Any]] = {}
        """Path, rank, targets and checksums of each adapter, by name."""
        self._stores = [WeightStore(options.device, rank=rank) for rank in range(options.tp_size)]

    def begin(self, body: Mapping[str, Any]) -> Answer:
        """Open an update."""
        if self._session:
            return Answer(False, "a weight-update session is already open; call end_weight_update() first")
        self._session = True
        return Answer(True, "Success")

    def end(self, body: Mapping[str, Any]) -> Answer:
        """Close an update."""
        if not self._session:
            return Answer(False, "no weight-update session is open; call begin_weight_update() first")
        self._session = False
        return Answer(True, "Success")

    def set_version(self, version: str | None) -> None:
        """Label what is served; without a label the old one stays, as with the real engine."""
        if version is not None and version != self.version:
            self.version = version
            self._changed(version)

    def update_from_tensor(self, body: Mapping[str, Any]) -> Answer:
        """Take a bucket from memory that the sender shares."""
        return self._update("update_weights_from_tensor", body)

    def update_from_distributed(self, body: Mapping[str, Any]) -> Answer:
        """Take a broadcast."""
        return self._update("update_weights_from_distributed", body)

    def update_from_disk(self, body: Mapping[str, Any]) -> Answer:
        """Read a directory; no update needs to be open."""
        return self._apply("update_weights_from_disk", body)

    def init_group(self, body: Mapping[str, Any]) -> Answer:
        """Join a group that weights are broadcast in."""
        return self._apply("init_weights_update_group", body)

    def destroy_group(self, body: Mapping[str, Any]) -> Answer:
        """Leave a group."""
        return self._apply("destroy_weights_update_group", body)

    def load_adapter(self, body: Mapping[str, Any]) -> Answer:
        """Read an adapter of peft under a new name."""
        name, path = str(body["lora_name"]), Path(body["lora_path"])
        if not self._adapter_name:
            return Answer(False, "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name in self.adapters:
            return Answer(False, f"LoRA with name {name} already exists.")
        try:
            config = json.loads((path / "adapter_config.json").read_text())
            with safe_open(path / "adapter_model.safetensors", "pt") as file:
                sums = {tensor: checksum(file.get_tensor(tensor)) for tensor in file.keys()}  # noqa: SIM118
            _check_slots(sums)
        except (OSError, ValueError, KeyError) as error:
            return Answer(False, f"Failed: {error!r}")
        targets = config["target_modules"]
        self.adapters[name] = {"path": str(path), "rank": config["r"], "targets": targets, "checksums": sums}
        return Answer(True, "", {"loaded_adapters": {name: str(path)}})

    def unload_adapter(self, body: Mapping[str, Any]) -> Answer:
        """Forget an adapter."""
        if self.adapters.pop(body["lora_name"], None) is None:
            return Answer(False, f"LoRA with name {body['lora_name']} does not exist.")
        return Answer(True, "")

    def check(self, body: Mapping[str, Any]) -> Answer:
        """Tell the checksums of what each process holds, by the names that they were sent under."""
        action = body.get("action", "checksum")
        if action != "checksum":
            return Answer(False, f"Unsupported action={action!r}")
        ranks = [{"checksums": store.checksums()} for store in self._stores]
        return Answer(True, "Success.", {"ranks": ranks})

    def corrupt(self) -> None:
        """Turn a bit of the tensor that was changed first of those changed last."""
        self._stores[0].corrupt()

    def _update(self, name: str, body: Mapping[str, Any]) -> Answer:
        return self.needs_session(name) or self._apply(name, body)

    def _apply(self, name: str, body: Mapping[str, Any]) -> Answer:
        """Let every process do what an endpoint of SGLang says, at once: a collective needs them all."""
        with ThreadPoolExecutor(len(self._stores)) as processes:
            calls = [processes.submit(getattr(store, name), body) for store in self._stores]
        problems = [error for call in calls if (error := call.exception()) is not None]
        if problems:
            return Answer(False, f"Failed: {problems[0]!r}"[:300])
        self.set_version(body.get("weight_version"))
        return Answer(True, "Success")

    def needs_session(self, name: str) -> Answer | None:
        """Return the refusal of an endpoint that is called outside an update."""
        if self._needs_session and not self._session:
            return Answer(False, f"{name} must run between begin_weight_update() and end_weight_update()")
        return None


def _check_slots(tensors: Iterable[str]) -> None:
    """Fuse the layers of an adapter, by their names, as SGLang's ``LoRAAdapter`` does.

    :raises KeyError: A layer lacks the one that it is fused with.
    :raises ValueError: There is no slot for one.
    """
    layers = {name.rpartition(".lora_")[0] for name in tensors}
    for query in [layer for layer in layers if layer.endswith(".q_proj")]:
        block = query.removesuffix("q_proj")
        layers.discard(block + "k_proj")
        layers -= {query}
        layers.remove(block + "v_proj")
    for gate in [layer for layer in layers if layer.endswith(".gate_proj")]:
        layers -= {gate, gate.removesuffix("gate_proj") + "up_proj"}
    if homeless := [layer for layer in layers if not layer.endswith(_SLOTS)]:
        raise ValueError(f"LoRA weights of {homeless} are not supported")
