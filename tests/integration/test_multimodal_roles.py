"""Reference and teacher are shown the images of the policy's samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.roles import Components
from anygauge.plugins import load_plugins
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config
from anygauge_tests.toy_tower import Package, Store, image, sample, toy_model

MakeWorker = Callable[..., ActorWorker]


@pytest.fixture(scope="module")
def store() -> Store:
    return Store()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the policy, another model of its size, and one whose weights cannot take turns with its own."""
    directory = tmp_path_factory.mktemp("models")
    found = {
        name: toy_model(directory / name, seed=seed) for seed, name in enumerate(("own", "other", "apart"))
    }
    path = found["apart"] / "config.json"
    hf = json.loads(path.read_text())
    hf["rope_parameters"]["rope_theta"] = 10.0
    path.write_text(json.dumps(hf))
    return found


@pytest.fixture
def make_worker(context: WorkerContext, models: dict[str, Path], store: Store) -> MakeWorker:
    plugins = load_plugins()
    plugins.register(Package(), "toy")

    def make(model: str = "own", **sections: Any) -> ActorWorker:
        config = engine_config(
            {"path": models[model], "modalities": ["image"]},
            train={"lr": 1e-3, "micro_batch_tokens": 64, "dtype": "float32"},
            **sections,
        )
        components = Components(trains=True, generates=False, learns=True)
        return ActorWorker(config, replace(context, plugins=plugins, media=store), components=components)

    return make


def shown(sample: TrainSample, store: Store) -> TrainSample:
    """Return a sample with the pixels of another image."""
    (medium,) = sample.media
    _, height, width = medium.grid
    return sample._replace(media=(medium._replace(key=image(store, height, width, 99).key),))


ROLES: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("other", {"algorithm": {"kl_coef": 0.1}}),
    "teacher in the policy's memory": ("other", {"algorithm": {"distill_coef": 1.0}}),
    "teacher of its own memory": ("apart", {"algorithm": {"distill_coef": 1.0}}),
    "teacher's own choice": ("apart", {"algorithm": {"distill_coef": 1.0, "distill_kl_coef": 1.0}}),
}


@pytest.mark.parametrize("name", ROLES)
def test_its_log_probs_are_those_of_the_image(
    make_worker: MakeWorker, models: dict[str, Path], store: Store, name: str
) -> None:
    """As the same model says them as a policy; and with another image's pixels they are others."""
    role = name.split()[0].removesuffix("'s")
    model, sections = ROLES[name]
    text, seen = sample([9], 4, 1), sample([3, image(store, 2, 2, 0), 6], 5, 2)
    samples = [text, seen, shown(seen, store)]
    expected = batches.log_probs(make_worker(model).trainer, samples, temperature=1.0)
    worker = make_worker(**sections, **{role: {"path": models[model]}})
    batch = batches.make_batch(samples)
    worker._run_passes(batch, updates=True)
    found = batches.split(batch, getattr(batch, f"{role}_log_probs"))
    for mine, own in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, own, rtol=0, atol=1e-5)
    assert (found[1] - found[2]).abs().max() > 0.01
    policy = batches.log_probs(worker.trainer, samples, temperature=1.0)
    assert all((mine - other).abs().max() > 0.01 for mine, other in zip(found, policy, strict=True))
