"""Names and documents use the terms of the field: retired words do not come back."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ("core", "hooks", "models", "backends")
SOURCES = [
    path
    for folder in (*SHIPPED, "tests", "bench", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
DOCUMENTS = sorted(
    [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
)

RETIRED: dict[str, str] = runpy.run_path(str(ROOT / "bench" / "retired_names.py"))["RETIRED"]
RETIRED_MODULES = {"calls", "found", "members", "parts", "requests", "waiting", "work"}
"""Whole names of modules, which say nothing about them."""
EXCEPTIONS = {
    ("core/anygauge/rollout/gateway/session.py", "Session.turns"),
    ("core/anygauge/rollout/gateway/turns.py", "Turns"),
    ("core/anygauge/config/rules/reward.py", "_shares_reward_and_label"),  # a verb
    ("core/anygauge/rollout/gateway/turns.py", "turns"),
}
"""Exceptions by file, and by name of the module or qualified name."""

FOUND_MOST = 150

NOT_IN_DOCUMENTS = (
    *("anew", "hearkens", "hitherto", "keeper", "likeliest", "manieth", "mend", "mends", "speakers", "storm"),
    *(
        "storms",
        "thereof",
        "whereof",
        "counts for nothing",
        "in which it is",
        "of which it is",
        "that it is asked for",
    ),
    *("what can run here", "what tells", "takes its turn", "holds its memory"),
)
BRITISH = re.compile(
    r"artefact|behaviour|centre|colour|favour|honour|labelled|learnt|licence|misspelt|neighbour"
    r"|(?:general|initial|material|normal|optim|organ|recogn|serial|summar)is(?:e|i|ation)|towards"
)
BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)
RIDDLE = r":(?:param \w+|returns|raises \w+): +(?:What|Of|By|That|Who|Whom)\b.*"


@dataclass(frozen=True, slots=True)
class Source:
    """Facts of a module. Its tree is not kept: all are two million objects, which slow later tests."""

    definitions: list[tuple[str, bool]]
    """Qualified names, and whether they are of classes."""
    docstrings: list[tuple[int, str]]
    """Line and text, of attributes and constants too."""
    found: int
    """How often a local variable or an argument of what ships is named so."""


@cache
def read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstrings = [
        (node.lineno, str(node.value.value).strip())
        for node in statements(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
    ]
    is_counted = path.relative_to(ROOT).parts[0] in SHIPPED and "found" in text
    found = sum(is_found(node) for node in ast.walk(tree)) if is_counted else 0
    return Source([*definitions(tree)], docstrings, found)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements below a node; most nodes are of expressions, which have none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, BLOCKS):
            yield child
            yield from statements(child)


def is_found(node: ast.AST) -> bool:
    match node:
        case ast.Name(id="found") | ast.arg(arg="found"):
            return True
    return False


def words(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the definitions in a node; no expression has one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + child.name, isinstance(child, ast.ClassDef)
            yield from definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, BLOCKS):
            yield from definitions(child, prefix)


def is_judged(path: str, name: str, is_class: bool) -> bool:
    """Classes of all files; functions of what ships. A test's own name is a sentence."""
    return is_class or (path.startswith(SHIPPED) and not name.rpartition(".")[2].startswith("test_"))


def test_no_module_has_a_retired_name() -> None:
    retired = {
        str(path.relative_to(ROOT)): sorted(words(path.stem) & RETIRED.keys())
        for path in SOURCES
        if words(path.stem) & RETIRED.keys() or path.stem in RETIRED_MODULES
        if (str(path.relative_to(ROOT)), path.stem) not in EXCEPTIONS
    }
    assert retired == {}


def test_no_class_or_function_has_a_retired_name() -> None:
    retired = {
        f"{path.relative_to(ROOT)}: {name}": f"write {RETIRED[word]}"
        for path in SOURCES
        for name, is_class in read(path).definitions
        if is_judged(str(path.relative_to(ROOT)), name, is_class)
        for word in words(name.rpartition(".")[2]) & RETIRED.keys()
        if (str(path.relative_to(ROOT)), name) not in EXCEPTIONS
    }
    assert retired == {}


def test_no_docstring_begins_with_a_relative_or_a_preposition() -> None:
    riddles = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in read(path).docstrings
        if re.match(r"(What|Of|By|That)\b", text)
    ]
    assert riddles == []


def test_no_field_of_a_docstring_begins_with_a_relative_or_a_preposition() -> None:
    riddles = [
        f"{path.relative_to(ROOT)}: {field}"
        for path in SOURCES
        if str(path.relative_to(ROOT)).startswith(SHIPPED)
        for _, text in read(path).docstrings
        for field in re.findall(RIDDLE, text)
    ]
    assert riddles == []


def test_a_field_that_begins_so_is_noticed() -> None:
    assert re.findall(RIDDLE, ":param seats: Of workers\n  :raises OSError: What is there") != []
    assert re.findall(RIDDLE, ":param seats: Offers of workers\n:returns: Seats that are free") == []


def test_a_local_variable_has_the_name_of_what_it_holds() -> None:
    found = sum(read(path).found for path in SOURCES if path.relative_to(ROOT).parts[0] in SHIPPED)
    assert found < FOUND_MOST


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_is_in_plain_english(document: Path) -> None:
    text = " ".join(document.read_text(encoding="utf-8").lower().split())
    assert [each for each in NOT_IN_DOCUMENTS if re.search(rf"\b{each}\b", text)] == []


def test_no_file_has_a_british_spelling() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    names = listed.stdout.removesuffix("\0").split("\0")
    files = [path for name in names if (path := ROOT / name).suffix != ".png" and path != Path(__file__)]
    spellings = {
        str(path.relative_to(ROOT)): words
        for path in files
        if path.exists() and (words := BRITISH.findall(path.read_text(encoding="utf-8").lower()))
    }
    assert spellings == {}


def test_a_british_spelling_is_noticed() -> None:
    assert BRITISH.findall("neighbours _normalised recentred towards summarising") == [
        *("neighbour", "normalise", "centre", "towards", "summarisi")
    ]
    assert BRITISH.findall("neighbors _normalized realism initial is organism toward") == []
