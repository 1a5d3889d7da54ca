"""Critic and teacher in the worker of the policy: warm-up, resume, and which memory they take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from anygauge.config.roles import Components
from anygauge.run_directory.dumps import read_batch, read_log_probs
from anygauge.testing.tiny import tiny_qwen3
from anygauge.trainer.actors import ActorWorker
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import CheckpointError
from anygauge_tests import batches
from anygauge_tests.batches import TrainSample
from anygauge_tests.engine_config import engine_config

MakeWorker = Callable[..., ActorWorker]
TRAIN = {"lr": 1e-3, "micro_batch_tokens": 64, "dtype": "float32", "optimizer_steps": 2}
PPO: dict[str, Any] = {"algorithm": {"advantage": "gae"}, "critic": {"lr": 1e-3, "value_clip": None}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=64, init_std=0.2)


LORA = {"engine": "fsdp", "lora": {"rank": 16, "alpha": 128, "modules_to_save": ["norm"]}}


@pytest.fixture(
    params=[
        {"engine": "megatron"},
        pytest.param({"engine": "fsdp"}, marks=pytest.mark.fsdp),
        pytest.param(LORA, marks=pytest.mark.fsdp),
    ],
    ids=["megatron", "fsdp", "lora"],
)
def make_worker(request: pytest.FixtureRequest, context: WorkerContext, model: Path) -> MakeWorker:
    def make(**sections: Any) -> ActorWorker:
        config = engine_config(
            model, **{**sections, "train": {**request.param, **sections.get("train", TRAIN)}}
        )
        return ActorWorker(config, context, components=Components(trains=True, generates=False, learns=True))

    return make


def make_training_batch(steps: int = 2) -> TrainBatch:
    generator = torch.Generator().manual_seed(1)
    samples = [
        TrainSample(
            tokens=torch.randint(18, 64, (length,), generator=generator).tolist(),
            response_length=length - 3,
            loss_mask=[1] * (length - 4) + [0],
            rollout_log_probs=[-1.0] * (length - 3),
            advantages=[length % 2 - 0.25] * (length - 3),
            reward=float(length % 2),
            baseline=0.5,
        )
        for length in (5, 9, 20, 8, 12, 7)
    ]
    return batches.plan_samples(samples, steps, 1, "token_mean")[0]


def weights(worker: ActorWorker) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.trainer.weights()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def save(worker: ActorWorker, path: Path) -> None:
    path.mkdir()
    worker.save_checkpoint(str(path))
    while (written := worker.checkpoint_written()) is not True:
        assert written is False, written


def test_the_warm_up_leaves_the_policy_as_it_is(make_worker: MakeWorker) -> None:
    critic = {**PPO["critic"], "lr_warmup_steps": 0}
    train = {"lr": 1e-3, "dtype": "float32", "warmup_steps": 4}
    worker, batch = make_worker(**{**PPO, "critic": critic, "train": train}), make_training_batch()
    before = weights(worker)
    warm = [worker.train(batch, update_policy=False) for _ in range(5)]
    assert same(before, weights(worker))
    losses = [sum(each["value_loss"] for each in steps) for steps in warm]
    assert losses[-1] < losses[0] / 2
    assert "grad_norm" not in warm[0][0]
    assert warm[0][0]["critic_lr"] == 1e-3
    step = worker.train(batch)[0]
    assert not same(before, weights(worker))
    assert step["lr"] == 2.5e-4, "the policy's own warm-up starts with its first step"
    assert {"loss", "grad_norm", "value_loss", "critic_grad_norm", "explained_variance"} <= step.keys()


def test_a_directory_that_a_worker_does_not_see_ends_no_run(make_worker: MakeWorker, tmp_path: Path) -> None:
    worker = make_worker(**PPO)
    worker.save_checkpoint(str(tmp_path / "absent"))
    found = worker.checkpoint_written()
    assert isinstance(found, str)
    assert "cannot be written: [Errno 2] No such file or directory" in found
    save(worker, tmp_path / "saved")


def test_an_export_that_fails_waits_for_the_checkpoint_that_is_being_written(
    make_worker: MakeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, answers = make_worker(**PPO), [False, False, True]
    monkeypatch.setattr(worker.trainer, "checkpoint_written", lambda: answers.pop(0))
    with pytest.raises(CheckpointError, match="exists"):
        worker.save_hf(str(tmp_path))
    assert not answers


def test_a_resume_goes_on_exactly(make_worker: MakeWorker, tmp_path: Path) -> None:
    batch, worker = make_training_batch(), make_worker(**PPO)
    worker.train(batch)
    save(worker, tmp_path / "saved")
    assert (tmp_path / "saved/critic/rank-00000.json").is_file()
    resumed = make_worker(**PPO)
    resumed.load_checkpoint(str(tmp_path / "saved"))
    for _ in range(2):
        assert resumed.train(batch) == worker.train(batch)
    assert same(weights(worker), weights(resumed))


def test_an_exported_critic_begins_where_it_ended(make_worker: MakeWorker, tmp_path: Path) -> None:
    batch, worker = make_training_batch(), make_worker(**PPO)
    worker.train(batch)
    worker.save_hf(str(tmp_path / "hf"))
    exported = tmp_path / "hf/critic"
    again = make_worker(**{**PPO, "critic": {**PPO["critic"], "path": exported}})
    samples = batches.unpack_samples(batch)
    assert worker._critic is not None
    assert again._critic is not None
    expected = batches.values(worker._critic, samples)
    assert any(values.any() for values in expected)
    for one, other in zip(batches.values(again._critic, samples), expected, strict=True):
        torch.testing.assert_close(one, other)
    model = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    with torch.no_grad():
        tokens = torch.tensor([samples[0].tokens])
        scores = model.score(model.model(tokens).last_hidden_state)[0, :, 0]
    length = samples[0].response_length
    torch.testing.assert_close(scores[-length - 1 : -1], expected[0], rtol=1e-4, atol=1e-5)
    AutoTokenizer.from_pretrained(exported)


def test_values_know_no_temperature(make_worker: MakeWorker) -> None:
    batch = make_training_batch()
    hot, cold = (make_worker(**PPO, rollout={"temperature": t}) for t in (2.0, 0.5))
    for worker in (hot, cold):
        worker.train(batch, update_policy=False)
    again = [worker.train(batch, update_policy=False)[0] for worker in (hot, cold)]
    assert again[0]["values"] == again[1]["values"] != 0


@pytest.mark.parametrize("advantage", ["gae", "grpo", "distilled"])
def test_a_dump_trains_again(make_worker: MakeWorker, tmp_path: Path, advantage: str) -> None:
    options: dict[str, Any] = {"algorithm": {"normalize_advantages": True}}
    if advantage == "gae":
        options = {**PPO, "algorithm": {"advantage": "gae", "normalize_advantages": True}}
    elif advantage == "distilled":
        teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2, seed=9)
        options = {"algorithm": {"distill_coef": 1.0}, "teacher": {"path": teacher}}
    first = make_worker(**options).train(make_training_batch(), str(tmp_path / "dump"))
    dumped = read_batch(tmp_path / "dump", dp_size=1)
    assert dumped.rewards.tolist() == [1.0, 0.0, 0.0, 1.0, 0.0, 1.0]
    assert make_worker(**options).train(dumped) == first
    assert first[0]["pg_loss"] != 0


def test_a_teacher_of_the_policys_size_borrows_its_memory(make_worker: MakeWorker, tmp_path: Path) -> None:
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2, seed=9)
    worker = make_worker(
        algorithm={"advantage": "on_policy_distillation", "policy_loss": "policy_gradient"},
        teacher={"path": teacher},
        train={"lr": 3e-3, "dtype": "float32", "optimizer_steps": 2},
    )
    batch = make_training_batch()
    steps = [worker.train(batch, str(tmp_path / "dump"))[0] for _ in range(8)]
    log_probs = read_log_probs(tmp_path / "dump")
    assert log_probs.keys() == {"old", "teacher", "current"}
    assert all(step["opd_reverse_kl"] != 0 for step in steps)
    borrowed = batches.log_probs(
        worker.trainer, batches.unpack_samples(batch), temperature=1.0, role="teacher"
    )
    for one, other in zip(borrowed, log_probs["teacher"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert not torch.allclose(log_probs["old"][0], log_probs["teacher"][0], atol=1e-2)


def test_the_policy_learns_what_the_teacher_thinks_of_the_samples(
    make_worker: MakeWorker, tmp_path: Path
) -> None:
    """Compare the gradient with that of half the squared differences."""
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2, seed=9)
    worker = make_worker(
        algorithm={"advantage": "on_policy_distillation", "policy_loss": "policy_gradient"},
        teacher={"path": teacher},
        train={"lr": 3e-3, "dtype": "float32"},
    )
    batch = make_training_batch(steps=1)
    distances = []
    for _ in range(8):
        worker.train(batch, str(tmp_path / "dump"))
        passes = read_log_probs(tmp_path / "dump")
        difference = torch.cat(passes["teacher"]) - torch.cat(passes["old"])
        distances.append(float(difference[batch.loss_mask].square().mean()))
    assert distances[-1] < distances[0] / 2


def test_a_teacher_of_another_size_is_an_engine_of_its_own(make_worker: MakeWorker, tmp_path: Path) -> None:
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2, layers=3)
    worker = make_worker(algorithm={"distill_coef": 1.0}, teacher={"path": teacher})
    batch = make_training_batch()
    before = weights(worker)
    assert worker.train(batch)[0]["opd_reverse_kl"] != 0
    assert not same(before, weights(worker))


def test_a_teacher_with_other_angles_is_an_engine_of_its_own(make_worker: MakeWorker, tmp_path: Path) -> None:
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2)
    hf = json.loads((teacher / "config.json").read_text())
    hf["rope_parameters"]["rope_theta"] = 10.0
    (teacher / "config.json").write_text(json.dumps(hf))
    worker = make_worker(algorithm={"distill_coef": 1.0}, teacher={"path": teacher})
    batch = make_training_batch()
    assert worker._teacher is not None
    worker._teacher.evaluate(batch)
    assert batch.teacher_log_probs is not None
    found = batches.split(batch, batch.teacher_log_probs)
    for sample, mine in zip(batches.unpack_samples(batch), found, strict=True):
        torch.testing.assert_close(mine, log_probs_of(teacher, sample), rtol=0, atol=1e-4)


def log_probs_of(model: Path, sample: TrainSample) -> torch.Tensor:
    """Return transformers' log-probabilities of a sample's response tokens, at temperature 1."""
    tokens = torch.tensor(sample.tokens)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens[None]).logits[0]
    chosen = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return chosen[-sample.response_length :]


@pytest.mark.parametrize("layers", [2, 3])
def test_a_teacher_is_asked_once(make_worker: MakeWorker, tmp_path: Path, layers: int) -> None:
    """For what it thinks of the samples and for its own choice; beside the policy its time is its own."""
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2, seed=9, layers=layers)
    options = {"advantage": "on_policy_distillation", "distill_kl_coef": 1.0}
    both, one = (
        make_worker(algorithm={**options, "distill_kl_coef": weight}, teacher={"path": teacher})
        for weight in (1.0, 0.0)
    )
    found, expected = (worker.train(make_training_batch())[0] for worker in (both, one))
    assert found["distill_kl"] > 0
    for name in ("opd_reverse_kl", "advantages", "pg_loss"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6)
    for worker in (both, one):
        report = worker.report()
        assert report["passes"]["log_probs"] == (2 if layers == 2 else 1)
        assert ("teacher" in report["seconds"]) is (layers == 3)
        assert worker.report()["passes"]["log_probs"] == 0


def test_all_logits_distil_the_same(make_worker: MakeWorker, tmp_path: Path) -> None:
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2, seed=9)
    tiles, plain = (
        make_worker(
            algorithm={"distill_kl_coef": 1.0, "distill_coef": 1.0, "distill_top_k": 8},
            teacher={"path": teacher},
            train={"lr": 1e-3, "dtype": "float32", "fused_loss": fused},
        ).train(make_training_batch())[0]
        for fused in (True, False)
    )
    assert tiles["distill_kl"] > 0
    assert tiles == pytest.approx(plain, rel=1e-4, abs=1e-5)


def test_the_warm_up_asks_nobody_whose_answer_is_not_read(make_worker: MakeWorker, tmp_path: Path) -> None:
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2, seed=9)
    algorithm = {"advantage": "gae", "kl_coef": 0.1, "distill_kl_coef": 1.0}
    worker = make_worker(**{**PPO, "algorithm": algorithm}, teacher={"path": teacher})
    for update, passes in ((False, 0), (True, 2)):
        worker.train(make_training_batch(steps=1), update_policy=update)
        assert worker.report()["passes"]["log_probs"] == passes


def test_one_policy_taught_by_itself_has_nothing_to_learn(make_worker: MakeWorker, model: Path) -> None:
    worker = make_worker(
        algorithm={"advantage": "on_policy_distillation"},
        teacher={"path": model},
        train={"lr": 1e-3, "dtype": "float32"},
    )
    step = worker.train(make_training_batch())[0]
    assert step["opd_reverse_kl"] == 0.0
    assert step["pg_loss"] == 0.0


def test_the_policy_comes_to_like_what_its_teacher_likes(make_worker: MakeWorker, tmp_path: Path) -> None:
    """All of the vocabulary is compared, so the first metric is the divergence of whole distributions."""
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2, seed=9)
    worker = make_worker(
        algorithm={"distill_kl_coef": 1.0, "distill_top_k": 64, "policy_loss": "policy_gradient"},
        teacher={"path": teacher},
        rollout={"temperature": 0.7},
        train={"lr": 3e-3, "dtype": "float32"},
    )
    batch = make_training_batch(steps=1)
    expected = divergence(batch, teacher, worker.config.model.path, temperature=0.7)
    steps = [worker.train(batch)[0]["distill_kl"] for _ in range(8)]
    assert steps[0] == pytest.approx(expected, rel=1e-4)
    assert steps[-1] < steps[0] / 2


def divergence(batch: TrainBatch, teacher: Path, policy: Path, *, temperature: float) -> float:
    """Return the mean KL divergence of the teacher from the policy over the tokens that count."""

    def log_probs(model: Any, sample: TrainSample) -> torch.Tensor:
        logits = model(torch.tensor([sample.tokens])).logits[0, -sample.response_length - 1 : -1]
        return torch.log_softmax(logits / temperature, -1)

    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (teacher, policy)]
    total = count = 0.0
    with torch.no_grad():
        for sample in batches.unpack_samples(batch):
            p, q = (log_probs(model, sample) for model in models)
            mask = torch.tensor(sample.loss_mask)
            total += float(((p.exp() * (p - q)).sum(-1) * mask).sum())
            count += float(mask.sum())
    return total / count


@pytest.mark.parametrize("layers", [2, 3])
def test_few_of_the_teachers_tokens_are_enough(make_worker: MakeWorker, tmp_path: Path, layers: int) -> None:
    """Use a teacher in the policy's memory, and one beside it."""
    teacher = tiny_qwen3(tmp_path / "teacher", vocab_size=64, init_std=0.2, seed=9, layers=layers)
    few, all_ = (
        make_worker(algorithm={"distill_kl_coef": 1.0, "distill_top_k": count}, teacher={"path": teacher})
        for count in (8, 1000)
    )
    bound = all_.train(make_training_batch())[0]["distill_kl"]
    assert bound / 4 < few.train(make_training_batch())[0]["distill_kl"] < bound
