"""A whole run whose samples an agent makes, through OpenAI's client, with the embedded engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anygauge_hooks.rl import NO_VERSION
from anygauge_tests.observer import Observer, run_with_observer
from anygauge_tests.recipe import tiny_recipe

MODULE = "agents_of_a_test"
AGENT = """
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

async def solve(base_url, api_key, row):
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:
        question = {"role": "user", "content": row["prompt"]}
        create = client.chat.completions.create
        first = await create(model="policy", messages=[question], max_tokens=3)
        answer = {"role": "assistant", "content": first.choices[0].message.content}
        more = {"role": "user", "content": "1+1="}
        await create(model="policy", messages=[question, answer, more], max_tokens=3)
        # A second conversation.
        other = {"role": "user", "content": "+"}
        last = await create(model="policy", messages=[question, other], max_tokens=2)
        said = last.choices[0].message.content
        return float(sum(character.isdigit() for character in said) - len(answer["content"]) / 8)
"""
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
)


def test_an_agent_is_trained(tmp_path: Path, forked_actors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{MODULE}.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = tiny_recipe(
        tmp_path,
        run__report=False,
        run__progress=False,
        rollout__function="agent",
        rollout__function_options__agent=f"{MODULE}:solve",
        rollout__max_new_tokens=12,
        save__hf_at_end=False,
    )
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    observer = Observer()
    run_with_observer(recipe, observer)
    sys.modules.pop(MODULE, None)
    assert len(observer.metrics) == 2
    # The engine's log-probs are the trainer's on the very same tokens, or they would differ.
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in observer.metrics)
    for group in observer.groups:
        assert len({sample.seed for sample in group.samples}) == 4
        assert len(group.samples) == 8
        for sample in group.samples:
            made = [version != NO_VERSION for version in sample.weight_versions]
            assert made == [mask == 1 for mask in sample.loss_mask]
            assert sample.reward is not None
        assert any(0 in sample.loss_mask for sample in group.samples)
