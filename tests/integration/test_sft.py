"""Supervised fine-tuning, whole, on chats: the loss is on the turns of the assistant."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_tokenizer
from anygauge.trainer.run import train
from anygauge_hooks import hookimpl
from anygauge_hooks.types import RunInfo
from anygauge_tests.recipe import tiny_recipe

CHATS = [
    [{"role": "user", "content": f"What is {n}+2?"}, {"role": "assistant", "content": f"It is {n + 2}."}]
    for n in range(8)
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sft")
    texts = [message["content"] for chat in CHATS for message in chat]
    (root / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in CHATS))
    tiny_recipe(
        root,
        model={"tokenizer": tiny_tokenizer(root / "model", texts=texts)},
        run__task="sft",
        run__name="sft",
        run__directory=root / "runs",
        run__steps=3,
        run__overwrite=True,
        run__report=False,
        data__train=[root / "chats.jsonl"],
        data__shuffle=False,
        data__input_key="messages",
        data__label_key="none",
        data__apply_chat_template=True,
        reward__function=None,
        rollout__prompts_per_step=8,
        rollout__samples_per_prompt=None,
        rollout__max_new_tokens=None,
        train__dtype="float32",
        eval__data=[root / "chats.jsonl"],
        eval__interval=3,
        placement__train_workers=2,
    )
    return root


class Interrupts:
    """Interrupts a run as it begins its second step."""

    @hookimpl
    def before_train_step(self, run: RunInfo) -> None:
        if run.step == 1:
            os.kill(os.getpid(), signal.SIGINT)


def metrics_of(root: Path, plugin: object | None = None, **overrides: Any) -> list[dict[str, Any]]:
    """Run the recipe and return its lines."""
    plugins = load_plugins(only=["cpu", "models"])
    if plugin is not None:
        plugins.register(plugin, "plugin")
    loaded = load_config(root / "run.toml", list(overrides.items()), backend="cpu", plugins=plugins)
    train(loaded, plugins)
    return [json.loads(line) for line in (root / "runs/sft/metrics.jsonl").read_text().splitlines()]


def expected_loss(root: Path, model: Path) -> float:
    """Return the mean negative log-likelihood of the answers and their ends, by transformers."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    total, count = 0.0, 0
    for chat in CHATS:
        prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        answer = chat[1]["content"] + "<|im_end|>"
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        with torch.no_grad():
            logits = policy(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
        picked = logits.log_softmax(-1)[range(len(after)), after]
        total, count = total - float(picked.sum()), count + len(after)
    return total / count


@pytest.mark.usefixtures("forked_actors")
def test_chats(chats: Path) -> None:
    lines = metrics_of(chats)
    steps = [line for line in lines if "train/loss" in line]
    evaluations = [line["eval/chats-loss"] for line in lines if "eval/chats-loss" in line]
    before, after = expected_loss(chats, chats / "model"), expected_loss(chats, chats / "runs/sft/hf")
    assert steps[0]["train/loss"] == pytest.approx(before, rel=1e-5)
    assert evaluations == pytest.approx([before, after], rel=1e-5)
    assert after < 0.9 * before
    assert not any(name.startswith("rollout/") for line in lines for name in line)
    with pytest.raises(KeyboardInterrupt):
        metrics_of(chats, Interrupts())
    assert [path.name for path in (chats / "runs/sft/checkpoints").iterdir()] == ["step-00000002"]
    resumed = metrics_of(chats, **{"run.overwrite": False, "run.resume": True})
    assert losses(resumed) == losses(lines)


def losses(lines: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    return [(line["train/step"], line["train/loss"]) for line in lines if "train/loss" in line]


def test_what_only_rl_knows_is_refused(chats: Path) -> None:
    with pytest.raises(
        ValueError, match=r'algorithm.kl_coef: found 0.1 .*; has no effect with run.task = "sft"'
    ):
        metrics_of(chats, **{"algorithm.kl_coef": 0.1})
