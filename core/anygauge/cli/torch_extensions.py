"""Diagnose a torch that cannot be imported: it loads vendors' extensions, and one of them fails."""

from __future__ import annotations

from anygauge_hooks.errors import TorchImportError

__all__ = ["AUTOLOAD", "extension_failure"]

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Torch's own switch. Workers import what their backend needs by name, with or without it."""
_MESSAGE = "Failed to load the backend extension: "


def extension_failure(error: BaseException) -> TorchImportError | None:
    """Return the error for an exception of ``import torch``; ``None`` if no extension caused it."""
    text = str(error)
    if not (isinstance(error, RuntimeError) and text.startswith(_MESSAGE)):
        return None
    name = text.removeprefix(_MESSAGE).split(". ")[0]
    reason = " ".join(str(_root(error)).split())
    return TorchImportError(
        f"torch cannot be imported: its extension {name} does not load ({reason}).",
        hint=f"`anygauge doctor` says what it lacks. To do without it: export {AUTOLOAD}=0.",
    )


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
