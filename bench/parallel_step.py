"""Train steps on several devices of one host against one of them, and how much of the communication shows.

    python bench/parallel_step.py                            # every layout on four devices
    python bench/parallel_step.py --only dp4 cp4 --layers 8  # some, of smaller models
    python bench/parallel_step.py --backend cpu --tiny       # a rehearsal on the host, tables and all

The engine is the one of a run, with random weights: Qwen3-1.7B's shape, and for experts six layers of
Qwen3-30B-A3B's. Every device has the work of one, two sequences: in a share of its own or, where the model
or its sequences are divided, in one that all have in common. ``of one`` is the step of one device over that
of the row.

Communication is the time in which a kernel of the communication library runs, waiting for other ranks
included; *exposed* is the part in which nothing else runs. Both are means over ranks, of profiled steps that
are not timed. Memory is the most that torch had allocated in a step, on any rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lone_rank import init_lone_group, replace_exchanges
from train_step import SHAPES, random_fsdp, random_megatron, sample_of

from anygauge.config import Config
from anygauge.device import take_peak_memory
from anygauge.distributed.process_groups import destroy_process_group, init_process_group
from anygauge.plugins import load_plugins
from anygauge_hooks.engines import WorkerContext
from anygauge_tests.batches import TrainSample, likelihood, make_batch

DENSE, EXPERTS = "1.7b", "30b-a3b"
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
COMMUNICATION = ("ncclDevKernel", "ncclKernel", "hccl")
"""How the kernels of the libraries begin."""
ANNOTATIONS = ("nccl:", "ProfilerStep", "##")
TIMEOUT_S = 90.0
Span = tuple[int, int]


class RankError(RuntimeError):
    """A rank has failed."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is divided, and what Megatron is told."""

    model: str = DENSE
    """Name of a shape."""
    world: int = 1
    parallel: Mapping[str, int] = field(default_factory=dict)
    megatron: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of ``[train]``."""

    @property
    def dp_size(self) -> int:
        """How many ranks have a share of their own."""
        return self.world // (self.parallel.get("tensor", 1) * self.parallel.get("context", 1))


def layouts(size: int) -> dict[str, Layout]:
    """Return every layout over ``size`` devices, by name."""
    return {
        "1": Layout(),
        f"dp{size}": Layout(world=size),
        f"dp{size} overlap of gradients": Layout(world=size, megatron={"overlap_grad_reduce": True}),
        f"dp{size} overlap": Layout(world=size, megatron=OVERLAP),
        f"tp{size}": Layout(world=size, parallel={"tensor": size}),
        f"cp{size}": Layout(world=size, parallel={"context": size}),
        f"cp{size} overlap": Layout(world=size, parallel={"context": size}, megatron=OVERLAP),
        "experts 1": Layout(EXPERTS),
        f"ep{size}": Layout(EXPERTS, size, {"expert": size}),
        f"ep{size} overlap": Layout(EXPERTS, size, {"expert": size}, OVERLAP),
    }


TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 512,
}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def shape_of(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the ``config.json`` of a model."""
    shape = SHAPES[model]
    if arguments.tiny:
        shape = shape | TINY | (TINY_EXPERTS if model == EXPERTS else {})
    return shape | ({"num_hidden_layers": arguments.layers} if arguments.layers else {})


# -------------------------------------------------------------------------
# Spans of time
# -------------------------------------------------------------------------


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return spans that do not overlap, in order, and cover what was covered."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def total(spans: Iterable[Span]) -> int:
    """Return how much time spans cover."""
    return sum(end - start for start, end in merged(spans))


def exposed(communication: Sequence[Span], compute: Sequence[Span]) -> int:
    """Return the time in which something is communicated and nothing computed."""
    return total([*communication, *compute]) - total(compute)


def spans_of(profile: Any) -> tuple[list[Span], list[Span]]:
    """Return when kernels of communication and when others ran, in nanoseconds."""
    found: tuple[list[Span], list[Span]] = [], []
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        if event.device_type() == torch.autograd.DeviceType.CPU or name.startswith(ANNOTATIONS):
            continue
        start = event.start_ns()
        found[not name.startswith(COMMUNICATION)].append((start, start + event.duration_ns()))
    return found


# -------------------------------------------------------------------------
# One rank
# -------------------------------------------------------------------------


def make_config(layout: Layout, model: Path, tokens: int) -> Config:
    """Return the config of an engine."""
    return Config.model_validate(
        {
            "run": {"name": "bench", "steps": 1000, "timeout_s": TIMEOUT_S},
            "model": {"path": model},
            "data": {"train": []},
            "reward": {"function": "none"},
            "train": {
                "dtype": "bfloat16",
                "micro_batch_tokens": tokens,
                "parallel": layout.parallel,
                "megatron": layout.megatron,
                **layout.train,
            },
        }
    )


def make_samples(count: int, length: int, vocab: int, seed: int) -> list[TrainSample]:
    """Return sequences of random tokens; all but the first of each are targets."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, vocab, (count, length), generator=generator).tolist()
    return [sample_of(TrainSample, row) for row in rows]


class Steps:
    """An engine and the share of this rank."""

    def __init__(
        self, layout: Layout, model: Path, context: WorkerContext, options: Mapping[str, Any]
    ) -> None:
        from anygauge.distributed.layout import Layout as Division

        count, length = options["sequences"] * layout.world // layout.dp_size, options["length"]
        config = make_config(layout, model, count * length)
        share = Division(layout.world, config.train.parallel).dp_rank(context.rank)
        self.engine = (random_fsdp if config.train.engine == "fsdp" else random_megatron)(config, context)
        vocab: int = json.loads((model / "config.json").read_text())["vocab_size"]
        if options.get("first_rank"):  # nobody embeds the tokens of other ranks
            vocab //= layout.parallel.get("tensor", 1)
        self.batch = make_batch(make_samples(count, length, vocab, share))
        weight = 1 / (options["sequences"] * layout.world * (length - 1))
        self.batch.loss_weights = torch.full((count * (length - 1),), weight)
        self.batch.old_log_probs = self.batch.rollout_log_probs

    def take(self) -> None:
        """Take an optimizer step."""
        # another object each time is planned and packed each time
        self.engine.train_step(replace(self.batch), likelihood, temperature=1.0, entropy_grad=False)

    def release(self) -> None:
        """Give all memory back: what the engine's hooks hold would stay."""
        memory = self.engine._memory
        for tensor in [*memory._weights(), *memory._rest(), *memory._temporary()]:
            tensor.untyped_storage().resize_(0)


def measure(steps: Steps, device: Any, options: Mapping[str, Any]) -> dict[str, float]:
    """Return what a rank finds: milliseconds, and the most memory of a step in GiB.

    The engine counts memory anew in each phase: what the device tells is that of the optimizer alone.
    """
    for _ in range(options["warm_up"]):
        steps.take()
    take_peak_memory()
    times = [seconds(steps, device) for _ in range(options["steps"])]
    row = {"step": statistics.median(times) * 1e3, "memory": (take_peak_memory() or 0) / 2**30}
    return row | (communicated(steps, device, options["profiled"]) if options["profiled"] else {})


def communicated(steps: Steps, device: Any, count: int) -> dict[str, float]:
    """Return the milliseconds of communication in each of some profiled steps."""
    kinds = torch.profiler.supported_activities() - {torch.profiler.ProfilerActivity.CPU}
    with torch.profiler.profile(activities=kinds or None) as profile:
        for _ in range(count):
            steps.take()
        device.synchronize()
    communication, compute = spans_of(profile)
    return {
        "communication": total(communication) / count / 1e6,
        "exposed": exposed(communication, compute) / count / 1e6,
    }


def seconds(steps: Steps, device: Any) -> float:
    """Return how long a step takes, from when all ranks are there."""
    device.synchronize()
    dist.barrier()
    start = time.perf_counter()
    steps.take()
    device.synchronize()
    return time.perf_counter() - start


def run_rank(
    rank: int, directory: str, chosen: Mapping[str, Layout], options: Mapping[str, Any], out: Any
) -> None:
    """Take steps in every layout that has a place for this rank, and put what was found into a queue."""
    torch.set_num_threads(options["threads"])
    plugins = load_plugins()
    backend = plugins.get("register_backends", options["backend"])
    a_layout = next(iter(chosen.values()))
    config = make_config(a_layout, Path(directory, a_layout.model), options["length"])
    plugins.prepare_worker(backend, "actor", "before_vendor_import")
    device = plugins.make_device(backend, rank)
    from anygauge.engines.megatron.prepare import prepare_megatron

    if options["first_rank"]:
        replace_exchanges()
    prepare_megatron(plugins, backend)
    plugins.prepare_worker(backend, "actor", "after_config", config=config)
    for number, (name, layout) in enumerate(chosen.items()):
        if rank >= layout.world:
            continue
        shared = dist.PrefixStore(str(number), dist.FileStore(f"{directory}/store"))
        if options["first_rank"]:
            init_lone_group(layout.world)
        else:
            init_process_group(
                plugins,
                backend,
                shared,
                rank=rank,
                world_size=layout.world,
                timeout_s=TIMEOUT_S,
                single_host=True,
            )
        context = WorkerContext(
            rank=rank, world_size=layout.world, backend=backend, device=device, plugins=plugins
        )
        out.put((name, measured(layout, Path(directory), context, options)))
        destroy_process_group()
        gc.collect()
        device.empty_cache()


def measured(
    layout: Layout, models: Path, context: WorkerContext, options: Mapping[str, Any]
) -> dict[str, float]:
    """Build an engine, measure it and take it apart."""
    from megatron.core import parallel_state

    steps = Steps(layout, models / layout.model, context, options)
    try:
        return measure(steps, context.device, options)
    finally:
        steps.release()
        parallel_state.destroy_model_parallel()


# -------------------------------------------------------------------------
# The table
# -------------------------------------------------------------------------


def results(size: int, chosen: Mapping[str, Layout], options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Start the ranks and yield a row for each layout as soon as all of its ranks have measured it.

    :param chosen: Layouts of one train engine, for which a process is prepared.
    :param options: ``shapes`` are the ``config.json`` of each model. With ``first_rank`` only the first of
        all starts, on one device (``lone_rank.py``).
    :raises RankError: A rank failed; it has printed why.
    """
    plugins = load_plugins()
    network: dict[str, Any] = {"interface": None, "ip_version": "any", "timeout_s": TIMEOUT_S}
    backend = plugins.get("register_backends", options["backend"])
    engine = next(iter(chosen.values())).train.get("engine", "megatron")
    network["train_engine"] = engine
    environment = plugins.worker_env(backend, role="actor", deterministic=False, **network)
    context = mp.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        for name, shape in options["shapes"].items():
            Path(directory, name).mkdir()
            Path(directory, name, "config.json").write_text(json.dumps(shape))
        arguments = (directory, chosen, options, out)
        ranks = [
            context.Process(target=run_rank, args=(rank, *arguments), daemon=True)
            for rank in range(1 if options["first_rank"] else size)
        ]
        with patch.dict(os.environ, environment):
            for each in ranks:
                each.start()
        found: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
        try:
            worlds = {name: min(layout.world, len(ranks)) for name, layout in chosen.items()}
            for _ in range(sum(worlds.values())):
                name, row = next_row(out, ranks)
                found[name].append(row)
                if len(found[name]) == worlds[name]:
                    yield {"layout": name, **mean(found[name])}
            for each in ranks:
                each.join(10)
        finally:
            for each in ranks:
                each.kill()


def next_row(out: Any, ranks: Sequence[Any]) -> tuple[str, dict[str, float]]:
    """Return what a rank puts next. One that waits for another in vain gives up first, and says why."""
    end = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < end:
        statuses = [each.exitcode for each in ranks]  # before the look at what they have put
        try:
            row: tuple[str, dict[str, float]] = out.get(timeout=1)
        except queue.Empty:
            if any(statuses):
                break
        else:
            return row
    raise RankError(f"A rank failed or hangs: their exit codes are {statuses}.")


def mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every figure over ranks; of memory the most."""
    found = {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}
    return {**found, "memory": max(row["memory"] for row in rows)}


def line(row: Mapping[str, Any], alone: float | None, tokens: int) -> str:
    """Return a row of the table.

    :param alone: Milliseconds of the step of one device.
    :param tokens: Of each device in a step.
    """
    of_one = "-" if alone is None else f"{alone / row['step']:.2f}"
    share = f"{row['exposed'] / row['communication']:.0%}" if row["communication"] else "-"
    figures = (
        *(f"{row['step']:.1f}", f"{tokens / row['step'] * 1e3:.0f}", of_one),
        *(f"{row['communication']:.1f}", f"{row['exposed']:.1f}", share, f"{row['memory']:.1f}"),
    )
    return f"| {row['layout']} | {' | '.join(figures)} |"


HEAD = (
    "| layout | step, ms | tokens/s of a device | of one | communication, ms | exposed, ms | share exposed | "
    "memory, GiB |\n|---|---|---|---|---|---|---|---|"
)


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description="Train steps on several devices")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--only", nargs="+", help="beginnings of the layouts' names")
    parser.add_argument("--layers", type=int, help="of both models")
    parser.add_argument("--tiny", action="store_true", help="models of no size")
    parser.add_argument("--sequences", type=int, default=2, help="of each device")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=7, help="that are timed; the median counts")
    return parser.parse_args()


def main() -> None:
    """Measure and print every layout."""
    arguments = parse()
    chosen = {
        name: layout
        for name, layout in layouts(arguments.devices).items()
        if not arguments.only or name.startswith(tuple(arguments.only))
    }
    tokens, alone = arguments.sequences * arguments.length, {}
    options = {
        "backend": arguments.backend,
        "shapes": {name: shape_of(name, arguments) for name in (DENSE, EXPERTS)},
        "threads": 1 if arguments.tiny else 4,
        "warm_up": 3,
        "profiled": 2,
        "first_rank": False,
        **{name: getattr(arguments, name) for name in ("sequences", "length", "steps")},
    }
    print(f"torch {torch.__version__}, {arguments.devices} devices, {tokens} tokens of each in a step")
    print(HEAD, flush=True)
    for row in results(arguments.devices, chosen, options):
        model = chosen[row["layout"]].model
        if chosen[row["layout"]].world == 1:
            alone[model] = row["step"]
        print(line(row, alone.get(model), tokens), flush=True)


if __name__ == "__main__":
    main()
