"""Environment variables for Ray, set before Ray is imported."""

from __future__ import annotations

import os
import sys
from secrets import token_hex

__all__ = ["OWN_CLUSTER", "set_ray_environment"]

OWN_CLUSTER = "start"
"""``cluster.address`` of a run that starts a cluster of its own."""
TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def set_ray_environment(address: str) -> None:
    """Set the variables that a run needs, as far as the user has not set them.

    A cluster of our own listens on the loopback interface, and its token is in its processes' memory alone.

    :param address: ``cluster.address``.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody unasked
    # Otherwise Ray warns that it hides devices from workers without any; the backend's worker_env does that.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if address == OWN_CLUSTER and not _is_connected():
        # Ray has no argument for it. Without several nodes to serve, which it calls a cluster, it takes the
        # loopback address for its own; the name of the variable is that of the systems where this is usual.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if not any(name in os.environ for name in TOKEN_VARIABLES):
            os.environ["RAY_AUTH_TOKEN"] = token_hex(32)


def _is_connected() -> bool:
    """Return whether this process belongs to a cluster already, which the run then joins."""
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())
