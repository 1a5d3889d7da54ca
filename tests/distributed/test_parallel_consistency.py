"""Ranks that would build or hold different models: an error with rank and key on each, and no wait."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from anygauge.config import Config
from anygauge_hooks.engines import WorkerContext

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

VOCAB = 63
LIMIT_S = 30.0
"""Half of what a collective waits for a rank that never comes."""


def build(config: Config, context: WorkerContext, case: dict[str, Any]) -> None:
    """Build each rank's actor from a directory and with settings of its own."""
    from anygauge.trainer.actors import ActorWorker

    model = config.model.model_copy(update={"path": Path(case["models"][context.rank])})
    train = config.train.model_copy(update=case.get("train_of", {}).get(context.rank, {}))
    ActorWorker(config.model_copy(update={"model": model, "train": train}), context)


def load_reference(config: Config, context: WorkerContext, case: dict[str, Any]) -> str:
    """Give each rank a reference of its own, and return why it is not kept."""
    from anygauge.trainer.actors import ActorWorker
    from anygauge_hooks.errors import RankMismatchError

    engine = ActorWorker(config, context).trainer
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    with pytest.raises(RankMismatchError) as caught:
        engine.load_role("reference", case["models"][context.rank])
    assert all(tensor.equal(before[name]) for name, tensor in engine.weights())
    return str(caught.value)


@pytest.fixture
def edited(make_model: Any, tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Return a model, and a copy of its directory with keys of its ``config.json`` changed."""

    def copy(**changes: Any) -> tuple[str, str]:
        path = make_model("qwen3", vocab_size=VOCAB, num_hidden_layers=4, tie_word_embeddings=True)
        other = tmp_path / "other"
        shutil.copytree(path, other)
        hf = json.loads((path / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(hf | changes))
        return str(path), str(other)

    return copy


def errors(crew: Any, action: str, models: tuple[str, ...], **case: Any) -> list[str]:
    found = crew.run(
        world=len(models),
        action=f"{Path(__file__)}:{action}",
        model=models[0],
        models=models,
        limit_s=LIMIT_S,
        **case,
    )
    return [getattr(result, "text", result) for result in found]


@pytest.mark.parametrize(
    ("changes", "parallel", "text"),
    [
        ({"rms_norm_eps": 0.5}, {}, "config.json.rms_norm_eps (rank 1: 0.5, others: 1e-06)"),
        (
            {"tie_word_embeddings": False},
            {"pipeline": 2},
            "tie_word_embeddings (rank 1: False, others",
        ),
    ],
    ids=["epsilon", "tied"],
)
def test_a_rank_with_another_config_is_named_on_every_rank(
    crew: Any, edited: Any, changes: dict[str, Any], parallel: dict[str, int], text: str
) -> None:
    found = errors(crew, "build", edited(**changes), parallel=parallel)
    assert len(set(found)) == 1
    assert "AG604" in found[0]
    assert text in found[0]


def test_a_rank_with_other_settings_is_named(crew: Any, edited: Any) -> None:
    """Directories may have another name on each host."""
    one, other = edited()
    found = errors(crew, "build", (one, one, other), train_of={1: {"lr": 0.5}})
    assert len(set(found)) == 1
    assert "different configs: train.lr (rank 1: 0.5, others: 0.01).\n" in found[0]


def test_a_rank_that_cannot_read_the_model_is_named(crew: Any, edited: Any) -> None:
    one, other = edited()
    (Path(other) / "config.json").unlink()
    here, there = errors(crew, "build", (one, other))
    assert "cannot be read by rank 1; this rank could" in here
    assert f"{other} is not a Hugging Face directory" in there


def test_weights_of_a_role_are_compared(crew: Any, make_model: Any) -> None:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": 4, "tie_word_embeddings": True}
    one, other = (str(make_model("qwen3", seed=seed, **sizes)) for seed in range(2))
    found = errors(crew, "load_reference", (one, other))
    assert len(set(found)) == 1
    assert "different weights of the reference: embedding.word_embeddings.weight (rank 1)," in found[0]
    assert "is reference.path the same directory" in found[0]


def test_a_rank_with_other_vectors_is_named_by_the_fsdp_engine(
    crew: Any, make_model: Any, tmp_path: Path
) -> None:
    """No rank has what another one has, but all read the same vectors."""
    path = make_model("qwen3", vocab_size=VOCAB, num_hidden_layers=4, tie_word_embeddings=True)
    other = shutil.copytree(path, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    found = errors(crew, "build", (str(path), str(other)), train={"engine": "fsdp"})
    assert len(set(found)) == 1
    assert "AG604" in found[0]
    assert "model.norm.weight (rank 1:" in found[0]
