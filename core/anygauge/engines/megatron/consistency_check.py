"""Check that ranks agree on the model config."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from anygauge.config import Config
from anygauge.config.roles import as_language_model
from anygauge.engines.agreement import check_facts_agree, config_facts, leaves
from anygauge.engines.hf_directory import read_config, reading_config
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.types import LoadedPlugins

__all__ = ["check_configs_agree"]


def check_configs_agree(config: Config, plugins: LoadedPlugins) -> None:
    """Check that all ranks build the same model. A collective of all ranks.

    :raises RankMismatchError: Something differs, or only some ranks can read it; on every rank.
    :raises AnygaugeError: This rank cannot read it.
    """
    check_facts_agree(partial(_facts, config, plugins))


def _facts(config: Config, plugins: LoadedPlugins) -> Iterator[tuple[str, str]]:
    """Yield keys and values of the config, of the model's and of what its family makes of that."""
    yield from config_facts(config)
    hf = as_language_model(read_config(config.model.path))
    spec = plugins.model(hf.get("architectures") or ())
    yield "family", spec.name
    with reading_config(config.model.path):
        yield from leaves(f"family {spec.name}", megatron_model(spec).transformer_config(hf))
