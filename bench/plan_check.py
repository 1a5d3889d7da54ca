"""Plans against measured train steps: memory within 10 %, time within 20 %.

    python bench/plan_check.py --backend cuda                # eight cases of four models, on one GPU
    python bench/plan_check.py --backend cuda --cases 4b 4b-fsdp-lora --runs 5
    python bench/plan_check.py --backend cuda --shapes 135m 0.6b
    python bench/plan_check.py --backend cpu --cases tiny    # that it runs, on the host

Each case is a side of ``bench/train_step.py`` in a process of its own: random weights and tokens, one
optimizer step. All processes make their models at once, then one after the other takes its steps. The plan is
what ``anygauge plan`` computes of the same config. Memory is the most that torch had allocated. The script
ends with status 1 if a case failed or is beyond a bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import train_step

from anygauge.config import Config
from anygauge.planning.memory import GIB
from anygauge.planning.plan import Assumptions, make_plan
from anygauge.planning.rates import DEVICE_MEMORY, RATES
from anygauge.planning.shape import read_shape

MEMORY_BOUND, TIME_BOUND = 0.10, 0.20
LONG = (4096, 4096)
PLAIN = 512
"""Equal lengths that are multiples of this run as a plain batch in attention."""
MASTER_BYTES = {"cuda": 2}
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
    """Keys of ``[train]`` that differ from those of the side."""


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
    length, count = case.lengths[0], len(case.lengths)
    train = {
        "dtype": "bfloat16",
        "engine": "fsdp" if case.side in train_step.FSDP else "megatron",
        "lora": {"rank": 16} if case.side in train_step.LORA else {},
        "micro_batch_tokens": case.micro_batch or length * count,
        **case.train,
    }
    return Config.model_validate(
        {
            "run": {"name": "bench", "task": "sft"},
            "model": {"path": case.shape},
            "data": {"train": [], "max_prompt_tokens": length},
            "rollout": {"prompts_per_step": count},
            "train": train,
        }
    )


def planned(case: Case, gpu: str, backend: str) -> tuple[float, float]:
    """Return the planned GiB and milliseconds of a case."""
    given = Assumptions(
        backend=backend,
        master_bytes=MASTER_BYTES.get(backend, 4),
        device_bytes=DEVICE_MEMORY[gpu],
        gpu=gpu,
        rates=RATES[gpu],
        is_plain_batch=case.lengths[0] % PLAIN == 0,
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


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--gpu", choices=RATES, default="H200", help="whose rates the plan takes")
    parser.add_argument("--cases", choices=CASES, nargs="+", default=QUICK)
    parser.add_argument("--shapes", nargs="+", help="only the cases of these shapes")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    names = [
        name for name in dict.fromkeys(args.cases) if args.shapes is None or CASES[name].shape in args.shapes
    ]
    print(HEAD, flush=True)
    rows = []
    with tempfile.TemporaryFile("w+") as args.errors:
        for name, row in zip(names, rows_of(names, args), strict=True):
            print(line(row) if row else f"{name:18} failed", flush=True)
            rows.append(row)
        args.errors.seek(0)
        if None in rows:
            print(args.errors.read()[-3000:], file=sys.stderr)
    return int(any(row is None or row.beyond for row in rows))


if __name__ == "__main__":
    sys.exit(main())
