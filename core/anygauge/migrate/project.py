"""The projects whose files can be imported."""

from __future__ import annotations

from anygauge.migrate import slime, trl, verl
from anygauge.migrate.table import Imported, convert

__all__ = ["import_text"]

READERS = {"slime": slime, "verl": verl, "trl": trl}
"""Modules with ``read(text, name) -> Input`` and ``rules(given, out)``."""


def import_text(project: str, text: str, name: str) -> Imported:
    """Return the config that a script or config of another project amounts to.

    :param name: File name, whose suffix says what it is.
    :raises ValueError: The text has no arguments of the project.
    """
    module = READERS[project]
    return convert(project, module.read(text, name), module.rules)
