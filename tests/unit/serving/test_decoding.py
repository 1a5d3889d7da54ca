"""Decoding by replay, with a recorder on the host that records by remembering what to call again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM

from anygauge.config.schema.rollout import Rollout
from anygauge.serving.embedded import decoding, prefixes
from anygauge.serving.embedded.engine import TransformersEngine
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge_cpu.device import CpuDevice
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_tests.embedded import sample_all

ALPHABET = "0123456789+="
PROMPTS = [
    Prompt(index=index, tokens=tuple(map(ALPHABET.index, text)), text=text)
    for index, text in enumerate(("37+58=", "1+2=", "9", "11111111+22222222="))
]
SEEDS = [list(range(8 * index, 8 * index + 5)) for index in range(len(PROMPTS))]
STEPS = 24


class Again:
    """A graph of the host: calls the function once more."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.work()


class Recording:
    """Counts what is recorded; calls each function twice, as a device may."""

    def __init__(self) -> None:
        self.graphs: list[Again] = []

    def __call__(self, work: Callable[[], None]) -> Again:
        work()
        work()
        self.graphs.append(Again(work))
        return self.graphs[-1]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_tokenizer(path, alphabet=ALPHABET)
    return tiny_qwen3(path, hidden=32, head_dim=8, mlp=48, init_std=0.3)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make recordings soon, and have them outgrown within a test."""
    monkeypatch.setattr(decoding, "_SHORTEST", 16)
    monkeypatch.setattr(prefixes, "_STEADY", 1)


def engine(path: Path, capture: Callable[[Callable[[], None]], Again] | None = None) -> TransformersEngine:
    return TransformersEngine(
        path, dtype=torch.float32, device=torch.device("cpu"), max_batch_tokens=100_000, capture=capture
    )


def sampled(engine: TransformersEngine, prompts: list[Prompt] = PROMPTS, **options: bool) -> list[Sample]:
    params = SamplingParams(max_new_tokens=STEPS, **options)  # type: ignore[arg-type]
    groups = sample_all(engine, prompts, params, SEEDS[: len(prompts)])
    return [sample for group in groups for sample in group]


def assert_same(found: list[Sample], expected: list[Sample]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.response_tokens == other.response_tokens
        torch.testing.assert_close(
            torch.tensor(one.log_probs), torch.tensor(other.log_probs), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("ignore_eos", [True, False], ids=["all rows stay", "rows end"])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["padded", "equal"])
def test_replayed_steps_sample_what_others_do(path: Path, prompts: list[Prompt], ignore_eos: bool) -> None:
    recording = Recording()
    found = sampled(engine(path, recording), prompts, ignore_eos=ignore_eos)
    assert_same(found, sampled(engine(path), prompts, ignore_eos=ignore_eos))
    replays = [graph.replays for graph in recording.graphs]
    if ignore_eos:
        assert sum(replays) >= STEPS - 6
        assert len(replays) >= 2  # 16 places are not enough
    else:
        assert sum(replays) > 0


def test_replayed_steps_read_the_weights_that_there_are(path: Path) -> None:
    recording = Recording()
    one, other = engine(path, recording), engine(path)
    before = sampled(one)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    changed = {name: tensor * 1.1 for name, tensor in model.state_dict().items()}
    for each in (one, other):
        each.update_weights(iter(changed.items()), version=1)
    after = sampled(one)
    assert_same(after, sampled(other))
    assert [each.response_tokens for each in after] != [each.response_tokens for each in before]


def test_a_model_that_cannot_be_recorded_is_asked_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def refuse(work: Callable[[], None]) -> Again:
        asked.append(work)
        raise RuntimeError("operation not permitted when stream is capturing")

    refused = engine(path, refuse)
    assert_same(sampled(refused, ignore_eos=True), sampled(engine(path), ignore_eos=True))
    sampled(refused, ignore_eos=True)
    assert len(asked) == 1
    assert "cannot be recorded: operation not permitted" in caplog.text


def test_a_model_that_reads_masks_in_its_own_way_is_decoded_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Falcon's linear biases are made of a mask of truth values ``[B, S]``."""
    tiny_tokenizer(tmp_path, alphabet=ALPHABET)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "alibi": True}
    torch.manual_seed(0)
    FalconForCausalLM(FalconConfig(vocab_size=16, **shape)).save_pretrained(tmp_path)
    recording = Recording()
    found = sampled(engine(tmp_path, recording), ignore_eos=True)
    assert_same(found, sampled(engine(tmp_path), ignore_eos=True))
    assert not recording.graphs
    assert "this model cannot be recorded" in caplog.text


def test_memory_that_is_not_enough_is_no_reason_to_go_on(path: Path) -> None:
    def refuse(work: Callable[[], None]) -> Again:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        sampled(engine(path, refuse), ignore_eos=True)


def test_layers_that_keep_another_state_are_not_recorded(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path, alphabet=ALPHABET)
    tiny_qwen3(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    kinds = ["sliding_attention", "full_attention"]
    config |= {"use_sliding_window": True, "sliding_window": 4, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(config))
    recording = Recording()
    sampled(engine(tmp_path, recording), ignore_eos=True)
    assert not recording.graphs


def test_the_host_has_none_and_a_run_may_want_none() -> None:
    assert CpuDevice().capture_graph is None
    assert not Rollout().enforce_eager
    assert Rollout.model_validate({"enforce_eager": True}).enforce_eager
