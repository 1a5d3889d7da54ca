"""Replacements made by importing torch-npu, against docs/seams.md: the real wheel on a simulated device."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

pytestmark = pytest.mark.npu_sim

PROGRAM = Path(__file__).parent / "programs" / "vendor_import.py"
PAGE = Path(__file__).parents[3] / "docs" / "seams.md"
SECTION = "What torch-npu replaces when it is imported"


def listed() -> dict[str, str]:
    """Return the module of what is there now, by attribute."""
    section = PAGE.read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| (`.+`) \|$", section, re.M)
    return {name: module for module, names in rows for name in re.findall(r"`([\w.]+)`", names)}


@pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="the page lists those of torch-npu 2.13")
def test_the_page_lists_what_the_installed_wheel_replaces(
    simulated: Callable[..., CompletedProcess[str]],
) -> None:
    done = simulated(str(PROGRAM))
    assert done.returncode == 0, done.stderr
    found, page = json.loads(done.stdout.splitlines()[-1]), listed()
    assert sorted(found.items() - page.items()) == []
    assert sorted(page.items() - found.items()) == []
