"""Break a backend in many ways, and run the conformance suite on each.

Run as ``python bench/backend_mutations.py --backend NAME`` with an installed backend, which is not edited: an
add-on plugin wraps its hooks, in every process that the suite starts. ``--list`` prints the faults.

First the suite must pass without a fault. A fault is ``caught`` if a test then fails that passed (or the
process crashes or hangs), ``escaped`` if every test passes, and ``not reached`` if nothing called what was
broken: a backend without remainders has no faults of them. Tests that a fault's name points to run first; one
that fails elsewhere must fail twice, or the result is ``unclear``.

With ``--quick`` no other tests run: what passes is called escaped, so the numbers are a lower bound.

With ``--store FILE`` results are kept as they come, and a later call goes on with what the file lacks for the
same suite, backend and fault. What ``--quick`` caught counts in a later call without it.

Ends with status 1 if more than 3 % of the reached faults escaped, not counting those that
``backend_faults/catalog.py`` explains.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from backend_faults.catalog import faults, hooks
from backend_faults.fault import BACKEND, FAULT, HOOKS, REACHED, Fault
from backend_faults.results import (
    CAUGHT,
    ESCAPED,
    NOT_REACHED,
    UNCLEAR,
    Counts,
    Keys,
    Result,
    Store,
    markdown,
    reason,
    unexplained,
)
from backend_faults.stranger import STRANGER
from backend_faults.suite import TESTS_OF, Run, likely, run_suite

ALLOWED = 0.03
LIMIT_S = 900
"""A suite that takes longer hangs, which is a way to fail."""

ENTRY_POINT = "[anygauge.plugins]\nzz-backend-fault = backend_faults.plugin:PLUGIN\n"
METADATA = "Metadata-Version: 2.1\nName: anygauge-backend-fault\nVersion: 0\n"

RunsSuite = Callable[..., Run]
"""``run(environment, words, only="")``."""


def main() -> int:
    """Run the faults and return how to exit."""
    options = parsed()
    chosen = [fault for fault in faults() if re.search(options.only, fault.name)]
    if options.named:
        chosen = [fault for fault in chosen if fault.name in STRANGER.values()]
    if options.list:
        print(*map(listed, chosen), sep="\n")
        return 0
    os.environ[BACKEND] = options.backend
    keys, store = Keys(options.backend, quick=options.quick), Store(options.store)
    with plugin_directory() as directory:
        run = partial(run_suite, options.backend, quick=options.quick, limit_s=LIMIT_S)
        run_one = partial(run_fault, run, directory)
        results = run_all(chosen, keys, store, run_one, options.jobs, options.minutes)
    if not results:
        return 2
    if options.markdown:
        statements = {fault.name: fault.statement for fault in chosen}
        print(*markdown(results, options.backend, statements), sep="\n")
    return summarize(results, options.backend)


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="cpu", metavar="NAME")
    parser.add_argument("--only", default="", metavar="REGEX", help="of faults' names")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs of the suite at a time")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        metavar="M",
        help="start no fault later; the next call goes on",
    )
    parser.add_argument("--store", type=Path, metavar="FILE", help="JSON lines; made if it is not there")
    parser.add_argument("--quick", action="store_true", help="the tests that a fault's name points to alone")
    parser.add_argument("--markdown", action="store_true", help="print a table of the results")
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    parser.add_argument(
        "--named", action="store_true", help="with --list: the faults of the stranger's backend"
    )
    return parser.parse_args()


def listed(fault: Fault) -> str:
    """Return the line of a fault in the list, with the stranger's name for it."""
    names = [words for words, name in STRANGER.items() if name == fault.name]
    return f"{fault.name:<48}{fault.statement}" + "".join(f" [{name}]" for name in names)


@contextmanager
def plugin_directory() -> Iterator[Path]:
    """Make a directory with the metadata of a distribution that has the add-on plugin."""
    with tempfile.TemporaryDirectory() as name:
        metadata = Path(name) / "anygauge_backend_fault-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(METADATA, encoding="utf-8")
        (metadata / "entry_points.txt").write_text(ENTRY_POINT, encoding="utf-8")
        sys.path.insert(0, name)
        first = (name, str(Path(__file__).resolve().parent))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (*first, os.environ.get("PYTHONPATH"))))
        yield Path(name)


def run_all(
    chosen: Sequence[Fault],
    keys: Keys,
    store: Store,
    run_one: Callable[..., Result],
    jobs: int,
    minutes: float = math.inf,
) -> list[Result]:
    """Return the results of all faults, or none if the suite fails without any."""
    catchers, last_start = store.catchers(), time.monotonic() + 60 * minutes

    def result_of(fault: Fault) -> Result | None:
        key = keys.of(fault)
        result = store.find(fault.name, keys.of(fault, CAUGHT)) or store.find(fault.name, key)
        if result is None and time.monotonic() < last_start:
            result = run_one(fault, key, catchers.get(fault.name))
            result = replace(result, key=keys.of(fault, result.outcome))
            store.add(result)
            print(result, flush=True)
        return result

    if not passes(keys, store, run_one):
        return []
    with ThreadPoolExecutor(jobs) as pool:
        return [result for result in pool.map(result_of, chosen) if result]


def passes(keys: Keys, store: Store, run_one: Callable[..., Result]) -> bool:
    """Return whether the suite passes without a fault."""
    key = keys.of(None)
    if store.find("", key):
        return True
    without = run_one(None, key, None)
    if without.outcome == ESCAPED:
        store.add(without)
    else:
        print(without.test, without.error, "the suite fails without any fault", sep="\n", file=sys.stderr)
    return without.outcome == ESCAPED


def run_fault(run: RunsSuite, directory: Path, fault: Fault | None, key: str, catcher: str | None) -> Result:
    """Run the suite with a fault, or without one.

    :param catcher: Test that caught the fault in an earlier version.
    """
    started, name = time.monotonic(), fault.name if fault else ""
    mark = directory / f"{name}.reached"
    wrapped = fault.hook if fault else hooks()  # a wrapper itself must not matter
    environment = {**os.environ, FAULT: name, HOOKS: wrapped, REACHED: str(mark)}
    words = words_of(fault) if fault else ()
    ended = run(environment, [catcher, *words] if catcher else words)
    outcome = verdict(ended, reached=mark.exists() or fault is None)
    if outcome == CAUGHT and ended.test and not likely(ended.test, words):
        again = run(environment, words, only=ended.test)
        outcome = CAUGHT if again.failed else UNCLEAR
    test = ended.test or ("" if ended.passed else died(ended))
    return Result(name, outcome, test, ended.error, round(time.monotonic() - started, 1), key)


def words_of(fault: Fault) -> Sequence[str]:
    """Return words of the names of tests that may notice a fault."""
    group = fault.name.partition(".")[0]
    return TESTS_OF.get(group, (group,))


def verdict(ended: Run, *, reached: bool) -> str:
    """Return what a run of the suite says of a fault."""
    if not reached:
        return NOT_REACHED if ended.passed else UNCLEAR
    return ESCAPED if ended.passed else CAUGHT if ended.failed else UNCLEAR


def died(ended: Run) -> str:
    """Return how a run ended in which no test failed."""
    if ended.status is None:
        return "the suite did not end"
    return f"the suite ended with status {ended.status}: {' '.join(ended.output.split()[-30:])}"


def summarize(results: Sequence[Result], backend: str) -> int:
    """Print the numbers, and return how to exit."""
    counts, outcomes = Counts.of(results), [result.outcome for result in results]
    left = f"not reached: {outcomes.count(NOT_REACHED)}, unclear: {outcomes.count(UNCLEAR)}"
    print(f"{counts.caught} of {counts.reached} caught; {left}")
    for result in results:
        if result.outcome == ESCAPED:
            print(f"escaped: {result.fault} ({reason(backend, result)})")
    return int(len(unexplained(results, backend)) > ALLOWED * counts.reached)


if __name__ == "__main__":
    sys.exit(main())
