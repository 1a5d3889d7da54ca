"""Fixtures of the meta tests: this checkout."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the checkout."""
    return Path(__file__).parents[2]
