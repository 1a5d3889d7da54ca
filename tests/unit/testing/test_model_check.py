"""``anygauge check-model``: right models pass, and each kind of wrong one fails in its own row, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge.testing.model_check import check_model
from anygauge.testing.model_cut import cut_model
from anygauge.testing.model_worker import CHECKS, CheckRow, checks
from anygauge.testing.tiny import tiny_family, tiny_tokenizer
from anygauge.testing.tiny_vision import add_vision_tokens, tiny_qwen3_vl
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec, TrainEngineSpec, WorkerContext
from anygauge_models.dense import DenseDecoder
from anygauge_tests.engine_config import engine_config
from anygauge_tests.fake_engine import FakeServer, Options

PROMPT = "The quick brown fox jumps over the lazy dog."
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

Rows = dict[str, CheckRow]
Check = Callable[..., Rows]


def write_model(directory: Path, name: str, **options: Any) -> Path:
    """Write a tiny random model of transformers with a tokenizer of bytes."""
    tiny_tokenizer(directory, texts=[PROMPT] * 8, vocab_size=300)
    config = getattr(transformers, f"{name}Config")(**{**TINY, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return directory


class Package:
    """A plugin with what a test registers."""

    def __init__(self, engines: Any) -> None:
        self.engines = engines

    @hookimpl
    def register_train_engines(self) -> list[TrainEngineSpec]:
        return [engine for engine in self.engines if isinstance(engine, TrainEngineSpec)]

    @hookimpl
    def register_rollout_engines(self) -> list[RolloutEngineSpec]:
        return [engine for engine in self.engines if isinstance(engine, RolloutEngineSpec)]


@pytest.fixture
def check(context: WorkerContext) -> Check:
    def checked(
        directory: Path, engine: str, package: Any = None, prompt: str = PROMPT, against: str | None = None
    ) -> Rows:
        plugins = load_plugins()
        if package is not None:
            plugins.register(package, "of_test")
        config = engine_config(directory, train={"engine": engine, "dtype": "float32", "clip_grad": 0.0})
        own = replace(context, plugins=plugins)
        rows = list(check_model(config, plugins, own, prompt, against=against))
        return {row.name: row for row in rows}

    return checked


def failed(rows: Rows) -> list[str]:
    return [name for name, row in rows.items() if row.status != "PASS"]


RIGHT = [
    ("Qwen3", "megatron", {}),
    ("Qwen2", "megatron", {"tie_word_embeddings": False}),
    ("Qwen3Moe", "megatron", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ("Phi", "fsdp", {"tie_word_embeddings": False}),
    pytest.param(  # a key's bias has rounding for a gradient
        *("OPT", "fsdp", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        marks=pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning"),
    ),
    ("SmolLM3", "megatron", {"num_hidden_layers": 4}),
    ("SmolLM3", "fsdp", {"num_hidden_layers": 4}),
    ("Mixtral", "fsdp", {"num_local_experts": 4, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize(("name", "engine", "options"), RIGHT)
def test_a_right_model_passes(
    check: Check, tmp_path: Path, name: str, engine: str, options: dict[str, Any]
) -> None:
    rows = check(write_model(tmp_path, name, **options), engine)
    assert tuple(rows) == CHECKS
    assert failed(rows) == [], rows


def test_a_model_that_sees_is_compared_without_its_tower(check: Check, tmp_path: Path) -> None:
    tokenizer = add_vision_tokens(tiny_tokenizer(tmp_path, texts=[PROMPT] * 8, vocab_size=300))
    rows = check(tiny_qwen3_vl(tmp_path, tokenizer, init_std=0.2), "megatron")
    assert failed(rows) == [], rows
    assert "; left out: model.visual." in rows["round trip"].found
    assert "of model.language_model.layers." in rows["gradients"].found


def test_a_family_without_its_layers_without_rotary_is_told_by_these_layers(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = DenseDecoder(family="smollm3").spec("SmolLM3ForCausalLM")
    monkeypatch.setattr("anygauge_models.smollm3.SMOLLM3", forgetful)
    rows = check(write_model(tmp_path, "SmolLM3", num_hidden_layers=12), "megatron")
    assert failed(rows) == ["layers", "log-probs", "packed", "gradients"]
    found = rows["layers"].found
    assert found.startswith("the first to differ is model.layers.3, by up to ")
    assert found.endswith("3 of 12 differ: model.layers.3, model.layers.7, model.layers.11")
    assert "model.layers.3.self_attn.q_proj.weight" in rows["gradients"].found


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_tensor_too_many_fails_by_its_name(check: Check, tmp_path: Path, engine: str) -> None:
    path = write_model(tmp_path, "Qwen3")
    change_weights(path, lambda each: each.update({"model.layers.1.extra.weight": torch.zeros(2)}))
    rows = check(path, engine)
    assert failed(rows) == ["weights"]
    assert "model.layers.1.extra.weight" in rows["weights"].found
    assert "[AG502]" in rows["weights"].found


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_missing_tensor_fails_by_its_name(check: Check, tmp_path: Path, engine: str) -> None:
    path = write_model(tmp_path, "Qwen3")
    change_weights(path, lambda each: each.pop("model.layers.1.mlp.up_proj.weight"))
    rows = check(path, engine)
    assert failed(rows) == ["weights"]
    assert "model.layers.1.mlp.up_proj.weight" in rows["weights"].found


# -------------------------------------------------------------------------
# Engines that are wrong in one way
# -------------------------------------------------------------------------


class Wrapped:
    """The engine of transformers' models, with one method of a test's."""

    def __init__(self, engine: Any, **methods: Any) -> None:
        self.engine = engine
        vars(self).update(
            {name: lambda *a, f=each, **k: f(engine, *a, **k) for name, each in methods.items()}
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def engine_with(change: Callable[[Any], Any] = lambda engine: None, **methods: Any) -> Package:
    """Return a plugin with an engine ``wrong``."""

    def make(config: Any, context: WorkerContext) -> Any:
        engine = load_plugins().get("register_train_engines", "fsdp").make(config, context)
        change(engine)
        return Wrapped(engine, **methods)

    from anygauge.engines.fsdp.family import causal_lm_family

    return Package([TrainEngineSpec(name="wrong", make=make, make_family=causal_lm_family)])


def renamed(engine: Any) -> Any:
    for name, tensor in engine.weights():
        yield name.replace("layers.1.mlp.up_proj", "layers.1.mlp.upper"), tensor


def doubled(engine: Any) -> Any:
    for name, tensor in engine.weights():
        yield name, tensor * 2 if name.endswith("1.mlp.up_proj.weight") else tensor


def turned(engine: Any) -> Any:
    for name, tensor in engine.weights():
        yield name, tensor.t() if name.endswith("1.mlp.up_proj.weight") else tensor


def twice(engine: Any) -> Any:
    yield from engine.weights()
    yield from ((name, tensor) for name, tensor in engine.weights() if name == "model.norm.weight")


UP = "model.layers.1.mlp.up_proj.weight"
EXPORTS = [
    (
        renamed,
        f"model.layers.1.mlp.upper.weight is exported, and the checkpoint has no such tensor, {UP} is not",
    ),
    (doubled, f"{UP} comes back with other values"),
    (turned, f"{UP} is exported as [64, 96], and is [96, 64]"),
    (twice, "model.norm.weight is exported twice"),
]


@pytest.mark.parametrize(("weights", "found"), EXPORTS)
def test_an_export_that_differs_is_told(check: Check, tmp_path: Path, weights: Any, found: str) -> None:
    rows = check(write_model(tmp_path, "Qwen3"), "wrong", engine_with(weights=weights))
    assert found in rows["round trip"].found
    assert rows["round trip"].status == "FAIL"
    assert rows["log-probs"].status == "PASS"


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_tied_output_layer_may_be_stored_too(check: Check, tmp_path: Path, engine: str) -> None:
    path = write_model(tmp_path, "Qwen3", tie_word_embeddings=True)
    embedding = "model.embed_tokens.weight"
    change_weights(path, lambda each: each.update({"lm_head.weight": each[embedding].clone()}))
    rows = check(path, engine)
    assert failed(rows) == []
    assert rows["round trip"].found.endswith("; left out: lm_head.weight")


def test_a_parameter_without_a_gradient_is_told(check: Check, tmp_path: Path) -> None:
    def weights(engine: Any) -> Any:
        yield from ((name, tensor) for name, tensor in engine.weights() if name != UP)

    rows = check(write_model(tmp_path, "Qwen3"), "wrong", engine_with(weights=weights))
    assert rows["round trip"].found == f"{UP} is not exported"
    assert rows["gradients"].found == f"transformers has gradients that the engine does not: {UP}"


def test_another_number_of_layers_is_told(check: Check, tmp_path: Path) -> None:
    package = engine_with(decoder_layers=lambda engine: engine.decoder_layers()[:1])
    rows = check(write_model(tmp_path, "Qwen3"), "wrong", package)
    assert failed(rows) == ["layers"]
    assert rows["layers"].found == "1 decoder layers ran, and 2 of transformers"


def test_an_engine_that_shows_no_layers_is_compared_without_them(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = engine_with()
    monkeypatch.delattr("anygauge.engines.fsdp.engine.FsdpEngine.decoder_layers")
    rows = check(write_model(tmp_path, "Qwen3"), "wrong", package)
    assert failed(rows) == []
    assert rows["layers"].found == "not compared: the engine does not show its layers"


def test_a_cut_model_has_the_items_of_its_layers(tmp_path: Path) -> None:
    path = write_model(tmp_path / "whole", "SmolLM3", num_hidden_layers=4)
    hf = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**hf, "text_config": hf}))
    cut_model(path, tmp_path / "cut", 3)
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    for each in (config, config["text_config"]):
        assert (each["num_hidden_layers"], each["no_rope_layers"]) == (3, [1, 1, 1])
    names = load_file(next((tmp_path / "cut").glob("*.safetensors"))).keys()
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"0", "1", "2"}


def test_a_padding_token_in_the_prompt_is_compared(check: Check, tmp_path: Path) -> None:
    path = write_model(tmp_path, "Qwen3", pad_token_id=37)
    change_weights(path, lambda each: each["model.embed_tokens.weight"][37].zero_())
    rows = check(path, "fsdp", prompt="".join(map(chr, range(32, 96))))
    assert failed(rows) == [], rows


def test_experts_that_transformers_writes_otherwise_are_told(check: Check, tmp_path: Path) -> None:
    spec = load_plugins().get("register_models", "qwen3_vl_moe")
    tiny_tokenizer(tmp_path, alphabet="".join(map(chr, range(0x4E00, 0x4E00 + 8))) + "abcd")
    rows = check(tiny_family(tmp_path, spec), "megatron", prompt="abcdabdc")
    assert failed(rows) == [], rows
    assert (
        "; transposed, as they are published: model.language_model.layers.1.mlp." in rows["round trip"].found
    )


def test_a_server_with_other_log_probs_fails_alone(check: Check, tmp_path: Path) -> None:
    served = []

    def serve(config: Config, context: WorkerContext) -> FakeServer:
        served.append(config.model.path)
        return FakeServer(Options(vocab_size=300))

    package = Package([RolloutEngineSpec(name="fake", serve=serve)])
    path = write_model(tmp_path, "Qwen3")
    rows = check(path, "megatron", package, against="fake")
    assert tuple(rows) == checks("fake")
    assert failed(rows) == ["served"], rows
    assert rows["served"].found.endswith("(limit 0.0001); the train engine is right: look at fake")
    assert served == [path]


def test_an_engine_without_servers_is_refused(check: Check, tmp_path: Path) -> None:
    rows = check(write_model(tmp_path, "Qwen3"), "megatron", against="transformers")
    assert failed(rows) == ["served"]
    assert rows["served"].found.startswith("The rollout engine 'transformers' is not a server.")


def test_sequences_that_affect_each_other_fail_when_packed_alone(check: Check, tmp_path: Path) -> None:
    def leaking(engine: Any, batch: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = engine.log_probs(batch, **options)
        result[-1] += 2e-4 * (len(batch.lengths) - 1)
        return result

    rows = check(write_model(tmp_path, "Qwen3"), "wrong", engine_with(log_probs=leaking))
    assert failed(rows) == ["packed"]
    assert rows["packed"].found.endswith("the sequences of a micro-batch affect each other")


def test_gradients_that_differ_fail_alone(check: Check, tmp_path: Path) -> None:
    def scaled(engine: Any, batch: Any, loss: Any, **options: Any) -> Any:
        def other(inputs: Any) -> Any:
            value, metrics = loss(inputs)
            return value * 1.01, metrics

        return engine.train_step(batch, other, **options)

    rows = check(write_model(tmp_path, "Qwen3"), "wrong", engine_with(train_step=scaled))
    assert failed(rows) == ["gradients"]
    assert "(0.01)" in rows["gradients"].found


def test_an_output_layer_that_differs_is_told_from_the_layers(check: Check, tmp_path: Path) -> None:
    def change(engine: Any) -> None:
        engine.root.logit_scale = 1.1

    rows = check(write_model(tmp_path, "Qwen3"), "wrong", engine_with(change))
    assert failed(rows) == ["log-probs", "packed", "gradients"]
    assert "affect each other" not in rows["packed"].found
    assert rows["log-probs"].found.endswith(
        "every decoder layer is right: look at the last norm and the output layer"
    )


def test_an_embedding_that_differs_is_told_from_the_layers(check: Check, tmp_path: Path) -> None:
    def change(engine: Any) -> None:
        engine.root.model.model.embed_tokens.register_forward_hook(lambda *call: call[-1] * 1.1)

    rows = check(write_model(tmp_path, "Qwen3", tie_word_embeddings=False), "wrong", engine_with(change))
    assert rows["layers"].status == "FAIL"
    assert rows["layers"].found == "the input of model.layers.0 differs by 0.1 of it: look at the embedding"


def test_weights_that_transformers_lacks_are_told(check: Check, tmp_path: Path) -> None:
    """An engine that takes what the reference does not has compared another model."""

    def change(engine: Any) -> None:
        change_weights(path, lambda each: each.pop(UP))

    path = write_model(tmp_path, "Qwen3")
    rows = check(path, "wrong", engine_with(change))
    assert rows["transformers"].status == "FAIL"
    assert rows["transformers"].found == f"missing: {UP}"


# -------------------------------------------------------------------------
# Tokenizer and memory
# -------------------------------------------------------------------------


def test_a_tokenizer_that_loses_text_fails(check: Check, tmp_path: Path) -> None:
    path = write_model(tmp_path, "Qwen3")
    file = path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": {"type": "Lowercase"}}))
    rows = check(path, "fsdp")
    assert failed(rows) == ["tokenizer"]
    assert rows["tokenizer"].found == f"decoded to {PROMPT.lower()!r}"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('no system') }}", "it refused a message of the user: no system"),
        ("{{ messages | length }}", "it renders a message of the user without its text: '1'"),
    ],
)
def test_a_chat_template_that_loses_the_message_fails(
    check: Check, tmp_path: Path, template: str, found: str
) -> None:
    path = write_model(tmp_path, "Qwen3")
    (path / "chat_template.jinja").write_text(template)
    rows = check(path, "fsdp")
    assert failed(rows) == ["chat template"]
    assert rows["chat template"].found == found


def test_a_prompt_of_one_token_fails_and_other_tokens_are_compared(check: Check, tmp_path: Path) -> None:
    rows = check(write_model(tmp_path, "Qwen3"), "fsdp", prompt="T")
    assert failed(rows) == ["tokenizer"]
    assert rows["tokenizer"].found.endswith("a log-prob needs 2: give a longer --prompt")
    assert "over 12 tokens" in rows["log-probs"].found


def test_tokens_beyond_the_vocabulary_fail(check: Check, tmp_path: Path) -> None:
    rows = check(write_model(tmp_path, "Qwen3", vocab_size=40), "fsdp")
    assert failed(rows) == ["tokenizer"]
    assert rows["tokenizer"].found.endswith("is beyond the model's vocab_size of 40")


def test_a_model_that_does_not_fit_is_not_loaded(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=1000)
    monkeypatch.setattr("anygauge.testing.model_check.read_memory", lambda: memory)
    rows = check(write_model(tmp_path, "Qwen3"), "fsdp")
    assert failed(rows) == ["memory"]
    assert "weights" not in rows
    weights = sum(each.numel() for each in load_file(tmp_path / "model.safetensors").values())
    assert rows["memory"].found == (
        f"needs {16 * weights:,} bytes for {weights:,} weights, 1,000 are available; "
        "--layers N checks the first N layers"
    )
