"""Strike a fleet of fake engines 200 times, and count what becomes of its requests.

Run as ``python bench/faults.py [--strikes 200] [--seeds 0]``; under three minutes. The engines are processes
of their own, forked from one that has imported what they need, and speak SGLang's HTTP API. They are killed,
hang, are paused, refuse an update of their weights at its beginning or its end, die in the middle of one,
become slow and answer with errors; the seed decides in which order. Whoever runs them starts those again that
the fleet finds dead, with the weights of that moment. Every token of every response is compared with what the
weights of its version give.

    .venv-sglang/bin/python bench/faults.py --sglang

strikes two real servers, as a run has them, with each of five faults once: killed, stopped so that they hang,
paused, an update with a tensor of another shape (of which SGLang's scheduler ends), and killed in the middle
of one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from anygauge_tests.chaos import Outcome, run_chaos
from anygauge_tests.chaos_summary import RequestSummary


def main() -> int:
    """Print one line per seed; the exit status tells whether all was well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strikes", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--sglang", action="store_true", help="each of five faults once, on real servers")
    found = parser.parse_args()
    well = True
    if found.sglang:
        return 0 if all([_served(seed) for seed in found.seeds]) else 1
    for seed in found.seeds:
        outcome = run_chaos(seed, found.strikes, engines=found.engines)
        _print(seed, outcome)
        well = well and outcome.is_well
    return 0 if well else 1


def _served(seed: int) -> bool:
    """Strike real servers, and return whether all was well."""
    from anygauge_cpu.env import declare_missing_operators

    declare_missing_operators()  # before anything of transformers is imported
    from anygauge_tests.served_chaos import run_served_chaos

    with tempfile.TemporaryDirectory() as folder:
        outcome = run_served_chaos(seed, Path(folder))
    print(f"seed {seed}, two SGLang servers:")
    print("  fault          both serve again after  answered meanwhile  restarts")
    for blow in outcome.faults:
        print(f"  {blow.fault:<13} {blow.seconds:20.1f} s {blow.answers:19} {blow.restarts:9}")
    _totals(outcome)
    return outcome.is_well


def _print(seed: int, outcome: Outcome) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.strikes.items()))
    print(f"seed {seed}: {sum(outcome.strikes.values())} strikes in {outcome.seconds:.1f} s ({kinds})")
    print(f"  {outcome.restarts} restarts")
    _totals(outcome)


def _totals(outcome: RequestSummary) -> None:
    print(
        f"  {outcome.sent} requests asked, {len(outcome.answers)} answered; {outcome.lost} lost, "
        f"{outcome.doubled} doubled, {outcome.mixed} made by several versions"
    )
    for problem in outcome.problems[:20]:
        print(f"  {problem}")


if __name__ == "__main__":
    sys.exit(main())
