"""Every registered family against transformers: logits, gradients, and weights that go in and come out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from anygauge.config.rules.architecture import architecture_hints
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.kernels.table import KernelTable
from anygauge.plugins import Plugins, load_plugins
from anygauge.testing.tiny import save_random, tiny_family, tiny_tokenizer
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ConfigError, WeightMappingError
from anygauge_hooks.kernels import KernelOp
from anygauge_hooks.megatron import LayerKind, megatron_model
from anygauge_hooks.models import ModelSpec
from anygauge_hooks.rl import Prompt, SamplingParams
from anygauge_hooks.types import BackendSpec, Device
from anygauge_tests.batches import TrainSample, log_probs
from anygauge_tests.embedded import sample_all
from anygauge_tests.engine_config import engine_config
from anygauge_tests.families import FAMILIES, differing_defaults

LENGTHS = (17, 5, 1, 40)
ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 62)))
"""With the padding token and the end of a sequence as many tokens as the tiny models have."""


@dataclass(frozen=True)
class Host:
    plugins: Plugins
    backend: BackendSpec
    device: Device

    def build(self, path: Path, **train: Any) -> Any:
        from anygauge.engines.megatron.model import build_policy, initialize_parallel
        from anygauge.engines.megatron.scope import make_scope

        config = engine_config(path, train=train)
        with make_scope(self.device):
            initialize_parallel(seed=0, timeout_s=60)
            return build_policy(config, self.plugins, self.backend, self.device)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    plugins = load_plugins()
    backend = plugins.get("register_backends", "cpu")
    prepare_megatron(plugins, backend)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Host(plugins, backend, plugins.make_device(backend, 0))
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def checkpoint(spec: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_family(tmp_path_factory.mktemp(spec.name), spec)


@pytest.fixture(scope="module")
def policy(host: Host, checkpoint: Path) -> Any:
    return host.build(checkpoint)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, 64, (length,), generator=generator) for length in LENGTHS]


def run(host: Host, policy: Any, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Return the logits of packed sequences, ``[T, V]``."""
    from anygauge.engines.megatron.inputs import inputs_on_device, model_inputs
    from anygauge.engines.megatron.scope import make_scope

    packed = model_inputs(torch.cat(sequences), list(map(len, sequences)))
    inputs = inputs_on_device(packed, policy.rotary, torch.device("cpu"))
    with make_scope(host.device):
        return policy.chunks[0](**inputs).flatten(0, 1)


def reference_logits(model: Any, sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([model(tokens[None]).logits[0] for tokens in sequences])


def test_logits_equal_transformers(
    host: Host, policy: Any, reference: Any, sequences: list[torch.Tensor]
) -> None:
    with torch.no_grad():
        actual, expected = run(host, policy, sequences), reference_logits(reference, sequences)
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(actual.log_softmax(-1), expected.log_softmax(-1), rtol=0, atol=1e-5)


def test_gradients_equal_transformers(
    host: Host, policy: Any, reference: Any, sequences: list[torch.Tensor]
) -> None:
    from anygauge.engines.megatron.scope import make_scope

    targets = torch.cat(sequences).roll(-1)
    expected_loss = torch.nn.functional.cross_entropy(reference_logits(reference, sequences), targets)
    reference.zero_grad()
    expected_loss.backward()
    loss = torch.nn.functional.cross_entropy(run(host, policy, sequences), targets)
    with make_scope(host.device):
        loss.backward()
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-5)
    expected = hf_gradients(reference)
    actual = policy_gradients(policy)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        error = (gradient - expected[name]).norm() / expected[name].norm().clamp(min=1e-6)
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.fsdp
def test_the_fsdp_engine_has_the_log_probs_of_transformers(
    host: Host, spec: ModelSpec, checkpoint: Path, reference: Any, sequences: list[torch.Tensor]
) -> None:
    """Those of all tokens that may be sampled, also after a sequence of the other length in its batch."""
    context = WorkerContext(
        rank=0, world_size=1, backend=host.backend, device=host.device, plugins=host.plugins
    )
    config = engine_config(checkpoint, train={"engine": "fsdp", "micro_batch_tokens": 64})
    engine = host.plugins.get("register_train_engines", "fsdp").make(config, context)
    samples = [
        TrainSample(
            each.tolist(),
            len(each) - 1,
            [1] * (len(each) - 1),
            [-0.5] * (len(each) - 1),
            [1.0] * (len(each) - 1),
        )
        for each in sequences
        if len(each) > 1
    ]
    forbidden = torch.tensor(spec.media.forbidden(spec.tiny()) if spec.media else (), dtype=torch.int64)
    for sample, actual in zip(samples, log_probs(engine, samples, temperature=1.0), strict=True):
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            logits = reference(tokens[None]).logits[0].index_fill(-1, forbidden, -torch.inf)
        expected = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    exported, stored = dict(engine.weights()), load_file(checkpoint / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)


def hf_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients under the names of the checkpoint, which transformers may store otherwise."""
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    found = saved_tensors(model)
    model.load_state_dict(values, strict=False)
    buffers = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in found.items() if name.rpartition(".")[2] not in buffers}


def saved_tensors(model: Any) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(Path(directory) / "model.safetensors")


def policy_gradients(policy: Any) -> dict[str, torch.Tensor]:
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    values = [p.detach().clone() for p in parameters]
    buffers = {name for rule in policy.rules for name in rule.hf if rule.canonical.endswith("expert_bias")}
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.grad)
        found = {name: tensor.clone() for name, tensor in policy.weights() if name not in buffers}
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
            parameter.grad = None
    return found


def test_the_short_way_is_of_plain_layers_alone(spec: ModelSpec, policy: Any) -> None:
    is_plain = [
        replace(kind, rotary=True, window=None) == LayerKind()
        for kind in megatron_model(spec).layers(spec.tiny())
    ]
    assert [layer.is_short for layer in policy.chunks[0].decoder.layers] == is_plain


def test_weights_come_out_as_they_went_in(policy: Any, checkpoint: Path) -> None:
    expected = load_file(checkpoint / "model.safetensors")
    actual = dict(policy.weights())
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


# -------------------------------------------------------------------------
# Variants
# -------------------------------------------------------------------------

PLAIN = {"rope_type": "default", "rope_theta": 500.0}
VARIANTS = [
    (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": PLAIN, "n_shared_experts": 2},
    ),
    (
        "deepseek_v3",
        {
            "rope_interleave": False,
            "rope_parameters": {**PLAIN, "rope_type": "yarn", "factor": 4.0, "truncate": False}
            | {"original_max_position_embeddings": 16},
        },
    ),
    ("qwen3_5", {"tie_word_embeddings": False, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3}),
    ("qwen3_5", {"rope_parameters": PLAIN, "layer_types": None, "num_hidden_layers": 4}),
    ("mistral", {"head_dim": None, "tie_word_embeddings": True}),
    ("qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    ("qwen3", {"tie_word_embeddings": False}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    ("qwen3_next", {"norm_topk_prob": False, "linear_num_key_heads": 4, "mlp_only_layers": []}),
    ("glm4", {"attention_bias": False, "tie_word_embeddings": True}),
    ("glm4_moe", {"use_qk_norm": False, "n_shared_experts": 2}),
    ("phi3", {"num_key_value_heads": 4, "rope_parameters": PLAIN, "tie_word_embeddings": True}),
    ("seed_oss", {"attention_bias": False, "head_dim": None}),
    ("smollm3", {"no_rope_layers": [0, 1, 1], "tie_word_embeddings": False}),
    ("llama", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_variants_equal_transformers(
    host: Host, tmp_path: Path, sequences: list[torch.Tensor], family: str, changes: dict[str, Any]
) -> None:
    compare_logits(host, tiny_family(tmp_path, FAMILIES[family], **changes), sequences)


SCALED = {
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    "yarn": {
        **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
        "original_max_position_embeddings": 16,
    },
}

UNSCALED = {"phi3"}
"""Families without these scalings in transformers."""


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_angles_equal_transformers(
    host: Host, tmp_path: Path, sequences: list[torch.Tensor], spec: ModelSpec, kind: str
) -> None:
    part = {
        key: spec.tiny()["rope_parameters"].get(key) for key in ("partial_rotary_factor", "mrope_section")
    }
    scaled = SCALED[kind] | {key: value for key, value in part.items() if value is not None}
    if spec.name in UNSCALED:
        with pytest.raises(ConfigError, match=f"{kind!r} is not supported by the {spec.name} family"):
            megatron_model(spec).transformer_config({**spec.tiny(), "rope_parameters": scaled})
        return
    compare_logits(host, tiny_family(tmp_path, spec, rope_parameters=scaled), sequences)


YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WRITTEN = [
    ("qwen3", {"rope_scaling": {**YARN, "original_max_position_embeddings": 16}}),
    ("qwen3", {"rope_scaling": {**YARN, "rope_theta": 700.0}, "max_position_embeddings": 64}),
    ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40.0, "mscale_all_dim": 1.0}}),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 900.0}),
    ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 64}),
    (
        "llama",
        {
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 16,
        },
    ),
    (
        "qwen2",  # as DeepSeek-R1-Distill-Qwen-1.5B
        {
            **{"rope_parameters": None, "rope_theta": 10_000, "max_position_embeddings": 131_072},
            **{"sliding_window": 4096, "max_window_layers": 1, "use_sliding_window": False},
            **{"use_mrope": False, "attention_dropout": 0.0},
        },
    ),
    (
        "llama",  # as DeepSeek-R1-Distill-Llama-8B
        {
            **{"rope_parameters": None, "rope_theta": 500_000.0, "max_position_embeddings": 131_072},
            **{"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
            **{"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
        },
    ),
]
"""Edits of a ``config.json`` that has ``rope_parameters``, by users and as models are published."""


@pytest.mark.parametrize(("family", "keys"), WRITTEN)
def test_angles_are_read_in_the_order_of_transformers(
    host: Host, tmp_path: Path, sequences: list[torch.Tensor], family: str, keys: dict[str, Any]
) -> None:
    path = tiny_family(tmp_path, FAMILIES[family])
    compare_logits(host, edited(path, **keys), sequences)


ANGLES = [
    ("qwen3", {}, True),
    ("qwen3", {"rope_scaling": YARN}, False),
    ("qwen3", {"rope_scaling": {**YARN, "attention_factor": 1.0}}, True),
    ("deepseek_v3", {"rope_scaling": {**YARN, "mscale_all_dim": 1.0}}, False),
    ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, True),
]


@pytest.mark.parametrize(("family", "keys", "are_unit"), ANGLES)
def test_a_kernel_is_chosen_by_whether_angles_are_multiplied(
    host: Host,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    keys: dict[str, Any],
    are_unit: bool,
) -> None:
    told: set[bool] = set()
    resolve = KernelTable.resolve

    def spy(table: KernelTable, op: KernelOp, **facts: Any) -> Any:
        if op == "rotary_embedding":
            told.add(facts["unit_angles"])
        return resolve(table, op, **facts)

    monkeypatch.setattr(KernelTable, "resolve", spy)
    policy = host.build(edited(tiny_family(tmp_path, FAMILIES[family]), **keys))
    cos, _ = policy.rotary(torch.arange(99))
    assert (cos.abs().max() <= 1) == are_unit
    assert told == {are_unit}


def edited(path: Path, **keys: Any) -> Path:
    """Change keys of a ``config.json``."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return path


def compare_logits(host: Host, path: Path, sequences: list[torch.Tensor]) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        actual = run(host, host.build(path), sequences)
        expected = reference_logits(model, sequences)
    assert expected.std() > 0.1
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


# -------------------------------------------------------------------------
# A text model inside one that sees
# -------------------------------------------------------------------------

VISION = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64},
    **{"patch_size": 4, "num_position_embeddings": 16},
}


def write_whole(spec: ModelSpec, path: Path) -> Path:
    """Write a tiny model as Qwen3.5 is published: with a vision tower, and its experts in stacks."""
    text = {key: value for key, value in spec.tiny().items() if key != "architectures"}
    tied = text["tie_word_embeddings"]
    config = AutoConfig.for_model(spec.name, text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    config.text_config.initializer_range = 0.1
    save_random(AutoModelForImageTextToText, config, path)
    file = path / "model.safetensors"
    save_file({**stacked_experts(load_file(file)), "mtp.fc.weight": torch.zeros(2)}, file, {"format": "pt"})
    return path


def stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with those of all experts of a layer in two, gates above ups."""
    parts: dict[str, list[torch.Tensor]] = {}
    found = {}
    for name in sorted(tensors, key=lambda name: [int(x) if x.isdigit() else x for x in name.split(".")]):
        if ".experts." not in name:
            found[name] = tensors[name]
            continue
        stem, _, expert = name.partition(".experts.")
        kind = "down_proj" if "down_proj" in expert else "gate_up_proj"
        parts.setdefault(f"{stem}.experts.{kind}", []).append(tensors[name])
    for name, each in parts.items():
        width = 2 if name.endswith("gate_up_proj") else 1
        pairs = [torch.cat(each[start : start + width]) for start in range(0, len(each), width)]
        found[name] = torch.stack(pairs)
    return found


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_model_is_trained_inside_one_that_sees(
    host: Host, tmp_path: Path, sequences: list[torch.Tensor], family: str
) -> None:
    spec = FAMILIES[family]
    path = write_whole(spec, tmp_path)
    hf = json.loads((path / "config.json").read_text())
    alone = {**spec.tiny(), "initializer_range": 0.1}
    assert not architecture_hints(spec, hf, load_plugins().get("register_train_engines", "megatron"))
    assert megatron_model(spec).transformer_config(hf) == megatron_model(spec).transformer_config(alone)
    assert spec.model_options(hf) == spec.model_options(spec.tiny())
    compare_logits(host, path, sequences)
    policy = host.build(path)
    whole = load_file(path / "model.safetensors")
    text = {name for name in whole if not name.startswith(("model.visual.", "mtp."))}
    found = dict(policy.weights())
    assert found.keys() == text
    assert all(torch.equal(found[name], whole[name]) for name in text)
    check_rollouts(host, policy, path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "model.layers.3.eh_proj.weight"),
        ("glm4_moe", "model.layers.3.eh_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
    ],
)
def test_what_predicts_the_token_after_the_next_is_left_out(
    host: Host, tmp_path: Path, family: str, name: str
) -> None:
    path = tiny_family(tmp_path, FAMILIES[family])
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: torch.zeros(2)}, file, {"format": "pt"})
    assert dict(host.build(path).weights()).keys() == tensors.keys()
    save_file({**tensors, "model.layers.33.eh_proj.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(WeightMappingError, match=r"model\.layers\.33\.eh_proj\.weight: in the checkpoint"):
        host.build(path)


# -------------------------------------------------------------------------
# Another package
# -------------------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
FILES = re.compile(r"^`([a-z_]+\.(?:toml|py))`:\n\n```\w+\n(.*?)^```$", re.M | re.S)


def test_a_family_of_another_package_works_as_the_page_shows_it(
    host: Host, tmp_path: Path, sequences: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    files = dict(FILES.findall(PAGE.read_text(encoding="utf-8")))
    for name in ("pyproject.toml", "anygauge_ernie.py"):
        text = files[name]
        assert len(text.splitlines()) < 70
        (source / name).write_text(text, encoding="utf-8")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", installed, source]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.syspath_prepend(installed)
    plugins = load_plugins()
    outside = Host(plugins, host.backend, host.device)
    spec = plugins.get("register_models", "ernie4_5")
    path = tiny_family(tmp_path / "model", spec)
    compare_logits(outside, path, sequences)
    assert differing_defaults(spec) == []
    config = json.loads((path / "config.json").read_text())
    for key, value in (("use_bias", True), ("hidden_act", "gelu")):
        with pytest.raises(ConfigError, match=f"{key} = {value!r} is not supported by the ernie4_5 family"):
            megatron_model(spec).transformer_config({**config, key: value})


# -------------------------------------------------------------------------
# The rollout engine
# -------------------------------------------------------------------------


def test_the_embedded_rollout_engine_serves_the_weights_of_the_policy(
    host: Host, spec: ModelSpec, policy: Any, checkpoint: Path
) -> None:
    check_rollouts(host, policy, checkpoint)


def check_rollouts(host: Host, policy: Any, checkpoint: Path) -> None:
    """Check that new weights arrive, and that what is sampled has the policy's log-probs."""
    from anygauge.serving.embedded.engine import TransformersEngine

    tiny_tokenizer(checkpoint, alphabet=ALPHABET)
    engine = TransformersEngine(
        checkpoint, dtype=torch.float32, device=torch.device("cpu"), max_batch_tokens=1000
    )
    parameters = [p for chunk in policy.chunks for p in chunk.parameters()]
    values = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(1.05)
        engine.update_weights(policy.weights(), 1)
        prompts = [
            Prompt(index=index, tokens=tuple(range(5, 5 + length)), text="")
            for index, length in enumerate((3, 1, 9))
        ]
        # Rows part at once, and end one after another.
        params = SamplingParams(max_new_tokens=8, temperature=1.0, stop_token_ids=tuple(range(40, 56)))
        seeds = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
        samples = [sample for group in sample_all(engine, prompts, params, seeds) for sample in group]
        assert len({len(sample.response_tokens) for sample in samples}) > 3
        for sample in samples:
            [[alone]] = sample_all(engine, [prompts[sample.prompt_index]], params, [[sample.seed]])
            assert alone.response_tokens == sample.response_tokens
            assert alone.log_probs == pytest.approx(sample.log_probs, abs=1e-5)
            tokens = torch.tensor(sample.prompt_tokens + sample.response_tokens)
            logits = run(host, policy, [tokens])[len(sample.prompt_tokens) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(sample.response_tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.log_probs), expected, rtol=0, atol=1e-5)
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def test_the_embedded_rollout_engine_lists_the_experts_that_it_lacks(tmp_path: Path) -> None:
    from anygauge.serving.embedded.weights import copy_weights, read_weights

    path = tiny_family(tmp_path, FAMILIES["qwen3_moe"])
    model = AutoModelForCausalLM.from_pretrained(path)
    lost = "model.layers.1.mlp.experts.3.up_proj.weight"
    weights = [(name, tensor) for name, tensor in read_weights(path) if name != lost]
    with pytest.raises(WeightMappingError, match=rf"missing: {re.escape(lost)}\.\n"):
        copy_weights(model, weights)
