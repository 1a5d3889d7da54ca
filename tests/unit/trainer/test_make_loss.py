"""From ``[algorithm]`` to the loss of a worker: corrections of the core, and of a plugin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from anygauge.algorithms import plugin
from anygauge.config import Config
from anygauge.plugins import Plugins
from anygauge.trainer.actors import make_loss
from anygauge_hooks import hookimpl
from anygauge_hooks.algorithms import Correction
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_hooks.errors import UnknownNameError
from anygauge_hooks.types import NamedFunction


def last_token_only(inputs: LossInputs, *, factor: float = 1.0) -> Correction:
    weights = torch.zeros_like(inputs.loss_weights)
    weights[-1] = factor
    return Correction(weights, {"gap": inputs.old_log_probs - inputs.rollout_log_probs})


class Plugin:
    @hookimpl
    def register_corrections(self) -> list[NamedFunction]:
        return [NamedFunction(name="last_token_only", fn=last_token_only)]


@pytest.fixture
def context() -> WorkerContext:
    plugins = Plugins()
    plugins.register(plugin, "core")
    plugins.register(Plugin(), "mine")
    return cast(WorkerContext, SimpleNamespace(plugins=plugins))


def config(**algorithm: Any) -> Config:
    tree = {"run": {"name": "t"}, "model": {"path": "m"}, "data": {"train": []}, "algorithm": algorithm}
    return Config.model_validate(tree)


@pytest.fixture
def inputs() -> LossInputs:
    old = torch.tensor([-1.0, -2.0, -3.0])
    return LossInputs(
        log_probs=old.clone().requires_grad_(),
        entropy=torch.ones(3),
        old_log_probs=old,
        rollout_log_probs=torch.tensor([-1.5, -2.5, -2.0]),
        reference_log_probs=None,
        advantages=torch.tensor([1.0, 2.0, -1.0]),
        loss_mask=torch.ones(3),
        loss_weights=torch.full((3,), 1 / 3),
        samples=[0, 1],
        lengths=[2, 1],
    )


def gradient(loss: Any, inputs: LossInputs) -> list[float]:
    found: list[float] = torch.autograd.grad(loss(inputs)[0], inputs.log_probs)[0].tolist()
    return found


def test_options_reach_the_correction(context: WorkerContext, inputs: LossInputs) -> None:
    loss = make_loss(config(correction={"tis": {"level": "sequence", "high": 1.5}}), context)
    sequences = [1.5, 1.5, torch.tensor(-1.0).exp().item()]
    expected = [-a * w / 3 for a, w in zip([1.0, 2.0, -1.0], sequences, strict=True)]
    assert gradient(loss, inputs) == pytest.approx(expected)


def test_a_chain_with_one_of_a_plugin(context: WorkerContext, inputs: LossInputs) -> None:
    loss = make_loss(config(correction={"last_token_only": {"factor": 0.5}, "icepop": {"low": 0.1}}), context)
    expected = 0.5 * torch.tensor(-1.0).exp().item() / 3
    assert gradient(loss, inputs) == pytest.approx([0.0, 0.0, expected])
    metrics = loss(inputs)[1]
    assert metrics["correction/last_token_only/gap"].item() == pytest.approx(0.0, abs=1e-6)
    assert metrics["correction/last_token_only/masked"].item() == pytest.approx(2 / 3)


def test_without_any_nothing_changes(context: WorkerContext, inputs: LossInputs) -> None:
    plain = make_loss(config(), context)
    assert gradient(plain, inputs) == pytest.approx([-1 / 3, -2 / 3, 1 / 3])
    assert not [name for name in plain(inputs)[1] if "correction" in name]


def test_an_unknown_name_is_an_error_in_a_worker_too(context: WorkerContext) -> None:
    with pytest.raises(UnknownNameError, match="'tiss' for corrections; available: icepop, last_token_only"):
        make_loss(config(correction={"tiss": {}}), context)
