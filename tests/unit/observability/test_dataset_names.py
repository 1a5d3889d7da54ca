"""Names of data sets that would overwrite metrics, or be taken for others, are problems."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.config import Config
from anygauge.observability import plugin
from anygauge.observability.metrics import train_datasets


def make_config(train: list[Any], evaluation: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "demo"},
            "model": {"path": "m"},
            "data": {"train": train},
            "reward": {"function": "math"},
            "eval": evaluation,
        }
    )


def problems(train: list[Any], evaluation: dict[str, Any]) -> list[tuple[str, Any]]:
    found = plugin.check_config(make_config(train, evaluation))
    assert all("give the data set another name" in each.hint for each in found)
    return [(each.path, each.found) for each in found]


@pytest.mark.parametrize("name", ["step", "response_len", "sequence_len"])
def test_a_data_set_cannot_have_the_name_of_a_metric(name: str) -> None:
    files = ["a.jsonl", f"data/{name}.jsonl@[:5]"]
    assert problems(files, {"data": files, "datasets": {name: {"files": ["b.jsonl"]}}}) == [
        ("data.train[1]", name),
        ("eval.data[1]", name),
        (f"eval.datasets.{name}", name),
    ]


@pytest.mark.parametrize("suffix", ["samples", "loss", "truncated_ratio", "failed_ratio"])
def test_an_evaluation_cannot_have_the_name_of_what_is_said_of_one(suffix: str) -> None:
    name = f"b-{suffix}"
    files = ["b.jsonl", {"path": "c.jsonl", "name": name}]
    assert problems(["a.jsonl"], {"data": files}) == [("eval.data[1]", name)]
    assert problems(["a.jsonl"], {"datasets": {name: {"files": files}}}) == [(f"eval.datasets.{name}", name)]


def test_other_names_are_none() -> None:
    names = ["loss.jsonl", "b-samples-2.jsonl", "step-1.jsonl", "samples.jsonl"]
    assert problems([*names, "b.jsonl", "b-samples.jsonl"], {"data": names}) == []


def test_data_sets_are_counted_by_name() -> None:
    one = [{"path": "a.jsonl", "name": "a"}, {"path": "b.jsonl", "name": "a"}]
    assert train_datasets(make_config(one, {})) == 1
    assert train_datasets(make_config([*one, "c.jsonl"], {})) == 2
