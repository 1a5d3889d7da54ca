"""Adapters that servers get by themselves (``weight_sync.transport = "adapter"``), with fake engines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from anygauge.config.lora import LoraSettings, adapter_config, read_adapter_config
from anygauge.config.schema import RolloutClient, WeightSync
from anygauge.serving.sglang.client import EngineClient
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.checksum import checksum
from anygauge.weight_sync.control import RefusedError
from anygauge.weight_sync.pusher import WeightPusher
from anygauge.weight_sync.transports.adapter import AdapterTransport
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_tests.fake_engine import FakeServer, Options
from anygauge_tests.fake_engine.weights import Weights

FOREVER = 100_000
SETTINGS = LoraSettings(rank=3, alpha=6.0, targets=None, modules_to_save=())


def adapter(version: int) -> dict[str, Tensor]:
    """Return the tensors of an adapter; together they take several buckets."""
    generator = torch.Generator().manual_seed(version)
    shapes = {"lora_A": (3, 400), "lora_B": (80, 3)}
    return {
        f"model.layers.{layer}.self_attn.{name}.{part}.weight": torch.randn(shape, generator=generator)
        for layer in range(2)
        for name in ("q_proj", "v_proj")
        for part, shape in shapes.items()
    }


@pytest.fixture
def push(tmp_path: Path) -> Iterator[WeightPusher]:
    describe = partial(adapter_config, SETTINGS, Path("base"), saved=())
    transport = AdapterTransport(tmp_path / "weights", Path("base"), describe)
    options = WeightSync(transport="adapter", bucket_bytes=4096, deadline_s=20)
    pusher = WeightPusher(options, transport, Buffers(partial(torch.empty, dtype=torch.uint8)))
    yield pusher
    pusher.close()


def peer(server: FakeServer) -> SGLangPeer:
    return server.peer()


async def generate(server: FakeServer, count: int, *, name: str = "policy") -> Generation:
    client = EngineClient(server.address, RolloutClient(pause_s=0.01), adapter=name)
    params = SamplingParams(max_new_tokens=count, ignore_eos=count == FOREVER)
    try:
        return await client.generate(GenerateRequest("7-0-0", (5, 11, 2), params, seed=7))
    finally:
        await client.close()


def test_a_server_holds_the_adapter_of_the_version_and_requests_ask_for_it(
    push: WeightPusher, adapter_server: FakeServer, tmp_path: Path
) -> None:
    with pytest.raises(RolloutError, match="not loaded: policy"):
        asyncio.run(generate(adapter_server, 4))
    for version in (3, 4):
        report = push.push(adapter(version).items(), version, [peer(adapter_server)])
        assert not report.failed, report
        assert report.buckets > 3
        state = adapter_server.state()
        held = state["adapters"]["policy"]
        directory = tmp_path / "weights" / f"version-{version}"
        sent = {f"base_model.model.{name}": checksum(tensor) for name, tensor in adapter(version).items()}
        assert held["checksums"] == sent
        assert (held["path"], held["rank"]) == (str(directory), 3)
        assert held["targets"] == ["q_proj", "v_proj"]
        assert (state["weight_version"], state["paused"]) == (str(version), False)
        answer = asyncio.run(generate(adapter_server, 4))
        assert set(answer.weight_versions) == {version}
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["version-4"]
    assert read_adapter_config(directory) == LoraSettings(
        rank=3, alpha=6.0, targets=["q_proj", "v_proj"], modules_to_save=()
    )
    assert json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
    assert load_file(directory / "adapter_model.safetensors").keys() == sent.keys()
    with pytest.raises(RolloutError, match="asks for the adapter None"):
        asyncio.run(generate(adapter_server, 4, name=""))


def test_requests_end_with_what_they_have_before_the_adapter_changes(
    push: WeightPusher, adapter_server: FakeServer
) -> None:
    """SGLang unloads an adapter once no request uses it: one that a pause only sends back would hold it."""
    push.push(adapter(1).items(), 1, [peer(adapter_server)])

    async def beside_an_update() -> Generation:
        request = asyncio.create_task(generate(adapter_server, FOREVER))
        ends = time.monotonic() + 20
        while not any(adapter_server.state()["requests"].values()):
            assert time.monotonic() < ends, "no token came"
            await asyncio.sleep(0.005)
        report = await asyncio.to_thread(push.push, adapter(2).items(), 2, [peer(adapter_server)])
        assert not report.failed, report
        return await request

    answer = asyncio.run(beside_an_update())
    assert answer.finish_reason == "abort"
    assert set(answer.weight_versions) == {1}


def test_a_server_that_refuses_an_adapter_is_not_used(push: WeightPusher, server: FakeServer) -> None:
    """It was started without ``--enable-lora``."""
    refusing = SGLangPeer(address=server.address, adapter="policy")
    (failed,) = push.push(adapter(1).items(), 1, [refusing]).failed
    assert failed.state == "unusable"
    assert "refused the adapter of version 1" in str(failed.error)


def test_tensors_of_a_failed_update_are_not_in_the_next_adapter(
    push: WeightPusher, adapter_server: FakeServer
) -> None:
    def torn() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in adapter(1).items():
            yield name.replace("self_attn", "other"), tensor
        raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        push.push(torn(), 1, [peer(adapter_server)])
    assert not push.push(adapter(2).items(), 2, [peer(adapter_server)]).failed
    held = adapter_server.state()["adapters"]["policy"]["checksums"]
    assert held.keys() == {f"base_model.model.{name}" for name in adapter(2)}


def test_an_adapter_that_is_not_unloaded_is_an_error_and_none_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = SGLangPeer(address="http://127.0.0.1:1", adapter="policy").target(deadline_s=1)
    refusals, paths = ["LoRA with name policy does not exist.", "Communication failed."], []

    def post(path: str, body: dict[str, str], *, what: str) -> dict[str, str]:
        paths.append(path)
        if path == "/unload_lora_adapter":
            raise RefusedError(refusals[0])
        return {}

    monkeypatch.setattr(target, "post", post)
    update = SimpleNamespace(version=1)
    target.load_adapter("there", update)
    assert paths == ["/unload_lora_adapter", "/load_lora_adapter", "/update_weight_version"]
    refusals.pop(0)
    with pytest.raises(RefusedError, match="Communication"):
        target.load_adapter("there", update)
    assert len(paths) == 4


@pytest.mark.parametrize(
    ("layers", "refusal"),
    [
        (["q_proj", "k_proj"], "v_proj"),
        (["v_proj"], "v_proj"),
        (["up_proj", "down_proj"], "up_proj"),
        (["in_proj_qkvz"], "in_proj_qkvz"),
        (["q_proj", "v_proj", "gate_proj", "down_proj"], ""),
    ],
)
def test_a_fake_server_refuses_layers_as_sglang_does(layers: list[str], refusal: str, tmp_path: Path) -> None:
    """Which it fuses with another one, or has no slot for."""
    weights = Weights(Options(adapter="policy"), lambda version: None)
    names = [f"model.layers.0.x.{layer}.lora_{part}.weight" for layer in layers for part in "AB"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(SETTINGS, Path("b"), layers, ())))
    answer = weights.load_adapter({"lora_name": "policy", "lora_path": str(tmp_path)})
    assert (answer.success, refusal in answer.message) == (not refusal, True)
    assert ("policy" in weights.adapters) is not bool(refusal)
