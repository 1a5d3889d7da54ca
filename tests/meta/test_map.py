"""The files that the architecture pages name exist, and the pictures match their sources."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import re
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DIAGRAMS = DOCS / "diagrams"
SOURCES = sorted(DIAGRAMS.glob("*.toml"))
RECORDS = sorted((DOCS / "adr").glob("[0-9]*.md"))
PAGES = [DOCS / "architecture.md", DOCS / "glossary.md", *RECORDS]
NAMED = re.compile(r"`([\w./*-]+?(?:\.py|\.md|\.toml|/))`")
BACKENDS = sorted((ROOT / "backends").glob("*/anygauge_*/"))
FILES = {
    str(path.relative_to(ROOT))
    for folder in ("core", "hooks", "models", "backends")
    for path in (ROOT / folder).rglob("*.py")
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def exists(name: str) -> bool:
    """Return whether a file exists: from the root, in the core, in hooks, or in each backend."""
    folders = (ROOT, ROOT / "core" / "anygauge", ROOT / "hooks" / "anygauge_hooks")
    if any(list(folder.glob(name)) for folder in folders):
        return True
    return "/" not in name and all((backend / name).exists() for backend in BACKENDS)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    names = NAMED.findall(page.read_text(encoding="utf-8"))
    assert names
    assert [name for name in names if not exists(name)] == []


def test_a_file_that_does_not_exist_is_noticed() -> None:
    assert NAMED.findall("see `trainer/nothing.py`") == ["trainer/nothing.py"]
    assert not exists("trainer/nothing.py")
    assert not exists("transformer_engine.py")  # of one backend alone
    assert exists("env.py")


@pytest.fixture(scope="module")
def renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("diagrams_render", DIAGRAMS / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(source: Path) -> dict[str, Any]:
    return tomllib.loads(source.read_text(encoding="utf-8"))


@pytest.mark.parametrize("source", SOURCES, ids=relative)
def test_a_picture_is_that_of_its_source(source: Path, renderer: ModuleType) -> None:
    svg = source.with_suffix(".svg").read_text(encoding="utf-8")
    assert svg == renderer.render(read(source)), "run python docs/diagrams/render.py"


@pytest.mark.parametrize("source", SOURCES, ids=relative)
def test_nothing_in_a_picture_covers_anything_else(source: Path, renderer: ModuleType) -> None:
    diagram = read(source)
    areas = {box["id"]: renderer.box_area(box) for box in diagram["box"] if box.get("kind") != "frame"}
    areas |= {
        " ".join(arrow["label"]): renderer.label_area(arrow)
        for arrow in diagram.get("arrow", ())
        if "label" in arrow
    }
    page = renderer.Rectangle(0, 0, renderer.WIDTH, diagram["height"])
    assert [
        (one, other)
        for (one, first), (other, second) in itertools.combinations(areas.items(), 2)
        if first.overlaps(second)
    ] == []
    assert [
        name
        for name, area in areas.items()
        if area.left < page.left
        or area.top < page.top
        or area.right > page.right
        or area.bottom > page.bottom
    ] == []


@pytest.mark.parametrize("source", SOURCES, ids=relative)
def test_every_file_in_a_picture_exists(source: Path) -> None:
    lines = [line for box in read(source)["box"] for line in box.get("lines", ()) if line.startswith("`")]
    names = [name for line in lines for name in re.findall(r"[\w/]+\.py", line)]
    assert [name for name in names if not any(file.endswith(f"/{name}") for file in FILES)] == []


def test_text_that_does_not_fit_is_refused(renderer: ModuleType) -> None:
    box = {"id": "small", "at": [0, 0], "size": [60, 40], "title": "A title of many words"}
    with pytest.raises(ValueError, match=r"small: its text needs \d+ pixels, and it has 60"):
        renderer.render({"title": "t", "height": 50, "box": [box]})
    with pytest.raises(ValueError, match="pixels of height"):
        renderer.render(
            {"title": "t", "height": 50, "box": [{**box, "size": [300, 40], "lines": ["1", "2"]}]}
        )


def test_every_picture_is_shown_by_a_page() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in DOCS.rglob("*.md")
        for target in re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    }
    assert {path for path in shown if not path.exists()} == set()
    assert {source.with_suffix(".svg") for source in SOURCES} <= shown


def test_the_layers_in_the_picture_are_those_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(each for each in contracts["contracts"] if each.get("containers") == ["anygauge"])["layers"]
    checked = [name for layer in layers for name in layer.split(" | ") if name != "__main__"]
    boxes = [box for box in read(DIAGRAMS / "contract.toml")["box"] if box.get("kind", "core") == "core"]
    boxes.sort(key=lambda box: (box["at"][1], box["at"][0]))
    drawn = [name for box in boxes for name in re.split(r", then |, ", box["title"].partition(":")[0])]
    assert drawn == checked


def test_the_glossary_is_in_alphabetical_order() -> None:
    rows = glossary_rows()
    terms = [term for term, _ in rows]
    assert len(terms) > 40
    assert terms == sorted(set(terms))
    assert [term for term, where in rows if not NAMED.search(where)] == []


@cache
def defining_files() -> dict[str, set[str]]:
    """Return the files that define each public class and function, by its words, such as ``scope map``."""
    files: dict[str, set[str]] = {}
    for file in FILES:
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                words = re.findall(r"[A-Z]?[a-z]+", node.name)
                if len(words) > 1 and node.name[0] != "_":
                    files.setdefault(" ".join(words).lower(), set()).add(file)
    return files


def unnamed_files(rows: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the files that define what a row is about, by term, if the row names none of them.

    A term of one word, such as "worker", may be a concept that only shares its name with a class or function.
    """
    defining = defining_files()
    return {
        term: files
        for term, where in rows
        if (files := defining.get(term.replace("-", " "), set()))
        if not any(file.endswith(name) for name in NAMED.findall(where) for file in files)
    }


def glossary_rows() -> list[tuple[str, str]]:
    """Return the term of each row, in lower case, and where the row says to find it."""
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    return [
        (term.lower(), where)
        for term, where in re.findall(r"^\| \*\*(.+?)\*\* \| .+ \| (.+) \|$", text, re.M)
    ]


def test_the_glossary_names_the_file_that_defines_a_class_or_function() -> None:
    assert unnamed_files(glossary_rows()) == {}
    assert unnamed_files([("scope map", "`hooks/anygauge_hooks/types.py`"), ("worker", "`none.py`")]) == {
        "scope map": {"hooks/anygauge_hooks/megatron.py"}
    }


@pytest.mark.parametrize("record", RECORDS, ids=relative)
def test_a_decision_record_has_its_parts_and_fits_on_a_page(record: Path) -> None:
    text = record.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.M) == ["Context", "Decision", "Consequences", "Alternatives"]
    assert re.search(r"^Status: (accepted|superseded)", text, re.M)
    assert 250 <= len(text.split()) <= 500
    index = (DOCS / "adr" / "README.md").read_text(encoding="utf-8")
    assert f"]({record.name})" in index
