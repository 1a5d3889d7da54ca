"""Adapter transport: writes each version as a peft adapter, which servers compute beside their weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, PEFT_PREFIX
from anygauge.weight_sync.buckets import unpack
from anygauge.weight_sync.transports.disk import DiskTransport

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.weights import WeightBucket, WeightTarget, WeightUpdate

__all__ = ["AdapterTransport"]


class AdapterTransport(DiskTransport):
    """Writes ``version-N`` as an adapter, lets the servers load it, and removes the previous version.

    :param directory: Directory that the servers see under the same path.
    :param model: Directory of the weights that the adapter belongs to.
    :param describe: From the ends of the names of the layers to ``adapter_config.json``.
    """

    def __init__(
        self, directory: Path, model: Path, describe: Callable[[Collection[str]], Mapping[str, Any]]
    ) -> None:
        super().__init__(directory, model)
        self._describe = describe
        self._tensors: dict[str, Tensor] = {}

    def send(self, bucket: WeightBucket, update: WeightUpdate) -> None:
        """Keep a bucket; with the last one write them all, because an adapter is one file."""
        from safetensors.torch import save_file

        # the memory of a bucket is used again
        self._tensors |= {name: tensor.clone() for name, tensor in unpack(bucket.tensors, bucket.data)}
        if not bucket.last:
            return
        layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in self._tensors}
        with self._appearing(update) as partial:
            held = {PEFT_PREFIX + name: tensor for name, tensor in self._tensors.items()}
            save_file(held, partial / ADAPTER_WEIGHTS, {"format": "pt"})
            (partial / ADAPTER_CONFIG).write_text(json.dumps(self._describe(sorted(layers)), indent=2) + "\n")
        self._tensors.clear()

    def _load(self, target: WeightTarget, path: str, update: WeightUpdate) -> None:
        target.load_adapter(path, update)

    def abandon(self) -> None:
        """Forget the tensors of a failed update."""
        self._tensors.clear()
