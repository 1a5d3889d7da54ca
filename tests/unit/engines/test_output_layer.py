"""Replacement of the output layer: gradients as with all logits, and room for another head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anygauge.config.roles import Components
from anygauge.testing.tiny import tiny_qwen3
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config
from anygauge_tests.largest_tensor import LargestTensor

VOCAB = 64
Make = Callable[..., Any]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return tiny_qwen3(directory, vocab_size=VOCAB, head_dim=32, init_std=0.2, tied=request.param)


@pytest.fixture
def make_engine(context: WorkerContext, checkpoint: Path) -> Make:
    def make(**train: Any) -> Any:
        config = engine_config(checkpoint, train={"lr": 1e-3, "micro_batch_tokens": 64, **train})
        return context.plugins.get("register_train_engines", "megatron").make(config, context)

    return make


def make_samples() -> list[TrainSample]:
    return batches.random_samples(((17, 5), (40, 20), (33, 30)), 0, VOCAB)


@pytest.mark.parametrize("distils", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_has_no_tensor_as_large_as_all_logits(
    context: WorkerContext, tmp_path: Path, fused: bool, distils: bool
) -> None:
    """All that a worker does in a step: log-probs, a reference, a teacher's own choice, both passes."""
    vocab, lengths = 16_384, (300, 300, 300, 300)
    sizes: dict[str, Any] = {"hidden": 32, "layers": 1, "heads": 2, "head_dim": 16, "mlp": 32}
    sections: dict[str, Any] = {"algorithm": {"entropy_coef": 0.01, "kl_coef": 0.1}}
    if distils:
        sections["teacher"] = {"path": tiny_qwen3(tmp_path / "t", vocab_size=vocab, seed=1, **sizes)}
        sections["algorithm"] |= {"distill_coef": 1.0, "distill_kl_coef": 1.0, "distill_top_k": 8}
    config = engine_config(
        tiny_qwen3(tmp_path / "m", vocab_size=vocab, **sizes),
        train={"lr": 1e-3, "dtype": "float32", "micro_batch_tokens": 2000, "fused_loss": fused},
        **sections,
    )
    worker = ActorWorker(config, context, components=Components(trains=True, generates=False, learns=True))
    samples = batches.random_samples([(length, length - 1) for length in lengths], 0, vocab)
    with LargestTensor() as largest:
        worker.train(batches.plan_samples(samples, 1, 1, "token_mean")[0])
    logits = sum(length - 1 for length in lengths) * vocab
    assert (largest.elements >= logits) is not fused
    assert not fused or largest.elements <= logits // 8, "the two buffers of a tile"


def loss(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    value = ((0.3 * inputs.entropy - inputs.log_probs) * inputs.loss_weights).sum()
    return value, {"loss": value.detach()}


def main_gradients(engine: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the gradient norm of a step, and the gradients that it left."""
    samples = make_samples()
    metrics = batches.train_step(
        engine,
        samples,
        loss,
        temperature=0.7,
        loss_weights=[[0.02] * sample.response_length for sample in samples],
        entropy_grad=True,
    )
    parameters: dict[str, Any] = dict(engine.policy.chunks[0].named_parameters())
    return metrics["grad_norm"], {name: p.main_grad.clone() for name, p in parameters.items()}


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
def test_gradients_are_those_of_all_logits(make_engine: Make, overlap: bool) -> None:
    megatron = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    results = [main_gradients(make_engine(fused_loss=fused, megatron=megatron)) for fused in (True, False)]
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert results[0][1].keys() == results[1][1].keys()
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("fused", [True, False], ids=["tiles", "all-logits"])
def test_gradients_are_those_of_megatrons_embedding(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, fused: bool, overlap: bool
) -> None:
    """Take a second step, which finds the gradients of the first; there are several micro-batches."""
    from anygauge.engines.megatron import model

    megatron = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}

    def second_step() -> tuple[float, dict[str, Tensor]]:
        engine = make_engine(fused_loss=fused, megatron=megatron)
        main_gradients(engine)
        return main_gradients(engine)

    found = second_step()
    monkeypatch.setattr(model, "replace_embeddings", lambda chunk: None)
    expected = second_step()
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-5, atol=1e-7, msg=name)


def test_log_probs_are_those_of_all_logits(make_engine: Make) -> None:
    found = [
        batches.log_probs(make_engine(fused_loss=fused), make_samples(), temperature=0.7)
        for fused in (True, False)
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def test_the_parameter_stays_where_it_was(make_engine: Make, checkpoint: Path) -> None:
    from anygauge.engines.megatron.layers.output import HiddenOutput, output_weight

    model = make_engine().policy.chunks[0]
    assert isinstance(model.output_layer, HiddenOutput)
    names = {name for name, _ in model.named_parameters()}
    assert ("output_layer.weight" in names) is not model.share_embeddings_and_output_weights
    assert output_weight(model) is model.shared_embedding_or_output_weight() or "output_layer.weight" in names


def test_without_chosen_rows_there_are_logits(make_engine: Make) -> None:
    from anygauge.engines.megatron.layers.output import output_weight

    model = make_engine().policy.chunks[0]
    weight = output_weight(model)
    hidden = torch.randn(5, 1, weight.shape[1])
    given = weight if model.share_embeddings_and_output_weights else None
    logits, bias = model.output_layer(hidden, weight=given)
    assert bias is None
    torch.testing.assert_close(logits, hidden @ weight.t())
    with model.output_layer.selected(torch.tensor([3, 1])):
        assert torch.equal(model.output_layer(hidden, weight=given)[0], hidden[[3, 1]])
    assert model.output_layer(hidden, weight=given)[0].shape == (5, 1, VOCAB)


def test_another_head_takes_the_place(make_engine: Make) -> None:
    """Also where the model is a part of another, as with a vision tower."""
    from anygauge.engines.megatron.layers.output import ResponseOutput, output_owner, replace_output_layer

    class Head(ResponseOutput):
        def __init__(self, layer: Any) -> None:
            super().__init__(layer)
            self.value = nn.Linear(8, 1)

        def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            return self.value(self.wanted(hidden)), None

    class Whole(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.language_model = part

    part = nn.Module()
    part.post_process, part.share_embeddings_and_output_weights = True, False  # type: ignore[assignment]
    part.output_layer = make_engine().policy.chunks[0].output_layer
    whole = Whole(part)
    replace_output_layer(whole, Head, "language_model")
    assert output_owner(whole, "language_model") is part
    assert isinstance(part.output_layer, Head)
    with part.output_layer.selected(torch.tensor([2])):
        assert part.output_layer(torch.randn(4, 1, 8))[0].shape == (1, 1, 1)


def test_a_stage_without_an_output_layer_keeps_none() -> None:
    from anygauge.engines.megatron.layers.output import replace_output_layer

    stage = nn.Module()
    stage.post_process = False  # type: ignore[assignment]
    replace_output_layer(stage, lambda layer: pytest.fail("there is none"))
    assert not hasattr(stage, "output_layer")
