"""Write what torch-npu has registered with torch, and what its library and sources say, as JSON.

python backends/npu/simulation -- python registered.py OUT
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch

from contract import read


def main(out: str) -> None:
    """Write both."""
    vendor: Any = importlib.import_module("torch_npu")
    package = Path(vendor.__file__).parent
    contract = read.contract(package)
    found = {
        "version": vendor.__version__.partition("+")[0],
        "registered": schemas(),
        "read": read.operators(package),
        "contract": contract,
        "arguments": {name: arguments(getattr(torch.npu, name)) for name in contract["functions"]},
        "read_arguments": {name: names(text) for name, text in contract["functions"].items()},
    }
    Path(out).write_text(json.dumps(found))


def schemas() -> dict[str, str]:
    """Return the schema of each operator of torch-npu, from torch's registry."""
    found = {}
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full.partition("::")
        if namespace == read.NAMESPACE:
            base, _, overload = name.partition(".")
            found[name] = str(getattr(getattr(torch.ops.npu, base), overload or "default")._schema)
    return found


def arguments(function: Any) -> list[str]:
    """Return the names of a function's arguments, as Python has it."""
    wanted = vars(function).get("__new__", function) if isinstance(function, type) else function
    return list(inspect.signature(wanted).parameters)


def names(signature: str) -> list[str]:
    """Return the names of the arguments of a signature in a contract."""
    (node,) = ast.parse(f"def f{signature}: pass").body
    assert isinstance(node, ast.FunctionDef)
    given = node.args
    positional = [*given.posonlyargs, *given.args, *filter(None, [given.vararg])]
    return [arg.arg for arg in [*positional, *given.kwonlyargs, *filter(None, [given.kwarg])]]


if __name__ == "__main__":
    main(*sys.argv[1:])
