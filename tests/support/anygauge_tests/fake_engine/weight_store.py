"""Weight updates of a fake server, on named tensors without a model.

It reads what SGLang 0.5.17 and 0.5.23 read: flattened buckets whose memory it maps, broadcasts, directories.
"""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.weight_sync.buckets import dtype_of
from anygauge.weight_sync.checksum import checksum

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from anygauge.weight_sync.broadcast import Membership
    from anygauge_tests.fake_engine.weight_device import WeightDevice

__all__ = ["WeightStore"]


class WeightStore:
    """Named tensors, replaced one by one. Each method takes the body of SGLang's endpoint of that name.

    :param device: Type of the device that broadcasts arrive on.
    :param rank: Of the process among those that split the model.
    """

    def __init__(self, device: str = "cpu", *, rank: int = 0) -> None:
        self._device = device
        self.tensors: dict[str, Tensor] = {}
        self._rank = rank
        self._groups: dict[str, Membership] = {}
        self._received: dict[tuple[str, ...], Tensor] = {}
        """Memory of broadcast buckets, by the names of their tensors."""
        self._changed = ""
        """The tensor that the last update changed first."""

    @property
    def _on(self) -> WeightDevice:
        from anygauge_tests.fake_engine.weight_device import weight_device

        return weight_device(self._device)

    def update_weights_from_tensor(self, body: Mapping[str, Any]) -> None:
        """Copy the tensors of a bucket out of the sender's memory."""
        payload = base64.b64decode(body["serialized_named_tensors"][self._rank])
        value = pickle.loads(payload)
        data = value["flattened_tensor"]
        self._changed = value["metadata"][0].name
        for place in value["metadata"]:
            view = data[place.start_idx : place.end_idx].view(place.dtype).reshape(place.shape)
            self.tensors[place.name] = view.clone()

    def update_weights_from_disk(self, body: Mapping[str, Any]) -> None:
        """Read the tensors of a directory."""
        from safetensors.torch import load_file

        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no weights in {body['model_path']}")
        self.tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self._changed = next(iter(self.tensors))

    def init_weights_update_group(self, body: Mapping[str, Any]) -> None:
        """Join the group that weights are broadcast in."""
        self._groups[body["group_name"]] = self._on.join(body, self._rank)

    def destroy_weights_update_group(self, body: Mapping[str, Any]) -> None:
        """Leave a group."""
        self._groups.pop(body["group_name"]).close()

    def update_weights_from_distributed(self, body: Mapping[str, Any]) -> None:
        """Take a broadcast: a bucket as one tensor, or tensor by tensor."""
        group = self._groups[body["group_name"]]
        places = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
        self._changed = body["names"][0]
        if body.get("load_format") == "flattened_bucket":
            self._receive_bucket(group, places)
            return
        for name, dtype, shape in places:
            self.tensors[name] = _received(group, self._empty(shape, dtype_of(dtype)))

    def _receive_bucket(self, group: Membership, places: Sequence[tuple[str, str, Sequence[int]]]) -> None:
        """Take a bucket into the memory of the last one of these tensors: parameters stay where they are."""
        import torch

        names = tuple(name for name, _, _ in places)
        sizes = [math.prod(shape) * dtype_of(dtype).itemsize for _, dtype, shape in places]
        data = self._received.get(names)
        if data is None or data.numel() != sum(sizes):
            data = self._received[names] = self._empty([sum(sizes)], torch.uint8)
        _received(group, data)
        parts = torch.split(data, sizes)
        for (name, dtype, shape), part in zip(places, parts, strict=True):
            self.tensors[name] = part.view(dtype_of(dtype)).reshape(tuple(shape))

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        import torch

        return torch.empty(tuple(shape), dtype=dtype, device=self._on.torch_device)

    def checksums(self) -> dict[str, str]:
        """Return the checksum of each tensor."""
        return {name: checksum(tensor) for name, tensor in self.tensors.items()}

    def corrupt(self) -> None:
        """Turn a bit."""
        import torch

        damaged = self.tensors[self._changed].clone()
        damaged.reshape(-1).view(torch.uint8)[0] ^= 1
        self.tensors[self._changed] = damaged


def _received(group: Membership, tensor: Tensor) -> Tensor:
    """Fill a tensor with what the trainer broadcasts, and return it."""
    from anygauge.weight_sync.broadcast import finish

    group.start(tensor)
    finish(tensor.device)
    return tensor
