"""Add-on plugin with the fault that the environment names; without a name it has no hook."""

from __future__ import annotations

import os
from functools import cache

from backend_faults.catalog import find
from backend_faults.fault import FAULT, HOOKS, plugin_of

PLUGIN = plugin_of(os.environ.get(HOOKS, ""), cache(lambda: find(os.environ[FAULT])))
