"""The config of a run: its schema, how it is loaded, and how plugins change it."""

from __future__ import annotations

from anygauge.config.load import LoadedConfig, dump_config, load_config, write_resolved
from anygauge.config.schema import Config

__all__ = ["Config", "LoadedConfig", "dump_config", "load_config", "write_resolved"]
