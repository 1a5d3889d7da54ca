"""A train step of a real size on one accelerator, beside transformers with and without Liger.

    python bench/train_step.py --backend cuda                       # the shape of Qwen3-4B, 2 x 4096 tokens
    python bench/train_step.py --backend cuda --lengths 4096 4096 4096 4096
    python bench/train_step.py --backend cuda --shape 0.6b --sides anygauge liger
    python bench/train_step.py --backend cuda --sides anygauge --profile   # where the time goes
    python bench/train_step.py --backend cuda --sides fsdp lora megatron-lora liger   # LoRA
    python bench/train_step.py --backend cuda --sides anygauge images frozen   # 8 images of 1 megapixel
    python bench/train_step.py --backend cuda --sides anygauge prefix --lengths $(yes 2304 | head -32) \
        --prompt 2048 --group 8 --micro-batch 9216    # groups with one prompt each
    python bench/train_step.py --shape tiny --lengths 64 32            # that it runs, on the host
    python bench/train_step.py --shape tiny --lengths 64 32 --pixels 32 --sides anygauge images frozen

Weights and tokens are random. Every side computes the mean likelihood of all tokens, clips the gradient at 1
and takes a step of AdamW, without recomputing anything. `anygauge` (the Megatron engine) and `fsdp` train in
bfloat16 with float32 main gradients and master weights; `liger` and `transformers` hold everything in
bfloat16, with torch's fused AdamW, and `liger-masters` is Liger with float32 masters. These get sequences
of unequal lengths as rows that are filled up. Each side has a process of its own; the ceiling is a product of
two matrices of 8192 x 8192 in it. Operations are those of the model, three times its forward pass.

`lora` is the FSDP engine with adapters of rank 16 on all layers but the output, `qlora` the same on a 4-bit
base, and `megatron-lora` the Megatron engine: their operations are twice the forward pass, since the base
gets no gradients.

`prefix` is `anygauge` with `train.prefix_packing`. With `--prompt` that many tokens of each row are a prompt,
which `--group` rows in succession share. Tokens and operations are those of whole rows on both sides.

`images` is a step of Qwen3-VL in anygauge, whose decoder has the same shape and as many tokens: most hold the
places of images. `frozen` does not train the tower, whose operations are counted once. Every image is another
one, and the likelihood is that of the text between them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

SIDES = (
    *("anygauge", "liger", "transformers", "fsdp", "lora", "qlora", "megatron-lora", "liger-masters"),
    *("images", "frozen", "prefix"),
)
FSDP = ("fsdp", "lora", "qlora")
LORA = ("lora", "qlora", "megatron-lora")
SEEING = ("images", "frozen")
WARM_UP = 3
READY = "ready"
"""Printed with ``--wait`` before the first step."""
GIB = 1 << 30

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def shape(hidden: int, layers: int, heads: int, key_heads: int, mlp: int, **others: Any) -> dict[str, Any]:
    """Return a ``config.json``."""
    return {
        **DENSE,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "intermediate_size": mlp,
        **others,
    }


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "router_aux_loss_coef": 0.0,
}
SHAPES = {
    "4b": shape(2560, 36, 32, 8, 9728),
    "1.7b": shape(2048, 28, 16, 8, 6144),
    "0.6b": shape(1024, 28, 16, 8, 3072),
    "135m": shape(576, 30, 9, 3, 1536, head_dim=64, vocab_size=49_152),
    "30b-a3b": shape(2048, 6, 32, 4, 6144, **EXPERTS),
    "30b-a3b-whole": shape(2048, 48, 32, 4, 6144, **EXPERTS),
    "thin": shape(128, 36, 4, 2, 256, head_dim=32, vocab_size=512),
    "tiny": shape(64, 2, 4, 2, 128, head_dim=16, vocab_size=512),
}
"""``30b-a3b`` has 6 of the 48 layers; a step of ``thin`` takes as long as the host needs for 36."""
TOWERS = {
    "4b": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 2560,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
    "tiny": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
}
"""Vision configs: that of Qwen3-VL-4B, and of a tiny model for the host."""
SPECIAL = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def with_tower(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a Qwen3-VL whose decoder is that of a shape."""
    text = {key: value for key, value in SHAPES[name].items() if key != "architectures"}
    half = text["head_dim"] // 2
    sections = [half - 2 * (half * 5 // 16), *[half * 5 // 16] * 2]
    rope = {**text["rope_parameters"], "mrope_section": sections, "mrope_interleaved": True}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {**text, "model_type": "qwen3_vl_text", "rope_parameters": rope},
        "vision_config": {
            "model_type": "qwen3_vl",
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            **TOWERS[name],
        },
        **{key: text["vocab_size"] - 1 - place for place, key in enumerate(SPECIAL)},
    }


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ``config.json`` of the one side of a process."""
    return with_tower(args.shape) if args.sides[0] in SEEING else SHAPES[args.shape]


# -------------------------------------------------------------------------
# Sides
# -------------------------------------------------------------------------


def _lora(side: str) -> dict[str, Any]:
    """Return the table of LoRA of a side."""
    if side not in LORA:
        return {}
    return {"rank": 16, "base": "nf4"} if side == "qlora" else {"rank": 16}


@contextmanager
def anygauge_step(args: argparse.Namespace, folder: Path) -> Iterator[Callable[[], object]]:
    """Yield a step of the train engine, packing included."""
    import torch
    import torch.distributed as dist

    from anygauge.engines.megatron.prepare import prepare_megatron
    from anygauge.plugins import load_plugins
    from anygauge_hooks.engines import WorkerContext
    from anygauge_tests.batches import TrainSample, likelihood, make_batch
    from anygauge_tests.engine_config import engine_config

    plugins = load_plugins()
    backend = plugins.get("register_backends", args.backend)
    prepare_megatron(plugins, backend)
    device = plugins.make_device(backend, 0)
    dist.init_process_group(backend.dist_backend, store=dist.HashStore(), rank=0, world_size=1)
    train = {"lr": 1e-5, "dtype": args.dtype, "micro_batch_tokens": args.micro_batch or sum(args.lengths)}
    side = args.sides[0]
    config = engine_config(
        {"path": str(folder), "modalities": ["image"] if side in SEEING else []},
        train={
            **train,
            **({"engine": "fsdp"} if side in FSDP else {"megatron": json.loads(args.megatron)}),
            "lora": _lora(side),
            "recompute": args.recompute,
            "prefix_packing": side == "prefix",
            "freeze": ["vision"] if side == "frozen" else [],
        },
    )
    pictures = ImageStore(args.pixels)
    context = WorkerContext(
        rank=0, world_size=1, backend=backend, device=device, plugins=plugins, media=pictures
    )
    engine = (random_fsdp if side in FSDP else random_megatron)(config, context)
    if side in SEEING:
        samples = [sample_of(TrainSample, *row) for row in vision_rows(args)]
    else:
        samples = [sample_of(TrainSample, row, prompt=args.prompt) for row in token_rows(args)]
    count = sum(sum(sample.loss_mask) for sample in samples)

    batch = make_batch(
        samples, loss_weights=torch.tensor([each / count for s in samples for each in s.loss_mask])
    )
    batch.old_log_probs = batch.rollout_log_probs
    # another object each time is planned and packed each time
    yield lambda: engine.train_step(replace(batch), likelihood, temperature=1.0, entropy_grad=False)
    dist.destroy_process_group()


def random_megatron(config: Any, context: Any) -> Any:
    """Return the Megatron engine with random weights."""
    from anygauge.engines.megatron.engine import MegatronEngine

    return MegatronEngine(config, context, build=random_policy)


def random_fsdp(config: Any, context: Any) -> Any:
    """Return the FSDP engine with random weights, in the place of those of a file."""
    import torch

    from anygauge.engines.fsdp import model
    from anygauge.engines.fsdp.engine import FsdpEngine
    from anygauge.engines.fsdp.weights import StoredNames, base_shards

    def fill(root: Any, path: Path) -> dict[str, StoredNames]:
        torch.manual_seed(0)
        for shard in base_shards(root):
            with shard.writing() as rows:
                rows.normal_(std=0.02) if rows.dim() > 1 else rows.fill_(1.0)
        return {}

    model.load_weights = fill
    model.warn_of_unused = model.log_frozen_experts = lambda *_: None
    return FsdpEngine(config, context)


def random_policy(*args: Any) -> Any:
    """Build a model with random weights, of which there is no file."""
    import torch

    from anygauge.engines.megatron.model import build_policy

    policy = build_policy(*args, load=False)
    torch.manual_seed(0)
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.02)
    return policy


def sample_of(kind: Any, tokens: list[int], media: Sequence[Any] = (), prompt: int = 1) -> Any:
    """Return a sample of whose tokens all but the first ones are a response, without places of images."""
    length = len(tokens) - prompt
    mask = [1] * len(tokens)
    for start, count in (span for each in media for span in each.spans):
        mask[start : start + count] = [0] * count
    return kind(
        tokens=tokens,
        response_length=length,
        loss_mask=mask[prompt:],
        rollout_log_probs=[0.0] * length,
        advantages=[1.0] * length,
        media=tuple(media),
    )


class ImageStore:
    """A store that makes the image of a key when it is first asked for it.

    :param side: In pixels.
    """

    def __init__(self, side: int) -> None:
        self._side = side
        self._made: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        """Return an image of noise."""
        import numpy as np

        from anygauge_hooks.media import Content

        if key not in self._made:
            noise = np.random.default_rng(int(key)).integers(256, size=(self._side, self._side, 3))
            self._made[key] = Content("image", noise.astype(np.uint8))
        return self._made[key]


def vision_rows(args: argparse.Namespace) -> list[tuple[list[int], list[Any]]]:
    """Return the tokens and images of each row: images first, then text to the row's length."""
    config = with_tower(args.shape)
    image, _, start, end = (config[key] for key in SPECIAL)
    rows = []
    for place, text in enumerate(token_rows(args)):
        tokens, media = [text[0]], []
        for number in range(place, args.images, len(args.lengths)):
            media.append(picture_at(args, number, len(tokens) + 1))
            tokens += [start, *[image] * media[-1].num_tokens, end]
        if len(tokens) > len(text):
            raise SystemExit(
                f"{len(media)} images of {args.pixels} pixels take more than {len(text)} tokens."
            )
        rows.append((tokens + [min(token, end - 1) for token in text[len(tokens) :]], media))
    return rows


def picture_at(args: argparse.Namespace, number: int, start: int) -> Any:
    """Return an image whose places begin at a token."""
    from anygauge_hooks.media import Media

    grid = args.pixels // TOWERS[args.shape]["patch_size"]
    return Media(kind="image", key=str(number), spans=((start, (grid // 2) ** 2),), grid=(1, grid, grid))


@contextmanager
def transformers_step(args: argparse.Namespace, folder: Path) -> Iterator[Callable[[], object]]:
    """Yield a step as one writes it with transformers, with Liger's kernels or without."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    side = args.sides[0]
    if side.startswith("liger"):
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3, apply_liger_kernel_to_qwen3_moe

        apply_liger_kernel_to_qwen3()
        apply_liger_kernel_to_qwen3_moe()
    device = torch.device("cuda" if args.backend == "cuda" else "cpu")
    with device:
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder),
            dtype=getattr(torch, args.dtype),
            attn_implementation="sdpa",
        )
    model.train()
    own = list(model.parameters())
    masters = [each.detach().float() for each in own] if side.endswith("masters") else own
    optimizer = torch.optim.AdamW(masters, lr=1e-5, weight_decay=0.0, fused=True)
    inputs, labels = filled_rows(token_rows(args), device)
    labels[:, : args.prompt] = -100

    def step() -> None:
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        if masters is not own:
            for master, each in zip(masters, own, strict=True):
                master.grad, each.grad = each.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        if masters is not own:
            with torch.no_grad():
                torch._foreach_copy_(own, masters)

    yield step


def filled_rows(rows: Sequence[list[int]], device: Any) -> tuple[dict[str, Any], Any]:
    """Return ids, and a mask where rows differ in length, and labels."""
    import torch

    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    inputs = {"input_ids": ids} | ({} if mask.all() else {"attention_mask": mask})
    return inputs, ids.masked_fill(mask == 0, -100)


def token_rows(args: argparse.Namespace) -> list[list[int]]:
    """Return the same random tokens to every side."""
    import torch

    generator = torch.Generator().manual_seed(0)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    rows = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in args.lengths]
    prompts = [rows[number - number % args.group][: args.prompt] for number in range(len(rows))]
    return [prompt + row[args.prompt :] for prompt, row in zip(prompts, rows, strict=True)]


# -------------------------------------------------------------------------
# Measuring
# -------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds, GiB and the ceiling of one side, in this process."""
    own = ("anygauge", "prefix", *FSDP, *LORA, *SEEING)
    side = anygauge_step if args.sides[0] in own else transformers_step
    with tempfile.TemporaryDirectory() as name:
        Path(name, "config.json").write_text(json.dumps(config_of(args)))
        with side(args, Path(name)) as step:
            if args.wait:
                print(READY, flush=True)
                sys.stdin.readline()
            for _ in range(WARM_UP):
                step()
            with watched() as state:
                times = [seconds(step) for _ in range(args.runs)]
            found = {"ms": statistics.median(times) * 1e3, "gib": peak_gib(), **state, "ceiling": ceiling()}
            if args.profile:
                profile(step)
    return found


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Yield what becomes the mean power and clock of a GPU in the meantime; 0 where nobody tells."""
    import torch

    seen: list[tuple[float, float]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            seen.append((torch.cuda.power_draw() / 1e3, torch.cuda.clock_rate()))

    thread = threading.Thread(target=watch)
    state = {"watts": 0.0, "mhz": 0.0}
    if torch.cuda.is_available() and importlib.util.find_spec("pynvml") is not None:
        thread.start()
    yield state
    done.set()
    if seen:
        thread.join()
        state["watts"], state["mhz"] = (statistics.mean(column) for column in zip(*seen, strict=True))


def seconds(step: Callable[[], object]) -> float:
    """Return how long a call takes until the device is done."""
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait for the accelerator, if there is one."""
    import torch

    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def peak_gib() -> float:
    """Return the most memory that was allocated on the device, also where the engine counts it by phase."""
    import torch

    from anygauge.device import peak_memory_by_phase

    if not torch.accelerator.is_available():
        return 0.0
    return max(torch.accelerator.max_memory_allocated(), *peak_memory_by_phase().values(), 0) / GIB


def ceiling() -> float:
    """Return the operations per second of a large product in bfloat16."""
    import torch

    if not torch.accelerator.is_available():
        return 0.0
    device = torch.accelerator.current_accelerator()
    a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16)
    times = [seconds(lambda: a @ b) for _ in range(30)]
    return 2 * 8192**3 / statistics.median(times)


def profile(step: Callable[[], object]) -> None:
    """Print the kernels that take most of a step, and when none runs; the profiler warms up first."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    schedule = torch.profiler.schedule(wait=0, warmup=2, active=1)
    with torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True) as seen:
        for _ in range(3):
            took = seconds(step)
            seen.step()
    kernels = [row for row in seen.key_averages() if is_kernel(row)]
    total = sum(row.self_device_time_total for row in kernels)
    print(f"{took * 1e3:.1f} ms, kernels {total / 1e3:.1f} ms", file=sys.stderr)
    for gap, start, before, after in gaps(seen.events())[:12]:
        print(
            f"{gap / 1e3:8.2f} ms idle at {start / 1e3:7.1f}: {before[:48]} | {after[:48]}", file=sys.stderr
        )
    for row in sorted(kernels, key=lambda row: -row.self_device_time_total)[:45]:
        print(f"{row.self_device_time_total / 1e3:9.2f} ms {row.count:6} {row.key[:110]}", file=sys.stderr)


def is_kernel(event: Any) -> bool:
    """Return whether an event, or a row of them, is work of the device, and no mark over it."""
    import torch

    return event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation


def gaps(events: Any) -> list[tuple[float, float, str, str]]:
    """Return how many microseconds no kernel ran, since when, and between which two; the longest first."""
    kernels = [each for each in events if is_kernel(each)]
    kernels.sort(key=lambda each: each.time_range.start)
    found: list[tuple[float, float, str, str]] = []
    first = last = kernels[0] if kernels else None
    for each in kernels:
        since = last.time_range.end
        if each.time_range.start > since:
            gap = each.time_range.start - since
            found.append((gap, since - first.time_range.start, last.name, each.name))
        if each.time_range.end > since:
            last = each
    return sorted(found, reverse=True)


def operations(config: dict[str, Any], lengths: Sequence[int]) -> float:
    """Return the operations of a step: products of matrices, and attention to half of each square."""
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    attention = hidden * size * (2 * heads + 2 * config["num_key_value_heads"])
    chosen = config.get("num_experts_per_tok")
    mlp = 3 * hidden * (chosen * config["moe_intermediate_size"] if chosen else config["intermediate_size"])
    router = hidden * config["num_experts"] if chosen else 0
    layer = attention + mlp + router
    weights = config["num_hidden_layers"] * layer + config["vocab_size"] * hidden
    scores = config["num_hidden_layers"] * heads * size * 2 * sum(length**2 for length in lengths)
    return 3.0 * (2 * weights * sum(lengths) + scores)


def operations_of(side: str, args: argparse.Namespace) -> float:
    """Return the operations of a step of a side, with those of the tower where it has one."""
    total = operations(SHAPES[args.shape], args.lengths) * (2 / 3 if side in LORA else 1)
    if side not in SEEING:
        return total
    from anygauge_models.qwen3_vl.vision import flops

    tower = args.images * flops(with_tower(args.shape), picture_at(args, 0, 0))
    return total + tower * (1 if side == "frozen" else 3)


def command_of(side: str, args: argparse.Namespace) -> list[str]:
    """Return the command that measures one side and prints its figures as JSON in its last line."""
    command = [sys.executable, __file__, "--alone", "--sides", side, "--shape", args.shape]
    names = "backend", "dtype", "runs", "megatron", "recompute", "micro_batch", "images", "pixels"
    for name in (*names, "prompt", "group"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    return [*command, "--lengths", *map(str, args.lengths), *["--profile"] * args.profile]


def in_own_process(side: str, args: argparse.Namespace) -> dict[str, float] | None:
    """Return the figures of one side, or ``None`` where it failed; its last words are printed."""
    if side.startswith("liger") and importlib.util.find_spec("liger_kernel") is None:
        print("liger is not installed", file=sys.stderr)
        return None
    done = subprocess.run(command_of(side, args), capture_output=True, text=True, check=False)
    if args.profile:
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        print(f"{side} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def report(args: argparse.Namespace, side: str, found: dict[str, float], first: dict[str, float]) -> None:
    """Print one row, beside the first."""
    tokens = sum(args.lengths)
    share = f"{found['rate'] / found['ceiling']:8.1%}" if found["ceiling"] else "       -"
    ratio, speed = found["ms"] / first["ms"], found["rate"] / first["rate"]
    print(
        f"{side:14}{found['ms']:10.1f}{tokens / found['ms'] * 1e3:12.0f}{found['rate'] / 1e12:10.0f}{share}"
        f"{found['gib']:8.1f}{found['watts']:7.0f}{found['mhz']:7.0f}{ratio:11.2f}{speed:13.2f}",
        flush=True,
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 4096])
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES[:4]))
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--micro-batch", type=int, default=0, help="tokens; all at once by default")
    parser.add_argument("--megatron", default="{}", help="train.megatron of the engine, as JSON")
    parser.add_argument("--recompute", default="none", help="train.recompute of the engine")
    parser.add_argument("--images", type=int, default=8, help="of the sides that see, in all rows together")
    parser.add_argument("--pixels", type=int, default=992, help="of each side of an image")
    parser.add_argument("--prompt", type=int, default=1, help="tokens of each row before its response")
    parser.add_argument("--group", type=int, default=1, help="rows in succession that have the same prompt")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help="with --alone: a line of input starts the steps")
    return parser


def main() -> int:
    """Measure one side, or print the table of all."""
    args = make_parser().parse_args()
    if args.alone:
        print(json.dumps(measure(args)))
        return 0
    lengths = " + ".join(map(str, args.lengths))
    print(f"{args.shape}, {lengths} tokens, {args.backend}, {args.dtype}, median of {args.runs}")
    print(
        f"{'side':14}{'ms':>10}{'tokens/s':>12}{'TFLOP/s':>10}{'ceiling':>8}{'GiB':>8}{'W':>7}{'MHz':>7}"
        f"{'time/first':>11}{'FLOP/s/first':>13}",
        flush=True,
    )
    rows: list[dict[str, float]] = []
    for side in args.sides:
        if found := in_own_process(side, args):
            rows.append({**found, "rate": operations_of(side, args) / found["ms"] * 1e3})
            report(args, side, rows[-1], rows[0])
    return 0 if len(rows) == len(args.sides) else 1


if __name__ == "__main__":
    sys.exit(main())
