"""Cost of a correction compared with the loss that it corrects.

Run as ``python bench/correction.py [--tokens 16384]``. A micro-batch of whole samples is taken forward and
backward through ``ppo_clip``, alternately without and with each correction, on this host's processor.

``ms``        processor time of the loss with the correction, median of the rounds
``loss``      the same over that of the loss without any
``log-probs`` what the correction adds, over the log-probs from hidden states that the loss starts with
              (``--hidden``, ``--vocab``): those of the smallest models are dear enough
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from anygauge.algorithms import correction as c
from anygauge.algorithms.corrected_loss import CorrectedLoss
from anygauge.algorithms.losses import policy_objective, ppo_clip
from anygauge.kernels.linear_logprob import linear_logprob
from anygauge_hooks.engines import LossFunction, LossInputs

CORRECTIONS = {
    "none": {},
    "tis": {"tis": c.tis},
    "tis, sequence": {"tis": partial(c.tis, level="sequence")},
    "icepop": {"icepop": c.icepop},
    "mis": {"mis": c.mis},
    "veto": {"veto": c.veto},
    "sequence_mask": {"sequence_mask": partial(c.sequence_mask, delta=0.1)},
    "metrics_only": {"metrics_only": c.metrics_only},
    "tis, veto, sequence_mask": {
        "tis": c.tis,
        "veto": c.veto,
        "sequence_mask": partial(c.sequence_mask, delta=0.1),
    },
}


def make_inputs(tokens: int, longest: int) -> LossInputs:
    """Return samples of equal length whose engine is a little off."""
    generator = torch.Generator().manual_seed(0)
    lengths = [longest] * (tokens // longest)
    size = sum(lengths)
    old = torch.randn(size, generator=generator) - 3
    ones = torch.ones(size)
    return LossInputs(
        log_probs=old.clone().requires_grad_(),
        entropy=ones,
        old_log_probs=old,
        rollout_log_probs=old + torch.randn(size, generator=generator) * 0.05,
        reference_log_probs=None,
        advantages=torch.randn(size, generator=generator),
        loss_mask=ones,
        loss_weights=ones / size,
        samples=range(len(lengths)),
        lengths=lengths,
    )


def seconds(run: Callable[[], None]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def take(loss: LossFunction, inputs: LossInputs) -> None:
    """Go forward and backward through a loss."""
    torch.autograd.grad(loss(inputs)[0], inputs.log_probs)


def log_probs(tokens: int, hidden: int, vocab: int) -> None:
    """Go forward and backward through the output layer."""
    states, weight = torch.randn(tokens, hidden, requires_grad=True), torch.randn(vocab, hidden)
    found, _ = linear_logprob(
        states, weight, torch.zeros(tokens, dtype=torch.int64), 1.0, None, entropy_grad=False
    )
    torch.autograd.grad(found.sum(), states)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    inputs = make_inputs(args.tokens, args.longest)
    loss = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
    losses = {
        name: policy_objective(CorrectedLoss(loss, chain) if chain else loss)
        for name, chain in CORRECTIONS.items()
    }
    runs = {name: partial(take, each, inputs) for name, each in losses.items()}
    for run in runs.values():
        run()
    rounds = [{name: seconds(run) for name, run in runs.items()} for _ in range(args.rounds)]
    found = {name: statistics.median(each[name] for each in rounds) for name in runs}
    output = seconds(partial(log_probs, args.tokens, args.hidden, args.vocab))
    print(f"{args.tokens} tokens in samples of {args.longest}; log-probs take {1000 * output:.0f} ms")
    print(f"{'correction':<26}{'ms':>7}{'loss':>7}{'log-probs':>11}")
    for name, value in found.items():
        added = (value - found["none"]) / output
        print(f"{name:<26}{1000 * value:>7.2f}{value / found['none']:>7.2f}{added:>11.5f}")


if __name__ == "__main__":
    main()
