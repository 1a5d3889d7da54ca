"""Make the inputs of ``examples/arithmetic_grpo.toml``: tokenizer, data, and a policy that can almost add.

The task is to continue ``37+58=`` with the digits of the sum, the last one first (``59``), and to stop.
A tiny Qwen3 is trained on worked examples until it answers about one held-out problem in five; GRPO does
the rest.

    python -m anygauge.cli.demo.inputs --seed 0 --out runs/arithmetic-inputs
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

OPERANDS = 100
EVAL_PROBLEMS = 512
VALIDATION_PROBLEMS = 256
SPLIT_SEED = 20_260_101
"""Which problems are held out is the same for every ``--seed``, so that runs can be compared."""
ALPHABET = "0123456789+="
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""A question and its answer are all that the policy can read, so a chat is one after the other."""
MANIFEST = "inputs.json"


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt and the answer that exact match expects."""

    prompt: str
    label: str


@dataclass(frozen=True, slots=True)
class Split:
    """Problems by use. No two parts share a pair of operands, in either order."""

    train: Sequence[Problem]
    validation: Sequence[Problem]
    evaluation: Sequence[Problem]


def problem(a: int, b: int) -> Problem:
    """Return ``a + b`` as a prompt and its answer, least significant digit first."""
    return Problem(f"{a}+{b}=", str(a + b)[::-1])


def split_problems() -> Split:
    """Hold out pairs of operands for the final score and for the end of the warm-up."""
    rng = random.Random(SPLIT_SEED)
    pairs = [(a, b) for a in range(OPERANDS) for b in range(a, OPERANDS)]
    rng.shuffle(pairs)
    evaluation = [problem(*rng.sample(pair, 2)) for pair in pairs[:EVAL_PROBLEMS]]
    held_out = EVAL_PROBLEMS + VALIDATION_PROBLEMS
    validation = [problem(*rng.sample(pair, 2)) for pair in pairs[EVAL_PROBLEMS:held_out]]
    train = [problem(*order) for a, b in pairs[held_out:] for order in sorted({(a, b), (b, a)})]
    return Split(train, validation, evaluation)


def write_rows(path: Path, problems: Sequence[Problem]) -> None:
    """Write problems as JSONL rows with the fields ``prompt`` and ``label``."""
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in problems), encoding="utf-8")


def encode_batch(tokenizer: Any, problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
    """Return token ids and next-token targets of whole rows, padded on the right.

    :returns: Two ``[B, S]`` int64 tensors; a target is -100 on the prompt and on the padding.
    """
    import torch

    prompts = tokenizer([row.prompt for row in problems], add_special_tokens=False)["input_ids"]
    answers = tokenizer([row.label for row in problems], add_special_tokens=False)["input_ids"]
    rows = [(p, [*a, tokenizer.eos_token_id]) for p, a in zip(prompts, answers, strict=True)]
    width = max(len(p) + len(a) for p, a in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    targets = torch.full((len(rows), width), -100)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        targets[i, len(prompt) - 1 : end - 1] = torch.tensor(answer)
    return ids, targets


def token_losses(model: Any, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each target, ``[B, S]``, 0 where there is none."""
    import torch

    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def expected_score(model: Any, ids: Tensor, targets: Tensor) -> float:
    """Return the mean probability that one sample at temperature 1 is the right answer and stops."""
    import torch

    with torch.no_grad():
        return float((-token_losses(model, ids, targets).sum(1)).exp().mean())


def pretrain(model: Any, tokenizer: Any, split: Split, args: argparse.Namespace) -> tuple[int, float]:
    """Train on worked examples until the validation problems score ``args.stop_score``.

    :returns: Steps taken and the score reached.
    """
    import torch

    generator = torch.Generator().manual_seed(args.seed)
    ids, targets = encode_batch(tokenizer, split.train)
    check = encode_batch(tokenizer, split.validation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    for step in range(1, args.max_steps + 1):
        rows = torch.randint(len(ids), (args.batch_size,), generator=generator)
        train_step(model, optimizer, ids[rows], targets[rows])
        score = expected_score(model, *check) if step % args.check_interval == 0 else 0.0
        if score >= args.stop_score:
            return step, score
    raise SystemExit(
        f"The warm-up did not reach {args.stop_score} in {args.max_steps} steps; last score {score:.3f}."
    )


def train_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, targets: Tensor) -> None:
    """Take one optimizer step on the mean loss of the answer tokens."""
    loss = token_losses(model, ids, targets).sum() / (targets >= 0).sum()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def make_policy(directory: Path, seed: int) -> tuple[Any, Any]:
    """Write and load a tokenizer of characters and a random Qwen3 of 0.4 million parameters.

    :returns: Model and tokenizer.
    """
    from transformers import AutoModelForCausalLM

    from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer

    tokenizer = tiny_tokenizer(directory, alphabet=ALPHABET)
    tokenizer.chat_template = CHAT_TEMPLATE
    tiny_qwen3(
        directory,
        hidden=128,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=384,
        max_positions=64,
        seed=seed,
        tokenizer=tokenizer,
    )
    return AutoModelForCausalLM.from_pretrained(directory, local_files_only=True), tokenizer


def make_inputs(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Write every input into ``out`` and return what is known of them."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second one
    split = split_problems()
    write_rows(out / "train.jsonl", split.train)
    write_rows(out / "eval.jsonl", split.evaluation)
    model, tokenizer = make_policy(out / "model", args.seed)
    started = time.monotonic()
    steps, score = pretrain(model, tokenizer, split, args)
    model.save_pretrained(out / "model")
    return {
        "steps": steps,
        "validation_score": score,
        "evaluation_score": expected_score(model, *encode_batch(tokenizer, split.evaluation)),
        "seconds": time.monotonic() - started,
    }


def recipe(args: argparse.Namespace) -> dict[str, Any]:
    """Return everything that the inputs depend on, this file included."""
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return {"source": source, **{key: value for key, value in vars(args).items() if key != "out"}}


def read_manifest(out: Path) -> dict[str, Any]:
    """Return what an earlier run noted in ``out``, or an empty table."""
    path = out / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Make the inputs of examples/arithmetic_grpo.toml.")
    parser.add_argument("--out", type=Path, default=Path("runs/arithmetic-inputs"), help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="seeds the weights and the warm-up")
    parser.add_argument(
        "--stop-score", type=float, default=0.22, help="validation score that ends the warm-up"
    )
    parser.add_argument("--max-steps", type=int, default=2000, help="give up after this many steps")
    parser.add_argument("--check-interval", type=int, default=5, help="steps between validations")
    parser.add_argument("--batch-size", type=int, default=256, help="rows in a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of AdamW")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the inputs, unless they are there already."""
    args = parse_args(argv)
    wanted, manifest = recipe(args), read_manifest(args.out)
    if manifest.get("recipe") == wanted:
        print(f"{args.out} is up to date.")
        return
    if args.out.exists() and not manifest:
        raise SystemExit(
            f"{args.out} exists and is not the work of this script; name another directory with --out."
        )
    partial = args.out.with_name(f"{args.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    result = make_inputs(args, partial)
    (partial / MANIFEST).write_text(
        json.dumps({"recipe": wanted, **result}, indent=2) + "\n", encoding="utf-8"
    )
    shutil.rmtree(args.out, ignore_errors=True)
    partial.rename(args.out)
    print(
        f"{args.out}: warm-up of {result['steps']} steps in {result['seconds']:.0f} s, "
        f"expected score on the held-out problems {result['evaluation_score']:.3f}"
    )


def prepare_process() -> None:
    """Let this process import transformers as a worker of the cpu backend does."""
    from anygauge.cli.arguments import requested_backend
    from anygauge.plugins import load_plugins

    plugins = load_plugins()
    plugins.prepare_worker(requested_backend(plugins, "cpu"), "demo", "before_vendor_import")


if __name__ == "__main__":
    prepare_process()
    main()
