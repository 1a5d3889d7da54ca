"""Formatting of network addresses."""

from __future__ import annotations

__all__ = ["in_url"]


def in_url(host: str) -> str:
    """Return an address as it stands in a URL and before a port: one of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
