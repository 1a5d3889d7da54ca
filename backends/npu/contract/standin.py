"""The operators of a contract, declared to torch's own dispatcher; their host versions may run them.

A wrong name, argument or type fails as it would with the wheel; no torch-npu is needed, and no NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["declared"]


@contextmanager
def declared(schemas: Mapping[str, str], run: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    """Declare operators for as long as the context is open.

    :param schemas: Schema of each name, as a contract has it.
    :param run: Returns what an operator does to host tensors, given its name.
    """
    library = torch.library.Library("npu", "DEF")
    try:
        for name, schema in schemas.items():
            library.define(schema.removeprefix("npu::"))
            library.impl(name, run(name), "CPU")
        yield
    finally:
        library._destroy()
