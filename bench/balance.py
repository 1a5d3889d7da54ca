"""Measure how evenly samples are divided among ranks and micro-batches, and how long that takes.

Run as ``python bench/balance.py [--rows FILE.jsonl]``. Costs are those of Qwen3-8B. Of each row of the table:

``slowest``     arithmetic of the rank with most to do, over the mean of the ranks
``by tokens``   the same where ranks are balanced by tokens, which leaves attention out
``longest``     the longest sample over that mean: no method gets below it
``in step``     what ranks take that wait for each other in every micro-batch, over the mean of the ranks
``filled``      the same where micro-batches are as full as can be, and costs are not looked at
``ms``          processor time of the division among ranks, costs included, and of one rank's division into
                micro-batches; both run in one thread

``--rows`` adds the texts of a file of JSON objects, four characters to a token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anygauge.data.balance import balance, imbalance, sequence_costs
from anygauge.data.packing import pack_by_cost, pack_by_tokens
from anygauge_models.qwen3 import DENSE

QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "vocab_size": 151_936,
}
LONGEST = 32_768
"""Tokens of a sample, and of a micro-batch."""
RANKS = (8, 64, 512)
PER_RANK = (16, 32, 64, 128)
COLUMNS = ("slowest", "by tokens", "longest", "in step", "filled", "ms", "ms")

Ints = NDArray[np.int64]


def distributions(rows: Path | None) -> Iterator[tuple[str, Callable[[np.random.Generator, int], Ints]]]:
    """Yield names, and what draws that many lengths."""
    yield "log-normal", lambda draw, count: clipped(draw.lognormal(7.6, 0.9, count))
    yield "bimodal", lambda draw, count: clipped(two_kinds(draw, count))
    yield "long tail", lambda draw, count: clipped(400 * (1 + draw.pareto(1.1, count)))
    if rows is not None:
        texts = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
        known = [sum(len(value) for value in row.values() if isinstance(value, str)) / 4 for row in texts]
        yield rows.parent.name, lambda draw, count: clipped(draw.choice(known, count))


def two_kinds(draw: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return four short answers to each long one."""
    is_short = draw.random(count) < 0.8
    return np.where(is_short, draw.normal(700, 200, count), draw.normal(14_000, 3_000, count))


def clipped(lengths: NDArray[np.float64]) -> Ints:
    """Return whole numbers of tokens."""
    return lengths.clip(32, LONGEST).astype(np.int64)


def measure(lengths: Ints, num_ranks: int) -> list[float]:
    """Return the columns of a row."""
    flops = partial(DENSE.flops_per_token, QWEN3_8B)
    started = time.process_time()
    costs = sequence_costs(lengths.tolist(), flops)
    ranks = balance(costs, num_ranks)
    milliseconds = 1e3 * (time.process_time() - started)
    even = imbalance(loads(costs, ranks))
    by_tokens = imbalance(loads(costs, balance(lengths.tolist(), num_ranks)))
    filled = [pack_by_tokens(lengths[rank].tolist(), LONGEST) for rank in ranks]
    count = max(map(len, filled))
    started = time.process_time()
    packed = [pack_by_cost(lengths[r].tolist(), costs[r], LONGEST, lambda needed: count) for r in ranks]
    packing = 1e3 * (time.process_time() - started) / num_ranks
    return [
        *(even, by_tokens, costs.max() / costs.sum() * num_ranks),
        *(
            in_step([loads(costs[r], each) for r, each in zip(ranks, bins, strict=True)])
            for bins in (packed, filled)
        ),
        *(milliseconds, packing),
    ]


def loads(costs: NDArray[np.float64], bins: Sequence[Sequence[int]]) -> list[float]:
    """Return the cost of each bin."""
    return [float(costs[indices].sum()) if indices else 0.0 for indices in bins]


def in_step(ranks: Sequence[Sequence[float]]) -> float:
    """Return the sum of the slowest in each micro-batch over the mean of what the ranks do in all."""
    slowest = sum(max(batch) for batch in zip_longest(*ranks, fillvalue=0.0))
    return slowest * len(ranks) / sum(map(sum, ranks))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure how evenly samples are divided.")
    parser.add_argument("--rows", type=Path)
    rows = parser.parse_args().rows
    print(f"{'lengths':<12}{'ranks':>6}{'samples':>9}" + "".join(f"{name:>11}" for name in COLUMNS))
    for name, draw in distributions(rows):
        for num_ranks in RANKS:
            for per_rank in PER_RANK:
                lengths = draw(np.random.default_rng(0), num_ranks * per_rank)
                values = measure(lengths, num_ranks)
                shown = "".join(f"{value:11.4f}" for value in values[:5])
                times = "".join(f"{value:11.1f}" for value in values[5:])
                print(f"{name:<12}{num_ranks:>6}{len(lengths):>9}{shown}{times}", flush=True)


if __name__ == "__main__":
    main()
