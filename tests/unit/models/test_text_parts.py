"""Families that are another one with parts that are left out: MiMo-7B, and Gemma 3 beside a vision tower."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen2ForCausalLM

from anygauge.config import Config
from anygauge.config.model_files import read_model
from anygauge.config.rules.media import model_media
from anygauge.engines.hf_directory import open_tensors
from anygauge.engines.megatron.weights.mapping import model_rules
from anygauge.plugins import load_plugins
from anygauge.serving.embedded.engine import make_engine
from anygauge.testing.tiny import save_random, tiny_family, tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec, text_config, transformers_model
from anygauge_hooks.rl import Prompt, SamplingParams
from anygauge_tests.batches import TrainSample, log_probs
from anygauge_tests.embedded import sample_all
from anygauge_tests.engine_config import engine_config

FAMILIES: dict[str, ModelSpec] = load_plugins().named("register_models")
ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 62)))
AUTO_MAP = {"AutoConfig": "configuration_mimo.MiMoConfig"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "mimo": {
        **{"vocab_size": 151_680, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 36},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
        **{"rope_theta": 640_000, "max_position_embeddings": 32_768, "sliding_window": 32_768},
        **{"use_sliding_window": False, "attention_bias": True, "tie_word_embeddings": False},
        **{"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
        "auto_map": AUTO_MAP,
    },
    "gemma3_multimodal": {
        **{"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
        **{"boi_token_index": 255_999, "eoi_token_index": 256_000, "image_token_index": 262_144},
        "mm_tokens_per_image": 256,
        "text_config": {
            **{"hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text"},
            **{"num_hidden_layers": 34, "sliding_window": 1024},
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {
            **{"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14},
            **{"model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27},
            "vision_use_head": False,
        },
    },
}
"""``config.json`` of XiaomiMiMo/MiMo-7B-RL and of google/gemma-3-4b-it, without dtypes and ids of tokens."""
BILLIONS = {"mimo": 7.62, "gemma3_multimodal": 3.88}
"""Parameters without what is left out, of 7.83 and 4.30."""
TEXT = {"mimo": "qwen2", "gemma3_multimodal": "gemma3"}
"""The family that each is. All that is compared with transformers for that one holds for it."""


@dataclass(frozen=True)
class Model:
    """A tiny model as it is published."""

    spec: ModelSpec
    path: Path
    reference: Any
    lost: Mapping[str, int]
    """How many of its tensors are left out, by how their names begin."""
    fate: str
    """Where they are left out."""

    def log_probs(self, tokens: list[int]) -> torch.Tensor:
        """Return those of every token after the first, of transformers' model."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([tokens])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[1:, None])[:, 0]


def write_mimo(path: Path) -> Model:
    """Write a model with a file of code, and a layer beside those of Qwen2, whose class is the reference."""
    spec = FAMILIES["mimo"]
    tiny_family(path, spec, auto_map=AUTO_MAP, num_nextn_predict_layers=1)
    (path / "configuration_mimo.py").write_text("raise RuntimeError('code of the checkpoint ran')")
    file = path / "model.safetensors"
    weights = load_file(file)
    fields = {key: value for key, value in spec.tiny().items() if key != "model_type"}
    reference = Qwen2ForCausalLM(Qwen2ForCausalLM.config_class(**fields)).eval()
    reference.load_state_dict(weights)
    save_file({**weights, "model.mtp_layers.0.input_proj.weight": torch.zeros(64, 128)}, file)
    return Model(spec, path, reference, {"model.mtp_layers.": 1}, "here and in what is saved")


def write_gemma3(path: Path) -> Model:
    """Write a model with a vision tower."""
    spec = FAMILIES["gemma3_multimodal"]
    save_random(AutoModelForImageTextToText, AutoConfig.for_model(**spec.tiny()), path)
    reference = AutoModelForImageTextToText.from_pretrained(path).eval()
    names = load_file(path / "model.safetensors")
    prefixes = ("multi_modal_projector.", "vision_tower.")
    tower = {name: each.bfloat16() for name, each in names.items() if name.startswith(prefixes)}
    save_file({**names, **tower}, path / "model.safetensors", {"format": "pt"})
    lost = {each: sum(n.startswith(each) for n in names) for each in prefixes}
    return Model(spec, path, reference, lost, "here; exports have them unchanged")


@pytest.fixture(scope="module", params=[write_mimo, write_gemma3], ids=TEXT)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    written: Model = request.param(tmp_path_factory.mktemp("model"))
    tiny_tokenizer(written.path, alphabet=ALPHABET)
    return written


def config_of(path: Path, engine: str, **model: Any) -> Config:
    return engine_config({"path": path, **model}, train={"engine": engine, "micro_batch_tokens": 64})


@pytest.mark.parametrize("hf", [*PUBLISHED.values(), *(FAMILIES[name].tiny() for name in TEXT)])
def test_to_megatron_it_is_the_family_of_its_text(hf: dict[str, Any]) -> None:
    spec: ModelSpec = load_plugins().model(hf["architectures"])
    text = FAMILIES[TEXT[spec.name]]
    own, other, table = megatron_model(spec), megatron_model(text), spec.read_config(hf)
    for function in ("transformer_config", "layers"):
        assert getattr(own, function)(hf) == getattr(other, function)(table)
    for one, two in zip(own.rotary(hf, torch.arange(9)), other.rotary(table, torch.arange(9)), strict=True):
        assert torch.equal(one, two)
    assert spec.model_options(hf) == text.model_options(table)
    assert spec.flops_per_token(hf, 100) == text.flops_per_token(table, 100)
    names = [[rule.canonical for rule in model_rules(each, table)] for each in (spec, text)]
    assert names[0] == names[1]


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_sizes_add_up(family: str) -> None:
    spec, hf = FAMILIES[family], PUBLISHED[family]
    own = transformers_model(spec)
    assert own is not None
    with torch.device("meta"):
        built = own.build(text_config(hf), torch.bfloat16)
    assert sum(each.numel() for each in built.parameters()) == pytest.approx(1e9 * BILLIONS[family], rel=2e-3)
    names = {re.sub(r"^model\.language_model\.", "language_model.model.", n) for n in built.state_dict()}
    assert {name for rule in model_rules(spec, hf) for name in rule.hf} == names - (
        {"lm_head.weight"} if spec.model_options(hf)["tie_embeddings"] else set()
    )


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_trainer_and_rollouts_have_the_log_probs_of_transformers(
    model: Model, context: WorkerContext, tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: str
) -> None:
    """No code of the checkpoint runs, what is left out is named, and an export has all that it claims."""
    config = config_of(model.path, engine)
    text, problems = read_model(model.path, context.plugins, engine=engine)
    assert text is not None
    assert not problems
    trainer = context.plugins.get("register_train_engines", engine).make(config, context)
    for prefix, count in model.lost.items():
        assert f"{count} tensors ({prefix} ...) are left out, {model.fate}" in caplog.text
    rollouts = make_engine(config, context)
    rollouts.update_weights(trainer.weights(), 1)
    prompt = Prompt(index=0, tokens=(5, 6, 7, 8), text="")
    [[sampled]] = sample_all(rollouts, [prompt], SamplingParams(max_new_tokens=6, ignore_eos=True), [[1]])
    tokens = [*prompt.tokens, *sampled.response_tokens]
    expected = model.log_probs(tokens)
    torch.testing.assert_close(torch.tensor(sampled.log_probs), expected[3:], rtol=0, atol=1e-5)
    sample = TrainSample(tokens, 9, [1] * 9, [-0.5] * 9, [1.0] * 9)
    [actual] = log_probs(trainer, [sample], temperature=1.0)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    stored = load_file(model.path / "model.safetensors")
    kept = {name: each for name, each in stored.items() if not name.startswith(tuple(model.lost))}
    exported = dict(trainer.weights())
    assert exported.keys() == kept.keys()
    assert all(torch.equal(exported[name], kept[name]) for name in kept)
    trainer.save_hf(str(tmp_path / "out"))
    assert not json.loads((tmp_path / "out" / "config.json").read_text()).get("num_nextn_predict_layers")
    with open_tensors(tmp_path / "out") as reader:
        whole = kept if model.spec.name == "mimo" else stored
        assert reader.names == whole.keys()
        assert all(torch.equal(reader(name), whole[name].float()) for name in whole)
        assert {reader.dtype(name) for name in whole} == {torch.float32}


@pytest.mark.parametrize(
    ("family", "kind", "reason"),
    [
        (
            "gemma3_multimodal",
            "image",
            "only text: tokens of an image attend to each other in both directions",
        ),
        ("qwen2_5_vl", "video", "image and text: transformers and servers count the positions after a video"),
    ],
)
@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_media_that_published_models_take_are_refused_with_the_reason(
    tmp_path: Path, engine: str, family: str, kind: str, reason: str
) -> None:
    config = config_of(tmp_path, engine, modalities=[kind])
    [problem] = model_media(config, FAMILIES[family].tiny(), load_plugins())
    assert problem.path == "model.modalities"
    assert f"the model's family takes {reason}" in problem.hint
