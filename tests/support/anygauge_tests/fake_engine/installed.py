"""A distribution that brings the fake engine to runs, as ``rollout.engine = "fake"``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["install_fake_engine"]

MODULE = '''"""Fake engines: written by anygauge_tests."""

from anygauge.serving.server_plan import plan_servers
from anygauge_tests.fake_engine import FakeServer, Options
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec

KEYS = {{"api_key": "key-of-{{rank}}", "admin_api_key": "admin-key-of-{{rank}}"}}
FAULTS = {faults!r}
OPTIONS = {options!r}


def serve(config, context):
    kind = plan_servers(config)[context.rank].kind
    half = kind if kind in ("prefill", "decode") else "null"
    keys = {{name: key.format(rank=context.rank) for name, key in KEYS.items()}}
    return FakeServer(Options(**keys, **OPTIONS, faults=FAULTS[context.rank], disaggregation=half))


@hookimpl
def register_rollout_engines():
    kinds = ("regular", "prefill", "decode", "encoder")
    able = dict(releases_memory=True, starts_early=True, loads_adapters=True, profiles=True)
    return [RolloutEngineSpec(name="fake", serve=serve, kinds=kinds, **able)]
'''


def install_fake_engine(directory: Path, faults: Sequence[str], options: Mapping[str, Any]) -> Path:
    """Write the distribution and return its directory: put it on ``sys.path``, which local workers get too.

    :param faults: Of each engine, as :class:`~anygauge_tests.fake_engine.options.Options` has them.
    :param options: Of all engines; their weights begin as version 0, and each asks for keys of its own.
    """
    metadata = directory / "anygauge_fake_rollout-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: anygauge-fake-rollout\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[anygauge.plugins]\nfake_rollout = anygauge_fake_rollout\n")
    text = MODULE.format(faults=list(faults), options={"weight_version": "0", **options})
    (directory / "anygauge_fake_rollout.py").write_text(text)
    return directory
