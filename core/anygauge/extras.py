"""Optional dependencies: how to install one that is missing."""

from __future__ import annotations

__all__ = ["install_extra"]


def install_extra(name: str) -> str:
    """Return the commands that install an extra: from an index, and in a clone, which needs no release.

    >>> install_extra("media")
    "pip install 'anygauge[media]', or in a clone of anygauge: pip install -e '.[media]'"
    """
    return f"pip install 'anygauge[{name}]', or in a clone of anygauge: pip install -e '.[{name}]'"
