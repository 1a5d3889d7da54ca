"""A plugin that provides what the default config names, and a loader of minimal configs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from anygauge.config import LoadedConfig, load_config
from anygauge.engines.megatron import plugin as megatron
from anygauge.plugins import Plugins
from anygauge.weight_sync import plugin as weight_sync
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec, TrainEngineSpec
from anygauge_hooks.megatron import LayerKind, MegatronModel
from anygauge_hooks.types import Availability, BackendSpec, FunctionPath, NamedFunction

Load = Callable[..., LoadedConfig]


def backend(name: str) -> BackendSpec:
    return BackendSpec(
        name=name,
        device_type=name,
        dist_backend="gloo",
        probe=lambda: Availability(ok=False, reason="no device"),
        scheduler_resource="GPU",
        local_device=lambda ids, env: 0,
    )


def grpo(rewards: object, *, center: bool = True, scale: bool = True) -> None: ...


def named(*names: str, fn: Callable[..., Any] = grpo) -> list[NamedFunction]:
    return [NamedFunction(name=name, fn=fn) for name in names]


def rotary(hf: Mapping[str, Any], positions: Any) -> tuple[Any, Any]:
    angles = positions * hf.get("rope_theta", 1.0)
    return angles.cos(), angles.sin()


class Model:
    """Fields of a ``ModelSpec`` that ``check`` reads."""

    name = "toy"
    architectures = ("ToyForCausalLM",)
    media = None
    refused_media = ""
    rollout_engines: tuple[str, ...] | None = None
    engines: ClassVar[dict[str, object]] = {
        "megatron": MegatronModel(
            transformer_config=lambda hf: {"num_layers": 2},
            weight_rules=lambda hf: [],
            rotary=rotary,
            layers=lambda hf: [LayerKind()] * 2,
        )
    }

    @staticmethod
    def model_options(hf: Mapping[str, Any]) -> dict[str, int]:
        return {}

    @staticmethod
    def unused_weights(hf: Mapping[str, Any]) -> list[str]:
        return []

    @staticmethod
    def carried_weights(hf: Mapping[str, Any]) -> list[str]:
        return []

    @staticmethod
    def flops_per_token(hf: Mapping[str, Any], sequence_length: int) -> float:
        return 1.0


TOY = Model()


class Everything:
    """A plugin that provides what the default config names."""

    @hookimpl
    def register_backends(self) -> list[BackendSpec]:
        return [backend("cpu"), backend("fast")]

    @hookimpl
    def register_train_engines(self) -> list[TrainEngineSpec]:
        return megatron.register_train_engines()

    @hookimpl
    def register_rollout_engines(self) -> list[RolloutEngineSpec]:
        return [RolloutEngineSpec(name="transformers")]

    @hookimpl
    def register_advantage_estimators(self) -> list[NamedFunction]:
        return named("grpo")

    @hookimpl
    def register_policy_losses(self) -> list[NamedFunction]:
        return named("ppo_clip")

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        return named("exact_match", fn=lambda response, label, metadata, strip=True: 0.0)

    @hookimpl
    def register_rollout_functions(self) -> list[NamedFunction]:
        async def turns(
            rollout: Any, prompt: Any, seed: int, *, tool: FunctionPath, most: int = 4
        ) -> None: ...

        return [*named("single_turn", fn=lambda rollout, prompt, seed: None), *named("turns", fn=turns)]

    @hookimpl
    def register_sample_filters(self) -> list[NamedFunction]:
        return named("zero_variance", "other", fn=lambda group, tolerance=0.0: True)

    @hookimpl
    def register_data_sources(self) -> list[NamedFunction]:
        return named("files")

    @hookimpl
    def register_trackers(self) -> list[NamedFunction]:
        return named("jsonl")

    @hookimpl
    def register_models(self) -> list[Model]:
        return [TOY]


@pytest.fixture
def plugins() -> Plugins:
    plugins = Plugins()
    plugins.register(Everything(), "everything")
    plugins.register(weight_sync, "weight_sync")
    return plugins


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    hf = {"architectures": ["ToyForCausalLM"], "max_position_embeddings": 4096, "vocab_size": 8}
    (directory / "config.json").write_text(json.dumps(hf))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text("{}")
    header = b'{"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}'
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    return directory


@pytest.fixture
def load(tmp_path: Path, plugins: Plugins, model_dir: Path) -> Load:
    """Return a loader of minimal configs: TOML text to add, tables to replace, overrides."""
    (tmp_path / "train.jsonl").write_text("")
    minimal = {
        "run": 'name = "t"',
        "model": f'path = "{model_dir}"',
        "data": f'train = ["{tmp_path / "train.jsonl"}"]',
        "reward": 'function = "exact_match"',
    }

    def load(
        tables: Mapping[str, str] | None = None,
        overrides: Sequence[str | tuple[str, Any]] = (),
        backend: str = "cpu",
        *,
        check_files: bool = True,
        defers_models: bool = False,
        trains: bool = True,
    ) -> LoadedConfig:
        added = dict(tables or {})
        lines = [f"[{name}]\n{text}\n{added.pop(name, '')}" for name, text in minimal.items()]
        lines += [f"[{name}]\n{text}" for name, text in added.items()]
        path = tmp_path / "c.toml"
        path.write_text("\n".join(lines))
        return load_config(
            path,
            overrides,
            backend=backend,
            plugins=plugins,
            check_files=check_files,
            defers_models=defers_models,
            trains=trains,
        )

    return load
