"""Samples and prompts keep their media wherever they are copied."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from anygauge.data.batch import select
from anygauge.trainer.plan import conversation_batch, plan_steps, rollout_batch
from anygauge_hooks.media import Media
from anygauge_hooks.rl import Group, Prompt
from anygauge_tests.scoring import sample as make_sample

CORE = Path(__file__).resolve().parents[3] / "core" / "anygauge"
CARRIERS = {"Prompt", "Sample", "TrainBatch", "pack_samples", "GenerateRequest"}
SHOWN = (Media(kind="image", key="a", spans=((1, 2),), grid=(1, 2, 4)),)


def made() -> Iterator[tuple[str, ast.Call, ast.AST]]:
    """Yield each place in the core where a carrier is made, and the expression around it.

    What tests make of text alone is left out.
    """
    for path in sorted(set(CORE.rglob("*.py")) - set((CORE / "testing").rglob("*.py"))):
        text = path.read_text(encoding="utf-8")
        if not any(f"{name}(" in text for name in CARRIERS):
            continue
        tree = ast.parse(text)
        parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CARRIERS:
                yield f"{path.relative_to(CORE)}:{node.lineno}", node, parents[parents[node]]


def says_media(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and any(each.arg == "media" for each in node.keywords)


def test_no_place_that_makes_a_sample_drops_its_media() -> None:
    places = list(made())
    assert len(places) > 6
    assert [place for place, *around in places if not any(map(says_media, around))] == []


def test_conversations_and_groups_become_samples_with_their_media() -> None:
    prompt = Prompt(index=0, tokens=(1, 9, 9), text="", response=(2,), loss_mask=(1,), media=SHOWN)
    assert conversation_batch([prompt]).media == [SHOWN]
    sample = make_sample(prompt_tokens=(1, 9, 9), reward=1.0, media=SHOWN)
    batch = rollout_batch([Group(prompt=prompt, samples=(sample, sample._replace(error="no")))])
    assert batch.media == [SHOWN, SHOWN]
    assert [each.media for each in plan_steps(select(batch, [0]), 1, 2, "sample_mean")] == [[SHOWN]] * 2
