"""A check of one model: its rows, its config, and this process as its only worker.

Imports neither torch nor transformers, for which a backend prepares the process first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from anygauge.config.load import LoadedConfig
    from anygauge.plugins import Plugins
    from anygauge_hooks.types import BackendSpec, WorkerContext

__all__ = ["CHECKS", "PROMPT", "SERVED", "CheckRow", "checks", "load_model_config", "one_worker"]

CHECKS = (
    *("configuration", "tokenizer", "chat template", "memory", "weights", "transformers", "round trip"),
    *("layers", "log-probs", "packed", "gradients"),
)
"""Names of the rows, in order."""
SERVED = "served"
"""Name of the row of a rollout engine; before the gradients, which take the place of the weights."""
PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps for 12 hours."
ROLE = "train"
"""Role of this process, for the plugins that prepare it."""
_SETTINGS: tuple[tuple[str, Any], ...] = (
    *(("run.name", "check-model"), ("run.task", "sft"), ("run.steps", 1), ("data.train", [])),
    ("rollout.max_new_tokens", 1),  # the default is too many for a tiny model
    # One micro-batch holds all, in the numbers that transformers computes with, and gradients as they are.
    *(("train.dtype", "float32"), ("train.clip_grad", 0.0), ("train.micro_batch_tokens", 1_000_000)),
)


Status = Literal["PASS", "FAIL", "NOT RUN"]


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check."""

    name: str
    status: Status
    found: str


def checks(against: str | None = None) -> tuple[str, ...]:
    """Return the names of the rows, in order.

    :param against: Name of a rollout engine that is a server; ``None`` for none.
    """
    return CHECKS if against is None else (*CHECKS[:-1], SERVED, CHECKS[-1])


def load_model_config(
    directory: Path,
    engine: str,
    plugins: Plugins,
    backend: BackendSpec,
    *,
    trust_remote_code: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Return the config of a run of a model, checked as ``anygauge train`` checks it.

    :param directory: A Hugging Face directory.
    :param engine: Name of a train engine.
    :param settings: Further values by config key.

    :raises ConfigError: The engine does not train the model, or the directory is incomplete.
    """
    from anygauge.config import load_config
    from anygauge.config.tree import Tree, put

    values = {
        **dict(_SETTINGS),
        "model.path": str(directory),
        "model.trust_remote_code": trust_remote_code,
        "train.engine": engine,
        **(settings or {}),
    }
    tree: Tree = {}
    for path, value in values.items():
        put(tree, path, value)
    return load_config(tree, (), backend=backend, plugins=plugins, trains=False)


@contextmanager
def one_worker(loaded: LoadedConfig, plugins: Plugins) -> Iterator[WorkerContext]:
    """Make this process the only worker of a run, on the first device of the backend."""
    config, backend = loaded.config, loaded.backend
    plugins.prepare_worker(backend, ROLE, "before_vendor_import", config=config)
    device = plugins.make_device(backend, backend.local_device((), os.environ))
    plugins.prepare_worker(backend, ROLE, "after_config", config=config)
    from torch.distributed import HashStore  # type: ignore[attr-defined]  # not listed

    from anygauge.distributed.process_groups import destroy_process_group, init_process_group
    from anygauge_hooks.types import WorkerContext

    timeout_s = config.run.timeout_s
    init_process_group(
        plugins, backend, HashStore(), rank=0, world_size=1, timeout_s=timeout_s, single_host=True
    )
    try:
        yield WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
    finally:
        destroy_process_group()
