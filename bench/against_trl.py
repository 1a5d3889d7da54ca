"""The demo in TRL's GRPOTrainer and here: samples a second and reward curves of both.

    python -m venv trl-venv
    trl-venv/bin/python -m pip install -c requirements/cpu.txt trl==1.16.0
    python bench/against_trl.py --trl trl-venv/bin/python
    python bench/against_trl.py --trl trl-venv/bin/python --processes 2 --threads 1
    python bench/against_trl.py --trl trl-venv/bin/python --backend cuda --dtype bfloat16
    python bench/against_trl.py --trl trl-venv/bin/python --lora 16    # needs peft there

The constraints keep torch and transformers at this project's versions. On a host with a GPU, constrain them
to those of the installed environment (``python -m pip freeze``).

Both sides start from the same model and draw 128 prompts x 8 samples of at most 4 tokens at temperature 1 for
each rollout, with transformers' generation, and take 4 optimizer steps of 256 samples with AdamW: clip range
0.2 and 0.28, no KL term, a mean over tokens, the same cosine schedule, float32 unless ``--dtype`` says
otherwise. TRL's ``bf16`` computes in bfloat16 and keeps float32 weights; anygauge keeps float32 master
weights. TRL runs without gradient checkpointing, which is its default and would cost it a forward pass; its
ratio needs the log-probs of a pass before the first optimizer step, where the demo takes those of its engine.
With ``--lora`` both train adapters on all linear layers but the output layer, scaled by 2, at the same
learning rate.

Runs alternate, ``--rounds`` times, since the speed of a host drifts. Samples a second are those of a rollout
over the time from the end of one rollout's optimizer steps to the next: the median of a run after its first
three, and of the runs. The ratio is the median over pairs of runs. Memory is the most that torch had
allocated on a GPU, or that a process had on the host. Ends with status 1 if the ratio is below 1.5.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "examples" / "arithmetic_grpo.toml"
MAKE_INPUTS = ROOT / "examples" / "arithmetic" / "make_inputs.py"
PROMPTS, SAMPLES, OPTIMIZER_STEPS, TOKENS = 128, 8, 4, 4
LR, MIN_LR = 6e-4, 6e-5
WARM_UP = 3
TARGET = 1.5
SHOWN = 8
"""Points of a reward curve."""


def run_ours(arguments: argparse.Namespace, turn: int) -> dict[str, Any]:
    """Train here, and return seconds and reward of each step, and the memory."""
    name, inputs = f"against-trl-{turn}", arguments.directory / "inputs"
    keys = {
        "run.name": name,
        "run.directory": arguments.directory,
        "run.steps": arguments.steps,
        "run.seed": turn,
        "model.path": inputs / "model",
        "data.train": json.dumps([str(inputs / "train.jsonl")]),
        "eval.data": "[]",
        "save.every": "none",
        "save.hf_at_end": "false",
        "train.dtype": arguments.dtype,
        "placement.train_workers": arguments.processes,
        "placement.threads_per_worker": arguments.threads,
    }
    if arguments.lora is not None:
        keys["train.lora.rank"] = arguments.lora
    options = [f"--{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "-m", "anygauge", "train", str(RECIPE), "--backend", arguments.backend]
    subprocess.run([*command, *options, *arguments.extra], check=True, stdout=subprocess.DEVNULL)
    text = (arguments.directory / name / "metrics.jsonl").read_text(encoding="utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if "perf/step_time" in row]
    ends = [row["time"] for row in rows]
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    rewards = [row["rollout/reward"] for row in rows]
    return {"seconds": seconds, "rewards": rewards, "gib": max(row["perf/device_memory_gib"] for row in rows)}


def run_trl(arguments: argparse.Namespace, turn: int) -> dict[str, Any]:
    """Train in TRL's environment, and return seconds and reward of each rollout, and the memory."""
    output = arguments.directory / f"trl-{turn}.json"
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(arguments.processes)]
    command = [
        *(str(arguments.trl), *(launch if arguments.processes > 1 else ()), str(Path(__file__).resolve())),
        *("--side", str(output), "--directory", str(arguments.directory), "--seed", str(turn)),
        *("--steps", str(arguments.steps), "--processes", str(arguments.processes)),
        *("--threads", str(arguments.threads), "--backend", arguments.backend, "--dtype", arguments.dtype),
        *(() if arguments.lora is None else ("--lora", str(arguments.lora))),
    ]
    # not the directory of this file: transformers would take its kernels.py for a library
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": str(arguments.threads)}
    environment["HF_HUB_OFFLINE"] = "1"
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return dict(json.loads(output.read_text(encoding="utf-8")))


def train_with_trl(arguments: argparse.Namespace) -> None:
    """Train with TRL, in a process of its environment; the first rank writes what was measured."""
    import torch
    from datasets import load_dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer  # type: ignore[import-not-found]

    torch.set_num_threads(arguments.threads)
    model = arguments.directory / "inputs" / "model"
    ends: list[float] = []
    rewards: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when the optimizer steps of each rollout ended."""

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step % OPTIMIZER_STEPS == 0:
                ends.append(time.time())

    def exact_match(completions: Sequence[str], label: Sequence[str], **others: Any) -> list[float]:
        scores = [float(text.strip() == answer) for text, answer in zip(completions, label, strict=True)]
        rewards.append(statistics.fmean(scores))
        return scores

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        reward_funcs=exact_match,
        args=trl_config(arguments),
        train_dataset=load_dataset("json", data_files=str(model.parent / "train.jsonl"), split="train"),
        callbacks=[Clock()],
        peft_config=None if arguments.lora is None else adapters(arguments.lora),
    )
    trainer.train()
    seconds = [later - earlier for earlier, later in pairwise(ends)]
    on_host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
    most = on_host if arguments.backend == "cpu" else torch.cuda.max_memory_allocated()
    if trainer.accelerator.is_main_process:
        found = {"seconds": seconds, "rewards": rewards, "gib": most / 2**30}
        arguments.side.write_text(json.dumps(found), encoding="utf-8")


def adapters(rank: int) -> Any:
    """Return what ``train.lora.rank`` trains, for peft."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def trl_config(arguments: argparse.Namespace) -> Any:
    """Return the demo's config for TRL."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(arguments.directory / "trl"),
        use_cpu=arguments.backend == "cpu",
        bf16=arguments.dtype == "bfloat16",
        seed=arguments.seed,
        max_steps=arguments.steps * OPTIMIZER_STEPS,
        per_device_train_batch_size=PROMPTS * SAMPLES // OPTIMIZER_STEPS // arguments.processes,
        steps_per_generation=OPTIMIZER_STEPS,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        loss_type="dapo",
        learning_rate=LR,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": MIN_LR},
        adam_beta2=0.999,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def samples_per_s(runs: Sequence[Mapping[str, Any]]) -> float:
    """Return the median over runs of the median rate of each, after its warm-up."""
    seconds = [statistics.median(run["seconds"][WARM_UP:] or run["seconds"]) for run in runs]
    return PROMPTS * SAMPLES / statistics.median(seconds)


def curve(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the mean reward of equal parts of the runs, in their order."""
    rewards = [statistics.fmean(at) for at in zip(*(run["rewards"] for run in runs), strict=False)]
    size = max(1, len(rewards) // SHOWN)
    parts = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    return " ".join(f"{statistics.fmean(part):.3f}" for part in parts)


def report(ours: Sequence[Mapping[str, Any]], trl: Sequence[Mapping[str, Any]]) -> float:
    """Print both sides and return the ratio of their rates."""
    for name, runs in (("anygauge", ours), ("TRL", trl)):
        rates = ", ".join(f"{samples_per_s([run]):,.0f}" for run in runs)
        memory = max(run["gib"] for run in runs)
        print(f"{name:>9}: {samples_per_s(runs):,.0f} samples/s (runs: {rates}), {memory:.2f} GiB")
        print(f"{'reward':>9}: {curve(runs)}")
    ratios = [samples_per_s([mine]) / samples_per_s([other]) for mine, other in zip(ours, trl, strict=True)]
    ratio = statistics.median(ratios)
    pairs = ", ".join(f"{each:.2f}" for each in ratios)
    print(f"    ratio: {ratio:.2f} (pairs: {pairs}), at least {TARGET}")
    return ratio


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; those that it does not know are keys of our config."""
    parser = argparse.ArgumentParser(description="the demo here and in TRL", allow_abbrev=False)
    parser.add_argument("--trl", type=Path, help="Python of the environment with TRL")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--processes", type=int, default=1, help="that train, on each side")
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--steps", type=int, default=40, help="rollouts of a run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank")
    parser.add_argument("--directory", type=Path, default=Path("runs/against-trl"))
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    arguments, arguments.extra = parser.parse_known_args(given)
    if arguments.trl is None and arguments.side is None:
        parser.error("--trl is missing")
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    """Run both sides in turns and compare them."""
    arguments = parse(given)
    arguments.directory = arguments.directory.resolve()
    if arguments.side is not None:
        train_with_trl(arguments)
        return
    inputs = ["--out", str(arguments.directory / "inputs")]
    subprocess.run([sys.executable, str(MAKE_INPUTS), *inputs], check=True)
    ours, trl = [], []
    for turn in range(arguments.rounds):
        ours.append(run_ours(arguments, turn))
        trl.append(run_trl(arguments, turn))
    sys.exit(report(ours, trl) < TARGET)


if __name__ == "__main__":
    main()
