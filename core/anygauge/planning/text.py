"""A plan as aligned tables of at most 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from anygauge.planning.memory import GIB, PROCESS, ServerMemory
from anygauge.planning.plan import Plan
from anygauge.planning.rates import RATES

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["as_json", "short_lines", "table_lines"]

Rows = Sequence[Sequence[str]]
_PARTS = {
    "weights": "weights",
    "masters": "float32 weights, or what bfloat16 ones lack",
    "gradients": "gradients",
    "moments": "Adam's moments",
    "others": "rollout engine in the process, critic",
    "activations": "activations",
    "logits": "logits kept by the loss",
    "work": "temporary",
}
_SECONDS = {
    "generate": "rollout",
    "log_probs": "log-prob passes",
    "train": "optimizer steps",
    "sync": "weight sync",
    "sleep": "sleep and wake-up",
}


def table_lines(config: Config, plan: Plan) -> Iterator[str]:
    """Yield the whole plan."""
    yield from head_lines(config, plan)
    yield from _section("Layout", _layout(config, plan))
    yield from _section("Batch, with the longest samples", _batches(plan))
    if plan.layout.trains:
        yield from _section("Device memory of the fullest training rank, GiB", _memory(plan))
    yield from _section("Device memory by phase, GiB", _phases(plan))
    for group, server in zip(plan.layout.servers, plan.servers, strict=False):  # none of external ones
        kind = "" if group.kind == "regular" else f" for {group.kind}"
        yield from _section(f"Rollout engine{kind}, GiB on each of its devices", _server(server))
    if plan.layout.trains:
        yield from _section("Host and disk, GiB", _host(config, plan))
    if plan.seconds:
        yield from _section(_time_title(plan), _time(plan))
    else:
        yield ""
        yield f"No expected time: rates were measured on {', '.join(RATES)} only (--gpu)."


def short_lines(config: Config, plan: Plan) -> Iterator[str]:
    """Yield the plan in a few lines, for the head of a dry run."""
    yield from head_lines(config, plan)
    batches, limit = plan.batches, plan.assumptions.device_bytes
    yield (
        f"  {batches.prompts} prompts, {batches.samples} samples and at most {batches.tokens:,} tokens a "
        f"step; {batches.mini_batches} x {batches.micro_batches} micro-batches on each rank"
    )
    of = f" of {limit / GIB:.1f}" if limit else ""
    by_phase = ", ".join(f"{name} {sum(both) / GIB:.1f}" for name, both in plan.phases.items())
    yield f"  device memory, GiB{of}: {by_phase}; checkpoint {plan.checkpoint / GIB:.1f}"
    if plan.total_seconds is not None:
        parts = ", ".join(f"{_SECONDS[name]} {seconds:.1f}" for name, seconds in plan.seconds.items())
        yield f"  at most {plan.total_seconds:.1f} s a step: {parts}"


def head_lines(config: Config, plan: Plan) -> Iterator[str]:
    """Yield what is planned for."""
    given, layout = plan.assumptions, plan.layout
    memory = "memory not known" if given.device_bytes is None else f"{given.device_bytes / GIB:.1f} GiB"
    yield (
        f"{config.model.path}: {_count(plan.shape.parameters)} parameters on "
        f"{layout.devices} x {given.gpu or given.backend} ({memory})"
    )


def _section(title: str, rows: Rows) -> Iterator[str]:
    yield ""
    yield title
    yield from _aligned(rows)


def _aligned(rows: Rows) -> Iterator[str]:
    """Yield rows with their first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        yield f"  {'  '.join(cells)}".rstrip()


def _layout(config: Config, plan: Plan) -> Rows:
    layout = plan.layout
    sizes = ("tensor", "pipeline", "context", "expert", "data")
    head = ("", "count", *sizes, "each holds")
    own = [str(getattr(layout, name)) for name in sizes]
    held = plan.layout.rank.total + plan.layout.rank.adapters
    shards = 1
    if config.train.engine == "fsdp":
        shards = layout.workers // config.train.parallel.replicate
    rows: list[Sequence[str]] = [head]
    if layout.trains:
        rows.append(("training ranks", str(layout.workers), *own, _count(held / shards)))
    for server in layout.servers:
        if server.is_external:
            continue
        name = "embedded engines" if server.is_embedded else "servers"
        name += "" if server.kind == "regular" else f" for {server.kind}"
        shared = plan.shape.parameters / server.shards
        divided = (server.shards // server.stages, server.stages, 1, 1, server.ranks)
        rows.append((name, str(server.count), *map(str, divided), _count(shared)))
    return rows


def _batches(plan: Plan) -> Rows:
    own = plan.batches
    return [
        ("", "step", "rank", "mini-batch", "micro-batch"),
        ("count", "1", str(plan.layout.data), str(own.mini_batches), str(own.micro_batches)),
        ("samples", f"{own.samples:,}", f"{own.rank_samples:,}", f"{own.mini_batch_samples:,}", ""),
        (
            "tokens",
            f"{own.tokens:,}",
            f"{own.rank_tokens:,}",
            f"{own.mini_batch_samples * own.sample_tokens:,}",
            f"{own.micro_batch_tokens:,}",
        ),
    ]


def _memory(plan: Plan) -> Rows:
    sizes = {name: getattr(plan.train, name) for name in _PARTS}
    rows = [(text, _gib(sizes[name])) for name, text in _PARTS.items() if sizes[name]]
    return [*rows, ("peak", _gib(plan.train.peak))]


def _phases(plan: Plan) -> Rows:
    limit = plan.assumptions.device_bytes
    rows = [("", "trainer", "rollout engine", "libraries", "sum", "of")]
    for name, (trainer, engine) in plan.phases.items():
        total = trainer + engine + PROCESS
        of = "" if limit is None else f"{total / limit:.0%}"
        rows.append((name, _gib(trainer), _gib(engine), _gib(PROCESS), _gib(total), of))
    return rows


def _server(server: ServerMemory) -> Rows:
    return [
        ("weights", _gib(server.weights)),
        (f"KV cache of {server.cache_tokens:,} tokens", _gib(server.cache)),
        ("logits, graphs, work space", _gib(server.others)),
    ]


def _host(config: Config, plan: Plan) -> Rows:
    rows = [("one checkpoint", _gib(plan.checkpoint))]
    if config.save.every is not None:
        rows.append(
            (f"checkpoints that are kept ({config.save.keep})", _gib(config.save.keep * plan.checkpoint))
        )
    rows.append(("export for Hugging Face", _gib(plan.export)))
    if plan.host_asleep:
        rows.append(("host memory of trainers asleep, reference", _gib(plan.host_asleep)))
    if plan.spare is not None:
        verb = "sleep in turns" if plan.sleeps else "both stay awake"
        rows.append((f"trainers and servers {verb}: spare with both awake", _gib(plan.spare)))
    return rows


def _time_title(plan: Plan) -> str:
    rates = plan.assumptions.rates
    assert rates is not None
    return f"Expected seconds a step, by rates of {plan.assumptions.gpu} ({rates.measured}, {rates.source})"


def _time(plan: Plan) -> Rows:
    rows = [(_SECONDS[name], f"{seconds:.2f}") for name, seconds in plan.seconds.items()]
    assert plan.total_seconds is not None
    return [*rows, ("step", f"{plan.total_seconds:.2f}")]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _count(number: float) -> str:
    """Return a number of parameters.

    >>> _count(1.72e9), _count(134.5e6), _count(0.4e6)
    ('1.72 B', '134 M', '0.4 M')
    """
    if number >= 1e9:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.{0 if number >= 1e7 else 1}f} M"


def as_json(plan: Plan, warnings: Sequence[str]) -> dict[str, Any]:
    """Return the plan as JSON types: bytes, seconds and counts."""
    given = plan.assumptions
    return {
        "parameters": plan.shape.parameters,
        "device": {"backend": given.backend, "gpu": given.gpu, "bytes": given.device_bytes},
        "layout": {**asdict(plan.layout), "devices": plan.layout.devices},
        "batch": {**asdict(plan.batches), "tokens": plan.batches.tokens},
        "train_bytes": {**asdict(plan.train), "peak": plan.train.peak},
        "engine_bytes": None if plan.server is None else asdict(plan.server),
        "engines_bytes": [asdict(server) for server in plan.servers],
        "phase_bytes": {
            name: {"trainer": own, "engine": engine} for name, (own, engine) in plan.phases.items()
        },
        "sleeps": plan.sleeps,
        "spare_bytes": plan.spare,
        "host_asleep_bytes": plan.host_asleep,
        "checkpoint_bytes": plan.checkpoint,
        "export_bytes": plan.export,
        "seconds": dict(plan.seconds),
        "step_seconds": plan.total_seconds,
        "warnings": list(warnings),
    }
