"""Advice on which config keys to change after an out-of-memory error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from anygauge.config import Config
from anygauge.runtime.rpc import Died
from anygauge_hooks.errors import OutOfMemoryError

__all__ = ["advise", "advise_death", "memory_advice"]

LESS = "lower"
MORE = "raise"
ADVICE: Mapping[str, Mapping[str, str]] = {
    "load": {"train.dtype": "bfloat16", "placement.train_workers": MORE},
    "generate": {
        "rollout.max_batch_tokens": LESS,
        "rollout.max_new_tokens": LESS,
        "rollout.dtype": "bfloat16",
    },
    "log_probs": {"train.micro_batch_tokens": LESS},
    "forward_backward": {"train.micro_batch_tokens": LESS, "train.recompute": "full"},
    "optimizer": {"placement.train_workers": MORE, "train.dtype": "bfloat16"},
    "values": {"train.micro_batch_tokens": LESS},
    "train_values": {
        "train.micro_batch_tokens": LESS,
        "train.recompute": "full",
        "placement.train_workers": MORE,
    },
    "weight_sync": {"rollout.max_batch_tokens": LESS, "rollout.dtype": "bfloat16"},
}
"""Advice by phase: keys, and the direction to move each in or the value to set. The optimizer's state is
divided among the workers, so more workers need less memory each."""
PHASES: Mapping[str, tuple[str, ...]] = {
    "connect": ("load",),
    "generate": ("generate",),
    "train": ("forward_backward", "optimizer"),
    "push_weights": ("weight_sync",),
    "take_weights": ("weight_sync",),
}
"""Phases that a worker may be in, by the call that it runs."""
KILLED = re.compile(r"SIGKILL|out of memory|low on memory|\bOOM\b|connection error code 2", re.IGNORECASE)
"""How a death reads that the kernel, or Ray before it, may have brought."""


def memory_advice(config: Config, phases: Iterable[str]) -> str:
    """Return keys to change so that some phases need less memory, with their current values."""
    steps = {key: action for phase in phases for key, action in ADVICE.get(phase, {}).items()}
    texts = [_text(key, action, attrgetter(key)(config)) for key, action in steps.items()]
    return f"To need less: {', or '.join(filter(None, texts))}." if any(texts) else ""


def _text(key: str, action: str, value: Any) -> str:
    if action in (LESS, MORE):
        return f"{action} {key} (now {json.dumps(value)})"
    return "" if value == action else f"set {key} = {json.dumps(action)} (now {json.dumps(value or 'none')})"


def advise(error: BaseException, config: Config) -> None:
    """Set the keys to change as the hint of an out-of-memory error."""
    if isinstance(error, OutOfMemoryError) and error.hint is None:
        error.hint = memory_advice(config, [error.phase]) or None


def advise_death(death: Died, method: str, config: Config, oom_kills: int) -> str | None:
    """Return a hint for a death that lack of memory may have caused, or ``None``.

    :param method: Method that the worker was running.
    :param oom_kills: Processes that the kernel has ended for lack of memory since the workers started.
    """
    if not KILLED.search(death.how):
        return None
    why = (
        f"The kernel's out-of-memory killer has ended {oom_kills} process(es) here since the workers started."
        if oom_kills > 0
        else "Unless it was killed on purpose, its host probably ran out of memory."
    )
    return f"{why} {memory_advice(config, PHASES.get(method, ()))}".rstrip()
