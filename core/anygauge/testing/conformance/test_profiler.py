"""The backend makes profilers of the kinds that it names, and of no others."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest

from anygauge.plugins import Plugins
from anygauge_hooks.types import BackendSpec

pytestmark = pytest.mark.conformance

TORCH = "torch"


def test_each_kind_has_a_profiler_and_no_other_kind(
    backend: BackendSpec, plugins: Plugins, tmp_path: Path
) -> None:
    make = partial(plugins.first, "make_profiler", backend=backend, path=str(tmp_path / "actor-0"))
    assert TORCH not in backend.profile_kinds, "the core has it"
    assert len(set(backend.profile_kinds)) == len(backend.profile_kinds)
    for kind in (TORCH, *backend.profile_kinds):
        assert isinstance(make(kind=kind), AbstractContextManager), kind
    assert make(kind="no such kind") is None
    assert not [*tmp_path.iterdir()], "nothing is recorded before a profiler is entered"
