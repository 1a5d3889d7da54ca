"""Arguments of servers that a run fills in. Covers server_defaults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anygauge.config import Config
from anygauge.plugins import Plugins, load_plugins
from anygauge.serving.sglang import defaults
from anygauge.serving.sglang.installed import Installed, read_arguments
from anygauge_hooks.types import BackendSpec

Make = Callable[..., Config]
GRAPHS = "rollout.sglang.cuda_graph_max_bs_decode"
PREFILL = "rollout.sglang.disable_prefill_cuda_graph"
SOURCE = """
class Arguments:
    tp_size: A[int, Arg(help="ranks")] = 1
    cuda_graph_max_bs_decode: A[int | None, "batch"] = None
    disable_prefill_cuda_graph: A[bool, "prefill"] = False
"""


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins()


@pytest.fixture
def gpu(plugins: Plugins) -> BackendSpec:
    return replace(plugins.get("register_backends", "cpu"), name="gpu", device_type="gpu")


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = Installed("0.5.23", read_arguments([SOURCE]))
    monkeypatch.setattr(defaults, "installed_sglang", lambda: installed)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 64)
    return tmp_path


def filled(config: Config, backend: BackendSpec) -> dict[str, Any]:
    return {change.path: change.value for change in defaults.server_defaults(config, backend)}


def step(prompts: int = 64, samples: int = 16, **others: Any) -> dict[str, Any]:
    return {"prompts_per_step": prompts, "samples_per_prompt": samples, **others}


@pytest.mark.parametrize(
    ("rollout", "placement", "batch"),
    [
        (step(), {}, 1024),
        (step(3, 4), {}, 16),
        (step(), {"rollout_workers": 2}, 512),
        (step(sglang={"dp_size": 4}), {}, 256),
        (step(over_sampling=8, prompts=24), {}, 512),
        (step(prompts=20, schedule="one_step_off"), {}, 640),
        (step(prompts=10, schedule="async", max_staleness=2), {}, 480),
        (step(prompts=512), {}, 1024),
    ],
)
def test_decoding_is_recorded_for_all_samples_in_flight(
    config: Make, gpu: BackendSpec, model: Path, rollout: Any, placement: Any, batch: int
) -> None:
    made = config(rollout, model={"path": model}, placement={"rollout_workers": 1, **placement})
    assert filled(made, gpu) == {GRAPHS: batch, PREFILL: True}


def test_large_models_have_smaller_batches(
    config: Make, gpu: BackendSpec, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "LARGEST_BATCHES", ((64, 512), (128, 256)))

    def batch(rollout: dict[str, Any]) -> Any:
        return filled(config(rollout, model={"path": model}), gpu).get(GRAPHS)

    assert batch(step()) == 512
    (model / "more.safetensors").write_bytes(b"0" * 64)
    assert batch(step()) == 256
    assert batch(step(sglang={"tp_size": 2})) == 512
    assert batch(step(sglang={"dp_size": 2})) == 256
    (model / "more.safetensors").write_bytes(b"0" * 65)
    assert batch(step()) is None


def test_a_model_that_is_not_here_has_sglangs_own_batches(config: Make, gpu: BackendSpec) -> None:
    assert filled(config(step()), gpu) == {PREFILL: True}


@pytest.mark.parametrize("name", ["cuda_graph_max_bs_decode", "cuda-graph-bs", "disable_cuda_graph"])
@pytest.mark.parametrize("of_group", [False, True])
def test_graphs_of_the_user_stay(
    config: Make, gpu: BackendSpec, model: Path, name: str, of_group: bool
) -> None:
    own = {"sglang": {name: 4}}
    rollout = step(groups=[own]) if of_group else step(**own)
    assert filled(config(rollout, model={"path": model}), gpu) == {}


def test_servers_of_other_models_keep_sglangs_own_graphs(config: Make, gpu: BackendSpec, model: Path) -> None:
    judge = {"groups": [{}, {"model": "judge", "path": "/models/judge"}]}
    made = config(step(**judge), model={"path": model}, placement={"rollout_workers": 2})
    assert filled(made, gpu) == {}


def test_versions_without_an_argument_are_not_given_it(
    config: Make, gpu: BackendSpec, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Installed(
        "0.5", read_arguments([SOURCE.replace("max_bs_decode", "max_bs").replace("disable_p", "p")])
    )
    monkeypatch.setattr(defaults, "installed_sglang", lambda: older)
    made = config(step(), model={"path": model})
    assert filled(made, gpu) == {"rollout.sglang.cuda_graph_max_bs": 1024}
    monkeypatch.setattr(defaults, "installed_sglang", lambda: None)
    assert filled(made, gpu) == {}


def test_the_cache_of_shared_devices_holds_the_samples_in_flight(config: Make, gpu: BackendSpec) -> None:
    def tokens(rollout: dict[str, Any], **sections: Any) -> Any:
        data = {"train": ["a.jsonl"], "max_prompt_tokens": 36}
        shared = {"placement": {"rollout_workers": 1, "colocated": True}, "data": data, **sections}
        return filled(config(rollout, **shared), gpu).get("rollout.max_batch_tokens")

    rollout = step(2, 4, max_new_tokens=64)
    assert tokens(rollout) == 1000
    files = {"files": ["a.jsonl"]}
    assert tokens(rollout, eval={"data": ["a.jsonl"], "max_new_tokens": 164}) == 2000
    assert tokens(rollout, eval={"datasets": {"long": {**files, "max_new_tokens": 364}}}) == 4000
    assert tokens(rollout, eval={"datasets": {"long": {**files, "max_prompt_tokens": 336}}}) == 4000
    assert tokens(rollout, eval={"datasets": {"any": {**files, "max_prompt_tokens": None}}}) is None
    judge = {"groups": [{}, {"model": "judge", "path": "/models/judge"}]}
    assert tokens({**rollout, **judge}, placement={"rollout_workers": 2, "colocated": True}) is None
    assert tokens(rollout, placement={"rollout_workers": 1}) is None
    assert tokens(rollout, data={"train": ["a.jsonl"]}) is None
    assert tokens({**rollout, "function": "multi_turn"}) is None
    seeing = {"path": "/models/tiny", "modalities": ["image"]}
    assert tokens(rollout, model=seeing) is None


def test_hosts_other_engines_and_external_servers_are_left_alone(
    config: Make, gpu: BackendSpec, plugins: Plugins, model: Path
) -> None:
    cpu = plugins.get("register_backends", "cpu")
    assert filled(config(step(), model={"path": model}), cpu) == {}
    external = step(external=["http://127.0.0.1:1"])
    assert filled(config(external, model={"path": model}, placement={}), gpu) == {}
    assert filled(config(step(engine="other"), model={"path": model}), gpu) == {}


def test_the_plugin_fills_them_in(plugins: Plugins, config: Make, gpu: BackendSpec, model: Path) -> None:
    made = config(step(), model={"path": model})
    answers = plugins.answers("adjust_config", config=made, backend=gpu)
    assert {change.path for _, change in answers} >= {GRAPHS, PREFILL}
