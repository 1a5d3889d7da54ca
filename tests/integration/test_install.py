"""Installation of the wheel, which is built from the sdist, and editable, without network.

The environments are those of ``make_environment`` in conftest.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
PACKAGES = {"anygauge", "anygauge_hooks", "anygauge_models", "anygauge_cpu"}
ENTRY_POINTS = """
import json
from importlib.metadata import entry_points
groups = ("anygauge.backends", "anygauge.plugins", "pytest11", "console_scripts")
found = {g: sorted(e.name for e in entry_points(group=g) if "anygauge" in e.value) for g in groups}
print(json.dumps(found))
"""


@pytest.fixture
def fresh_clone(tmp_path: Path) -> Path:
    """Return a copy of the files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    clone = tmp_path / "clone"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((ROOT / name).read_bytes())
    return clone


def check_install(environment: Any, where: Path, backends: Sequence[str] = ("cpu",)) -> None:
    """Check that the project is imported from ``where``, and that its command and its plugins are found."""
    packages = sorted(PACKAGES | {f"anygauge_{name}" for name in backends})
    names = ", ".join(packages)
    code = f"import json, {names}; print(json.dumps([package.__file__ for package in ({names})]))"
    for file in json.loads(environment.run_python(code)):
        assert Path(file).is_relative_to(where), file
    found = json.loads(environment.run_python(ENTRY_POINTS))
    assert found == {
        "anygauge.backends": sorted(backends),
        "anygauge.plugins": ["models"],
        "pytest11": ["anygauge"],
        "console_scripts": ["anygauge"],
    }
    loaded = environment.run_python("import sys, anygauge.cli; print('torch' in sys.modules)")
    assert loaded.strip() == "False"
    assert "train" in environment.run_anygauge("--help")


def test_wheel_holds_the_four_packages_and_nothing_else(artifacts: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(artifacts[0]) as wheel:
        names = wheel.namelist()
    assert {name.split("/")[0] for name in names} - PACKAGES == {"anygauge-0.1.0.dist-info"}
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    report = (ROOT / "core/anygauge/observability/report").iterdir()
    parts = [path.name for path in report if path.suffix in (".html", ".css", ".js")]
    assert len(parts) > 3
    assert {f"anygauge/observability/report/{part}" for part in parts} <= set(names)
    assert not [name for name in names if re.search(r"(^|/)(tests?|conftest)(/|\.py)|\.pyc$", name)]


@pytest.mark.parametrize("name", ["anygauge", "cuda", "npu"])
def test_a_wheel_says_on_an_index_what_it_is(
    name: str, artifacts: tuple[Path, Path], backend_artifacts: dict[str, tuple[Path, Path]]
) -> None:
    wheel = ({"anygauge": artifacts} | backend_artifacts)[name][0]
    with zipfile.ZipFile(wheel) as opened:
        (metadata,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        shown = message_from_bytes(opened.read(metadata))
        license_text = opened.read(metadata.replace("METADATA", "licenses/LICENSE"))
    assert license_text == (ROOT / "LICENSE").read_bytes()
    assert (shown["Version"], shown["License-Expression"]) == ("0.1.0", "Apache-2.0")
    assert len(shown["Summary"]) > 40
    urls = dict(each.split(", ") for each in shown.get_all("Project-URL", []))
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert urls["Repository"] == REPOSITORY
    assert shown["Description-Content-Type"] == "text/markdown"
    links = LINK.findall(shown.get_payload())
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_links_of_the_wheels_description_lead_to_files_of_its_release(artifacts: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(artifacts[0]) as wheel:
        text = wheel.read("anygauge-0.1.0.dist-info/METADATA").decode()
    pages = re.findall(re.escape(REPOSITORY) + r"/blob/v0\.1\.0/([^)\s#]+)", text)
    images = re.findall(
        r"!\[[^\]]*\]\(https://raw\.githubusercontent\.com/anygauge/anygauge/v0\.1\.0/(\S+)\)", text
    )
    assert len(pages) > 30
    assert images == ["docs/images/run.svg"]
    assert [path for path in (*pages, *images) if not (ROOT / path).exists()] == []


def test_sdist_is_enough_to_build_and_no_more(artifacts: tuple[Path, Path]) -> None:
    with tarfile.open(artifacts[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "core/anygauge/py.typed"} <= names
    assert not [
        name for name in names if name.startswith(("tests/", "backends/cuda", "backends/npu", ".ci/"))
    ]
    assert {"docs/architecture.md", "examples/arithmetic_grpo.toml"} <= names


def test_install_of_the_wheel(artifacts: tuple[Path, Path], make_environment: Callable[[], Any]) -> None:
    environment = make_environment()
    environment.pip_install(artifacts[0])
    check_install(environment, environment.path)
    recipe = environment.run_python("from anygauge.cli.demo import RECIPE; print(RECIPE.read_text(), end='')")
    assert recipe == (ROOT / "examples" / "arithmetic_grpo.toml").read_text(encoding="utf-8")
    assert "--seed" in environment.run_anygauge("demo", "--help")
    environment.run_python("import anygauge.cli.demo.inputs")


def test_editable_install_of_the_project_and_both_backends(
    fresh_clone: Path, make_environment: Callable[[], Any]
) -> None:
    environment = make_environment()
    backends = [fresh_clone / "backends" / name for name in ("cuda", "npu")]
    environment.pip_install("-e", fresh_clone, "-e", backends[0], "-e", backends[1])
    check_install(environment, fresh_clone, backends=("cpu", "cuda", "npu"))
    errors = environment.run_python(
        "from anygauge.plugins import load_plugins; print(load_plugins().load_errors)"
    )
    assert errors.strip() == "{}"
