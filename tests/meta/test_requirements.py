"""The pinned sets agree with what the distributions declare, and these declare what they import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from anygauge.version import __version__

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
RELEASED_WITH = {"pydantic_core": "pydantic"}
"""Modules of a distribution that another one pins to the digit, so that only that one is declared."""
INSTALLED_APART = {"sglang"}
"""Modules whose distribution no dependency can name: SGLang's own pins would replace torch."""
OWN = {"anygauge", "anygauge_hooks", "anygauge_models", "anygauge_cpu", "anygauge_cuda", "anygauge_npu"}


def project(folder: str) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    return table


def declared(extra: str | None = None, *, folder: str = ".") -> list[Requirement]:
    table = project(folder)
    texts = table["optional-dependencies"][extra] if extra else table["dependencies"]
    return [Requirement(text) for text in texts]


def pins(path: Path) -> dict[str, str]:
    """Return version by name, files that it includes counted in."""
    found: dict[str, str] = {}
    for line in lines(path):
        if line.startswith("-r "):
            found |= pins(path.parent / line.removeprefix("-r "))
        else:
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = version.split(";")[0].strip()
    return found


def lines(path: Path) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.split("#")[0].strip()
        if text:
            yield text


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.stem)
def test_every_line_is_an_exact_pin_and_names_no_host(path: Path) -> None:
    for line in lines(path):
        assert re.fullmatch(r"-r [a-z-]+\.txt|[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+( *;.*)?", line), line


@pytest.mark.parametrize(
    ("name", "extra", "folder"),
    [
        ("cpu", None, "."),
        ("sglang-cpu", None, "."),
        ("dev", "test", "."),
        ("cuda", "vendor", "backends/cuda"),
        ("npu", "vendor", "backends/npu"),
    ],
)
def test_a_set_meets_what_is_declared(name: str, extra: str | None, folder: str) -> None:
    found = pins(ROOT / "requirements" / f"{name}.txt")
    wrong = [str(each) for each in declared(extra, folder=folder) if not meets(each, found)]
    assert not wrong


def test_the_set_with_sglang_differs_from_the_run_time_set_where_sglang_needs_it_alone() -> None:
    ours, theirs = (pins(ROOT / "requirements" / f"{name}.txt") for name in ("cpu", "sglang-cpu"))
    assert set(ours) <= set(theirs)
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert differing == {"huggingface-hub", "tokenizers", "transformers"}


def test_the_set_of_ascend_differs_from_the_run_time_set_where_ascend_needs_it_alone() -> None:
    ours, theirs = (pins(ROOT / "requirements" / f"{name}.txt") for name in ("cpu", "npu"))
    assert {name for name in ours if ours[name] != theirs.get(name)} == {"numpy", "pyarrow", "torch"}
    assert set(theirs) - set(ours) == {"cloudpickle", "decorator", "scipy", "torch-npu"}


@pytest.mark.parametrize("backend", ["cuda", "npu"])
def test_a_backends_wheel_has_a_description_and_the_license(backend: str) -> None:
    folder, table = ROOT / "backends" / backend, project(f"backends/{backend}")
    assert table["license-files"] == ["LICENSE"]
    assert not (folder / "LICENSE").is_symlink()  # a link leads out of the sdist
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (folder / table["readme"]).read_text(encoding="utf-8").startswith(f"# {table['name']}\n")


def test_the_distributions_have_one_version_and_name_each_other_by_it() -> None:
    projects = {folder: project(folder) for folder in (".", "backends/cuda", "backends/npu")}
    assert {each["version"] for each in projects.values()} == {__version__}
    assert len({each["urls"]["Repository"] for each in projects.values()}) == 1
    for backend in ("cuda", "npu"):
        assert projects["."]["optional-dependencies"][backend] == [
            f"anygauge-{backend}[vendor]=={__version__}"
        ]
        assert projects[f"backends/{backend}"]["dependencies"] == [f"anygauge=={__version__}"]


def meets(requirement: Requirement, found: dict[str, str]) -> bool:
    version = found.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version)


@cache
def distributions() -> Mapping[str, Sequence[str]]:
    """Return the distributions that have each top-level module; every file of every distribution is read."""
    return packages_distributions()


def imported_modules(folder: Path) -> dict[str, Path]:
    """Return the top-level modules that a package imports, each with a file that does."""
    found: dict[str, Path] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0]: path for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found[node.module.split(".")[0]] = path
    return found


@pytest.mark.parametrize(
    "folder", ["core/anygauge", "hooks/anygauge_hooks", "models/anygauge_models", "backends/cpu/anygauge_cpu"]
)
def test_what_the_root_distribution_imports_is_declared(folder: str) -> None:
    modules = imported_modules(ROOT / folder)
    owners = distributions()
    optional = (each for extra in ("test", "media", "qlora") for each in declared(extra))
    names = {canonicalize_name(each.name) for each in (*declared(), *optional)}
    undeclared = {
        module: str(path.relative_to(ROOT))
        for module, path in modules.items()
        if module not in sys.stdlib_module_names | OWN | INSTALLED_APART
        and RELEASED_WITH.get(module) not in names
        and not {canonicalize_name(owner) for owner in owners.get(module, [module])} & names
    }
    assert not undeclared


OF_THE_OLDEST_TORCH = {
    *("current_accelerator", "current_device_index", "current_stream", "device_count", "device_index"),
    *("empty_cache", "is_available", "set_device_index", "set_stream", "synchronize"),
}
"""Functions of ``torch.accelerator`` in torch 2.10. Later ones have more, such as ``empty_host_cache``."""


@pytest.mark.parametrize("folder", ["core", "models", "backends"])
def test_nothing_is_called_that_the_oldest_torch_has_not(folder: str) -> None:
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py"))
    found = {name for text in texts for name in re.findall(r"torch\.accelerator\.(\w+)\(", text)}
    assert found <= OF_THE_OLDEST_TORCH


def test_the_addresses_of_the_project_are_those_of_its_metadata() -> None:
    urls = project(".")["urls"]
    assert all(url.startswith((urls["Repository"], urls["Documentation"])) for url in urls.values())
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    written = {
        "mkdocs.yml": dict(re.findall(r"^(repo_url|site_url): (.+?)/?$", site, re.MULTILINE))
        == {"repo_url": urls["Repository"], "site_url": urls["Documentation"]}
    }
    for name in ("cuda", "npu"):
        backend, page = f"backends/{name}", f"{urls['Documentation']}/{name}"
        text = (ROOT / backend / "README.md").read_text(encoding="utf-8")
        links = re.findall(r"(https://[^)\s]+)/blob/main/", text)
        written[f"{backend}/pyproject.toml"] = project(backend)["urls"] == {**urls, "Documentation": page}
        written[f"{backend}/README.md"] = set(links) == {urls["Repository"]}
    assert [path for path, agrees in written.items() if not agrees] == []
