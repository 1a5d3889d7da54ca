"""How many bfloat16 weights an optimizer step changes, and how few bytes say which.

    python bench/changed_weights.py
    python bench/changed_weights.py --rates 1e-6 --steps 20 --hidden 768

A Qwen3 with random weights of the usual scale (0.02) takes policy gradient steps with random rewards in the
train engine, in bfloat16 with float32 master weights and the engine's own AdamW. Printed for each learning
rate, as the median over the steps after the warm-up of Adam's moments: the share of weights whose bfloat16
value changed, and the size of the changes as the transport `delta` encodes them, relative to all weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cpu_step import context, make_config

from anygauge.data.batch import pack_samples
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge.weight_sync.changes import bytes_view, changed, framed
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.engines import LossInputs, WorkerContext

SAMPLES, PROMPT, RESPONSE = 32, 4, 28
VOCABULARY = 512
MOMENTS = 10
"""Steps until the first moment of Adam, with a decay of 0.9, has forgotten most of its start."""


def policy_gradient(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of REINFORCE."""
    return -(inputs.log_probs * inputs.advantages * inputs.loss_weights).sum(), {}


def rollouts(step: int) -> TrainBatch:
    """Return random samples with normalized rewards."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, PROMPT + RESPONSE), generator=generator).tolist()
    rewards = torch.rand(SAMPLES, generator=generator).round()
    batch = pack_samples(
        [row[:PROMPT] for row in tokens],
        [row[PROMPT:] for row in tokens],
        loss_masks=[(1,) * RESPONSE] * SAMPLES,
        log_probs=[(0.0,) * RESPONSE] * SAMPLES,
        media=[()] * SAMPLES,
    )
    batch.old_log_probs = batch.rollout_log_probs
    batch.advantages = ((rewards - rewards.mean()) / rewards.std()).repeat_interleave(RESPONSE)
    batch.loss_weights = torch.full((SAMPLES * RESPONSE,), 1 / (SAMPLES * RESPONSE))
    return batch


def changes(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Return the share of weights that changed, and of the bytes that say so."""
    count, size, frames = 0, 0, []
    for number, (name, tensor) in enumerate(new.items()):
        count += int((old[name] != tensor).sum())
        size += tensor.numel()
        frames.append(changed(number, bytes_view(old[name]), bytes_view(tensor), tensor.itemsize))
    wire = framed([], [each for each in frames if each is not None])
    return count / size, len(wire) / (size * tensor.itemsize)


def train(path: Path, worker: WorkerContext, rate: float, steps: int) -> list[tuple[float, float]]:
    """Return the changes of each step after the first few."""
    config = make_config(path)
    keys = {"lr": rate, "min_lr": rate, "warmup_steps": 0, "dtype": "bfloat16"}
    config = config.model_copy(update={"train": config.train.model_copy(update=keys)})
    engine: Any = worker.plugins.get("register_train_engines", "megatron").make(config, worker)
    versions: list[tuple[float, float]] = []
    old = {name: tensor.clone() for name, tensor in engine.weights()}
    for step in range(MOMENTS + steps):
        engine.train_step(replace(rollouts(step)), policy_gradient, temperature=1.0, entropy_grad=False)
        new = {name: tensor.clone() for name, tensor in engine.weights()}
        if step >= MOMENTS:
            versions.append(changes(old, new))
        old = new
    return versions


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=512)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        tiny_tokenizer(path, alphabet="".join(chr(0x4E00 + index) for index in range(VOCABULARY - 2)))
        tiny_qwen3(path, vocab_size=VOCABULARY, hidden=given.hidden, mlp=4 * given.hidden)
        worker = context()
        for rate in given.rates:
            weights, wire = zip(*train(path, worker, rate, given.steps), strict=True)
            print(
                f"learning rate {rate:.0e}: {1 - statistics.median(weights):.2%} of the weights unchanged, "
                f"{statistics.median(wire):.2%} of the bytes sent (at most {max(wire):.2%})"
            )


if __name__ == "__main__":
    main()
