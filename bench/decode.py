"""Measure the embedded engine's decoding with graphs and without, random weights of Qwen3's shapes.

Run as ``python bench/decode.py [--shape 0.6b] [--batches 1 16 64] [--tokens 256]`` on the device. Both ways
are timed in one process, after a short call of each; without graphs for ``--plain-tokens``, since it is slow.
A sample is *same* if it has the tokens that are drawn without graphs; differences of log-probs count up to
where two samples part. The rows ``again`` compare with the very pass that is recorded, queued anew for each
token: what differs there more than between two such runs is the fault of a graph.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anygauge.plugins import load_plugins, select_backend
from anygauge.serving.embedded.engine import TransformersEngine
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.types import CaptureGraph, Device
from anygauge_tests.embedded import sample_all

SMALL = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960}
MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 32}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"vocab_size": 512},
    "0.6b": SMALL
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": SMALL
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "moe": SMALL
    | MOE
    | {"hidden_size": 1024, "moe_intermediate_size": 384, "num_hidden_layers": 8, "num_attention_heads": 16},
}
PROMPT = 128
"""Tokens of the longest prompt; others are up to a quarter shorter."""


@dataclass(frozen=True)
class Again:
    """Stands for a graph: calls the function."""

    work: Callable[[], None]

    def replay(self) -> None:
        """Call it again."""
        self.work()


def write_model(directory: Path, shape: str, device: torch.device) -> Path:
    """Write a Hugging Face directory with weights drawn on the device."""
    path = tiny_qwen3(directory)
    config = json.loads((path / "config.json").read_text())
    config |= {"vocab_size": 151_936, "layer_types": None, "initializer_range": 0.04} | SHAPES[shape]
    (path / "config.json").write_text(json.dumps(config))
    with device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
        # as sharp as a trained model: of flat distributions any rounding draws another token
        model.model.norm.weight.data.mul_(8)
    model.save_pretrained(path)
    return path


def prompts(vocab_size: int) -> list[Prompt]:
    """Return four prompts of unlike lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = (PROMPT, PROMPT - 5, PROMPT - 17, PROMPT * 3 // 4)
    ids = (torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths)
    return [Prompt(index=index, tokens=tuple(tokens), text="") for index, tokens in enumerate(ids)]


def generate(engine: TransformersEngine, batch: int, tokens: int) -> tuple[list[Sample], float]:
    """Return ``batch`` samples of up to four prompts, and the seconds that they took."""
    some = prompts(engine._vocab_size)[: min(4, batch)]
    seeds = [list(range(index, batch, len(some))) for index in range(len(some))]
    start = time.perf_counter()
    groups = sample_all(engine, some, SamplingParams(max_new_tokens=tokens, ignore_eos=True), seeds)
    return [sample for group in groups for sample in group], time.perf_counter() - start


def compare(found: list[Sample], expected: list[Sample]) -> tuple[int, float]:
    """Return how many samples have the same tokens, and by how much the log-probs of shared ones differ."""
    same, largest = 0, 0.0
    for one, other in zip(found, expected, strict=True):
        pairs = zip(one.response_tokens, other.response_tokens, one.log_probs, other.log_probs, strict=True)
        for mine, theirs, log_prob, wanted in pairs:
            if mine != theirs:
                break
            largest = max(largest, abs(log_prob - wanted))
        same += one.response_tokens == other.response_tokens
    return same, largest


def rows(path: Path, device: Device, args: argparse.Namespace, dtype: str) -> Iterator[str]:
    """Measure a precision; yield the rows of the table."""

    def open_engine(capture: CaptureGraph | None) -> TransformersEngine:
        options = {"dtype": getattr(torch, dtype), "device": device.torch_device}
        return TransformersEngine(path, **options, max_batch_tokens=10**6, capture=capture)

    def row(batch: int, text: str, found: list[Sample], expected: list[Sample]) -> str:
        same, difference = compare(found, expected)
        return f"{args.shape:5} {dtype:9} {batch:5} {text:33} {same:5}/{batch:<4} {difference:9.2e}"

    plain, graphs = open_engine(None), open_engine(device.capture_graph)
    short = args.plain_tokens
    for batch in args.batches:
        generate(plain, batch, 4)
        expected, before = generate(plain, batch, short)
        found, _ = generate(graphs, batch, short)
        _, after = generate(graphs, batch, args.tokens)
        rates = batch * short / before, batch * args.tokens / after
        text = f"{rates[0]:11.0f} {rates[1]:12.0f} {rates[1] / rates[0]:7.2f}x"
        yield row(batch, text, found, expected)
    again = open_engine(Again)
    expected, _ = generate(again, batch, short)
    yield row(batch, "     graphs and again", found, expected)
    yield row(batch, "     again and again", generate(again, batch, short)[0], expected)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--plain-tokens", type=int, default=48)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    args = parser.parse_args()
    plugins = load_plugins()
    backend, _ = select_backend(plugins)
    device = plugins.make_device(backend, 0)
    if device.capture_graph is None:
        raise SystemExit(f"{backend.name} records no graphs.")
    with tempfile.TemporaryDirectory() as directory:
        path = write_model(Path(directory), args.shape, device.torch_device)
        print("shape dtype     batch without t/s     with t/s   ratio              same    log-prob")
        for dtype in args.dtypes:
            for row in rows(path, device, args, dtype):
                print(row, flush=True)


if __name__ == "__main__":
    main()
