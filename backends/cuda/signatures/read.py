"""Signatures of Transformer Engine, read from its sources without importing or building them.

The sources of a release are those of its tag at https://github.com/NVIDIA/TransformerEngine.

    python read.py DIRECTORY_WITH_transformer_engine VERSION COMMIT   # writes transformer_engine-VERSION.json
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CALLED", "FOLDER", "signatures"]

FOLDER = Path(__file__).parent
CALLED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Linear": ("pytorch/module/linear.py", ("__init__", "forward")),
    "GroupedLinear": ("pytorch/module/grouped_linear.py", ("__init__", "forward")),
    "RMSNorm": ("pytorch/module/rmsnorm.py", ("__init__",)),
    "DotProductAttention": (
        "pytorch/attention/dot_product_attention/dot_product_attention.py",
        ("__init__", "forward"),
    ),
    "ops.RMSNorm": ("pytorch/ops/basic/rmsnorm.py", ("__init__",)),
    "ops.SwiGLU": ("pytorch/ops/basic/activation.py", ("__init__",)),
}
"""Classes by name below ``transformer_engine.pytorch``: the file of each, and the methods that are called."""


def signatures(package: Path) -> dict[str, str]:
    """Return the parameters of each method, as its source has them, annotations left out.

    :raises LookupError: A class or a method is not where it was.
    """
    texts = {}
    for name, (file, methods) in CALLED.items():
        tree = ast.parse((package / file).read_text(encoding="utf-8"))
        for method in methods:
            texts[f"{name}.{method}"] = _parameters(tree, name.rpartition(".")[2], method)
    return texts


def _parameters(tree: ast.Module, name: str, method: str) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for each in node.body:
                if isinstance(each, ast.FunctionDef) and each.name == method:
                    return ast.unparse(_bare(each.args))
            bases = {ast.unparse(base) for base in node.bases}
            for base in ast.walk(tree):
                if isinstance(base, ast.ClassDef) and base.name in bases:
                    return _parameters(tree, base.name, method)
    raise LookupError(f"{name}.{method} is not in the source")


def _bare(arguments: ast.arguments) -> ast.arguments:
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return arguments


def main(directory: str, version: str, commit: str) -> None:
    """Write the contract of a version."""
    versions = {
        "version": version,
        "commit": commit,
        "signatures": signatures(Path(directory) / "transformer_engine"),
    }
    text = json.dumps(versions, indent=1) + "\n"
    (FOLDER / f"transformer_engine-{version}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
