"""Checks of a run's rewards and rows that are cheap enough to make before its processes start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anygauge.config.data_files import split_slice
from anygauge.config.modalities import modalities
from anygauge.config.rules.reward import is_scored
from anygauge.config.schema import Config, Data, Reward
from anygauge.data.evaluation import eval_data, eval_datasets
from anygauge.data.fields import RowFields
from anygauge.data.index import check_first_rows
from anygauge.hub import localized
from anygauge.hub.names import data_name
from anygauge.plugins import Plugins
from anygauge.rollout.rewards import check_columns, check_reward

__all__ = ["check_first"]


def check_first(config: Config, plugins: Plugins) -> None:
    """Check the reward functions, and the first rows of the data files that are here.

    No function is called. The rest of the rows is read while the processes come up.

    :raises RewardError: A function cannot be called as a reward, or needs a column that the rows lack.
    :raises DataError: A file cannot be read, or one of its first rows cannot be used.
    """
    has_media = bool(modalities(config))
    for data, rewards in _sets(localized(config, download=False)):
        fields = RowFields(data, config.run.task == "sft", data.multimodal_keys if has_media else None)
        for reward in rewards:
            check_reward(reward, plugins)
        for row in _first_rows(data, fields):
            for reward in rewards:
                check_columns(reward, plugins, data.label_key, fields.metadata(row))


def _sets(config: Config) -> Iterator[tuple[Data, list[Reward]]]:
    """Yield how each data set is read, and the reward that its samples get, if any."""
    yield config.data, [config.reward] if is_scored(config) else []
    for each in eval_datasets(config).values():
        reward = each.reward or config.reward
        yield eval_data(config, each), [reward] if reward.function or reward.parts else []


def _first_rows(data: Data, fields: RowFields) -> Iterator[dict[str, Any]]:
    """Yield the first row of each file; a source of somebody's own reads other files, or others' rows."""
    for file in data.train if data.source == "files" else ():
        if data_name("data", file.path) is None:  # which is not in the cache yet
            name, rows = split_slice(file.path)
            yield check_first_rows(Path(name), rows, fields)
