"""Saving of training state: copied to the host at once, written in the background."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anygauge.engines.checkpoint_files import RankFile, check_dtype, write_rank
from anygauge.failures import in_background
from anygauge_hooks.errors import CheckpointError
from anygauge_hooks.types import Device

__all__ = [
    "CHANGING",
    "BackgroundSave",
    "ToHost",
    "group_settings",
    "hex_state",
    "restore_rng",
    "rng_state",
    "unhex_state",
]

STUCK_S = 60.0
"""Longest wait for an earlier write, which should have ended long ago."""
SEE_LOG = "The log of the rank says more."
CHANGING = ("lr", "weight_decay", "step")
"""Settings of a parameter group that change while it trains."""

ToHost = Callable[[str, Tensor], Tensor]


class BackgroundSave(ABC):
    """Writes the state of one rank. Host buffers of a save are kept for the next one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host: dict[str, Tensor] = {}
        self._write: Future[None] | None = None
        self._refused: CheckpointError | None = None
        """Why the last save did not begin."""

    @abstractmethod
    def _copy(self, to_host: ToHost) -> tuple[RankFile, Mapping[str, Tensor]]:
        """Return what is written.

        :param to_host: Called to copy each tensor to the host.
        """

    def save(self, directory: Path) -> None:
        """Copy the state to the host, and start to write it; an earlier write is waited for.

        What goes wrong is for :meth:`written` to say.
        """
        if self._write is not None and wait([self._write], STUCK_S).not_done:
            reason = f"the write before has not ended after {STUCK_S} s more"
            self._refused = _unwritten(reason, "Give the run a faster disk, or save less often.")
            return
        self._refused = None
        try:
            description, tensors = self._copy(self._to_host)
        except CheckpointError as error:
            self._refused = error
            return
        except (MemoryError, RuntimeError) as error:
            self._refused = _no_copy(error)
            return
        self._device.synchronize()
        # No write of a run that has failed may keep its process alive.
        self._write = in_background(lambda: write_rank(directory, description, tensors), "checkpoint")

    def written(self) -> bool:
        """Return whether the last save is on disk.

        :raises CheckpointError: It could not be written, for whatever reason: a run goes on without the save.
        """
        if self._refused is not None:
            raise self._refused
        if self._write is None or not self._write.done():
            return self._write is None
        error = self._write.exception()
        if isinstance(error, OSError):
            hint = "Free space on the disk, or give the run a directory that every worker may write to."
            raise _unwritten(str(error), hint) from error
        if error is not None:
            raise _unwritten(repr(error), SEE_LOG) from error
        return True

    def _to_host(self, name: str, tensor: Tensor) -> Tensor:
        check_dtype(name, tensor)
        held = self._host.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            pinned = self._device.type != "cpu"
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            self._host[name] = held
        return held.copy_(tensor, non_blocking=True)


def _no_copy(error: Exception) -> CheckpointError:
    """Return why the state cannot be copied to the host; torch says by its words alone that memory is out."""
    text = str(error)
    if isinstance(error, MemoryError) or any(words in text for words in ("allocate memory", "out of memory")):
        return _unwritten(
            f"there is no room on the host for a copy: {text}", "Give workers more host memory."
        )
    return _unwritten(f"it cannot be copied to the host: {error!r}", SEE_LOG)


def _unwritten(reason: str, hint: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint cannot be written: {reason}.", hint=hint)


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that a checkpoint keeps."""
    return {name: group[name] for name in CHANGING if name in group}


def rng_state(device: Device) -> dict[str, Any]:
    """Return the state of every random generator, as JSON can write it."""
    version, internal, gauss = random.getstate()
    legacy = np.random.get_state(legacy=False)
    assert isinstance(legacy, dict)
    words = legacy["state"]
    return {
        "python": [version, list(internal), gauss],
        "numpy": {**legacy, "state": {**words, "key": words["key"].tolist()}},
        "torch": hex_state(torch.get_rng_state()),
        "device": hex_state(device.get_rng_state()),
    }


def restore_rng(device: Device, state: Mapping[str, Any]) -> None:
    """Restore the result of :func:`rng_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    words = state["numpy"]["state"]
    key_words = np.array(words["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**words, "key": key_words}})
    torch.set_rng_state(unhex_state(state["torch"]))
    device.set_rng_state(unhex_state(state["device"]))


def hex_state(state: Tensor) -> str:
    """Return the bytes of a generator's state as text."""
    return state.cpu().numpy().tobytes().hex()


def unhex_state(text: str) -> Tensor:
    """Return the state that :func:`hex_state` wrote."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
