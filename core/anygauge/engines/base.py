"""Parts of a train engine that do not depend on how the model is divided."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anygauge.config import Config
from anygauge.config.families import family
from anygauge.device import memory_phase
from anygauge.engines.background_save import BackgroundSave
from anygauge.engines.carried_weights import carried_weights
from anygauge.engines.hf_directory import read_config, write_directory
from anygauge.engines.memory_offload import DeviceMemory
from anygauge.observability.phases import record_phase
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import NonFiniteError

__all__ = ["BaseEngine", "check_finite", "torch_dtype"]


class BaseEngine(ABC):
    """Exports, checkpoints and timings of a train engine."""

    _memory: DeviceMemory
    _checkpoint: BackgroundSave

    def __init__(self, config: Config, context: WorkerContext) -> None:
        self.config = config
        self.context = context
        self.device = context.device.torch_device
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @abstractmethod
    def _exported(self) -> tuple[Iterator[tuple[str, Tensor]], torch.dtype]:
        """Return full tensors under Hugging Face names, and their dtype; only rank 0 writes them."""

    def _config_changes(self) -> Mapping[str, Any]:
        """Return the keys in which the ``config.json`` of an export differs from the model's."""
        return {}

    def _write_adapter(self, target: Path) -> None:
        """Write a peft adapter; a collective, which an engine with LoRA has."""
        raise NotImplementedError

    def save_hf(self, path: str) -> None:
        """Write a complete Hugging Face directory, a peft adapter in ``adapter/``, or both; rank 0 writes."""
        self._memory.need("weights", "a Hugging Face directory")
        lora = self.config.train.lora
        if not lora.is_on or lora.export != "adapter":
            self._write_weights(Path(path))
        if lora.is_on and lora.export != "merged":
            self._write_adapter(Path(path) / "adapter")

    def _write_weights(self, path: Path) -> None:
        weights, dtype = self._exported()
        if self.context.rank == 0:
            changes = self._config_changes()
            everything = chain(weights, self._carried(dtype))
            write_directory(path, self.config.model.path, everything, dtype, changes=changes)
        else:
            for _ in weights:
                pass
        dist.barrier()

    def _carried(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the model's directory that an export has and the engine does not."""
        hf = read_config(self.config.model.path)
        spec = family(self.context.plugins, hf, self.config.train.engine)
        for name, tensor in carried_weights(self.config.model.path, spec.carried_weights(hf)):
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

    def save_checkpoint(self, path: str) -> None:
        """Copy the training state to the host, and start to write it into a directory."""
        self._memory.need("everything", "a checkpoint")
        self._checkpoint.save(Path(path))

    def checkpoint_written(self) -> bool:
        """Return whether the checkpoint of :meth:`save_checkpoint` is on disk."""
        return self._checkpoint.written()

    def timings(self) -> Mapping[str, float]:
        """Return and reset the seconds spent since the last call, by phase."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with record_phase(phase):
            try:
                with memory_phase(self.context.device, phase):
                    yield
            finally:
                self.context.device.synchronize()
                self._seconds[phase] += time.perf_counter() - start


def check_finite(step: int, loss: float, norm: float) -> None:
    """Check the loss and the gradient norm of a step, before a weight is changed.

    :raises NonFiniteError: One of them is infinite or not a number.
    """
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFiniteError(
            f"Optimizer step {step}: loss {loss}, gradient norm {norm}; no weight was changed.",
            hint="Lower train.lr, check the rewards, or use train.dtype = 'float32'.",
        )


def torch_dtype(config: Config) -> torch.dtype:
    """Return the dtype that the model computes in."""
    dtype: torch.dtype = getattr(torch, config.train.dtype or "float32")
    return dtype
