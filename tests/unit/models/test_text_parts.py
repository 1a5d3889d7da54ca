"""MiMo-7B, which transformers has no class for, as the Qwen2 that it is but for layers that are never run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2ForCausalLM

from anygauge.config import Config
from anygauge.config.model_files import read_model
from anygauge.engines.megatron.weights.mapping import model_rules
from anygauge.plugins import load_plugins
from anygauge.serving.embedded.engine import make_engine
from anygauge.testing.tiny import tiny_family, tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec, transformers_model
from anygauge_hooks.rl import Prompt, SamplingParams
from anygauge_tests.batches import TrainSample, log_probs
from anygauge_tests.embedded import sample_all

FAMILIES: dict[str, ModelSpec] = load_plugins().named("register_models")
MIMO, QWEN2 = FAMILIES["mimo"], FAMILIES["qwen2"]
PUBLISHED = {
    **{"vocab_size": 151_680, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 36},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    **{"rope_theta": 640_000, "max_position_embeddings": 32_768, "sliding_window": 32_768},
    **{"use_sliding_window": False, "attention_bias": True, "tie_word_embeddings": False},
    **{"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
    **{"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}},
}
"""``config.json`` of https://huggingface.co/XiaomiMiMo/MiMo-7B-RL, without its tokens."""
ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 62)))
EXTRA = "model.mtp_layers.0.input_proj.weight"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model as it is published: with files of code, and a layer beside those of Qwen2."""
    path = tiny_family(tmp_path_factory.mktemp("mimo"), MIMO, auto_map=PUBLISHED["auto_map"])
    (path / "configuration_mimo.py").write_text("raise RuntimeError('code of the checkpoint ran')")
    file = path / "model.safetensors"
    save_file({**load_file(file), EXTRA: torch.zeros(64, 128)}, file, {"format": "pt"})
    tiny_tokenizer(path, alphabet=ALPHABET)
    return path


def config_of(path: Path, engine: str) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "test", "steps": 1},
            "model": {"path": path},
            "data": {"train": []},
            "reward": {"function": "none"},
            "train": {"engine": engine, "micro_batch_tokens": 64},
        }
    )


def reference_log_probs(path: Path, tokens: list[int]) -> torch.Tensor:
    """Return those of every token after the first, of Qwen2's class with the same weights."""
    hf = json.loads((path / "config.json").read_text())
    fields = {key: value for key, value in hf.items() if key not in ("auto_map", "model_type")}
    model = Qwen2ForCausalLM(Qwen2ForCausalLM.config_class(**fields)).eval()
    weights = {name: each for name, each in load_file(path / "model.safetensors").items() if name != EXTRA}
    model.load_state_dict(weights)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


@pytest.mark.parametrize("hf", [MIMO.tiny(), PUBLISHED], ids=["tiny", "published"])
def test_it_is_qwen2_to_megatron(hf: dict[str, Any]) -> None:
    """So all that is compared with transformers for Qwen2 holds for it."""
    own, other = megatron_model(MIMO), megatron_model(QWEN2)
    for function in ("transformer_config", "weight_rules", "layers"):
        assert getattr(own, function)(hf) == getattr(other, function)(hf)
    for one, two in zip(own.rotary(hf, torch.arange(9)), other.rotary(hf, torch.arange(9)), strict=True):
        assert torch.equal(one, two)
    assert MIMO.model_options(hf) == QWEN2.model_options(hf)
    assert MIMO.flops_per_token(hf, 100) == QWEN2.flops_per_token(hf, 100)


def test_published_sizes_add_up() -> None:
    """To 7.62 billion; the layer that is left out has the rest of 7.83."""
    own = transformers_model(MIMO)
    assert own is not None
    with torch.device("meta"):
        model = own.build(PUBLISHED, torch.bfloat16)
    weights = model.state_dict()
    assert sum(each.numel() for each in weights.values()) == pytest.approx(7.62e9, rel=1e-3)
    assert weights.keys() == {name for rule in model_rules(MIMO, PUBLISHED) for name in rule.hf}


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_trainer_and_rollouts_have_the_log_probs_of_qwen2(
    directory: Path, context: WorkerContext, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    """No code of the checkpoint runs, and the layers that are left out are named."""
    config = config_of(directory, engine)
    text, problems = read_model(directory, context.plugins, engine=engine)
    assert text is not None
    assert not problems
    trainer = context.plugins.get("register_train_engines", engine).make(config, context)
    assert "1 tensors (model.mtp_layers. ...) are left out, here and in what is saved" in caplog.text
    rollouts = make_engine(config, context)
    prompt = Prompt(index=0, tokens=(5, 6, 7, 8), text="")
    [[sampled]] = sample_all(rollouts, [prompt], SamplingParams(max_new_tokens=6, ignore_eos=True), [[1]])
    tokens = [*prompt.tokens, *sampled.response_tokens]
    expected = reference_log_probs(directory, tokens)
    torch.testing.assert_close(torch.tensor(sampled.log_probs), expected[3:], rtol=0, atol=1e-5)
    sample = TrainSample(tokens, 9, [1] * 9, [-0.5] * 9, [1.0] * 9)
    [actual] = log_probs(trainer, [sample], temperature=1.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    stored = load_file(directory / "model.safetensors")
    assert dict(trainer.weights()).keys() == stored.keys() - {EXTRA}
    rollouts.update_weights(trainer.weights(), 1)
