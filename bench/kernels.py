"""Measure a backend's kernels, forward and backward, beside their references and torch's own operators.

Run as ``python bench/kernels.py [--threads 2] [--runs 15] [--dtype float32]`` for those of the host.
Candidates take turns, so that a slow moment of the machine hits all of them; the table shows medians in
milliseconds. With ``--backend cuda [--op NAME ...]`` it is a table of its own: ``gpu_kernels.py``.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_kernels import permute, rms_norm, rotary, swiglu

from anygauge.kernels.table import reference_kernel
from anygauge_cpu.kernels import cpu_kernels
from anygauge_hooks.kernels import KernelOp

OURS: Mapping[KernelOp, Callable[..., Any]] = {kernel.op: kernel.fn for kernel in cpu_kernels()}
"""An op that is not here is served by its reference."""


@dataclass
class Case:
    """One op at one size. ``inputs`` are made anew for every call, outside the clock."""

    op: KernelOp
    size: str
    inputs: Callable[[], tuple[Any, ...]]
    torch_own: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)


def time_case(case: Case, runs: int) -> dict[str, float]:
    """Return the median time of each candidate in milliseconds."""
    reference = reference_kernel(case.op).fn
    candidates = {"ours": OURS.get(case.op, reference), "reference": reference, "torch": case.torch_own}
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates.items())
    for run in range(runs + 2):
        order.append(order.pop(0))  # who comes first after the inputs are made pays for fresh memory
        for name, fn in order:
            elapsed = time_once(fn, case.inputs(), case.options)
            if run >= 2:
                times[name].append(elapsed)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def time_once(fn: Callable[..., Any], inputs: Sequence[Any], options: Mapping[str, Any]) -> float:
    """Return the seconds of one forward and backward."""
    start = time.perf_counter()
    result = fn(*inputs, **options)
    outputs = [out for out in (result if isinstance(result, tuple) else (result,)) if out.requires_grad]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.grad(outputs, wanted, [torch.ones_like(out) for out in outputs])
    return time.perf_counter() - start


def cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield the demo's sizes (1024 sequences of about 10 tokens) and those of ``bench/cpu_step.py``."""
    lengths = random.Random(0).choices(range(7, 14), k=1024)
    sizes = {"demo": (lengths, 128, 4, 2, 32, 384, 16), "step": ([256] * 4, 256, 4, 2, 64, 768, 8192)}
    for size, (seqs, hidden, heads, key_heads, head_dim, ffn, vocab) in sizes.items():
        tokens = sum(seqs)
        random_ = _random(dtype)
        angles = torch.rand(tokens, head_dim // 2).repeat(1, 2)
        targets = torch.randint(vocab, (tokens,))
        qkv = [(tokens, heads, head_dim), (tokens, key_heads, head_dim), (tokens, key_heads, head_dim)]
        yield Case("rms_norm", size, lambda t=tokens, h=hidden, r=random_: (*r((t, h), (h,)), 1e-6), rms_norm)
        yield Case(
            "rotary_embedding",
            size,
            lambda s=qkv, a=angles, r=random_: (*r(*s[:2]), a.cos(), a.sin()),
            rotary,
        )
        yield Case("swiglu", size, lambda t=tokens, f=ffn, r=random_: r((t, 2 * f)), swiglu)
        yield Case(
            "varlen_attention",
            size,
            lambda s=qkv, n=tuple(seqs), d=head_dim, r=random_: (*r(*s), n, d**-0.5),
            _sdpa_per_sequence,
            {"causal": True},
        )
        yield Case(
            "vocab_parallel_logprob",
            size,
            lambda t=tokens, v=vocab, y=targets, r=random_: (r((t, v))[0].clone(), y, 1.0, None),
            _torch_logprob,
            {"entropy_grad": False},
        )
        yield Case(
            "layer_norm",
            size,
            lambda t=tokens, h=hidden, r=random_: (*r((t, h), (h,), (h,)), 1e-6),
            _torch_layer_norm,
        )
        yield from expert_cases(size, tokens, hidden, random_)


def expert_cases(size: str, tokens: int, hidden: int, random_: Callable[..., Any]) -> Iterator[Case]:
    """Yield the way to 8 of 64 experts and back."""
    experts, topk = 64, 8
    chosen = torch.rand(tokens, experts).topk(topk, dim=1).indices
    is_chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, value=True)
    rows = reference_kernel("token_permute").fn(torch.zeros(tokens, 1), is_chosen.float(), is_chosen, topk)[2]
    yield Case(
        "topk_router",
        size,
        lambda: (torch.randn(tokens, experts).requires_grad_(), topk),
        _torch_router,
        {"score_function": "softmax"},
    )
    yield Case(
        "token_permute",
        size,
        lambda: (*random_((tokens, hidden)), torch.rand(tokens, experts).requires_grad_(), is_chosen, topk),
        permute,
    )
    yield Case("token_unpermute", size, lambda: (*random_((tokens * topk, hidden)), rows), _torch_unpermute)


def _random(dtype: torch.dtype) -> Callable[..., tuple[Tensor, ...]]:
    def make(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes)

    return make


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _torch_router(logits: Tensor, topk: int, *, score_function: str) -> Tensor:
    return logits.topk(topk, dim=1).values.softmax(1)


def _torch_unpermute(permuted: Tensor, rows: Tensor) -> Tensor:
    """Return the sums in the dtype of the rows."""
    of_row = torch.empty(rows.numel(), dtype=torch.int64)
    of_row[rows.flatten()] = torch.arange(len(rows)).repeat_interleave(rows.shape[1])
    return permuted.new_zeros(len(rows), permuted.shape[1]).index_add(0, of_row, permuted)


def _sdpa_per_sequence(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float, *, causal: bool
) -> Tensor:
    parts = zip(*(torch.split(x.transpose(0, 1), lengths, dim=1) for x in (q, k, v)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(
            *(x.unsqueeze(0) for x in part), is_causal=causal, scale=scale, enable_gqa=True
        )
        for part in parts
    ]
    return torch.cat(outputs, dim=2)


def _torch_logprob(
    logits: Tensor, targets: Tensor, temperature: float, group: None, *, entropy_grad: bool
) -> Tensor:
    """Return log-probabilities alone: torch gives no entropy with them."""
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--op", nargs="*", default=(), help="of --backend cuda")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    if args.backend == "cuda":
        import gpu_kernels

        gpu_kernels.show(args.op)
        return
    torch.set_num_threads(args.threads)
    print(f"{'op':24}{'size':6}{'ours ms':>10}{'reference':>12}{'torch':>10}{'torch/ours':>12}")
    for case in cases(getattr(torch, args.dtype)):
        ms = time_case(case, args.runs)
        ratio = ms["torch"] / ms["ours"]
        print(
            f"{case.op:24}{case.size:6}{ms['ours']:10.2f}{ms['reference']:12.2f}{ms['torch']:10.2f}{ratio:12.2f}"
        )


if __name__ == "__main__":
    main()
