"""Config checks of SGLang servers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from anygauge.config import Config
from anygauge.plugins import Plugins, load_plugins
from anygauge.serving.sglang import rules
from anygauge.serving.sglang.arguments import run_arguments
from anygauge.serving.sglang.installed import Installed
from anygauge_hooks.types import Availability, BackendSpec

Make = Callable[..., Config]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture
def cpu(plugins: Plugins) -> BackendSpec:
    backend: BackendSpec = plugins.get("register_backends", "cpu")
    return backend


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch, installed: Installed) -> None:
    monkeypatch.setattr(rules, "installed_sglang", lambda: installed)


def found(config: Config, backend: BackendSpec) -> dict[str, str]:
    return {each.path: each.hint for each in rules.sglang_problems(config, backend)}


def test_a_config_that_fits_has_no_problem(config: Make, cpu: BackendSpec) -> None:
    assert found(config({"sglang": {"tp_size": 2}}), cpu) == {}


def test_a_server_needs_a_worker_of_its_own(config: Make, cpu: BackendSpec) -> None:
    assert found(config(placement={}), cpu) == {
        "placement.rollout_workers": "a server has a process of its own: write 1"
    }
    groups = {"groups": [{"servers": 2}, {"model": "judge", "path": "/j"}]}
    assert found(config(groups, placement={}), cpu)["placement.rollout_workers"].endswith("write 3")


def test_a_replay_without_engines_keeps_the_servers_of_its_config(config: Make, cpu: BackendSpec) -> None:
    mode = {"mode": "train_only", "replay_rollouts": "dumps"}
    assert found(config(placement={}, debug=mode), cpu) == {}


def test_arguments_of_all_and_of_a_group_are_checked(config: Make, cpu: BackendSpec) -> None:
    rollout = {"sglang": {"tp_sise": 2}, "groups": [{"sglang": {"port": 1}}]}
    assert set(found(config(rollout), cpu)) == {"rollout.sglang.tp_sise", "rollout.groups[0].sglang.port"}


def test_recordings_have_a_length_that_servers_take(config: Make, cpu: BackendSpec) -> None:
    sounds = {"train": ["a.jsonl"], "multimodal_keys": {"image": "images", "audio": "sound"}}
    assert found(config(data=sounds), cpu) == {}
    hint = "servers of SGLang take recordings of at most 30 seconds"
    assert found(config(data=sounds, media={"max_seconds": 31}), cpu) == {"media.max_seconds": hint}
    images = {"train": ["a.jsonl"], "multimodal_keys": {"image": "images"}}
    assert found(config(data=images, media={"max_seconds": 31}), cpu) == {}


def test_encoders_are_sent_images_alone(config: Make, cpu: BackendSpec) -> None:
    rollout = {"groups": [{"kind": "encoder"}, {"kind": "regular"}]}
    clips = {"path": "/models/tiny", "modalities": ["image", "video"]}
    frozen = {"dtype": "float32", "freeze": ["vision"]}
    problems = found(config(rollout, model=clips, train=frozen), cpu)
    assert problems["model.modalities"].startswith('servers of kind "encoder" decode video themselves')


def test_encoders_need_a_tower_that_is_not_trained(config: Make, cpu: BackendSpec) -> None:
    rollout = {"groups": [{"kind": "encoder"}, {"kind": "regular"}]}
    model = {"path": "/models/tiny", "modalities": ["image"]}
    assert found(config(rollout), cpu) == {}, "in a run of text there is none"
    hint = found(config(rollout, model=model), cpu)["train.freeze"]
    assert hint.startswith('servers of kind "encoder" take no new weights: add "vision"')
    frozen = {"dtype": "float32", "freeze": ["vision"]}
    assert found(config(rollout, model=model, train=frozen), cpu) == {}


def test_another_engine_makes_the_keys_void(config: Make, cpu: BackendSpec) -> None:
    rollout: dict[str, Any] = {
        "engine": "transformers",
        "sglang": {"tp_size": 2},
        "groups": [{"sglang": {"x": 1}}],
    }
    hint = 'has no effect with rollout.engine = "transformers"; leave it out'
    assert found(config(rollout), cpu) == {"rollout.sglang": hint, "rollout.groups[0].sglang": hint}


def test_a_missing_sglang_is_named_with_the_command_that_installs_it(
    config: Make, cpu: BackendSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "installed_sglang", lambda: None)
    command = "in a clone of anygauge, pip install --no-deps -r requirements/sglang-cpu.txt"
    assert found(config(), cpu) == {"rollout.engine": f"SGLang is not installed; install it: {command}"}
    elsewhere = replace(cpu, probe=lambda: Availability(ok=False, reason="no device"))
    assert found(config(), elsewhere) == {}, "a host without the backend only checks a config"


@pytest.mark.parametrize(("treat_as", "fits"), [(None, False), ("0.5.23", True), ("0.4", False)])
def test_an_unlisted_version_needs_the_switch(
    treat_as: str | None,
    fits: bool,
    config: Make,
    cpu: BackendSpec,
    installed: Installed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "installed_sglang", lambda: installed._replace(version="0.6.0"))
    problems = found(config({"sglang_version": treat_as} if treat_as else {}), cpu)
    assert list(problems) == ([] if fits else ["rollout.sglang_version"])


def test_a_server_without_a_tokenizer_finds_no_strings(config: Make, cpu: BackendSpec) -> None:
    arguments = {"sglang": {"skip_tokenizer_init": True}}
    for rollout in (arguments, {"groups": [arguments]}):
        assert "use stop_token_ids" in found(config({"stop": ["\n"], **rollout}), cpu)["rollout.stop"]


@pytest.mark.parametrize(
    ("sglang", "transport", "problem"),
    [
        ({"dp_size": 2}, "tensor", "copies of the weights"),
        ({"data-parallel-size": 2}, "delta", "copies of the weights"),
        ({"dp_size": 2}, "disk", None),
        ({"dp_size": 2, "enable_dp_attention": True}, "tensor", None),
        ({"pp_size": 2}, "distributed", "without pp_size"),
        ({"pp_size": 2}, "tensor", None),
    ],
)
def test_a_transport_that_does_not_reach_every_process_of_a_server(
    sglang: dict[str, Any],
    transport: str,
    problem: str | None,
    config: Make,
    cpu: BackendSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "argument_problems", lambda *_: ())
    for rollout in ({"sglang": sglang}, {"groups": [{"sglang": sglang}]}):
        hints = found(config(rollout, weight_sync={"transport": transport}), cpu)
        assert list(hints) == (["weight_sync.transport"] if problem else [])
        assert (problem or "") in "".join(hints.values())


@pytest.mark.parametrize(("length", "fits"), [(305, False), (306, True)])
def test_a_server_takes_a_prompt_with_its_response(
    length: int, fits: bool, config: Make, cpu: BackendSpec
) -> None:
    data = {"train": ["t.jsonl"], "max_prompt_tokens": 100}
    rollout = {"max_new_tokens": 200, "sglang": {"context_length": length}}
    assert list(found(config(rollout, data=data), cpu)) == ([] if fits else ["rollout.sglang.context_length"])


@pytest.mark.parametrize(("version", "fits"), [("0.5.17", False), ("0.5.23", True)])
def test_a_response_of_several_versions_needs_a_server_that_tells_them_apart(
    version: str,
    fits: bool,
    config: Make,
    cpu: BackendSpec,
    installed: Installed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "installed_sglang", lambda: installed._replace(version=version))
    problems = found(config(weight_sync={"pause": "in_place"}), cpu)
    assert list(problems) == ([] if fits else ["weight_sync.pause"])


@pytest.mark.parametrize("name", ["cpu", "cuda", "npu"])
def test_each_backend_gives_servers_its_device_and_nothing_to_other_engines(
    name: str, config: Make, plugins: Plugins
) -> None:
    backends = plugins.named("register_backends")
    if name not in backends:
        pytest.skip(f"the {name} backend is not installed")
    ask = {"config": config({"max_batch_tokens": 512}), "backend": backends[name]}
    given = plugins.merged("rollout_engine_args", engine="sglang", **ask)
    assert given["device"] == name
    assert given.get("max_total_tokens") == (512 if name == "cpu" else None)
    assert plugins.merged("rollout_engine_args", engine="transformers", **ask) == {}


@pytest.mark.parametrize("name", ["cuda", "npu"])
@pytest.mark.parametrize("sleeps", [True, False])
def test_a_server_on_the_trainers_device_can_give_memory_back(
    name: str, sleeps: bool, config: Make, plugins: Plugins
) -> None:
    backends = plugins.named("register_backends")
    if name not in backends:
        pytest.skip(f"the {name} backend is not installed")
    made = config(placement={"rollout_workers": 1, "colocated": sleeps})
    given = plugins.merged("rollout_engine_args", engine="sglang", config=made, backend=backends[name])
    assert given["enable_memory_saver"] is sleeps


def test_only_a_server_of_ours_is_told_of_the_platform(
    cpu: BackendSpec, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anygauge_cpu.rollout import activate_platform

    ask = {"backend": cpu, "deterministic": False, "interface": None, "ip_version": "any", "timeout_s": 9.0}
    asked, other = (plugins.worker_env(role=role, **ask) for role in ("sglang", "rollout"))
    assert asked.keys() - other.keys() == {"ANYGAUGE_SGLANG_PLATFORM", "SGLANG_PLATFORM"}
    monkeypatch.delenv("ANYGAUGE_SGLANG_PLATFORM", raising=False)
    assert activate_platform() is None
    monkeypatch.setenv("ANYGAUGE_SGLANG_PLATFORM", asked["ANYGAUGE_SGLANG_PLATFORM"])
    assert activate_platform() == "anygauge_cpu.sglang_platform.HostPlatform"


def lora_run(
    config: Make, targets: Any = None, transport: str = "adapter", path: str = "/models/tiny"
) -> Config:
    train = {"dtype": "float32", "lora": {"rank": 2, "targets": targets}}
    return config(train=train, weight_sync={"transport": transport}, model={"path": path})


def test_a_version_that_cannot_unload_adapters_is_refused(
    config: Make, cpu: BackendSpec, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(lora_run(config), cpu) == {}
    monkeypatch.setattr(rules, "installed_sglang", lambda: installed._replace(version="0.5.17"))
    hint = found(lora_run(config), cpu)["weight_sync.transport"]
    assert hint.startswith("SGLang 0.5.17 never unloads an adapter whose request was aborted")
    assert "install a newer SGLang" in hint


@pytest.mark.parametrize(
    ("targets", "hint"),
    [
        (["q_proj"], "no adapter of q_proj without one of v_proj"),
        (["q_proj", "k_proj"], "no adapter of q_proj without one of v_proj"),
        (["self_attn.v_proj"], "no adapter of v_proj without one of q_proj"),
        (["k_proj", "v_proj"], "without one of q_proj"),
        (["up_proj", "down_proj"], "no adapter of up_proj without one of gate_proj"),
        (["kv_a_proj_with_mqa"], "without one of q_a_proj"),
        (["o_proj", "c_attn"], "no adapters of c_attn; choose among q_proj, k_proj"),
        (["q_proj", "v_proj", "gate_proj", "down_proj"], None),
        (None, None),
    ],
)
def test_layers_that_servers_load_no_adapter_of_are_refused(
    targets: Any, hint: str | None, config: Make, cpu: BackendSpec
) -> None:
    problems = found(lora_run(config, targets), cpu)
    assert list(problems) == (["train.lora.targets"] if hint else [])
    assert (hint or "") in problems.get("train.lora.targets", "")
    assert found(lora_run(config, targets, "tensor"), cpu) == {}, "merged weights"


def test_layers_that_targets_do_not_name_are_those_of_the_weights(
    config: Make, cpu: BackendSpec, tmp_path: Path
) -> None:
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    others = ["linear_attn.in_proj_qkvz", "mlp.shared_expert_gate", "mlp.gate", "mlp.experts.0.w1"]
    names = [f"model.layers.0.{layer}" for layer in (*attention, *others)] + ["model.layers.1.eh_proj"]
    tensors = {f"{name}.weight": torch.zeros(2, 2) for name in (*names, "lm_head", "model.embed_tokens")}
    tensors |= {
        "model.layers.0.norm.weight": torch.zeros(2),
        "model.layers.0.a.conv1d.weight": torch.zeros(2, 1, 2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 1}')
    hint = found(lora_run(config, path=str(tmp_path)), cpu)["train.lora.targets"]
    assert hint.startswith("SGLang loads no adapters of in_proj_qkvz, shared_expert_gate; choose among")
    chosen = lora_run(config, r".*\.self_attn\..*", path=str(tmp_path))
    assert found(chosen, cpu) == {}
    assert run_arguments(chosen)["lora_target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    only = lora_run(config, r".*\.q_proj", path=str(tmp_path))
    assert "without one of v_proj" in found(only, cpu)["train.lora.targets"]
