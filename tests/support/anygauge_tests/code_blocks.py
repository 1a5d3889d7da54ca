"""Blocks of code on pages of the documentation."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["blocks", "commands"]


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of a page that are marked with a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """Return the command lines of a page, without comments."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [re.sub(r"\s+#.*$", "", line).strip() for line in lines if line.strip()]
