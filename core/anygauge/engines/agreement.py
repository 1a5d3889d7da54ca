"""Agreement of ranks: on a config, on whether a directory can be read, and the words of an error about it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from anygauge.config import Config
from anygauge.distributed.all_gather import all_gather_values
from anygauge.engines.hf_directory import read_config
from anygauge.wording import listed
from anygauge_hooks.errors import AnygaugeError, CheckpointError, RankMismatchError

__all__ = [
    "check_facts_agree",
    "config_facts",
    "leaves",
    "majority",
    "named_ranks",
    "on_every_rank",
    "other_files",
]

Source = TypeVar("Source")

TABLES = ("run", "algorithm", "train", "rollout")
"""Tables of the resolved config that determine how a model is built and trained."""
_DIGEST = TypeAdapter(str)
_FACTS = TypeAdapter(dict[str, str] | None)
_READABLE = TypeAdapter(bool)


# -------------------------------------------------------------------------
# Facts
# -------------------------------------------------------------------------


def check_facts_agree(read: Callable[[], Iterable[tuple[str, str]]]) -> None:
    """Check that all ranks have the same facts about the model. A collective of all ranks.

    :param read: Reads the facts of this rank; may raise an error of the project.
    :raises RankMismatchError: Something differs, or only some ranks can read it; on every rank.
    :raises AnygaugeError: This rank cannot read it.
    """
    facts, problem = None, None
    try:
        facts = dict(read())
    except AnygaugeError as error:
        problem = error
    facts_of_ranks = [facts]
    if len(set(all_gather_values(hashlib.blake2b(repr(facts).encode()).hexdigest(), _DIGEST))) > 1:
        facts_of_ranks = all_gather_values(facts, _FACTS)
    if problem is not None:
        raise problem
    if len(facts_of_ranks) > 1:
        raise RankMismatchError(_difference(facts_of_ranks), hint=other_files("model.path"))


def config_facts(config: Config) -> Iterator[tuple[str, str]]:
    """Yield keys and values of a config and of its model's ``config.json``.

    Paths may differ: each host has its own cache.
    """
    for name in TABLES:
        yield from leaves(name, getattr(config, name).model_dump())
    yield from leaves("config.json", read_config(config.model.path))


def leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables under their dotted names, without paths."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(f"{name}.{key}", inner)
    elif not isinstance(value, Path) and not callable(value):  # what a function prints has its address
        yield name, repr(value)


def _difference(facts_of_ranks: Sequence[Mapping[str, str] | None]) -> str:
    """Return the differences between ranks, or the ranks that cannot read the model."""
    if unread := [rank for rank, facts in enumerate(facts_of_ranks) if facts is None]:
        return f"The model cannot be read by {named_ranks(unread)}; this rank could."
    read = [facts for facts in facts_of_ranks if facts is not None]
    by_key = {key: [facts.get(key, "nothing") for facts in read] for facts in read for key in facts}
    different = [_odd_value(key, values) for key, values in by_key.items() if len(set(values)) > 1]
    return f"Ranks start with different configs: {listed(different)}."


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


# -------------------------------------------------------------------------
# Directories
# -------------------------------------------------------------------------


@contextmanager
def on_every_rank(opening: AbstractContextManager[Source], directory: Path) -> Iterator[Source]:
    """Open a directory on all ranks. A collective.

    :raises CheckpointError: One of them cannot read it; on every rank.
    """
    with ExitStack() as stack:
        problem = None
        try:
            source = stack.enter_context(opening)
        except CheckpointError as error:
            problem = error
        failed = [rank for rank, ok in enumerate(all_gather_values(problem is None, _READABLE)) if not ok]
        if problem is not None:
            raise problem
        if failed:
            raise CheckpointError(
                f"Ranks {failed} cannot read {directory}; this rank could.",
                hint="Every host must see the same files. See the log of such a rank.",
            )
        yield source
