"""Imports: clean, light, and no top-level folder that is a package."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from graphlib import TopologicalSorter
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grimp
import pytest

from anygauge.plugins import BACKENDS_GROUP, DEFAULT_PLUGINS, PLUGINS_GROUP

PACKAGES = {
    "anygauge": "core",
    "anygauge_hooks": "hooks",
    "anygauge_models": "models",
    "anygauge_cpu": "backends/cpu",
    "anygauge_cuda": "backends/cuda",
    "anygauge_npu": "backends/npu",
    "anygauge_tests": "tests/support",
}
VENDOR = ("torch_npu", "mindspeed", "transformer_engine", "apex", "flash_attn", "pynvml", "sglang")
KERNEL_LANGUAGES = {
    "anygauge_cuda.triton.": "triton",
    "anygauge_cpu.sglang_platform": "sglang",  # SGLang imports these two, nobody else
    "anygauge.serving.sglang.processors.contents": "sglang",
}
"""Languages that modules import and the development environment lacks, by prefix of the modules."""
TOGETHER = {
    "anygauge": ["anygauge_models", "anygauge", "anygauge_tests"],
    **{name: [name] for name in ("anygauge_hooks", "anygauge_cpu", "anygauge_cuda", "anygauge_npu")},
}
"""Packages that a process imports. All of the first one's import Megatron, which takes most of the time."""
HEAVY = ("torch", "megatron", "transformers", "ray", "numpy", "pandas")

IMPORT_ALL = """
import builtins, gc, importlib, json, sys, warnings

package, modules, filters, vendor = json.loads(sys.argv[1])
warnings.simplefilter("error")
for text in filters:
    action, message, category, module = (text.split(":") + [""] * 3)[:4]
    kind = getattr(builtins, category or "Warning")
    warnings.filterwarnings(action, message, kind, module)
if package == "anygauge":  # as a worker starts: what is set here decides how megatron is imported
    from anygauge.engines.megatron.prepare import prepare_megatron
    from anygauge.plugins import load_plugins

    plugins = load_plugins()
    prepare_megatron(plugins, plugins.get("register_backends", "cpu"))
for module in modules:
    importlib.import_module(module)
    found = [name for name in vendor if name in sys.modules]
    assert not found, f"{module} imports {found}"
gc.freeze()  # the end of the process need not look at them all
"""

IMPORT_PACKAGE = """
import sys

before = {*sys.modules}
import anygauge

more = {name for name in {*sys.modules} - before if name.partition(".")[0] not in sys.stdlib_module_names}
assert more == {"anygauge", "anygauge.version"}, more
assert {"Config", "Run", "evaluate", "generate", "train"} <= {*dir(anygauge)}
"""
IMPORT_NAMES = """
import json, sys
from anygauge import *

assert train and evaluate and generate and Run and Config
found = [name for name in json.loads(sys.argv[1])[0] if name in sys.modules]
assert not found, found
"""
IMPORT_LIGHT = """
import importlib, json, sys

modules, heavy = json.loads(sys.argv[1])
for module in modules:
    importlib.import_module(module)
    found = [name for name in heavy if name in sys.modules]
    assert not found, f"{module} imports {found}"
"""


def modules(folder: Path) -> list[str]:
    paths = (path.relative_to(folder).with_suffix("") for path in sorted(folder.rglob("*.py")))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def run(code: str, *values: object) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, json.dumps(values)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", TOGETHER)
def test_every_module_imports_without_a_warning_and_without_a_vendor_library(
    root: Path, name: str, tmp_path: Path, run_with_torch: Callable[..., str]
) -> None:
    """The contract and the core, in cold processes, import torch themselves."""
    absent = tuple(prefix for prefix, needed in KERNEL_LANGUAGES.items() if find_spec(needed) is None)
    names = [
        module
        for package in TOGETHER[name]
        for module in modules(root / PACKAGES[package])
        if module.partition(".")[0] == package and not module.startswith(absent)
    ]
    assert {*TOGETHER[name]} <= {*names}
    options = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    values = (name, names, options["filterwarnings"], VENDOR)
    if name in ("anygauge", "anygauge_hooks"):
        run(IMPORT_ALL, *values)
        return
    script = tmp_path / "imports.py"
    script.write_text(IMPORT_ALL)
    run_with_torch(script, json.dumps(values))


def test_every_package_is_imported() -> None:
    assert sorted(PACKAGES) == sorted(package for packages in TOGETHER.values() for package in packages)


def test_the_command_line_and_every_plugin_import_nothing_heavy() -> None:
    entries = [entry for group in (BACKENDS_GROUP, PLUGINS_GROUP) for entry in entry_points(group=group)]
    ours = [entry.module for entry in entries if entry.module.startswith("anygauge")]
    assert len(ours) >= 4
    names = ["anygauge", "anygauge_hooks.specs", "anygauge.cli", "anygauge.config", "anygauge.plugins"]
    run(IMPORT_LIGHT, [*names, *DEFAULT_PLUGINS, *ours], HEAVY)


def test_the_python_api_imports_nothing_heavy_and_the_package_next_to_nothing() -> None:
    run(IMPORT_PACKAGE)
    run(IMPORT_NAMES, HEAVY)


def test_help_takes_less_than_half_a_second() -> None:
    seconds = []
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-m", "anygauge", "--help"], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        # Of the processor: a busy machine does not make it slower.
        seconds.append(usage.ru_utime + usage.ru_stime)
    assert min(seconds) < 0.5


def test_no_module_imports_itself_through_others() -> None:
    """Imports inside functions and under ``TYPE_CHECKING`` count: they too say who knows whom."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 400
    TopologicalSorter(imports).prepare()  # its error names the modules of a cycle


def test_no_top_level_folder_is_a_package(root: Path) -> None:
    folders = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    folders += [path for path in (root / "backends").iterdir() if path.is_dir()]
    assert len(folders) > 8
    assert [folder.name for folder in folders if (folder / "__init__.py").exists()] == []


def test_what_scripts_import_is_there(root: Path, tmp_path: Path, start_script: Callable[..., Any]) -> None:
    """Measurements and examples are run by hand, so that nobody else would notice."""
    scripts = [path for folder in ("bench", "examples") for path in (root / folder).rglob("*.py")]
    assert len(scripts) > 9
    nodes = [node for path in scripts for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    ours = sorted({ast.unparse(node) for node in imports if (node.module or "").startswith("anygauge")})
    assert len(ours) > 9
    script = tmp_path / "imports.py"
    script.write_text("\n".join(ours))
    process, output = start_script(script)
    assert process.wait(200) == 0, output.read_text()
