"""Layouts, tasks and sizes of ``bench/end_to_end.py``, as keys of a run's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = [
    "COMMON",
    "GPU_SERVER",
    "OF_SERVERS",
    "RANDOM",
    "ROWS",
    "TASKS",
    "Row",
]

Keys = Mapping[str, Any]


class Row(NamedTuple):
    """A layout."""

    devices: int
    keys: Keys
    """Config keys beyond those of all rows and of the task."""
    model: str = "given"
    """``experts`` trains a small random mixture of experts instead of the model that was given."""


SERVED = {"rollout.engine": "sglang", "placement.rollout_workers": 1}
APART = {**SERVED, "placement.colocated": False}
STAGES = {"weight_sync.senders": "stages"}
ASYNC = {"rollout.schedule": "async", "rollout.max_staleness": 1}
CRITIC = {
    "algorithm.advantage": "gae",
    "algorithm.advantage_options": {"gamma": 1.0, "lambd": 1.0},
    "algorithm.normalize_advantages": True,
    "critic.lr": 1e-5,
}


def colocated(trainers: int, server_tp: int = 1, **parallel: int) -> dict[str, Any]:
    """Return the keys of a layout whose servers are on the devices of its trainers.

    :param server_tp: Devices of one server; there are as many servers as that leaves room for.
    :param parallel: Keys of ``train.parallel``.
    """
    keys = {f"train.parallel.{name}": size for name, size in parallel.items()}
    servers = {"placement.rollout_workers": trainers // server_tp}
    if server_tp > 1:
        servers["rollout.sglang.tp_size"] = server_tp
    return {**SERVED, "placement.colocated": True, "placement.train_workers": trainers, **servers, **keys}


def apart(trainers: int, servers: int, **keys: Any) -> dict[str, Any]:
    """Return the keys of a layout whose servers have devices of their own."""
    return {**APART, "placement.train_workers": trainers, "placement.rollout_workers": servers, **keys}


BESIDE = {**colocated(1), "placement.offload": "never"}
"""Trainer and server both awake on one device from the start."""
ROWS: Mapping[str, Row] = {
    "embedded": Row(1, {"rollout.engine": "transformers"}),
    "colocated": Row(1, colocated(1)),
    "colocated-one-step-off": Row(1, {**BESIDE, "rollout.schedule": "one_step_off"}),
    "colocated-async": Row(1, {**BESIDE, **ASYNC}),
    "apart-sync": Row(2, APART),
    "apart-one-step-off": Row(2, {**APART, "rollout.schedule": "one_step_off"}),
    "apart-async": Row(2, {**APART, **ASYNC}),
    "apart-ray": Row(2, {**APART, "placement.launcher": "ray"}),
    "colocated-dp2": Row(2, colocated(2)),
    "colocated-tp2": Row(2, colocated(2, server_tp=2, tensor=2)),
    "colocated-pp2": Row(2, colocated(2, pipeline=2)),
    "colocated-cp2": Row(2, colocated(2, context=2)),
    "experts-ep2": Row(2, colocated(2, expert=2), model="experts"),
    "critic": Row(2, {**colocated(2), **CRITIC}),
    "apart-pp2": Row(3, apart(2, 1, **{"train.parallel.pipeline": 2}, **STAGES)),
    "experts-apart-ep2": Row(3, apart(2, 1, **{"train.parallel.expert": 2}, **STAGES), model="experts"),
    "colocated-tp2-dp2": Row(4, colocated(4, server_tp=2, tensor=2)),
    "colocated-tp2-pp2": Row(4, colocated(4, server_tp=2, tensor=2, pipeline=2)),
    "experts-ep4": Row(4, colocated(4, expert=4), model="experts"),
    "apart-async-2-2": Row(4, apart(2, 2, **ASYNC)),
    "colocated-tp2-pp2-dp2": Row(8, colocated(8, server_tp=2, tensor=2, pipeline=2)),
    "colocated-tp2-cp2-dp2": Row(8, colocated(8, server_tp=2, tensor=2, context=2)),
    "experts-ep8": Row(8, colocated(8, expert=8), model="experts"),
    "apart-async-4-4": Row(8, apart(4, 4, **ASYNC)),
}

COMMON: Keys = {
    "run.overwrite": True,
    "placement.launcher": "local",
    "placement.train_workers": 1,
    "algorithm.clip_high": 0.28,
    "train.optimizer_steps": 2,
    # evaluated first: its only sample ends with the first token that the engine generates
    "eval.datasets.first.max_prompts": 1,
    "eval.datasets.first.max_new_tokens": 1,
    "eval.temperature": 0.0,
    "rollout.after_sample": ["end_to_end_inputs:note_first"],
    "save.every": "none",
    "save.hf_at_end": False,
}
TASKS: Mapping[str, Keys] = {
    "sums": {
        "data.input_key": "question",
        "data.label_key": "answer",
        "data.apply_chat_template": True,
        "data.max_prompt_tokens": 128,
        "reward.function": "end_to_end_inputs:last_number",
        "rollout.prompts_per_step": 64,
        "rollout.samples_per_prompt": 16,
        "rollout.max_new_tokens": 64,
        "train.lr": 5e-6,
        "train.micro_batch_tokens": 65_536,
    },
    "demo": {
        "reward.function": "exact_match",
        "rollout.prompts_per_step": 64,
        "rollout.samples_per_prompt": 8,
        "rollout.max_new_tokens": 4,
        "train.dtype": "float32",
        "train.lr": 2e-4,
        "train.micro_batch_tokens": 8192,
        "critic.lr": 1e-3,
    },
}
RANDOM: Keys = {"reward.function": "end_to_end_inputs:even_characters"}
"""Keys of a random model, whose answers are all wrong."""
OF_SERVERS = ("rollout.sglang", "placement.rollout_workers", "placement.colocated", "rollout.schedule")
"""Beginnings of keys that a run without servers does not have."""
GPU_SERVER: Keys = {"rollout.sglang.grammar_backend": "none"}
"""Keys of servers on accelerators: no row constrains its responses. The rest is what runs fill in."""
