"""Arguments of a worker's server: precedence, and those of its kind."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.plugins import Plugins, load_plugins
from anygauge.serving.sglang import server as server_module
from anygauge.serving.sglang.installed import Installed
from anygauge.serving.sglang.server import SGLangServer, make_server
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.types import BackendSpec

Make = Callable[..., Config]
PORTS = server_module._Ports(http=7, collectives=8, bootstrap=9)


class EngineArguments:
    """A plugin that wants arguments, as a backend does."""

    @hookimpl
    def rollout_engine_args(self, engine: str) -> dict[str, Any]:
        return {"attention_backend": "theirs", "tensor-parallel-size": 4} if engine == "sglang" else {}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    found = load_plugins(only=[])
    found.register(EngineArguments(), "asks")
    return found


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch, installed: Installed) -> None:
    monkeypatch.setattr(server_module, "installed_sglang", lambda: installed)


def context(plugins: Plugins, rank: int = 0, **facts: Any) -> WorkerContext:
    backend = BackendSpec(
        name="abacus",
        device_type="privateuseone",
        dist_backend="gloo",
        probe=lambda: (_ for _ in ()).throw(AssertionError("not asked")),
        scheduler_resource="GPU",
        local_device=lambda ids, env: 0,
        visible_devices_env="ABACUS_VISIBLE",
    )
    device: Any = None
    return WorkerContext(rank=rank, world_size=8, backend=backend, device=device, plugins=plugins, **facts)


def words(server: SGLangServer) -> str:
    return " ".join(server._command_for(PORTS)[3:])


def test_the_users_word_counts_more_than_the_backends_and_the_configs_most(
    config: Make, plugins: Plugins, tmp_path: Path
) -> None:
    made = make_server(
        config({"sglang": {"attention_backend": "mine"}}), context(plugins, logs=str(tmp_path))
    )
    assert words(made) == (
        "--attention-backend mine --tp-size 4 --model-path /models/tiny --dtype float32 --random-seed 7 "
        "--sampling-defaults openai --host 127.0.0.1 --port 7 --nccl-port 8"
    )
    assert made.peer().tensor_parallel == 4
    assert made.log == tmp_path / "rollout-0-engine.log"


def test_a_server_listens_on_its_nodes_address_and_sees_its_own_devices(
    config: Make, plugins: Plugins
) -> None:
    made = make_server(config(), context(plugins, address="10.0.0.3", accelerators=("4", "5")))
    assert "--host 10.0.0.3 " in words(made)
    assert made._environment["ABACUS_VISIBLE"] == "4,5"
    assert made._environment["ANYGAUGE_SGLANG_BACKEND"] == "abacus"
    assert int(made._environment["SGLANG_FORCE_STREAM_INTERVAL"]) > 1_000_000
    assert made.log == Path("runs/unit/logs/rollout-0-engine.log")


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, "--encoder-only --model-path /models/tiny"),
        (1, "--disaggregation-mode prefill --language-only --model-path /models/tiny"),
        (2, "--disaggregation-mode decode --model-path /models/tiny"),
        (3, "--model-path /models/judge"),
    ],
)
def test_a_worker_has_the_server_of_its_rank(
    rank: int, expected: str, config: Make, plugins: Plugins
) -> None:
    kinds = [{"kind": kind} for kind in ("encoder", "prefill", "decode")]
    groups = [*kinds, {"model": "judge", "path": "/models/judge"}]
    made = make_server(config({"groups": groups}), context(plugins, rank))
    made._encoders = ["http://h:1"]
    line = words(made)
    assert expected in line
    assert ("--encoder-urls http://h:1" in line) is (rank == 1)
    assert ("--disaggregation-bootstrap-port 9" in line) is (rank == 1)
    assert made.peer().bootstrap == ("127.0.0.1:9" if rank == 1 else "")


def test_a_server_has_the_adapter_of_a_run_that_sends_it_alone(config: Make, plugins: Plugins) -> None:
    lora = {"dtype": "float32", "lora": {"rank": 2}}
    made = make_server(
        config(train=lora, weight_sync={"transport": "adapter"}), context(plugins, address="10.0.0.3")
    )
    assert made._adapter == "policy"
    assert make_server(config(train=lora), context(plugins, address="10.0.0.3"))._adapter == ""


def test_a_node_without_sglang_says_the_command_that_installs_it(
    config: Make, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "installed_sglang", lambda: None)
    with pytest.raises(RolloutError, match="does not have") as caught:
        make_server(config(), context(plugins))
    assert "pip install sglang==0.5.23" in str(caught.value)


def test_a_version_that_was_not_tested_is_spoken_to_as_the_config_says(
    config: Make, plugins: Plugins, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "installed_sglang", lambda: installed._replace(version="0.6.0"))
    with pytest.raises(RolloutError, match=r"SGLang 0\.6\.0 was not tested"):
        make_server(config(), context(plugins))
    made = make_server(config({"sglang_version": "0.5.17"}), context(plugins))
    assert (made.facts()["version"], made.facts()["installed"]) == ("0.5.17", "0.6.0")
    assert not made.peer().api.has_session


def test_an_encoder_takes_the_port_that_others_know_again(config: Make, plugins: Plugins) -> None:
    groups = [{"kind": "encoder"}, {"kind": "regular"}]
    encoder, other = (make_server(config({"groups": groups}), context(plugins, rank)) for rank in (0, 1))
    free = server_module._free_ports("127.0.0.1").http
    for made in (encoder, other):
        assert made._earlier_port() == 0
        made._address = f"http://127.0.0.1:{free}"
    assert (encoder._earlier_port(), other._earlier_port()) == (free, 0)
    assert server_module._free_ports("127.0.0.1", free).http == free
    with socket.create_server(("127.0.0.1", free)):
        assert server_module._free_ports("127.0.0.1", free).http != free
