"""The arguments of Liger's Ascend kernels that the backend calls, read from an unpacked wheel.

python liger.py DIRECTORY_OF_liger_kernel VERSION    # writes liger_kernel-VERSION.json beside this file
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

from anygauge_npu.liger import MODULES, PACKAGE

__all__ = ["signatures"]


def signatures(package: Path) -> dict[str, str]:
    """Return what each autograd function's ``apply`` takes, by module."""
    folder = package.parent / PACKAGE.replace(".", "/")
    return {module: _taken(folder / f"{module}.py", name) for module, name in MODULES.items()}


def _taken(path: Path, name: str) -> str:
    """Return the arguments of ``forward`` after the context."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    del method.args.args[0]
                    return f"({ast.unparse(method.args)})"
    raise LookupError(f"{path} has no {name}")


def main(package: str, version: str) -> None:
    """Write the arguments."""
    path = Path(__file__).with_name(f"liger_kernel-{version}.json")
    path.write_text(json.dumps(signatures(Path(package)), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
