"""Strike a fleet of fake engines 200 times, and count what becomes of its requests.

Run as ``python bench/faults.py [--strikes 200] [--seeds 0]``; under three minutes. The engines are processes
of their own, forked from one that has imported what they need, and speak SGLang's HTTP API. They are killed,
hang, are paused, refuse an update of their weights at its beginning or its end, die in the middle of one,
become slow and answer with errors; the seed decides in which order. Whoever runs them starts those again that
the fleet finds dead, with the weights of that moment. Every token of every response is compared with what the
weights of its version give.
"""

from __future__ import annotations

import argparse
import sys

from anygauge.testing.storm import Outcome, storm


def main() -> int:
    """Print one line per seed; the exit status tells whether all was well."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strikes", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--engines", type=int, default=4)
    found = parser.parse_args()
    well = True
    for seed in found.seeds:
        outcome = storm(seed, found.strikes, engines=found.engines)
        _print(seed, outcome)
        well = well and not (outcome.problems or outcome.lost or outcome.doubled)
    return 0 if well else 1


def _print(seed: int, outcome: Outcome) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.strikes.items()))
    print(f"seed {seed}: {sum(outcome.strikes.values())} strikes in {outcome.seconds:.1f} s ({kinds})")
    print(
        f"  {outcome.asked} requests asked, {len(outcome.answers)} answered; {outcome.lost} lost, "
        f"{outcome.doubled} doubled, {outcome.mixed} made by several versions; {outcome.restarts} restarts"
    )
    for problem in outcome.problems[:20]:
        print(f"  {problem}")


if __name__ == "__main__":
    sys.exit(main())
