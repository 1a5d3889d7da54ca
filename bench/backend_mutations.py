"""Break a backend in many ways, and run the conformance suite on each.

Run as ``python bench/backend_mutations.py --backend NAME`` with an installed backend, which is not edited: an
add-on plugin wraps its hooks, in every process that the suite starts. ``--list`` prints the faults. First
the suite must pass without a fault. A fault is ``caught`` if the suite then fails, ``escaped`` if it passes,
and ``not reached`` if nothing called what was broken: a backend without remainders has no faults of them.
Ends with status 1 if more than 3 % of the reached ones escaped, but for those that
``backend_faults/catalog.py`` explains.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backend_faults.catalog import EXPLAINED, faults
from backend_faults.fault import BACKEND, FAULT, HOOKS, REACHED, Fault

SUITE = "anygauge.testing.conformance"
ALLOWED = 0.03
PASSED = 0
LIMIT_S = 900
"""A suite that takes longer hangs, which is a way to fail."""

ENTRY_POINT = "[anygauge.plugins]\nzz-backend-fault = backend_faults.plugin:PLUGIN\n"
METADATA = "Metadata-Version: 2.1\nName: anygauge-backend-fault\nVersion: 0\n"


@dataclass(frozen=True, slots=True)
class Result:
    """How a run of the suite with a fault ended."""

    fault: Fault
    outcome: str
    test: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.outcome:<12}{self.seconds:6.1f} s  {self.fault.name:<48}{self.test}"


def main() -> int:
    """Run the faults and return how to exit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", default="cpu", metavar="NAME")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="of a fault's name")
    parser.add_argument("--jobs", type=int, default=1, metavar="N")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [fault for fault in faults() if options.only in fault.name]
    if options.list:
        print(*(f"{fault.name:<48}{fault.statement}" for fault in chosen), sep="\n")
        return 0
    with plugin_directory() as directory:
        environment = {**os.environ, "PYTHONPATH": python_path(directory), BACKEND: options.backend}
        status, output = run_suite(environment, options.backend)
        if status != PASSED:
            print(output, "the suite fails without any fault", sep="\n", file=sys.stderr)
            return 2
        with ThreadPoolExecutor(options.jobs) as pool:
            results = [*pool.map(partial(run_fault, directory, environment), chosen)]
    return summarise(results, options.backend)


@contextmanager
def plugin_directory() -> Iterator[Path]:
    """Make a directory with the metadata of a distribution that has the add-on plugin."""
    with tempfile.TemporaryDirectory() as name:
        metadata = Path(name) / "anygauge_backend_fault-0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(METADATA, encoding="utf-8")
        (metadata / "entry_points.txt").write_text(ENTRY_POINT, encoding="utf-8")
        yield Path(name)


def python_path(directory: Path) -> str:
    """Return a module path on which the plugin and its metadata come first."""
    first = (str(directory), str(Path(__file__).parent))
    return os.pathsep.join((*first, *filter(None, [os.environ.get("PYTHONPATH")])))


def run_fault(directory: Path, environment: Mapping[str, str], fault: Fault) -> Result:
    """Run the suite with a fault, and print how it ended."""
    mark, started = directory / fault.name, time.monotonic()
    broken = {**environment, FAULT: fault.name, HOOKS: fault.hook, REACHED: str(mark)}
    status, output = run_suite(broken, environment[BACKEND])
    outcome = "not reached" if not mark.exists() else "escaped" if status == PASSED else "caught"
    result = Result(fault, outcome, first_failure(output) if status else "", time.monotonic() - started)
    print(result, flush=True)
    return result


def run_suite(environment: Mapping[str, str], backend: str) -> tuple[int | None, str]:
    """Run the suite up to its first failure; return its exit status, ``None`` if it hangs, and its output."""
    command = [sys.executable, "-m", "pytest", "--pyargs", SUITE, "--backend", backend]
    with tempfile.TemporaryDirectory() as empty:
        try:
            result = subprocess.run(
                [*command, "-x", "-q", "-rfE", "-p", "no:cacheprovider"],
                env=environment,
                cwd=empty,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return None, ""
    return result.returncode, result.stdout


def first_failure(output: str) -> str:
    """Return the first test that failed."""
    failure = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return failure[1].rpartition("/")[2] if failure else "the suite did not end"


def summarise(results: Sequence[Result], backend: str) -> int:
    """Print the numbers, and return how to exit."""
    reached = [result for result in results if result.outcome != "not reached"]
    escaped = [result.fault for result in reached if result.outcome == "escaped"]
    print(
        f"{len(reached) - len(escaped)} of {len(reached)} caught; not reached: {len(results) - len(reached)}"
    )
    for fault in escaped:
        print(f"escaped: {fault.statement} ({EXPLAINED.get((backend, fault.name), 'not explained')})")
    unexplained = [fault for fault in escaped if (backend, fault.name) not in EXPLAINED]
    return int(len(unexplained) > ALLOWED * len(reached))


if __name__ == "__main__":
    sys.exit(main())
