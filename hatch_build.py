"""The long description of the wheel: README.md, whose links lead to the files of the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

IMAGE = re.compile(r"(!\[[^\]]*\]\()(?!https?:)([^)\s]+)")
LINK = re.compile(r"(?<!!)(\[[^\]]*\]\()(?!https?:|#)([^)\s]+)")


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """Return a page of the root whose relative links lead to the files of a release."""
    files = repository.replace("github.com", "raw.githubusercontent.com")
    text = IMAGE.sub(rf"\g<1>{files}/v{version}/\g<2>", text)
    return LINK.sub(rf"\g<1>{repository}/blob/v{version}/\g<2>", text)


class CustomMetadataHook(MetadataHookInterface):
    """Sets ``readme``, which pyproject.toml declares as dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the long description to the project's metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = with_absolute_links(text, metadata["urls"]["Repository"], metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
