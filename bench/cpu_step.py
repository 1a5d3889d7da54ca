"""Train steps and whole GRPO steps on the CPU, beside plain transformers and AdamW, in one process.

    python bench/cpu_step.py                 # both vocabularies, median of 7 alternated runs
    python bench/cpu_step.py --runs 3        # a quicker look
    python bench/cpu_step.py --engine fsdp   # the FSDP engine

Both sides do the same work: the log-probabilities of 4 x 256 tokens, their negative mean as loss, gradient
clipping at 1 and AdamW in float32. The plain side is what one would write first: ``model(tokens)``,
log-softmax, ``torch.optim.AdamW``. Ratios above 1 mean that anygauge is faster.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from anygauge.algorithms.advantages import grpo
from anygauge.algorithms.losses import bind_options, policy_objective, ppo_clip
from anygauge.config import Config
from anygauge.config.schema import Algorithm
from anygauge.data.batch import pack_samples
from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge.trainer.estimate import estimate
from anygauge.trainer.plan import plan_steps, rollout_batch
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.rl import Group, Prompt, SamplingParams
from anygauge_hooks.types import NamedFunction
from anygauge_tests.batches import likelihood
from anygauge_tests.embedded import sample_all
from anygauge_tests.engine_config import engine_config

BATCH, LENGTH = 4, 256
PROMPTS, SAMPLES, PROMPT_LENGTH, NEW_TOKENS = 16, 8, 16, 32


def context() -> WorkerContext:
    """Return the context of a lone process."""
    plugins = load_plugins()
    backend = plugins.get("register_backends", "cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return WorkerContext(
        rank=0, world_size=1, backend=backend, device=plugins.make_device(backend, 0), plugins=plugins
    )


def make_config(path: Path, engine: str) -> Config:
    """Return the config of both the train and the rollout engine."""
    return engine_config(path, train={"engine": engine, "lr": 1e-4, "micro_batch_tokens": 16_384})


def seconds(step: Callable[[], object]) -> float:
    """Return how long one call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def alternate(runs: int, repeats: int, **steps: Callable[[], object]) -> dict[str, float]:
    """Return the median seconds of each step over alternated runs of ``repeats`` calls, warmed up."""
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(runs):
        for name, step in steps.items():
            times[name].append(sum(seconds(step) for _ in range(repeats)) / repeats)
    return {name: statistics.median(values) for name, values in times.items()}


def plain_train_step(
    model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> Callable[[], None]:
    """Return a train step in plain transformers."""

    def step() -> None:
        optimizer.zero_grad()
        log_probs = model(tokens).logits[:, :-1].log_softmax(-1)
        loss = -log_probs.gather(-1, tokens[:, 1:, None]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def engine_train_step(engine: Any, tokens: torch.Tensor) -> Callable[[], object]:
    """Return the same train step through the engine, packing included."""
    length = LENGTH - 1
    zeros, rows = [(0.0,) * length] * BATCH, tokens.tolist()
    batch = pack_samples(
        [row[:1] for row in rows],
        [row[1:] for row in rows],
        loss_masks=[(1,) * length] * BATCH,
        log_probs=zeros,
        media=[()] * BATCH,
    )
    batch.old_log_probs, batch.advantages = batch.rollout_log_probs, batch.rollout_log_probs
    batch.loss_weights = torch.full((BATCH * length,), 1 / (BATCH * length))
    return lambda: engine.train_step(replace(batch), likelihood, temperature=1.0, entropy_grad=False)


def bench_train_step(path: Path, worker: WorkerContext, vocab: int, runs: int, engine_name: str) -> None:
    """Print tokens per second of a train step on both sides."""
    tokens = torch.randint(0, vocab, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    config = make_config(path, engine_name)
    engine = worker.plugins.get("register_train_engines", engine_name).make(config, worker)
    result = alternate(
        runs, 3, plain=plain_train_step(model, optimizer, tokens), anygauge=engine_train_step(engine, tokens)
    )
    report(f"train step, V={vocab}, {BATCH} x {LENGTH} tokens", result, BATCH * LENGTH)


def report(name: str, result: dict[str, float], tokens: int) -> None:
    """Print one row."""
    plain, ours = tokens / result["plain"], tokens / result["anygauge"]
    print(f"{name:45} plain {plain:8.0f} tok/s   anygauge {ours:8.0f} tok/s   ratio {ours / plain:.3f}")


def plain_grpo_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    prompts: torch.Tensor,
    score: Callable[[Sequence[int]], float],
) -> Callable[[], None]:
    """Return a GRPO step in plain transformers: generate, score, one optimizer step."""

    def step() -> None:
        with torch.no_grad():
            repeated = prompts.repeat_interleave(SAMPLES, 0)
            tokens = model.generate(
                repeated,
                attention_mask=torch.ones_like(repeated),
                do_sample=True,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                top_k=0,
            )
        responses = tokens[:, PROMPT_LENGTH:]
        rewards = torch.tensor([score(row) for row in responses.tolist()]).view(PROMPTS, SAMPLES)
        advantages = torch.stack([grpo(group) for group in rewards]).view(-1, 1)
        optimizer.zero_grad()
        log_probs = model(tokens).logits[:, PROMPT_LENGTH - 1 : -1].log_softmax(-1)
        taken = log_probs.gather(-1, responses[..., None])[..., 0]
        loss = -((taken - taken.detach()).exp() * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def engine_grpo_step(
    trainer: Any, rollout: Any, prompts: torch.Tensor, score: Callable[[Sequence[int]], float]
) -> Callable[[], None]:
    """Return the same GRPO step through both engines, weight sync included."""
    drawn = [Prompt(index=i, tokens=tuple(row), text="") for i, row in enumerate(prompts.tolist())]
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    loss = policy_objective(bind_options(ppo_clip, clip_low=0.2, clip_high=0.2))
    estimator = NamedFunction(name="grpo", fn=grpo)
    version = 0

    def step() -> None:
        nonlocal version
        version += 1
        seeds = [[version * 1000 + i * SAMPLES + j for j in range(SAMPLES)] for i in range(PROMPTS)]
        groups = [
            Group(prompt=prompt, samples=tuple(with_reward(sample, score) for sample in samples))
            for prompt, samples in zip(drawn, sample_all(rollout, drawn, params, seeds), strict=True)
        ]
        (batch,) = plan_steps(rollout_batch(groups), 1, 1, "token_mean")
        batch.old_log_probs = batch.rollout_log_probs
        estimate(Algorithm(), estimator, batch, torch.clone)
        trainer.train_step(batch, loss, temperature=1.0, entropy_grad=False)
        rollout.update_weights(trainer.weights(), version)

    return step


def with_reward(sample: Any, score: Callable[[Sequence[int]], float]) -> Any:
    """Return the sample with its reward."""
    return sample._replace(reward=score(sample.response_tokens))


def bench_grpo_step(path: Path, worker: WorkerContext, vocab: int, runs: int, engine_name: str) -> None:
    """Print generated and trained tokens per second of a whole step on both sides."""
    prompts = torch.randint(
        0, vocab - 2, (PROMPTS, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0)
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    config = make_config(path, engine_name)
    trainer = worker.plugins.get("register_train_engines", engine_name).make(config, worker)
    rollout = worker.plugins.get("register_rollout_engines", "transformers").make(config, worker)

    def score(tokens: Sequence[int]) -> float:
        return sum(token % 2 for token in tokens) / len(tokens)

    result = alternate(
        runs,
        1,
        plain=plain_grpo_step(model, optimizer, prompts, score),
        anygauge=engine_grpo_step(trainer, rollout, prompts, score),
    )
    tokens = PROMPTS * SAMPLES * (PROMPT_LENGTH + NEW_TOKENS)
    report(f"GRPO step, V={vocab}, {PROMPTS} x {SAMPLES} samples of {NEW_TOKENS}", result, tokens)


def main() -> None:
    """Run every comparison."""
    parser = argparse.ArgumentParser(description="CPU step benchmark")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine", choices=("megatron", "fsdp"), default="megatron")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    worker = context()
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, median of {arguments.runs} alternated runs"
    )
    for vocab in (8192, 512):
        with tempfile.TemporaryDirectory() as directory:
            tokenizer = tiny_tokenizer(directory, alphabet="0123456789")
            tiny_qwen3(
                directory, vocab_size=vocab, hidden=256, head_dim=64, mlp=768, tied=True, tokenizer=tokenizer
            )
            bench_train_step(Path(directory), worker, vocab, arguments.runs, arguments.engine)
            bench_grpo_step(Path(directory), worker, vocab, arguments.runs, arguments.engine)


if __name__ == "__main__":
    main()
