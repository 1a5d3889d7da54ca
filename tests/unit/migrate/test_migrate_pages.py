"""``bench/migrate_pages.py --try``: the tables of scripts that were tried, against checkouts."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCH = str(Path(__file__).parents[3] / "bench/migrate_pages.py")
SCRIPT = (
    "python train.py --hf-checkpoint m --balance-data --odd 1 --actor-num-gpus-per-node 8 --rm-type math "
    "--rollout-num-gpus 8 --n-samples-per-prompt 4 --lr-decay-style constant"
)
NEEDS = "data.train, data.label_key"


@pytest.fixture
def checkouts(tmp_path: Path) -> Path:
    file = tmp_path / "slime/scripts/a.sh"
    file.parent.mkdir(parents=True)
    file.write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(("row", "count"), [((6, 1, 1), 0), ((5, 1, 1), 1)])
def test_rows_that_differ_are_printed(checkouts: Path, row: tuple[int, ...], count: int) -> None:
    differences = runpy.run_path(BENCH)["differences"]
    rows = list(differences(checkouts, {"slime": ("slime 1", [("scripts/a.sh", *row, NEEDS)])}))
    assert len(rows) == count, rows


def test_a_script_that_is_not_there_is_a_difference(tmp_path: Path) -> None:
    differences = runpy.run_path(BENCH)["differences"]
    (row,) = differences(tmp_path, {"slime": ("slime 1", [("a.sh", 3, 1, 3, "passes")])})
    assert "cannot be read" in row
