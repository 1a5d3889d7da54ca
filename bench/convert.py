"""How fast weights are converted, beside reading and writing the same bytes as they are.

    python bench/convert.py                    # 1 GB, both directions, one process
    python bench/convert.py --gb 4 --workers 4

A Qwen3 of random bits is made under runs/. Each round copies its files with safetensors (read every tensor,
write every tensor) and converts it to Megatron and back, each of the three first in turn; the shortest times
are compared, with everything written to the disk before the clock stops. Starting Python and importing torch
is left out on both sides. Ends with status 1 if a direction is slower than the goal of 40 % of the copy.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from anygauge.disk import tree_to_disk
from anygauge.engines.megatron.conversion.convert import hf_to_megatron, megatron_to_hf
from anygauge.engines.megatron.weights.mapping import hf_tensors, model_rules
from anygauge.plugins import Plugins, load_plugins

ROOT = Path(__file__).parents[1] / "runs" / "bench-convert"
GOAL = 0.4
HIDDEN, WIDTH, HEADS, GROUPS, HEAD, VOCAB = 2048, 6144, 16, 8, 128, 32_000


def config(layers: int) -> dict[str, object]:
    """Return a Qwen3 of the width of its 1.7B size."""
    return {
        **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB},
        **{"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": layers, "head_dim": HEAD},
        **{"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "rms_norm_eps": 1e-6},
        **{"max_position_embeddings": 4096, "tie_word_embeddings": True, "dtype": "bfloat16"},
    }


def make_source(directory: Path, gigabytes: float, plugins: Plugins) -> int:
    """Write the checkpoint and return its bytes."""
    per_layer = 2 * (HIDDEN * HEAD * 2 * (HEADS + GROUPS) + 3 * HIDDEN * WIDTH)
    hf = config(max(1, round(gigabytes * 1e9 / per_layer)))
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf))
    shapes = {
        "linear_qkv.weight": (HEAD * (HEADS + 2 * GROUPS), HIDDEN),
        "linear_proj.weight": (HIDDEN, HEAD * HEADS),
        "linear_fc1.weight": (2 * WIDTH, HIDDEN),
        "linear_fc2.weight": (HIDDEN, WIDTH),
        "word_embeddings.weight": (VOCAB, HIDDEN),
        "q_layernorm.weight": (HEAD,),
        "k_layernorm.weight": (HEAD,),
    }
    canonical = (
        (rule, torch.empty(shapes.get(".".join(rule.canonical.split(".")[-2:]), (HIDDEN,)), device="meta"))
        for rule in model_rules(plugins.model(["Qwen3ForCausalLM"]), hf)
    )
    tensors = {
        name: torch.randint(-(2**15), 2**15, tensor.shape, dtype=torch.int16).view(torch.bfloat16)
        for name, tensor in hf_tensors(canonical)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def copy(source: Path, target: Path) -> None:
    """Read and write every tensor."""
    target.mkdir()
    with safe_open(source / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    tree_to_disk(target)


def seconds(function: Callable[[], object]) -> float:
    """Return how long a call takes, with nothing left over from before."""
    os.sync()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def one_round(first: int, plugins: Plugins, workers: int) -> dict[str, float]:
    """Return the seconds of the copy and of each direction.

    :param first: Which of them comes first: a disk may be quicker, or slower, after a pause.
    """
    source, megatron, target = ROOT / "source", ROOT / "megatron", ROOT / "target"
    tasks: list[tuple[str, Callable[[], object]]] = [
        ("copy", lambda: copy(source, target)),
        ("to Megatron", lambda: hf_to_megatron(source, target, plugins, workers=workers)),
        ("to HF", lambda: megatron_to_hf(megatron, target, plugins, workers=workers)),
    ]
    found = {}
    for name, task in [*tasks[first:], *tasks[:first]]:
        found[name] = seconds(task)
        shutil.rmtree(target)
    return {name: found[name] for name, _ in tasks}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="how fast weights are converted")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    plugins = load_plugins()
    shutil.rmtree(ROOT, ignore_errors=True)
    try:
        size = make_source(ROOT / "source", arguments.gb, plugins)
        hf_to_megatron(ROOT / "source", ROOT / "megatron", plugins, workers=arguments.workers)
        rounds = [one_round(number % 3, plugins, arguments.workers) for number in range(arguments.rounds)]
    finally:
        shutil.rmtree(ROOT, ignore_errors=True)
    plain = min(each["copy"] for each in rounds)
    print(f"{size / 1e9:.2f} GB, {arguments.workers} processes, the shortest of {arguments.rounds} rounds")
    slow = False
    for name in rounds[0]:
        shortest = min(each[name] for each in rounds)
        slow |= plain / shortest < GOAL
        print(
            f"{name:>12}  {shortest:6.2f} s  {size / 1e9 / shortest:5.2f} GB/s"
            f"  {plain / shortest:7.0%} of the copy"
        )
    sys.exit(slow)


if __name__ == "__main__":
    main()
