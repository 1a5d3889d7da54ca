"""Models with experts, divided: the same as whole, and the same routes wherever a layer runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config import Config
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample, sample_of

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

VOCAB = 64
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert": 2}),
    "tp2-ep1": (2, {"tensor": 2}),
    "ep2-tp2": (4, {"expert": 2, "tensor": 2}),
    "ep2-cp2": (4, {"expert": 2, "context": 2}),
    "ep2-pp2": (4, {"expert": 2, "pipeline": 2}),
    "etp2": (2, {"expert_tensor": 2}),
    "tp2-etp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "ep2-etp2-tp2": (4, {"expert": 2, "expert_tensor": 2, "tensor": 2}),
    "etp2-cp2-pp2": (4, {"expert_tensor": 2, "context": 2, "pipeline": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
}
TRAIN: dict[str, dict[str, Any]] = {
    "glm4_moe": {"megatron": {"moe_router_bias_update_rate": 0.01}},  # by the load on all ranks together
    "qwen3_moe": {},
}
Alone = Callable[[str], Any]


def run_family(crew: Any, make_model: Any, family: str, world: int, **case: Any) -> list[Any]:
    model = make_model(family, num_hidden_layers=4, initializer_range=0.1)
    options = {"action": "train", **case}
    found: list[Any] = crew.run(world=world, model=str(model), vocab=VOCAB, **options)
    for rank, result in enumerate(found):
        assert not hasattr(result, "text"), f"rank {rank}: {getattr(result, 'text', '')}"
    return found


@pytest.fixture(scope="module")
def alone(crew: Any, make_model: Any) -> Alone:
    """Return what one process gives, by family."""
    known: dict[str, Any] = {}

    def run(family: str) -> Any:
        if family not in known:
            known[family] = run_family(crew, make_model, family, 1, train=TRAIN[family])[0]
        return known[family]

    return run


@pytest.mark.parametrize(
    ("mode", "family"),
    [(mode, family) for mode in MODES for family in TRAIN if mode not in ("vpp2", "cp2") or TRAIN[family]],
)
def test_divided_experts_train_like_whole_ones(
    crew: Any, make_model: Any, alone: Alone, mode: str, family: str
) -> None:
    world, parallel = MODES[mode]
    expected = alone(family)
    train = TRAIN[family]
    for result in run_family(crew, make_model, family, world, parallel=parallel, train=train):
        for step, wanted in zip(result["metrics"], expected["metrics"], strict=True):
            assert step == pytest.approx(wanted, rel=2e-5, abs=1e-5)
        assert result["weights"].keys() == expected["weights"].keys()
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, expected["weights"][name], rtol=0, atol=2e-5, msg=name)
        for tokens, values in result["after"].items():
            torch.testing.assert_close(values, expected["after"][tokens], rtol=0, atol=1e-4)


def case_samples(vocab: int) -> list[TrainSample]:
    generator = torch.Generator().manual_seed(0)
    return [
        sample_of(
            torch.randint(0, vocab, (length,), generator=generator).tolist(),
            length - 2,
            log_prob=-2.5,
            advantage=1.0 if length % 2 else -0.5,
        )
        for length in (17, 5, 24, 3, 11, 8, 20, 9)
    ]


def replayed(config: Config, context: WorkerContext, case: dict[str, Any]) -> dict[str, float]:
    """Take a step with routes of before; routers that would choose anew would choose the last experts."""
    from anygauge.distributed.layout import layout_of
    from anygauge.engines.megatron.layers.moe import routers
    from anygauge.trainer.actors import ActorWorker

    actor = ActorWorker(config, context)
    engine: Any = actor.trainer
    layout = layout_of(config)
    samples = case_samples(case["vocab"])
    ranks = batches.plan_samples(samples, 1, layout.data, config.algorithm.loss_aggregation)
    batch = ranks[layout.dp_rank(context.rank)]
    engine.log_probs(batch, temperature=0.8)
    if case["perturb"]:
        for router in routers(engine.policy.chunks):
            router.expert_bias.copy_(torch.arange(len(router.expert_bias), dtype=torch.float32))
    batch.old_log_probs = batch.rollout_log_probs
    return dict(engine.train_step(batch, actor.loss, temperature=0.8, entropy_grad=True))


REPLAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "vpp2-cp2": (4, {"pipeline": 2, "virtual_pipeline": 2, "context": 2}),
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}),
}


@pytest.mark.parametrize("mode", REPLAYS)
def test_every_layer_replays_the_routes_of_its_micro_batch(crew: Any, make_model: Any, mode: str) -> None:
    """With full recompute, which runs each layer twice and in another order."""
    world, parallel = REPLAYS[mode]
    action = {"action": f"{Path(__file__)}:replayed"}
    (expected,) = run_family(crew, make_model, "glm4_moe", 1, perturb=False, **action)
    (control,) = run_family(crew, make_model, "glm4_moe", 1, perturb=True, **action)
    assert abs(control["grad_norm"] - expected["grad_norm"]) > 1e-3
    train = {"router_replay": True, "recompute": "full"}
    for found in run_family(
        crew, make_model, "glm4_moe", world, perturb=True, train=train, parallel=parallel, **action
    ):
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-5)
