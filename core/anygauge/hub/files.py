"""Files downloaded from a hub, and the file patterns of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from anygauge.hub.weight_files import weight_names

__all__ = ["CODE", "NOT_WANTED", "TOKENIZERS", "WANTED", "HubFiles", "lacking"]

WANTED = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.safetensors")
"""Config, tokenizer, chat template and weights."""
NOT_WANTED = ("*/*", "consolidated*.safetensors", "adapter_model.safetensors")
"""Other forms of the same weights: folders of other formats, a second copy in one file."""
CODE = "*.py"
"""Asked for only where the config lets code of a checkpoint run."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class HubFiles:
    """A name on this host."""

    path: Path
    """A directory of a model, or a file of data."""
    revision: str
    """Pinned revision: the commit, where the hub reports it."""
    complete: bool = True
    """Whether nothing of it is known to be missing."""


def lacking(directory: Path) -> Iterator[str]:
    """Yield missing files of a model directory, for example after an interrupted download."""
    if not (directory / "config.json").is_file():
        yield "config.json"
    if not any((directory / name).is_file() for name in TOKENIZERS):
        yield "a tokenizer"
    try:
        yield from (name for name in weight_names(directory) if not (directory / name).is_file())
    except ValueError:
        yield "its weights"
