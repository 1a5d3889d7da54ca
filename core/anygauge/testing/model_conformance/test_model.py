"""The tiny model of each family against transformers', on each train engine that builds it.

Each row of ``anygauge check-model`` is a test, except those of the tokenizer, which belongs to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from anygauge.plugins import Plugins, load_plugins, select_backend
from anygauge.testing.model_check import check_model
from anygauge.testing.model_worker import CHECKS, CheckRow, load_model_config, one_worker
from anygauge.testing.tiny import tiny_family, tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.models import ModelSpec

OF_CHECKPOINTS = ("tokenizer", "chat template")
ENGINES = ("megatron", "fsdp")
PROMPT = "a small model computes the same here as there, and so do its gradients"
UNUSED = tuple(map(chr, range(0x4E00, 0x4E00 + 20)))
"""Characters of the first tokens, which may be padding; the last tokens may be placeholders of media."""

pytestmark = pytest.mark.filterwarnings("default")


class Case(NamedTuple):
    """A family on an engine."""

    name: str
    engine: str
    module: str | None
    """Where a family comes from that is not installed."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Test each family that was asked for on each engine."""
    if "case" in metafunc.fixturenames:
        cases = list(_cases(metafunc.config.getoption("anygauge_model")))
        ids = [f"{case.name}-{case.engine}" for case in cases]
        metafunc.parametrize("case", cases, ids=ids, scope="module")


def _cases(model: str | None) -> Iterator[Case]:
    plugins = load_plugins()
    installed: Sequence[ModelSpec] = plugins.collect("register_models")
    chosen, module = [spec for spec in installed if model in (None, spec.name)], None
    if not chosen:
        module = model
        chosen = list(_module(model).register_models())
    for spec in chosen:
        engines = [engine for engine in ENGINES if engine in (*spec.engines, "fsdp")]
        yield from (Case(spec.name, engine, module) for engine in engines)


def _module(model: str | None) -> Any:
    if model is None:
        raise pytest.UsageError("no model family is installed")
    try:
        return import_module(model)
    except ImportError as error:
        names = sorted(spec.name for spec in load_plugins().collect("register_models"))
        raise pytest.UsageError(
            f"--model {model}: neither an installed family ({', '.join(names)}) nor a module with "
            f"register_models: {error}"
        ) from error


def _plugins_of(case: Case) -> Plugins:
    plugins = load_plugins()
    if case.module is not None:
        plugins.register(import_module(case.module), case.module)
    return plugins


class _Process:
    """This process as the worker of one run after the other, in one process group."""

    def __init__(self, backend: str, stack: ExitStack) -> None:
        self._backend, self._stack = backend, stack
        self._context: WorkerContext | None = None

    def check(self, case: Case, directory: Path) -> dict[str, CheckRow]:
        plugins = _plugins_of(case)
        backend, _ = select_backend(plugins, self._backend)
        loaded = load_model_config(directory, case.engine, plugins, backend)
        if self._context is None:
            self._context = self._stack.enter_context(one_worker(loaded, plugins))
        context = replace(self._context, plugins=plugins)
        return {row.name: row for row in check_model(loaded.config, plugins, context, PROMPT)}


@pytest.fixture(scope="module")
def process(request: pytest.FixtureRequest) -> Iterator[_Process]:
    """Return this process as a worker."""
    with ExitStack() as stack:
        yield _Process(request.config.getoption("anygauge_backend"), stack)


@pytest.fixture(scope="module")
def rows(case: Case, process: _Process, tmp_path_factory: pytest.TempPathFactory) -> dict[str, CheckRow]:
    """Return what was found of a family."""
    spec: ModelSpec = _plugins_of(case).get("register_models", case.name)
    directory = tiny_family(tmp_path_factory.mktemp(case.name), spec)
    tiny_tokenizer(directory, alphabet="".join((*UNUSED, *sorted(set(PROMPT)))))
    return process.check(case, directory)


@pytest.mark.parametrize("check", [name for name in CHECKS if name not in OF_CHECKPOINTS])
def test_check(rows: dict[str, CheckRow], case: Case, check: str) -> None:
    """Pass a row of ``anygauge check-model``."""
    if check not in rows:
        pytest.fail(f"not run: {list(rows)[-1]} failed before", pytrace=False)
    row = rows[check]
    assert row.status == "PASS", row.found
