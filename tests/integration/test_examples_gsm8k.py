"""The GSM8K recipe, with a tiny model and a tokenizer that is trained on the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from anygauge.cli import main
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge_tests.datasets import read_rows, write_gsm8k

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("forked_actors")
def test_recipe_trains(tmp_path: Path) -> None:
    data = write_gsm8k(tmp_path)
    texts = [row[key] for row in read_rows(data / "train.jsonl") for key in ("question", "answer")]
    tokenizer = tiny_tokenizer(tmp_path / "model", texts=texts, vocab_size=1024)
    overrides = {
        "model.path": tiny_qwen3(tmp_path / "model", tokenizer=tokenizer),
        "data.train": f'["{data / "train.jsonl"}"]',
        "eval.data": f'["{data / "test.jsonl"}"]',
        "eval.max_prompts": 8,
        "eval.interval": 1,
        "run.directory": tmp_path,
        "run.steps": 2,
        "rollout.prompts_per_step": 4,
        "rollout.samples_per_prompt": 2,
        "rollout.max_new_tokens": 16,
        "placement.threads_per_worker": 1,
    }
    arguments = [part for key, value in overrides.items() for part in (f"--{key}", str(value))]
    assert main(["train", str(ROOT / "examples/gsm8k_grpo.toml"), "--backend", "cpu", *arguments]) == 0
    rows = read_rows(tmp_path / "gsm8k-grpo" / "metrics.jsonl")
    evaluations = [row for row in rows if "eval/step" in row]
    assert [row["eval/step"] for row in evaluations] == [0, 1, 2]
    assert {row["eval/test-samples"] for row in evaluations} == {8}
    rollouts = [row for row in rows if "rollout/step" in row]
    assert [row["rollout/samples"] for row in rollouts] == [8, 8]
    assert all(0 < row["rollout/response_len/mean"] <= 16 for row in rollouts)
    exported = tmp_path / "gsm8k-grpo" / "hf"
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        assert (exported / name).is_file()
