"""Size, structure and language of the source code: one table, for this tree and for a commit beside it.

    python bench/code_metrics.py
    python bench/code_metrics.py --base 7bc2900
    python bench/code_metrics.py --list "broad excepts"     # where each counted thing is

The sources are all Python files of ``core``, ``hooks``, ``models`` and ``backends``. A code line has a token
that is no comment and belongs to no docstring (of an attribute, too), no import and no ``__all__``.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from checkout import ROOT, extract, packages, short_id
from retired_names import RETIRED

AREAS = ("core", "hooks", "models", "backends")
TESTING = "core/anygauge/testing/"
THIRD_PARTY = "tests/backends/third_party"
SMALL = 60
"""Lines."""
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
BAD_OPENING = re.compile(r"(What|Of|By|That)\b")
UNTYPED = ("config", "kernels", "plugins")
"""Arguments and fields of the contract that are no ``Any``."""
KEPT_FIELDS = {"outputs"}
"""Fields with a callable that takes the result of a library's module, which is of any type."""
BROAD = {"Exception", "BaseException"}
FOREIGN = "foreign code: "
"""Starts the reason beside a broad except: which plugin, reward, agent, engine or library it guards."""
KEPT_MODULES = {"rollout/gateway/turns.py"}
"""Modules whose retired word is the field's own there: turns of a conversation."""
SAMPLE_NAMES = (
    *("Prompt", "OpenGroup", "Draft", "SampleDraft", "GenerateRequest", "Generation", "Sample"),
    *("DoneGroup|Group", "TrainSample", "TrainBatch|MiniBatch", "StepData"),
    *("PlannedBatch|MicroBatch", "LossInputs"),
)
"""Classes that hold a sample between a row of the data and the loss; classes of one stage stand together."""
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A Python file."""

    path: str
    text: str

    @cached_property
    def nodes(self) -> Sequence[ast.AST]:
        """All nodes of its syntax tree."""
        return [*ast.walk(ast.parse(self.text))]

    @property
    def lines(self) -> int:
        """Lines of text."""
        return self.text.count("\n")

    @property
    def is_core(self) -> bool:
        """Whether the file is in core, outside testing."""
        return self.path.startswith("core/") and not self.path.startswith(TESTING)

    def at(self, node: ast.stmt | ast.expr | ast.arg | ast.excepthandler, what: str = "") -> str:
        """Return the place of a node."""
        return f"{self.path}:{node.lineno} {what}".rstrip()


class Tree(NamedTuple):
    """A source tree."""

    root: Path
    sources: Sequence[Source]


def read_tree(root: Path) -> Tree:
    """Return the sources of a tree."""
    paths = [path for area in AREAS for path in sorted((root / area).rglob("*.py"))]
    texts = [(str(path.relative_to(root)), path.read_text(encoding="utf-8")) for path in paths]
    return Tree(root, [Source(path, text) for path, text in texts])


# -------------------------------------------------------------------------
# Size
# -------------------------------------------------------------------------


def code_lines(source: Source) -> int:
    """Return how many lines of a file are code."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in source.nodes:
        if isinstance(node, ast.stmt) and is_no_code(node):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def is_no_code(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring, an import or ``__all__``."""
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom) or docstring(node) is not None


def docstring(node: ast.stmt) -> str | None:
    """Return the text of a statement that is nothing but text."""
    if (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ):
        return node.value.value
    return None


def all_code(tree: Tree) -> Counter[str]:
    """Return the code lines of each file."""
    return Counter({source.path: code_lines(source) for source in tree.sources})


def wheel_code(tree: Tree) -> Counter[str]:
    """Return the code lines of each file that is in a wheel."""
    roots = tuple(f"{package.relative_to(tree.root)}/" for package in packages(tree.root))
    return Counter(
        {source.path: code_lines(source) for source in tree.sources if source.path.startswith(roots)}
    )


def core_code(tree: Tree) -> Counter[str]:
    """Return the code lines of each file of the core without testing."""
    return Counter({source.path: code_lines(source) for source in tree.sources if source.is_core})


def small_files(tree: Tree) -> list[str]:
    """Return the files that have few lines."""
    return [
        f"{source.path} {source.lines}"
        for source in tree.sources
        if source.lines < SMALL and not source.path.endswith("/__init__.py")
    ]


def fullest_folder(tree: Tree) -> list[str]:
    """Return the files of the folder that has most."""
    folders = Counter(source.path.rpartition("/")[0] for source in tree.sources)
    ((folder, _),) = folders.most_common(1)
    return [source.path for source in tree.sources if source.path.rpartition("/")[0] == folder]


def third_party(tree: Tree) -> Counter[str]:
    """Return the lines of each file of the backend that stands for one of a third party."""
    paths = sorted((tree.root / THIRD_PARTY).rglob("*.py"))
    return Counter({str(path.relative_to(tree.root)): path.read_text().count("\n") for path in paths})


# -------------------------------------------------------------------------
# Structure
# -------------------------------------------------------------------------


def backend_comparisons(tree: Tree) -> list[str]:
    """Return where a backend compares a backend's name."""
    return [
        source.at(node, ast.unparse(node))
        for source in tree.sources
        if source.path.startswith("backends/")
        for node in source.nodes
        if isinstance(node, ast.Compare) and any(map(is_backend_name, (node.left, *node.comparators)))
    ]


def is_backend_name(node: ast.expr) -> bool:
    """Return whether an expression is ``backend.name``."""
    is_name = isinstance(node, ast.Attribute) and node.attr == "name"
    return is_name and isinstance(node.value, ast.Name) and node.value.id == "backend"


def untyped_contract(tree: Tree) -> list[str]:
    """Return the arguments and fields of the contract whose type is ``Any`` and could be named."""
    return [
        source.at(node, f"{name}: {ast.unparse(annotation)}")
        for source in tree.sources
        if source.path.startswith("hooks/")
        for node in source.nodes
        for name, annotation in annotated(node)
        if name not in KEPT_FIELDS
        if (name in UNTYPED and re.match(r"Any\b", ast.unparse(annotation))) or takes_untyped(annotation)
    ]


def takes_untyped(annotation: ast.expr) -> bool:
    """Return whether a type has a ``Callable`` with an argument ``Any``, be it the config or another."""
    return any(
        isinstance(argument, ast.Name) and argument.id == "Any"
        for node in ast.walk(annotation)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Callable"
        if isinstance(node.slice, ast.Tuple) and isinstance(node.slice.elts[0], ast.List)
        for argument in node.slice.elts[0].elts
    )


def annotated(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the name and the type of an argument or a field."""
    if isinstance(node, ast.arg) and node.annotation is not None:
        yield node.arg, node.annotation
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id, node.annotation


def probed_protocols(tree: Tree) -> list[str]:
    """Return the attributes that the core looks for in objects and that a backend's class defines."""
    defined = {
        name
        for source in tree.sources
        if source.path.startswith("backends/")
        for node in source.nodes
        if isinstance(node, ast.ClassDef)
        for name in members(node)
    }
    probes: dict[str, str] = {}
    for source in tree.sources:
        for node in source.nodes if source.is_core else ():
            if (name := probed(node)) in defined:
                assert isinstance(node, ast.Call)
                probes.setdefault(name, source.at(node, name))
    return list(probes.values())


def members(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names that a class defines."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each.name
        elif isinstance(each, ast.Assign):
            yield from (target.id for target in each.targets if isinstance(target, ast.Name))


def probed(node: ast.AST) -> str:
    """Return the attribute that ``hasattr``, or ``getattr`` with a default, looks for."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1):
        return ""
    counts = {"hasattr": 2, "getattr": 3}.get(node.func.id)
    name = node.args[1]
    is_text = isinstance(name, ast.Constant) and isinstance(name.value, str)
    return str(name.value) if is_text and counts == len(node.args) else ""


def broad_excepts(tree: Tree) -> list[str]:
    """Return where the core catches every exception, each with the reason that stands beside it."""
    return [
        source.at(node, source.text.splitlines()[node.lineno - 1].strip())
        for source in tree.sources
        if source.is_core and "except" in source.text
        for node in source.nodes
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type)
    ]


def unguarded(tree: Tree) -> list[str]:
    """Return the broad excepts that do not say which foreign code they guard."""
    return [each for each in broad_excepts(tree) if FOREIGN not in each]


def is_broad(caught: ast.expr | None) -> bool:
    """Return whether an ``except`` clause catches every exception."""
    types = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(each is None or (isinstance(each, ast.Name) and each.id in BROAD) for each in types)


def broad_ratio(tree: Tree) -> float:
    """Return the broad excepts in a thousand lines of the core, blank ones and comments included."""
    return 1000 * len(broad_excepts(tree)) / sum(source.lines for source in tree.sources if source.is_core)


# -------------------------------------------------------------------------
# Language
# -------------------------------------------------------------------------


def bad_openings(tree: Tree) -> list[str]:
    """Return the docstrings of modules, classes and functions that open with a relative or a preposition."""
    return [
        f"{source.path}:{getattr(node, 'lineno', 1)} {text.splitlines()[0]}"
        for source in tree.sources
        for node in source.nodes
        if isinstance(node, ast.Module | Definition)
        if (text := ast.get_docstring(node)) and BAD_OPENING.match(text)
    ]


def bad_attribute_openings(tree: Tree) -> list[str]:
    """Return the docstrings of attributes and constants that open so."""
    return [
        source.at(node, text.splitlines()[0])
        for source in tree.sources
        for firsts in [first_statements(source)]
        for node in source.nodes
        if isinstance(node, ast.stmt) and id(node) not in firsts
        if (text := docstring(node)) and BAD_OPENING.match(text)
    ]


def first_statements(source: Source) -> set[int]:
    """Return the identities of the statements that modules, classes and functions begin with."""
    return {
        id(node.body[0]) for node in source.nodes if isinstance(node, ast.Module | Definition) and node.body
    }


def retired_modules(tree: Tree) -> list[str]:
    """Return the modules whose name has a retired word."""
    return [
        source.path
        for source in tree.sources
        if words(Path(source.path).stem) & RETIRED.keys() and not source.path.endswith(tuple(KEPT_MODULES))
    ]


def retired_definitions(tree: Tree) -> list[str]:
    """Return the classes and functions whose name has a retired word."""
    return [
        source.at(node, node.name)
        for source in tree.sources
        for node in source.nodes
        if isinstance(node, Definition) and words(node.name) & RETIRED.keys()
    ]


def words(name: str) -> set[str]:
    """Return the words of an identifier, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def found_names(tree: Tree) -> list[str]:
    """Return where ``found`` is the name of a variable."""
    return [
        source.at(node)
        for source in tree.sources
        for node in source.nodes
        if isinstance(node, ast.Name) and node.id == "found"
    ]


def sample_names(tree: Tree) -> list[str]:
    """Return the stages of a sample that have a class of their own."""
    classes = {
        node.name
        for source in tree.sources
        for node in source.nodes
        if isinstance(node, ast.ClassDef) and not source.path.startswith(TESTING)
    }
    return [names for names in SAMPLE_NAMES if classes & set(names.split("|"))]


ROWS: dict[str, Callable[[Tree], Counter[str] | list[str] | float]] = {
    "code lines": all_code,
    "code lines in wheels": wheel_code,
    "code lines of core without testing": core_code,
    f"files under {SMALL} lines, other than __init__.py": small_files,
    "files in the fullest folder": fullest_folder,
    "names of one sample": sample_names,
    "comparisons with a backend's name in backends": backend_comparisons,
    "Any for config, kernels or plugins in the contract": untyped_contract,
    "protocols found by hasattr": probed_protocols,
    "docstrings that open with What, Of, By or That": bad_openings,
    "attribute docstrings that do": bad_attribute_openings,
    "modules with a retired word in their name": retired_modules,
    "classes and functions with one": retired_definitions,
    "uses of a variable named found": found_names,
    "lines of the third-party backend": third_party,
    "broad excepts in core without testing": broad_excepts,
    "the same in a thousand lines": broad_ratio,
    "the same that guard no foreign code": unguarded,
}
"""Function that counts each row: lines by file, places, or a ratio."""


def value(counted: Counter[str] | list[str] | float) -> str:
    """Return the figure of a row."""
    if isinstance(counted, float):
        return f"{counted:.2f}"
    return str(counted.total() if isinstance(counted, Counter) else len(counted))


def places(counted: Counter[str] | list[str] | float) -> Iterator[str]:
    """Yield what a row counts, a line each."""
    if isinstance(counted, Counter):
        yield from (f"{count:>6} {path}" for path, count in counted.most_common())
    elif isinstance(counted, list):
        yield from counted


def main() -> int:
    """Print the table, or what some rows count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", metavar="COMMIT", help="adds a column for this commit")
    parser.add_argument("--list", metavar="TEXT", help="print what the rows count whose title has this text")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trees = {"this tree": read_tree(ROOT)}
        if arguments.base is not None:
            name = short_id(arguments.base)
            trees = {name: read_tree(extract(arguments.base, Path(directory) / "tree")), **trees}
        if arguments.list is not None:
            for title in (title for title in ROWS if arguments.list in title):
                print("\n".join([f"{title}:", *places(ROWS[title](trees["this tree"]))]))
            return 0
        print(f"{'':<52}", *(f"{name:>10}" for name in trees))
        for title, count in ROWS.items():
            print(f"{title:<52}", *(f"{value(count(tree)):>10}" for tree in trees.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
