"""Results of faults: kept in a file, counted, and shown as a table."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from backend_faults.catalog import EXPLAINED, module_of
from backend_faults.fault import Fault
from backend_faults.stranger import STRANGER

CAUGHT, ESCAPED, NOT_REACHED, UNCLEAR = "caught", "escaped", "not reached", "unclear"
HERE = Path(__file__).parent
HELPERS = ("fault", "kernel_parts", "kernel_table", "plugin", "suite")
"""Modules that a fault needs beside its own."""
CORE = ("anygauge.testing", "anygauge.kernels", "anygauge_hooks")
"""Packages whose code a verdict depends on, beside the backend's."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a run of the suite with a fault ended."""

    fault: str
    """Empty for the run without a fault."""
    outcome: str
    test: str = ""
    error: str = ""
    seconds: float = 0.0
    key: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:<12}{self.seconds:6.1f} s  {self.fault:<48}{self.test}"


class Store:
    """Results in a file of JSON lines, or in memory alone without one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else ()
        self.results = [Result(**json.loads(line)) for line in lines]

    def add(self, result: Result) -> None:
        """Keep a result."""
        self.results.append(result)
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")

    def find(self, fault: str, key: str) -> Result | None:
        """Return the result of a fault with this key."""
        return next((one for one in self.results if (one.fault, one.key) == (fault, key)), None)

    def catchers(self) -> Mapping[str, str]:
        """Return the test that caught each fault last, in any version of the code."""
        return {one.fault: one.test for one in self.results if one.outcome == CAUGHT}


class Keys:
    """Digests of the code that a verdict depends on."""

    def __init__(self, backend: str, *, quick: bool = False) -> None:
        (entry,) = entry_points(group="anygauge.backends", name=backend)
        packages = (*CORE, entry.module.partition(".")[0])
        self.suite = _digest(backend, *(path for package in packages for path in _files(package)))
        self.part = "quick" if quick else ""

    def of(self, fault: Fault | None, outcome: str = "") -> str:
        """Return the key of a fault, or of the run without one.

        :param outcome: What tests that a fault's name points to catch, the whole suite catches with them.
        """
        if fault is None:
            return self.suite
        names = (*HELPERS, module_of(fault))
        part = "" if outcome == CAUGHT else self.part
        return _digest(self.suite, part, *(HERE / f"{name}.py" for name in names))


def _files(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    for directory in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(directory).rglob("*.py"))


def _digest(*parts: str | Path) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.read_bytes() if isinstance(part, Path) else part.encode())
    return digest.hexdigest()[:16]


# -------------------------------------------------------------------------
# Numbers
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of faults by outcome."""

    faults: int
    reached: int
    caught: int
    escaped: int

    @classmethod
    def of(cls, results: Iterable[Result]) -> Counts:
        """Count results."""
        outcomes = [result.outcome for result in results]
        caught, escaped = outcomes.count(CAUGHT), outcomes.count(ESCAPED)
        return cls(len(outcomes), caught + escaped, caught, escaped)

    def cells(self) -> str:
        """Return the cells of a table."""
        return f"{self.faults} | {self.reached} | {self.caught} | {self.escaped}"


def unexplained(results: Iterable[Result], backend: str) -> list[Result]:
    """Return what escaped without an explanation."""
    return [one for one in results if one.outcome == ESCAPED and (backend, one.fault) not in EXPLAINED]


def markdown(results: Sequence[Result], backend: str, statements: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a table with a row for each group, and the faults that escaped.

    :param statements: By the name of the fault.
    """
    yield f"`python bench/backend_mutations.py --backend {backend} --markdown` at {commit()}:"
    yield ""
    yield "| broken | faults | reached | caught | escaped |"
    yield "| --- | --- | --- | --- | --- |"
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.fault.partition(".")[0], []).append(result)
    for group, members in sorted(groups.items()):
        yield f"| `{group}` | {Counts.of(members).cells()} |"
    yield f"| all | {Counts.of(results).cells()} |"
    named = [result for result in results if result.fault in STRANGER.values()]
    yield f"| the stranger's | {Counts.of(named).cells()} |"
    yield ""
    for one in results:
        if one.outcome == ESCAPED:
            yield f"- `{one.fault}`: {statements[one.fault]}. {reason(backend, one)}."


def commit() -> str:
    """Return the commit of this checkout."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return f"commit {found.stdout.strip()}" if found.returncode == 0 else "no commit"


def reason(backend: str, escaped: Result) -> str:
    """Return why a fault may escape, as a sentence."""
    text = EXPLAINED.get((backend, escaped.fault), "not explained")
    return text[0].upper() + text[1:]
