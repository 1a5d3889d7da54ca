"""Compare log-probs under rotary angles in float32 and in bfloat16 with those of a server, on the host.

The NPU's kernel rounds cosines and sines to bfloat16 (``anygauge_npu.rotary``), and so does SGLang on NPUs.
This computes what that does to the difference between a trainer's and a server's log-probs: a random Qwen3 in
bfloat16 scores the same tokens with three rotations. No NPU is involved.

    .venv/bin/python bench/rotary_rounding.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

TOKENS, HEAD, VOCAB, BASE = 512, 64, 512, 1e6
STARTS = (0, 7_000, 30_000)
"""Position of the first token."""
SEEDS = range(4)
Rotation = Callable[[Tensor, Tensor, Tensor], Tensor]


def swapped(x: Tensor) -> Tensor:
    """Return ``(-b, a)`` of two halves ``(a, b)``."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate in float32 and round the result."""
    return (x.float() * cos + swapped(x).float() * sin).to(x.dtype)


def rounded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Round the angles first, as the NPU's kernel is given them."""
    return exact(x, cos.to(x.dtype).float(), sin.to(x.dtype).float())


def served(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute in bfloat16 throughout, as SGLang's plain rotation and transformers do."""
    return x * cos.to(x.dtype) + swapped(x) * sin.to(x.dtype)


def log_probs(model: Any, tokens: Tensor, start: int, rotation: Rotation) -> Tensor:
    """Return the log-probs of the tokens from position ``start`` on."""
    frequencies = BASE ** -(torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(start, start + len(tokens)), frequencies).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    modeling_qwen3.apply_rotary_pos_emb = lambda q, k, *_, **__: (
        rotation(q, cos, sin),
        rotation(k, cos, sin),
    )
    with torch.no_grad():
        logits = model(tokens[None], use_cache=False).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]


def model_of(seed: int) -> Any:
    """Return a random model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=HEAD,
        intermediate_size=512,
        initializer_range=0.05,
    )
    return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def main() -> None:
    """Print the mean difference from the server for each position and choice of the trainer's."""
    print("| first position | float32 angles | rounded angles |\n|---|---|---|")
    for start in STARTS:
        gaps: dict[Rotation, list[Tensor]] = {exact: [], rounded: []}
        for seed in SEEDS:
            model, tokens = model_of(seed), torch.randint(VOCAB, (TOKENS,))
            server = log_probs(model, tokens, start, served)
            for rotation, found in gaps.items():
                found.append((log_probs(model, tokens, start, rotation) - server).abs())
        means = (torch.cat(found).mean() for found in gaps.values())
        print(f"| {start} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")


if __name__ == "__main__":
    main()
