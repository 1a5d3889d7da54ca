"""Features among embeddings and after layers: gradients, shared images, text, freezing, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anygauge.algorithms.values import value_loss
from anygauge.config.roles import critic_config
from anygauge.plugins import load_plugins
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError, MediaMismatchError
from anygauge_hooks.media import Media
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config
from anygauge_tests.toy_tower import HOLDER, Package, Store, image, sample, toy_model

MakeEngine = Callable[..., Any]


@pytest.fixture(scope="module")
def store() -> Store:
    return Store()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_model(tmp_path_factory.mktemp("toy"), tied=True)


@pytest.fixture
def make_engine(context: WorkerContext, checkpoint: Path, store: Store) -> MakeEngine:
    plugins = load_plugins()
    plugins.register(Package(), "toy")

    def make(modalities: Sequence[str] = ("image",), role: str = "actor", **train: Any) -> Any:
        config = engine_config(
            {"path": checkpoint, "modalities": modalities},
            train={"lr": 1e-3, "micro_batch_tokens": 64, "clip_grad": 0.0, **train},
        )
        found = replace(context, plugins=plugins, media=store)
        spec = plugins.get("register_train_engines", "megatron")
        if role == "critic":
            return spec.make_critic(critic_config(config), found)
        return spec.make(config, found)

    return make


@pytest.fixture
def mixed(store: Store) -> list[TrainSample]:
    """Text alone, one image, the same image again, and two of other shapes."""
    one, wide, tall = (image(store, *size, seed) for seed, size in enumerate(((2, 2), (1, 3), (3, 2))))
    return [
        sample([9], 4, 1),
        sample([3, one, 6], 5, 2),
        sample([2, one, 4], 3, 3),
        sample([1, wide, 2, tall, 5], 4, 4),
    ]


def take_step(engine: Any, samples: Sequence[TrainSample]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradients of a step on the mean log-probability, and its metrics."""
    metrics = batches.train_step(engine, samples)
    stored = engine.policy.tensors
    found = {name: each.main_grad.clone() for name, each in stored.items() if hasattr(each, "main_grad")}
    return found, dict(metrics)


def assert_alike(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, each in expected.items():
        assert each.abs().max() > 0, name
        error = (actual[name] - each).norm() / each.norm()
        assert error < 1e-5, f"{name}: {error}"


@pytest.fixture
def plain(
    make_engine: MakeEngine, mixed: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Tensor]:
    """Return gradients where autograd sees every path from the towers to the layers."""
    from anygauge.engines.megatron.media import model
    from anygauge.engines.megatron.media.merge import Deposits, Features

    def merge(hidden: Tensor, features: Features, sum_over: Any = None) -> tuple[Tensor, Deposits]:
        assert sum_over is None
        merged = hidden.index_copy(0, features.rows, features.main[features.source].unsqueeze(1))
        return merged, Deposits(features.levels, features.rows, features.source, is_learned=False)

    with monkeypatch.context() as patch:
        patch.setattr(model, "merge", merge)
        return take_step(make_engine(), mixed)[0]


@pytest.mark.parametrize("recompute", ["none", "elementwise", "selective", "full"])
def test_gradients_are_those_of_plain_autograd(
    make_engine: MakeEngine, mixed: list[TrainSample], plain: dict[str, Tensor], recompute: str
) -> None:
    engine = make_engine(recompute=recompute)
    assert len(engine._pack(batches.make_batch(mixed)).plans) == 1
    assert_alike(take_step(engine, mixed)[0], plain)


def test_a_micro_batch_has_each_image_once(make_engine: MakeEngine, mixed: list[TrainSample]) -> None:
    engine = make_engine()
    (batch,) = engine._pack(batches.make_batch(mixed)).readers(1)[0]
    part = batch.inputs["media"]["visual"]
    assert part.count == 4 + 3 + 6
    assert len(part.rows) == 4 + 4 + 3 + 6
    assert batch.inputs["position_ids"].shape == (3, 1, sum(len(each.tokens) for each in mixed))


def test_samples_together_are_as_samples_alone(make_engine: MakeEngine, mixed: list[TrainSample]) -> None:
    engine = make_engine()
    together = batches.log_probs(engine, mixed, temperature=1.0)
    alone = [batches.log_probs(engine, [each], temperature=1.0)[0] for each in mixed]
    torch.testing.assert_close(torch.cat(together), torch.cat(alone), rtol=0, atol=1e-5)


def test_another_image_gives_other_log_probs(
    make_engine: MakeEngine, mixed: list[TrainSample], store: Store
) -> None:
    engine = make_engine()
    other = image(store, 2, 2, 77)
    swapped = mixed[1]._replace(media=(mixed[1].media[0]._replace(key=other.key),))
    right, wrong = (batches.log_probs(engine, [each], temperature=1.0)[0] for each in (mixed[1], swapped))
    assert (right - wrong).abs().max() > 0.01


def test_an_image_changes_what_stands_for_it_alone(make_engine: MakeEngine, mixed: list[TrainSample]) -> None:
    """Two samples of the same tokens in one micro-batch, of which each has its own image."""
    engine = make_engine()
    ones = image(engine.context.media, 2, 2, 0), image(engine.context.media, 2, 2, 5)
    pair = [mixed[1]._replace(media=(each.moved(3),)) for each in ones]
    first, second = batches.log_probs(engine, pair, temperature=1.0)
    torch.testing.assert_close(
        first, batches.log_probs(engine, mixed[1:2], temperature=1.0)[0], rtol=0, atol=1e-5
    )
    assert (first - second).abs().max() > 0.01


def test_a_tower_that_learns_runs_without_images(make_engine: MakeEngine, mixed: list[TrainSample]) -> None:
    """Its gradients are zeros, and there: ranks that sum gradients wait for each of them."""
    engine = make_engine()
    tower = engine.policy.chunks[0].visual
    gradients, _ = take_step(engine, mixed[:1])
    assert tower.passes == 1
    assert all(each.grad_added_to_main_grad or each.main_grad is not None for each in tower.parameters())
    assert not any(each.any() for name, each in gradients.items() if name.startswith("visual."))
    batches.log_probs(engine, mixed[:1], temperature=1.0)
    assert tower.passes == 1, "nothing is learned from a pass that only asks"


@pytest.mark.parametrize(("frozen", "learning"), [("vision", "decoder"), ("language", "visual")])
def test_frozen_parts_have_no_gradients(
    make_engine: MakeEngine, mixed: list[TrainSample], frozen: str, learning: str
) -> None:
    everything, _ = take_step(make_engine(), mixed)
    engine = make_engine(freeze=[frozen], recompute="full")
    before = {name: each.clone() for name, each in engine.policy.tensors.items()}
    some, _ = take_step(engine, mixed)
    expected = {name for name in everything if name.startswith("visual.") == (frozen == "language")}
    assert_alike(some, {name: everything[name] for name in expected})
    changed = {name for name, each in engine.policy.tensors.items() if not each.equal(before[name])}
    assert changed == expected
    assert any(name.startswith(learning) for name in changed)


@pytest.mark.parametrize(
    ("modalities", "freeze"),
    [
        (("image",), ["vision", "language"]),
        (("image",), ["vision", r"(?!.*visual\.).*"]),
        (("image",), ["language", r".*visual\..*"]),
        ((), ["language"]),
    ],
)
def test_nothing_to_train_is_refused(make_engine: MakeEngine, modalities: Any, freeze: list[str]) -> None:
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        make_engine(modalities=modalities, freeze=freeze)


def test_a_run_of_text_has_no_tower(make_engine: MakeEngine, mixed: list[TrainSample]) -> None:
    engine = make_engine(modalities=())
    assert not any("visual" in name for name in engine.policy.tensors)
    assert not any("visual" in name for name, _ in engine.weights())
    assert "media" not in next(engine._pack(batches.make_batch(mixed[:1])).readers(1)[0]).inputs
    texts = [batches.log_probs(each, mixed[:1], temperature=1.0)[0] for each in (engine, make_engine())]
    assert texts[0].equal(texts[1])


def test_media_that_no_tower_takes_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match="no tower for it"):
        make_engine(modalities=("audio",))


def test_the_weights_of_towers_are_saved_and_read(
    make_engine: MakeEngine, checkpoint: Path, tmp_path: Path
) -> None:
    engine = make_engine()
    engine.save_hf(str(tmp_path / "export"))
    written, source = (all_tensors(path) for path in (tmp_path / "export", checkpoint))
    assert written.keys() == source.keys()
    assert all(written[name].equal(source[name]) for name in source)


def all_tensors(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: each for path in directory.glob("*.safetensors") for name, each in load_file(path).items()}


BROKEN: dict[str, tuple[Callable[[TrainSample], TrainSample], str]] = {
    "none": (lambda it: it._replace(media=()), r"has 4 placeholders, and its media \(none\) have 0"),
    "elsewhere": (lambda it: it._replace(media=(it.media[0].moved(1),)), "have 4, in other places"),
    "beyond": (lambda it: it._replace(media=(it.media[0].moved(99),)), "have 4, in other places"),
    "fewer": (lambda it: it._replace(media=(_with_spans(it.media[0], (3, 3)),)), "have 3"),
    "lost": (lambda it: it._replace(media=(it.media[0]._replace(key="gone"),)), "is not in the store"),
}


def _with_spans(media: Media, *spans: tuple[int, int]) -> Media:
    return media._replace(spans=spans)


@pytest.mark.parametrize("name", BROKEN)
def test_placeholders_without_features_are_refused(
    make_engine: MakeEngine, mixed: list[TrainSample], name: str
) -> None:
    change, message = BROKEN[name]
    with pytest.raises(MediaMismatchError, match=rf"(?s){message}.*AG609"):
        batches.log_probs(make_engine(), [change(mixed[1])], temperature=1.0)


def test_a_tower_that_makes_fewer_features_is_refused(
    make_engine: MakeEngine, mixed: list[TrainSample], store: Store
) -> None:
    small = image(store, 1, 2, 3)
    wrong = mixed[1]._replace(media=(mixed[1].media[0]._replace(key=small.key),))
    with pytest.raises(MediaMismatchError, match="made 2 features, for 4 placeholders"):
        batches.log_probs(make_engine(), [wrong], temperature=1.0)


def test_both_passes_get_every_input(
    make_engine: MakeEngine, mixed: list[TrainSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put an input into the one dictionary: it reaches the model in either pass."""
    from anygauge.engines.megatron import inputs

    engine, canary, seen = make_engine(), object(), []
    model, forward = engine.policy.chunks[0], type(engine.policy.chunks[0]).forward

    def watched(*args: Any, make: Any = inputs.model_inputs, **options: Any) -> Any:
        return {**make(*args, **options), "canary": canary}

    def run(**given: Any) -> Tensor:
        assert given.pop("canary") is canary
        seen.append((given.keys(), torch.is_grad_enabled()))
        output: Tensor = forward(model, **given)
        return output

    monkeypatch.setattr(inputs, "model_inputs", watched)
    monkeypatch.setattr(model, "forward", run)
    batches.log_probs(engine, mixed, temperature=1.0)
    take_step(engine, mixed)
    assert [learns for _, learns in seen] == [False, True]
    assert seen[0][0] == seen[1][0] >= {"input_ids", "position_ids", "packed_seq_params", "media"}


def test_costs_of_samples_have_their_images(mixed: list[TrainSample]) -> None:
    from anygauge.data.balance import media_costs

    costs = media_costs([each.media for each in mixed], lambda media: float(media.num_tokens))
    assert costs.tolist() == [0, 2, 2, 9]


@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize("columns", [None, 3])
def test_forbidden_tokens_have_no_share(entropy_grad: bool, columns: int | None) -> None:
    """Log-probabilities, entropy and gradients are those of a softmax without them."""
    from anygauge.engines.megatron.layers.output import OutputLogprob
    from anygauge.kernels.linear_logprob import linear_logprob

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator) for rows in (5, 12))
    allowed = torch.tensor([i for i in range(12) if i not in (3, 11)])
    targets = allowed[torch.randint(10, (5,) if columns is None else (5, columns), generator=generator)]
    options = {} if columns is None else {"rest": True}

    def values(masks: bool) -> tuple[Tensor, Tensor]:
        if not masks:
            model = SimpleNamespace(
                post_process=True,
                share_embeddings_and_output_weights=False,
                output_layer=SimpleNamespace(weight=leaves[1]),
            )
            ask = OutputLogprob(linear_logprob, None, 12, forbidden=(3, 11))
            return ask(model, leaves[0], targets, 0.7, entropy_grad=entropy_grad, **options)
        logits = (leaves[0] @ leaves[1].t() / 0.7).index_fill(1, torch.tensor([3, 11]), -1e9)
        all_of = logits.log_softmax(1)
        entropy = -(all_of.exp() * all_of).sum(1)
        own = targets if columns else targets[:, None]
        found = all_of.gather(1, own)
        if columns:
            left = all_of.scatter(1, own, -torch.inf).logsumexp(1, keepdim=True)
            return torch.cat((found, left), 1), entropy if entropy_grad else entropy.detach()
        return found[:, 0], entropy if entropy_grad else entropy.detach()

    results = []
    for masks in (False, True):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        log_probs, entropy = values(masks)
        (log_probs.sum() + entropy.square().sum()).backward()
        results.append((log_probs.detach(), entropy.detach(), leaves[0].grad, leaves[1].grad))
    for actual, expected in zip(*results, strict=True):
        assert actual is not None
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("modalities", [("image",), ()])
def test_the_trainer_leaves_placeholders_out(
    make_engine: MakeEngine, mixed: list[TrainSample], modalities: Sequence[str]
) -> None:
    """All other tokens together have probability 1, also in a run of text."""
    batch = batches.make_batch(mixed[:1])
    found = make_engine(modalities).top_k_log_probs(batch, 64, temperature=1.0)
    assert found.ids.shape[1] == 63
    assert HOLDER not in found.ids
    torch.testing.assert_close(found.log_probs[:, :-1].exp().sum(1), torch.ones(4), rtol=0, atol=1e-5)


def test_a_critic_sees(make_engine: MakeEngine, mixed: list[TrainSample], store: Store) -> None:
    """Its values are those of the images, and its tower learns, or does not where it is frozen."""
    critic, fixed = make_engine(role="critic"), make_engine(role="critic", freeze=["vision"])
    for each in (critic, fixed):
        with torch.no_grad():
            each.policy.tensors["output_layer.weight"].fill_(0.1)
    together = batches.values(critic, mixed)
    alone = [batches.values(critic, [each])[0] for each in mixed]
    torch.testing.assert_close(torch.cat(together), torch.cat(alone), rtol=0, atol=1e-5)
    swapped = mixed[1]._replace(media=(mixed[1].media[0]._replace(key=image(store, 2, 2, 78).key),))
    assert (batches.values(critic, [swapped])[0] - together[1]).abs().max() > 0.01
    before = critic.policy.tensors["visual.inner.weight"].clone()
    for each in (critic, fixed):
        batches.train_values(
            each,
            mixed,
            value_loss,
            loss_weights=[[0.1] * sample.response_length for sample in mixed],
            old_values=together,
            returns=[values + 1 for values in together],
        )
    assert not critic.policy.tensors["visual.inner.weight"].equal(before)
    assert fixed.policy.tensors["visual.inner.weight"].equal(before)


def test_gradients_of_features_are_summed_over_ranks_in_one_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks of sequence parallelism in turns, against all tokens at once; an image is in three places."""
    from anygauge.engines.megatron.media import merge as module

    generator = torch.Generator().manual_seed(0)
    hidden, main, level, grad = (
        torch.randn(*size, generator=generator) for size in ((6, 1, 4), (3, 4), (3, 4), (6, 1, 4))
    )
    rows, source = torch.tensor([0, 2, 3, 5]), torch.tensor([0, 2, 2, 2])

    def run(own: slice, sum_over: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden[own], main, level)]
        here = (rows >= own.start) & (rows < own.stop)
        features = module.Features(leaves[1], [leaves[2]], rows[here] - own.start, source[here])
        merged, deposits = module.merge(leaves[0], features, sum_over)
        deposits.add_to(merged, 0).backward(grad[own])
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    whole = run(slice(0, 6), None)
    sent: list[Tensor] = []
    monkeypatch.setattr(module.dist, "all_reduce", lambda tensor, group: sent.append(tensor.clone()))
    parts = [run(slice(0, 3), "ranks"), run(slice(3, 6), "ranks")]
    assert [tuple(each.shape) for each in sent] == [(2, 3, 4)] * 2, "one collective of both"
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole[0])
    torch.testing.assert_close(sent[0] + sent[1], torch.stack(whole[1:]))
    assert not whole[1][1].any(), "a feature that stands nowhere"
