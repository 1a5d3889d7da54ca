"""Read the schemas and signatures of torch-npu that the NPU backend relies on.

Read from an unpacked wheel without importing it, so for any version and on any host. An operator's schema is
a text in ``libtorch_npu.so``; a function of ``torch.npu`` is Python. Needs torch to parse a schema.

    python read.py DIRECTORY_OF_torch_npu VERSION    # writes torch_npu-VERSION.json and differences.json
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from anygauge_hooks.megatron import REDIRECTED

__all__ = [
    "DIFFERENCES",
    "Contract",
    "compare",
    "contract",
    "contracts",
    "differences",
    "functions",
    "operators",
    "used",
]

FOLDER = Path(__file__).parent
DIFFERENCES = FOLDER / "differences.json"
BACKEND = FOLDER.parent / "anygauge_npu"
NAMESPACE = "npu"

Contract = dict[str, dict[str, str]]
"""``{"operators": {name: schema}, "functions": {name: signature}}``."""

DEFINED_IN = ("__init__", "utils", "memory", "random", "streams", "npu_config")
"""Modules of ``torch_npu.npu`` whose functions it offers as its own."""

NAMES = ("npu", "self._npu")
"""Expressions that the backend uses for ``torch.npu``."""

SETTINGS = {"config", "conv", "matmul", "version"}
"""Its attributes that are not called."""


def operators(package: Path) -> dict[str, str]:
    """Return the schema of each operator that a package's library declares, by name with overload."""
    schemas: dict[str, str] = {}
    for text in _texts((package / "lib" / "libtorch_npu.so").read_bytes(), b") -> "):
        try:
            schema = torch._C.parse_schema(f"{NAMESPACE}::{text}")
        except RuntimeError:
            continue  # a text that only looks like one
        name = schema.name.removeprefix(f"{NAMESPACE}::")
        schemas[f"{name}.{schema.overload_name}" if schema.overload_name else name] = str(schema)
    return schemas


def _texts(library: bytes, part: bytes) -> Iterator[str]:
    """Yield each text of a library, which ends with a zero byte, that has a part."""
    place = library.find(part)
    while place >= 0:
        start, end = library.rfind(b"\0", 0, place) + 1, library.find(b"\0", place)
        text = library[start:end]
        if re.fullmatch(rb"[\x20-\x7e]+", text):
            yield text.decode()
        place = library.find(part, end)


def functions(package: Path) -> dict[str, str]:
    """Return the signature of each function and class of ``torch.npu``, by name."""
    signatures: dict[str, str] = {}
    for module in DEFINED_IN:
        tree = ast.parse((package / "npu" / f"{module}.py").read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                signatures.setdefault(node.name, f"({ast.unparse(node.args)})")
            elif isinstance(node, ast.ClassDef):
                signatures.setdefault(node.name, _constructor(node))
    return signatures


def _constructor(node: ast.ClassDef) -> str:
    """Return the arguments that make an instance."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name in ("__new__", "__init__"):
            return f"({ast.unparse(method.args)})"
    return "()"


def used(source: Path = BACKEND) -> tuple[set[str], set[str]]:
    """Return the operators and the functions of ``torch.npu`` that a folder of Python names."""
    called: set[str] = set()
    named: set[str] = set()
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                owner = ast.unparse(node.value)
                if owner == f"torch.ops.{NAMESPACE}":
                    called.add(node.attr)
                elif owner in NAMES:
                    named.add(node.attr)
            elif isinstance(node, ast.Name) and node.id == "REDIRECTED":
                named.update(REDIRECTED)
    return called, named - SETTINGS


def contract(package: Path) -> Contract:
    """Return what the backend uses of a package, with the operators that stand behind those it names."""
    declared, offered = operators(package), functions(package)
    called, named = used()
    wanted = {f"{name}{suffix}" for name in called for suffix in ("", "_backward", "_grad")}
    wanted |= {f"_{name}" for name in called}
    return {
        "operators": {
            name: schema for name, schema in sorted(declared.items()) if name.partition(".")[0] in wanted
        },
        "functions": {name: offered[name] for name in sorted(named & offered.keys())},
    }


def contracts() -> dict[str, Contract]:
    """Return every contract that is kept, by the version of torch-npu."""
    paths = sorted(FOLDER.glob("torch_npu-*.json"))
    return {path.stem.removeprefix("torch_npu-"): json.loads(path.read_text()) for path in paths}


def compare(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return a line for each thing of ``old`` that is not the same in ``new``."""
    return [line for name in old for line in _drift(name, old[name], new)]


def _drift(name: str, old: str, new: Mapping[str, str]) -> Iterator[str]:
    if name not in new:
        twins = [other for other, schema in new.items() if _tail(schema) == _tail(old)]
        yield f"{name}: removed" + (f", perhaps renamed to {', '.join(twins)}" if twins else "")
        return
    before, after = _arguments(old), _arguments(new[name])
    yield from (f"{name}: argument {key} removed" for key in before if key not in after)
    yield from (f"{name}: argument {key} added" for key in after if key not in before)
    for key in before:
        if key in after and before[key] != after[key]:
            yield f"{name}: argument {key} changed from {before[key]!r} to {after[key]!r}"
    kept = [key for key in after if key in before]
    if kept != [key for key in before if key in after]:
        yield f"{name}: arguments have another order"
    if _returned(old) != _returned(new[name]):
        yield f"{name}: returns {_returned(new[name])} where it returned {_returned(old)}"


def _tail(schema: str) -> str:
    return schema[schema.index("(") :]


def _returned(schema: str) -> str:
    return schema.rpartition(" -> ")[2] if " -> " in schema else ""


def _arguments(schema: str) -> dict[str, str]:
    """Return type, default and kind of each argument, by name."""
    if " -> " in schema:
        parsed = torch._C.parse_schema(schema)
        return {a.name: f"{a.real_type} = {a.default_value}, {a.kwarg_only}" for a in parsed.arguments}
    signature: Any = ast.parse(f"def f{schema}: pass").body[0]
    given = signature.args
    positional = given.posonlyargs + given.args
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    pairs = [*zip(positional, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    shown = {arg.arg: "" if default is None else ast.unparse(default) for arg, default in pairs}
    return shown | {f"*{arg.arg}": "" for arg in (given.vararg, given.kwarg) if arg}


def differences() -> dict[str, list[str]]:
    """Return what differs between the newest contract and each of the others, by version."""
    *others, newest = sorted(contracts().items(), key=lambda item: _version(item[0]))
    return {
        version: [
            line for part in ("operators", "functions") for line in compare(kept[part], newest[1][part])
        ]
        for version, kept in others
    }


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def main(package: str, version: str) -> None:
    """Write the contract of an unpacked wheel, and what differs between all."""
    _write(FOLDER / f"torch_npu-{version}.json", contract(Path(package)))
    _write(DIFFERENCES, differences())


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
