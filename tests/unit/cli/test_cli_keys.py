"""``anygauge keys``: every key of the schema, and a JSON schema that takes the files which runs take."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from anygauge.cli import main
from anygauge.config.keys import config_keys, json_schema
from anygauge.config.validate import keys

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """Return the JSON schema as a file would have it."""
    return dict(json.loads(json.dumps(json_schema())))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["keys", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_keys_have_type_choices_default_meaning_and_page(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys)
    assert "  --run.name  (string; required)" in lines
    assert '  --run.trackers  (list of strings; default ["jsonl"])' in lines
    assert '  --train.dtype  (string or "none"; default "none")' in lines
    assert "  --train.lr  (number, > 0; default 1e-06)" in lines
    assert "      Peak learning rate." in lines
    assert "      Choices: none, elementwise, selective, full." in lines
    assert "      Choices: cispo, gspo, policy_gradient, ppo_clip, sft." in lines, "registered names"
    assert '      "none" takes rollout.max_new_tokens.' in lines
    assert "      docs/lora.md" in lines
    assert not any("``" in line for line in lines)


def test_tables_in_tables_are_listed_key_by_key() -> None:
    paths = [key.path for key in config_keys()]
    assert len(set(paths)) == len(paths)
    missing = {path for path, _ in keys()} - set(paths)
    assert all(any(path.startswith(f"{table}.") for path in paths) for table in missing)
    inner = {
        "train.parallel.tensor", "rollout.groups[].kind", "data.train[].weight", "reward.parts.NAME.weight",
        "eval.datasets.NAME.reward.parts.NAME.function",
    }  # fmt: skip
    assert inner <= set(paths)


def test_words_select_keys(capsys: pytest.CaptureFixture[str]) -> None:
    heads = [line.split()[0] for line in shown(capsys, "one_step_off") if line.startswith("  --")]
    assert heads == ["--rollout.schedule"], "found by a choice"
    heads = [line.split()[0] for line in shown(capsys, "save.", "hugging") if line.startswith("  --")]
    assert heads == ["--save.hf_every", "--save.hf_at_end"], "of a table, found by the meaning"
    assert main(["keys", "no_such_word"]) == 1
    assert "No key has no_such_word" in capsys.readouterr().out


def test_arguments_of_other_projects_are_named_by_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "learning_rate") == ["  learning_rate of TRL: train.lr (docs/migrate/trl.md)"]
    (line,) = shown(capsys, "--n-samples-per-prompt=8")  # as it stands in a script
    assert line.startswith("  --n-samples-per-prompt of slime: rollout.samples_per_prompt (")
    (line,) = shown(capsys, "++actor_rollout_ref.rollout.n=8")
    assert " of verl: rollout.samples_per_prompt (" in line
    lines = shown(capsys, "use-kl-loss")
    assert [line.split()[2] for line in lines] == ["slime:", "verl:"]
    table, argument = shown(capsys, "actor_rollout_ref", "num_train_epochs")
    assert table.startswith("  actor_rollout_ref: a table of verl: `anygauge import verl FILE`")
    assert argument.startswith("  num_train_epochs: set run.steps: epochs")
    (line,) = shown(capsys, "--learning_rate", "1e-5")  # the value is no word
    assert line.startswith("  --learning_rate of TRL: ")
    assert main(["keys", "leraning_rate"]) == 1
    out = capsys.readouterr().out
    assert out == (
        "No key has leraning_rate in its path, choices or meaning.\n  leraning_rate: did you mean train.lr?\n"
    )
    assert shown(capsys, "--lr", "1e-6")[0].startswith("  --lr of slime: train.lr (")


def test_words_may_begin_with_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--train.lr", "1e-3") == shown(capsys, "train.lr")
    assert shown(capsys, "--", "train.lr") == shown(capsys, "train.lr")
    for typo in ("--jsno", "--jsn=1"):
        with pytest.raises(SystemExit):
            main(["keys", typo])
        word = typo.partition("=")[0]
        assert f"unrecognized arguments: {word} (did you mean --json?)" in capsys.readouterr().err


def test_each_key_is_a_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = shown(capsys, "--json", "kl_type")
    key = json.loads(line)
    assert (key["path"], key["default"], key["page"]) == ("algorithm.kl_type", '"k3"', "docs/algorithms.md")
    assert key["choices"] == ["k1", "k2", "k3", "low_var_kl"]


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_schema_takes_every_example(example: Path, schema: dict[str, Any]) -> None:
    jsonschema.validate(tomllib.loads(example.read_text(encoding="utf-8")), schema)


@pytest.mark.parametrize(
    ("table", "is_right"),
    [
        (
            {"model": "Qwen/Qwen3-0.6B", "data": {"train": ["a.jsonl", {"path": "b.jsonl", "weight": 2}]}},
            True,
        ),
        ({"save": {"every": "none"}, "on": {"cuda": {"train": {"lr": 1e-5}}}}, True),
        ({"save": {"every": "never"}}, False),
        ({"train": {"lrr": 1e-5}}, False),
        ({"on": {"cuda": {"train": {"lrr": 1e-5}}}}, False),
        ({"train": {"lr": "1e-5"}}, False),
        ({"rollout": {"schedule": "asynchronous"}}, False),
    ],
)
def test_the_schema_knows_what_a_file_may_have(
    table: dict[str, Any], is_right: bool, schema: dict[str, Any]
) -> None:
    assert jsonschema.Draft202012Validator(schema).is_valid(table) is is_right
