"""A whole run with a real server: its log-probs are the trainer's, version after version."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import save_file

from anygauge_hooks.rl import Group
from anygauge_tests.observer import Observer, Rewarding, run_with_observer
from anygauge_tests.recipe import tiny_recipe

BENCH = Path(__file__).parents[2] / "bench" / "end_to_end.py"
ROWS = ("apart-sync", "colocated-tp2")
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]


def run(directory: Path, **keys: Any) -> Observer:
    path = tiny_recipe(
        directory,
        **{
            "run__steps": 3,
            "rollout__engine": "sglang",
            "rollout__max_batch_tokens": 8192,
            "rollout__sglang.context_length": 256,
            "placement__rollout_workers": 1,
            "placement__start_timeout_s": 600,
            "train__dtype": "float32",
            "train__lr": 1e-2,
            **keys,
        },
    )
    observer = Rewarding()
    run_with_observer(path, observer)
    return observer


def versions(groups: Sequence[Group]) -> list[int]:
    samples = [sample for group in groups for sample in group.samples]
    return sorted({version for sample in samples for version in sample.weight_versions})


TASK = {
    "data": {"label_key": "label"},
    "reward": {"function": "end_to_end_inputs:even_characters"},
    "rollout": {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "max_new_tokens": 4,
        "max_batch_tokens": 8192,
        "sglang": {"context_length": 256},
    },
    "train": {"dtype": "float32", "lr": 1e-2},
    "placement": {"start_timeout_s": 600},
    "weight_sync": {"verify": "always"},
    "run": {"report": False},
}


def test_servers_and_trainers_agree_in_every_step_apart_and_colocated(tmp_path: Path) -> None:
    """Rows of ``bench/end_to_end.py``: the second divides the model in the trainers and in the server."""
    inputs = tiny_recipe(tmp_path).parent
    files = [str(inputs / "data.jsonl")]
    sets = {name: {"files": files, "max_prompts": 1} for name in ("first", "eval")}
    task = {**TASK, "data": {**TASK["data"], "train": files}, "eval": {"datasets": sets}}
    (tmp_path / "task.toml").write_text(tomli_w.dumps(task), encoding="utf-8")
    places = ["--store", str(tmp_path / "rows.jsonl"), "--directory", str(tmp_path / "runs")]
    given = ["--backend", "cpu", "--model", str(inputs / "model"), "--task", str(tmp_path / "task.toml")]
    command = [sys.executable, str(BENCH), *given, "--rows", *ROWS, "--steps", "3", *places]
    assert subprocess.run(command, check=False).returncode == 0
    rows = list(map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines()))
    assert [row["row"] for row in rows] == [*ROWS]
    assert max(row["log_prob_difference"] for row in rows) < 1e-4
    for row in ROWS:
        lines = (tmp_path / "runs" / f"end-to-end-{row}" / "metrics.jsonl").read_text().splitlines()
        steps = [metrics for metrics in map(json.loads, lines) if "perf/step_time" in metrics]
        assert [metrics["rollout/lag/max"] for metrics in steps] == [0, 0, 0]
        assert steps[0]["train/grad_norm"] > 0  # so that the weights of the next steps are others


def test_samples_of_an_asynchronous_run_tell_the_weights_of_each_token(tmp_path: Path) -> None:
    """Two pipeline stages each send their layers, and the server's checksums of both are compared."""
    keys = {
        "rollout__schedule": "async",
        "algorithm__correction__tis": {},
        "placement__train_workers": 2,
        "train__parallel__pipeline": 2,
        "weight_sync__transport": "distributed",
        "weight_sync__senders": "stages",
        "weight_sync__verify": "always",
    }
    observer = run(tmp_path, run__steps=6, rollout__max_new_tokens=64, **keys)
    assert versions(observer.groups)[0] == 0
    assert versions(observer.groups)[-1] in (4, 5)  # the last step trains version 5
    logs = "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*.log"))
    assert "training ranks 0, 1 send the weights" in logs
    assert max(metrics["rollout/lag/max"] for metrics in observer.metrics) == 1


SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
"""Shapes of the weights of the recipe's model that have an adapter."""
RANK = 8


def write_adapter(directory: Path) -> None:
    """Write an adapter of all linear layers of the recipe's model in peft's format."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight": 0.15
        * torch.randn(shape, generator=generator)
        for layer in range(2)
        for name, (rows, columns) in SHAPES.items()
        for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK)))
    }
    targets = [name.rpartition(".")[2] for name in SHAPES]
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 12, "target_modules": targets}
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")


def test_a_server_computes_the_adapter_beside_the_base_from_the_first_step(tmp_path: Path) -> None:
    """It loads ``model.path``, training starts from an adapter, and each version is the adapter by itself."""
    write_adapter(tmp_path / "adapter")
    lora = {"train__engine": "fsdp", "train__lora__path": tmp_path / "adapter", "algorithm__kl_coef": 0.01}
    observer = run(tmp_path, reward__function="digits", weight_sync__transport="adapter", **lora)
    for metrics in observer.metrics:
        assert metrics["train/train_rollout_logprob_abs_diff"] < 1e-4
        assert metrics["train/grad_norm"] > 0
    assert observer.metrics[0]["train/kl_loss"] > 1e-3, "the reference has no adapter"
