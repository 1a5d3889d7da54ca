"""Check that ranks agree on the model config."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from anygauge.config import Config
from anygauge.config.roles import as_language_model
from anygauge.distributed.all_gather import all_gather_values
from anygauge.engines.megatron.weights.hf import read_config, reading_config
from anygauge_hooks.errors import AnygaugeError, RankMismatchError
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.types import LoadedPlugins

__all__ = ["check_configs_agree", "majority", "named_ranks", "other_files", "shown"]

SHOWN = 5
"""Tensors or keys that an error names."""
TABLES = ("run", "algorithm", "train", "rollout")
"""Tables of the resolved config that determine how a model is built and trained."""
_DIGEST = TypeAdapter(str)
_FACTS = TypeAdapter(dict[str, str] | None)


# -------------------------------------------------------------------------
# Configs
# -------------------------------------------------------------------------


def check_configs_agree(config: Config, plugins: LoadedPlugins) -> None:
    """Check that all ranks build the same model. A collective of all ranks.

    Paths may differ: each host has its own cache.

    :raises RankMismatchError: Something differs, or only some ranks can read it; on every rank.
    :raises AnygaugeError: This rank cannot read it.
    """
    facts, problem = None, None
    try:
        facts = dict(_facts(config, plugins))
    except AnygaugeError as error:
        problem = error
    facts_of_ranks = [facts]
    if len(set(all_gather_values(hashlib.blake2b(repr(facts).encode()).hexdigest(), _DIGEST))) > 1:
        facts_of_ranks = all_gather_values(facts, _FACTS)
    if problem is not None:
        raise problem
    if len(facts_of_ranks) > 1:
        raise RankMismatchError(_difference(facts_of_ranks), hint=other_files("model.path"))


def _difference(facts_of_ranks: Sequence[Mapping[str, str] | None]) -> str:
    """Return the differences between ranks, or the ranks that cannot read the model."""
    if unread := [rank for rank, facts in enumerate(facts_of_ranks) if facts is None]:
        return f"The model cannot be read by {named_ranks(unread)}; this rank could."
    read = [facts for facts in facts_of_ranks if facts is not None]
    by_key = {key: [facts.get(key, "nothing") for facts in read] for facts in read for key in facts}
    different = [_odd_value(key, values) for key, values in by_key.items() if len(set(values)) > 1]
    return f"Ranks start with different configs: {shown(different)}."


def _facts(config: Config, plugins: LoadedPlugins) -> Iterator[tuple[str, str]]:
    """Yield keys and values of the config, of the model's and of what its family makes of that."""
    for name in TABLES:
        yield from _leaves(name, getattr(config, name).model_dump())
    directory = config.model.path
    hf = read_config(directory)
    yield from _leaves("config.json", hf)
    hf = as_language_model(hf)
    spec = plugins.model(hf.get("architectures") or ())
    yield "family", spec.name
    with reading_config(directory):
        yield from _leaves(f"family {spec.name}", megatron_model(spec).transformer_config(hf))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif not isinstance(value, Path) and not callable(value):  # what a function prints has its address
        yield name, repr(value)


def _odd_value(key: str, values: Sequence[str]) -> str:
    """Return a key with the ranks and values that are not with the most."""
    usual = majority(values)
    odd = [rank for rank, value in enumerate(values) if value != usual]
    return f"{key} ({named_ranks(odd)}: {values[odd[0]]}, others: {usual})"


# -------------------------------------------------------------------------
# Messages
# -------------------------------------------------------------------------


def majority(values: Sequence[Any]) -> Any:
    """Return the value of most ranks; where as many have one as another, that of the first."""
    return max(dict.fromkeys(values), key=values.count)


def other_files(directory: str) -> str:
    """Return the hint for ranks that have read different files."""
    return f"Every rank must read the same files: is {directory} the same directory on each node?"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as an error names them."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def shown(texts: Sequence[str]) -> str:
    """Return the first texts and the number of the others."""
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(texts[:SHOWN]) + more
