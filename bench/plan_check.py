"""Plans against measured train steps: memory within 10 %, time within 20 %.

    python bench/plan_check.py --backend cuda                # eight cases of four models, on one GPU
    python bench/plan_check.py --backend cuda --cases 4b 4b-fsdp-lora --runs 5
    python bench/plan_check.py --backend cuda --shapes 135m 0.6b
    python bench/plan_check.py --backend cuda --devices 2    # twelve cases of five models, on two GPUs
    python bench/plan_check.py --backend cuda --devices 8 --first-rank   # what one of eight holds, on one GPU
    python bench/plan_check.py --backend cpu --cases tiny    # that it runs, on the host
    python bench/plan_check.py --backend cpu --devices 2 --length 64 --cases tiny-data tiny-tensor

Each case is a side of ``bench/train_step.py`` in a process of its own: random weights and tokens, one
optimizer step. All processes make their models at once, then one after the other takes its steps. The plan is
what ``anygauge plan`` computes of the same config. Memory is the most that torch had allocated. The script
ends with status 1 if a case failed or is beyond a bound.

With ``--devices``, a case is a layout of ``bench/parallel_step.py``, two samples for each device. One process
a device takes the steps of all cases of one train engine. The first case that fails ends them; ``--cases``
runs those after it. With ``--first-rank`` the first rank takes them alone, and the plan is that of a step
whose exchanges take no time.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, zip_longest
from typing import Any, NamedTuple

import parallel_step
import torch
import train_step

from anygauge.config import Config
from anygauge.planning.memory import GIB
from anygauge.planning.plan import Assumptions, make_plan
from anygauge.planning.rates import RATES
from anygauge.planning.shape import read_shape
from anygauge.plugins import load_plugins
from anygauge_cuda.plugin import CUDA

MEMORY_BOUND, TIME_BOUND = 0.10, 0.20
LONG = (4096, 4096)
PLAIN = 512
"""Equal lengths that are multiples of this run as a plain batch in attention."""
HEAD = f"{'case':18}{'GiB':>8}{'planned':>9}{'ratio':>7}{'ms':>9}{'planned':>9}{'ratio':>7}  beyond"


@dataclass(frozen=True)
class Case:
    """A train step."""

    shape: str
    side: str = "anygauge"
    """As ``bench/train_step.py`` names it."""
    lengths: Sequence[int] = LONG
    """Equal lengths of the samples."""
    micro_batch: int = 0
    """Tokens of a micro-batch; 0 takes all at once."""
    train: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``[train]`` that differ from those of the side, on one device."""
    layout: parallel_step.Layout = field(default_factory=parallel_step.Layout)
    """How several devices divide the model, each with as many samples as ``lengths``."""

    @property
    def samples(self) -> int:
        """Samples of a data-parallel rank."""
        return len(self.lengths) * self.layout.world // self.layout.dp_size


CASES: Mapping[str, Case] = {
    "tiny": Case("tiny", lengths=(64, 64)),
    "tiny-fsdp-lora": Case("tiny", "lora", lengths=(64, 64)),
    "135m": Case("135m"),
    "135m-short": Case("135m", lengths=(96,) * 170),
    "0.6b": Case("0.6b"),
    "1.7b": Case("1.7b"),
    "4b": Case("4b"),
    "4b-micro": Case("4b", micro_batch=4096),
    "4b-full": Case("4b", train={"recompute": "full"}),
    "4b-elementwise": Case("4b", train={"recompute": "elementwise"}),
    "4b-lora": Case("4b", "megatron-lora"),
    "4b-lora-full": Case("4b", "megatron-lora", train={"recompute": "full"}),
    "1.7b-fsdp": Case("1.7b", "fsdp"),
    "4b-fsdp": Case("4b", "fsdp"),
    "4b-fsdp-micro": Case("4b", "fsdp", micro_batch=4096),
    "4b-fsdp-lora": Case("4b", "lora"),
    "4b-fsdp-lora-full": Case("4b", "lora", train={"recompute": "full"}),
}
QUICK = ("135m", "0.6b", "1.7b", "4b", "4b-lora", "1.7b-fsdp", "135m-short", "4b-lora-full")
"""Cases whose models are on one GPU at once, the quickest first: a minute or two in all."""
DIVISIONS: Mapping[str, Sequence[str]] = {
    "tiny": ("data", "tensor", "context", "fsdp"),
    "135m": ("data",),
    "0.6b": ("data", "tensor"),
    "1.7b": ("data", "tensor", "context", "fsdp"),
    "30b-a3b": ("expert", "data"),
    "4b": ("fsdp", "tensor", "data"),
}
"""How several devices divide each model; the one that needs most memory is the last."""


EIGHT = parallel_step.Layout(
    "30b-a3b-whole",
    8,
    parallel={"tensor": 4, "expert": 8},
    megatron={"moe_router_force_load_balancing": True},
    train={"recompute": "elementwise", "micro_batch_tokens": 8192},
)
"""The choice of ``anygauge init`` for Qwen3-30B-A3B on eight devices until this was measured. In a
random model of this depth all tokens would go to the same experts."""


def division_keys(division: str, devices: int) -> dict[str, Any]:
    """Return the fields of a layout that divides a model in one way."""
    if division in ("data", "fsdp"):
        return {"train": {"engine": division}} if division == "fsdp" else {}
    return {"parallel": {division: devices}}


def divided(devices: int, length: int) -> dict[str, Case]:
    """Return the cases of several devices."""
    layouts = {
        f"{shape}-{division}": parallel_step.Layout(shape, devices, **division_keys(division, devices))
        for shape, divisions in DIVISIONS.items()
        for division in divisions
    }
    if devices == EIGHT.world:
        layouts["30b-a3b-init"] = EIGHT
    lengths = (length,) * len(LONG)
    return {name: Case(layout.model, lengths=lengths, layout=layout) for name, layout in layouts.items()}


class Row(NamedTuple):
    """Measured and planned memory and time of a case, in GiB and milliseconds."""

    name: str
    gib: float
    planned_gib: float
    ms: float
    planned_ms: float

    @property
    def beyond(self) -> list[str]:
        """The figures that are beyond their bound."""
        memory = abs(self.planned_gib / self.gib - 1) > MEMORY_BOUND if self.gib else False
        time = abs(self.planned_ms / self.ms - 1) > TIME_BOUND
        return [name for name, is_beyond in (("memory", memory), ("time", time)) if is_beyond]


def config_of(case: Case) -> Config:
    """Return the config of a run whose step is that of a case: SFT on rows of one length."""
    length, layout = case.lengths[0], case.layout
    train = {
        "dtype": "bfloat16",
        "engine": "fsdp" if case.side in train_step.FSDP else "megatron",
        "lora": {"rank": 16} if case.side in train_step.LORA else {},
        "micro_batch_tokens": case.micro_batch or length * case.samples,
        "parallel": layout.parallel,
        **case.train,
        **layout.train,
    }
    return Config.model_validate(
        {
            "run": {"name": "bench", "task": "sft"},
            "model": {"path": case.shape},
            "data": {"train": [], "max_prompt_tokens": length},
            "rollout": {"prompts_per_step": case.samples * layout.dp_size},
            "train": train,
            "placement": {"train_workers": layout.world},
        }
    )


def planned(case: Case, gpu: str, backend: str, *, exchanges: bool = True) -> tuple[float, float]:
    """Return the planned GiB and milliseconds of a case, and with it of what its ranks exchange."""
    rates = RATES[gpu] if exchanges else replace(RATES[gpu], link=math.inf)
    given = Assumptions(
        backend=backend,
        master_bytes=load_plugins().get("register_backends", backend).master_weight_bytes,
        device_bytes=CUDA.device_memory[gpu],
        gpu=gpu,
        rates=rates,
        is_plain_batch=case.lengths[0] % PLAIN == 0 and "context" not in case.layout.parallel,
    )
    plan = make_plan(config_of(case), read_shape(train_step.SHAPES[case.shape]), given)
    return plan.train.peak / GIB, plan.seconds["train"] * 1e3


def start(case: Case, args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start the process of a case, which makes its model and then waits for a line."""
    options = ["--shape", case.shape, "--lengths", *map(str, case.lengths), "--backend", args.backend]
    options += ["--runs", str(args.runs), "--micro-batch", str(case.micro_batch)]
    options += ["--recompute", case.train.get("recompute", "none")]
    command = train_step.command_of(case.side, train_step.make_parser().parse_args(options))
    pipe = subprocess.PIPE
    return subprocess.Popen([*command, "--wait"], stdin=pipe, stdout=pipe, stderr=args.errors, text=True)


def is_ready(process: subprocess.Popen[str]) -> bool:
    """Wait until a process has its model; return whether it has."""
    assert process.stdout is not None
    return any(line.strip() == train_step.READY for line in process.stdout)


def checked(name: str, process: subprocess.Popen[str], args: argparse.Namespace) -> Row | None:
    """Return the row of a case whose process has its model; ``None`` if it fails."""
    out, _ = process.communicate("\n")
    if process.returncode:
        return None
    found: Mapping[str, float] = json.loads(out.splitlines()[-1])
    gib, ms = planned(CASES[name], args.gpu, args.backend)
    return Row(name, found["gib"], gib, found["ms"], ms)


def line(row: Row) -> str:
    """Return a row of the table."""
    ratio = f"{row.planned_gib / row.gib:7.2f}" if row.gib else "      -"
    return (
        f"{row.name:18}{row.gib:8.1f}{row.planned_gib:9.1f}{ratio}{row.ms:9.1f}{row.planned_ms:9.1f}"
        f"{row.planned_ms / row.ms:7.2f}  {' '.join(row.beyond)}"
    ).rstrip()


def rows_of(names: Sequence[str], args: argparse.Namespace) -> Iterator[Row | None]:
    """Yield the row of each case. All make their models at once, and take their steps one after the other."""
    processes = {name: start(CASES[name], args) for name in names}
    try:
        ready = [name for name in names if is_ready(processes[name])]
        for name in names:
            yield checked(name, processes[name], args) if name in ready else None
    finally:
        for process in processes.values():
            process.kill()


def divided_rows(cases: Mapping[str, Case], args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of cases of several devices, until one fails."""
    options = {
        "backend": args.backend,
        "shapes": {case.shape: train_step.SHAPES[case.shape] for case in cases.values()},
        "sequences": len(LONG),
        "length": args.length,
        "threads": 4,
        "warm_up": train_step.WARM_UP,
        "steps": args.runs,
        "profiled": 0,
        "first_rank": args.first_rank,
    }
    checks = {"replica_check_every": 0} if args.first_rank else {}
    layouts = {name: replace(case.layout, train=case.layout.train | checks) for name, case in cases.items()}
    tells_memory = torch.accelerator.is_available()  # a host tells that of the whole process
    engines = groupby(layouts.items(), lambda item: item[1].train.get("engine"))
    try:
        for row in chain.from_iterable(
            parallel_step.results(args.devices, dict(some), options) for _, some in engines
        ):
            case = cases[row["layout"]]
            gib, ms = planned(case, args.gpu, args.backend, exchanges=not args.first_rank)
            yield Row(row["layout"], row["memory"] if tells_memory else 0.0, gib, row["step"], ms)
    except parallel_step.RankError as error:
        print(error, file=sys.stderr)


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--gpu", choices=RATES, default="H200", help="whose rates the plan takes")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument(
        "--first-rank", action="store_true", help="of several devices, on one: memory and its own work"
    )
    parser.add_argument(
        "--length", type=int, help=f"tokens of a sample, with --devices; {LONG[0]} by default"
    )
    parser.add_argument("--cases", nargs="+", help="by default, those of a minute or two")
    parser.add_argument("--shapes", nargs="+", help="only the cases of these shapes")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    if args.length and args.devices == 1:
        parser.error("--length is for --devices: the cases of one have their own")
    if args.first_rank and args.devices == 1:
        parser.error("--first-rank is for --devices: it is the first of several")
    args.length = args.length or LONG[0]
    args.known = CASES if args.devices == 1 else divided(args.devices, args.length)
    if unknown := [name for name in args.cases or () if name not in args.known]:
        parser.error(f"--cases {' '.join(unknown)}: choose from {', '.join(args.known)}")
    return args


def chosen(args: argparse.Namespace) -> dict[str, Case]:
    """Return the cases to run."""
    some = QUICK if args.devices == 1 else [name for name, case in args.known.items() if case.shape != "tiny"]
    cases = {name: args.known[name] for name in args.cases or some}
    return {name: case for name, case in cases.items() if args.shapes is None or case.shape in args.shapes}


def main() -> int:
    """Print the table."""
    args = parse()
    cases = chosen(args)
    print(HEAD, flush=True)
    rows = []
    with tempfile.TemporaryFile("w+") as args.errors:
        measured = rows_of(list(cases), args) if args.devices == 1 else divided_rows(cases, args)
        for name, row in zip_longest(cases, measured):
            print(line(row) if row else f"{name:18} failed", flush=True)
            rows.append(row)
        args.errors.seek(0)
        if None in rows:
            print(args.errors.read()[-3000:], file=sys.stderr)
    return int(any(row is None or row.beyond for row in rows))


if __name__ == "__main__":
    sys.exit(main())
