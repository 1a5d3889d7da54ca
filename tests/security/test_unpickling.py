"""Which code unpickles, and what the object collectives of libraries may load."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from anygauge.distributed.all_gather import plain_objects
from anygauge_hooks.errors import RankMismatchError

PACKAGES = ("anygauge", "anygauge_hooks", "anygauge_models", "anygauge_cpu", "anygauge_cuda", "anygauge_npu")
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
WORDS = re.compile(r"pickle|_object\b|_object_list\b|Unpickler")
UNPICKLES = {
    "runtime/rpc.py": "driver and workers, which the run has started",
    "rollout/rewards/process.py": "a scoring process, of what the driver sends",
    "engines/megatron/conversion/dist_index.py": "a checkpoint's index, with a list of classes",
}
"""Files of the core that load pickles, and whose."""


def calls() -> Iterator[tuple[str, str]]:
    """Yield the file and the dotted name of every call in the files that may unpickle."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in Path(folder).rglob("*.py"):
                text = path.read_text(encoding="utf-8")
                for node in ast.walk(ast.parse(text if WORDS.search(text) else "")):
                    if isinstance(node, ast.Call):
                        yield path.relative_to(folder).as_posix(), ast.unparse(node.func)


def test_pickles_are_loaded_in_few_files_and_object_collectives_are_not_called() -> None:
    loading, collective = set(), set()
    for file, name in calls():
        if name in ("pickle.loads", "pickle.load", "cloudpickle.loads", "_Unpickler", "pickle.Unpickler"):
            loading.add(file)
        if name.rpartition(".")[2] in OBJECT_COLLECTIVES:
            collective.add(file)
    assert loading == set(UNPICKLES)
    assert collective == {"testing/conformance/collective_cases.py"}  # that a backend can do them


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.usefixtures("context")
def test_object_collectives_inside_load_plain_data_only(tmp_path: Path) -> None:
    received: list[Any] = [None]
    plain = [(("lr", 1e-3), None), {"a": [True, "text", b"bytes", {1, 2}]}]
    with plain_objects():
        dist.all_gather_object(received, plain)
        with pytest.raises(RankMismatchError, match="instead of plain data"):
            dist.all_gather_object(received, Touch(tmp_path / "ran"))
    assert received == [plain]
    assert not (tmp_path / "ran").exists()
    dist.all_gather_object(received, Touch(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()
