"""Write what docs/backends.md shows of the code: the files of the outside backend, and who serves what.

Run it after a change of a hook, a kernel or ``tests/backends/third_party``; a test fails until then:

    .venv/bin/python bench/backends_page.py

It needs no device and answers the same wherever it runs: what a backend declares, not what is installed here.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path

from anygauge.kernels.table import REFERENCE_DTYPES, core_kernels
from anygauge.plugins import Plugins, find_backend, load_plugins
from anygauge_hooks.kernels import KERNEL_OPS, KernelImpl, KernelOp
from anygauge_hooks.types import BackendSpec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/backends.md"
PROJECT = ROOT / "tests/backends/third_party"
BACKENDS = ("cpu", "cuda", "npu")
BLOCK = re.compile(r"(?<=^```)(python|toml)\n# (\S+)\n.*?(?=^```)", re.M | re.S)
MADE = re.compile(r"(?<=^<!-- made: )(hooks|kernels)( -->\n).*?(?=^<!-- end -->)", re.M | re.S)
NO_ANSWER = re.compile(
    r"(?:(?:no|without an) answer (?:means )?|, else |First result: (?=[^.]*not answered))"
    r"(.+?)(?:,? stand for what is not answered)?\.$",
    re.M | re.S,
)


def with_files(text: str) -> str:
    """Return the page with the outside backend's files as they are."""
    return BLOCK.sub(lambda found: f"{found[1]}\n# {found[2]}\n{(PROJECT / found[2]).read_text()}", text)


def with_tables(text: str) -> str:
    """Return the page with its tables as the plugins' code has them."""
    plugins = load_plugins(only=BACKENDS)
    tables = {"hooks": hook_rows(plugins), "kernels": kernel_rows(plugins)}
    return MADE.sub(lambda found: f"{found[1]}{found[2]}{rendered(found[1], tables[found[1]])}", text)


def rendered(first: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with a column for each backend."""
    head = (first.removesuffix("s"), *BACKENDS)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def hook_rows(plugins: Plugins) -> Iterator[Sequence[str]]:
    """Yield who implements each hook that is called for a backend, or that one of them implements."""
    for hook in plugins.hooks():
        caller = getattr(plugins.manager.hook, hook)
        own = {one.plugin_name for one in caller.get_hookimpls()}
        if own & set(BACKENDS) or "backend" in inspect.signature(caller.spec.function).parameters:
            yield f"`{hook}`", *(served(own, caller.spec.function, backend) for backend in BACKENDS)


def served(own: Container[str], hook: Callable[..., object], backend: str) -> str:
    """Return where a backend's own implementation is, or what stands in for it."""
    if backend in own:
        return f"`anygauge_{backend}`"
    found = NO_ANSWER.search(inspect.getdoc(hook) or "")
    return " ".join(found[1].replace("``", "`").split()) if found else "-"


def kernel_rows(plugins: Plugins) -> Iterator[Sequence[str]]:
    """Yield who serves each operation, the first that is asked first."""
    known = plugins.named("register_backends")
    columns = [declared(plugins, find_backend(plugins, known, name)) for name in BACKENDS]
    for op in KERNEL_OPS:
        yield f"`{op}`", *("<br>".join(sources(op, kernels)) for kernels in columns)


def declared(plugins: Plugins, backend: BackendSpec) -> list[KernelImpl]:
    """Return every kernel of a backend and of the core, installed or not, the one to use first."""
    own = plugins.collect("register_kernels", backend=backend)
    return sorted([*own, *core_kernels()], key=lambda kernel: -kernel.priority)


def sources(op: KernelOp, kernels: Iterable[KernelImpl]) -> Iterator[str]:
    """Yield who serves an operation and where; the reference if a case is left with all modules installed."""
    missing = set(REFERENCE_DTYPES)
    for kernel in kernels:
        if kernel.op == op:
            yield " ".join([f"`{kernel.source}`", *conditions(kernel)])
            missing -= set() if kernel.limits else set(kernel.dtypes)
    if missing:
        yield "reference"


def conditions(kernel: KernelImpl) -> Iterator[str]:
    """Yield where a kernel serves, if not everywhere."""
    if not set(kernel.dtypes) >= set(REFERENCE_DTYPES):
        yield f"({', '.join(kernel.dtypes)})"
    for name, values in (kernel.limits or {}).items():
        yield f"({name}: {listed(values)})"
    if kernel.requires:
        yield f"(needs {', '.join(kernel.requires)})"


def listed(values: Sequence[object]) -> str:
    """Return the values of a fact, and numbers without a gap by the first and the last."""
    if isinstance(values, range) and values.step == 1 and len(values) > 2:
        return f"{values[0]} to {values[-1]}"
    return ", ".join("none" if value is None else str(value) for value in values)


if __name__ == "__main__":
    PAGE.write_text(with_tables(with_files(PAGE.read_text())))
