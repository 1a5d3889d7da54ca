"""``anygauge plan``: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anygauge.cli import main
from anygauge.cli.devices import backend_of_gpu, device_facts
from anygauge_cpu.plugin import CPU
from anygauge_cuda.plugin import CUDA
from anygauge_hooks.types import Availability
from anygauge_tests.published_sizes import QWEN3_4B

CONFIG = """
model = "model"
[run]
name = "t"
[data]
train = ["train.jsonl"]
max_prompt_tokens = 512
[reward]
function = "exact_match"
[train]
dtype = "bfloat16"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory with a config and a model without weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("c.toml").write_text(CONFIG)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(QWEN3_4B))


def plan(*options: str) -> int:
    return main(["plan", "c.toml", "--backend", "cuda", *options])


def test_a_plan_fits_a_terminal_and_ends_with_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu", "H200", "--train.micro_batch_tokens", "8192") == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "model: 4.02 B parameters on 1 x H200 (139.8 GiB)"
    assert lines[-1].split()[0] == "step"
    titles = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert [title.split(",")[0].split(" by")[0] for title in titles] == [
        "Layout",
        "Batch",
        "Device memory of the fullest training rank",
        "Device memory",
        "Rollout engine",
        "Host and disk",
        "Expected seconds a step",
    ]
    assert printed.err == ""


def test_every_kind_of_layout_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    served = ["--rollout.engine", "sglang", "--placement.rollout_workers", "8"]
    colocated = [*served, "--placement.colocated", "true", "--placement.train_workers", "8"]
    for options in (colocated, ["--train.engine", "fsdp"], ["--run.task", "sft"]):
        assert plan("--gpu", "h200", *options) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("tensor", "other", "sizes"),
    [
        (2, "dp_size=4", "2 1 1 1 4 2.01"),
        (2, "pp_size=2", "2 2 1 1 1 1.01"),
        (4, "ep_size=4", "4 1 1 1 1 1.01"),
    ],
)
def test_a_server_is_shown_as_it_is_divided(
    tensor: int, other: str, sizes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [
        f"--rollout.sglang.tp_size={tensor}",
        f"--rollout.sglang.{other}",
        "--placement.rollout_workers",
        "1",
    ]
    assert plan("--rollout.engine", "sglang", "--weight_sync.transport", "disk", *own) == 0
    (row,) = re.findall(r"^  servers +1 +(.+) B$", capsys.readouterr().out, re.M)
    assert row.split() == sizes.split()


def test_json_has_bytes_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu", "H200", "--json", "--train.micro_batch_tokens", "8192") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["parameters"] == pytest.approx(4.02e9, rel=1e-3)
    assert found["device"] == {"backend": "cuda", "gpu": "H200", "bytes": 139.8 * 2**30}
    parts = [value for name, value in found["train_bytes"].items() if name != "peak"]
    assert found["train_bytes"]["peak"] == pytest.approx(sum(parts))
    assert found["step_seconds"] == pytest.approx(sum(found["seconds"].values()))
    assert found["warnings"] == []


def test_what_cannot_fit_is_an_error_after_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--device-memory", "40") == 1
    printed = capsys.readouterr()
    assert "Adam's moments" in printed.out
    assert "No expected time: rates were measured on H200 only" in printed.out
    assert printed.err.endswith("[AG203]\n")
    assert plan("--device-memory", "90") == 0
    assert capsys.readouterr().err.startswith("warning: train needs ")


def test_a_device_that_is_not_here_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "c.toml", "--backend", "npu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("model: 4.02 B parameters on 1 x npu (memory not known)\n")
    assert printed.err == ""


def test_workers_of_a_host_share_its_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anygauge_hooks.resources.read_memory", lambda: type("Memory", (), {"total": 2**40}))
    options = ["--placement.train_workers", "4", "--json", "--train.dtype", "float32"]
    assert main(["plan", "c.toml", "--backend", CPU.name, *options]) == 0
    assert json.loads(capsys.readouterr().out)["device"]["bytes"] == 2**38


@pytest.mark.parametrize("is_here", [True, False])
def test_the_device_of_this_host_is_asked(is_here: bool) -> None:
    """Its driver's name leads to its rates, unless the user says another one."""
    backend = replace(CUDA, name="other", probe=lambda: Availability(ok=is_here))
    device = SimpleNamespace(torch_device=torch.device("cpu"), memory=lambda: {"total": 2**36})
    plugins: Any = SimpleNamespace(make_device=lambda *_: device, collect=lambda _: [CUDA])
    facts = device_facts(plugins, backend)
    assert (facts.memory, facts.gpu, facts.is_here) == (2**36 if is_here else None, None, is_here)
    assert device_facts(plugins, backend, "H100").gpu == "H100"
    assert device_facts(plugins, backend, "H100", 70).memory == 70 * 2**30
    assert device_facts(plugins, backend, "a100-40").memory == CUDA.device_memory["A100-40"]
    assert backend_of_gpu(plugins, "A100-40") == "cuda"
    plugins.collect = lambda _: [CUDA, replace(CUDA, name="other")]
    assert backend_of_gpu(plugins, "A100-40") is None, "two backends have it"


def test_what_is_asked_for_wrongly(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--gpu", "H2000") == 1
    assert "--gpu H2000: not a known GPU; backend cuda knows: H200, " in capsys.readouterr().err
    assert main(["plan", "c.toml", "--gpu", "H2000"]) == 1
    assert "--gpu H2000: not a known GPU; known: H200, " in capsys.readouterr().err
    assert main(["plan", "c.toml", "--backend", "cpu", "--gpu", "H200"]) == 1
    assert "--gpu H200: not a known GPU; backend cpu knows: none." in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        plan("--device-memory", "-1")
    assert stopped.value.code == 2
    assert "'-1' is not a finite number of GiB above 0" in capsys.readouterr().err
    Path("model/config.json").unlink()
    assert plan() == 1
    assert "A plan needs the sizes of model.path = 'model': has no config.json." in capsys.readouterr().err
    assert plan("--model.path", "modle") == 1
    assert "and no such directory in " in (error := capsys.readouterr().err)
    assert "; did you mean model?" in error
    assert plan("--model.path", "/nowhere/model") == 1
    text = "A plan needs the sizes of model.path = '/nowhere/model': there is no directory of that path"
    assert text in capsys.readouterr().err


def test_a_model_that_is_not_in_the_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan takes a cache that has the sizes alone, as the command that it names fills it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(Path("cache").absolute()))
    assert plan("--model.path", "Qwen/Qwen3-4B") == 1
    error = capsys.readouterr().err
    assert "model.path = 'Qwen/Qwen3-4B', whose config.json is not in the cache" in error
    assert "Run `hf download Qwen/Qwen3-4B config.json`" in error
    assert "as a path, it is not a directory in " in error
    repository = Path("cache/models--Qwen--Qwen3-4B")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/config.json").write_text(json.dumps(QWEN3_4B))
    assert plan("--model.path", "Qwen/Qwen3-4B") == 0


def test_a_division_that_the_train_engine_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    olmo = {**QWEN3_4B, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rms_norm_eps": 1e-6}
    olmo["rope_theta"] = 500_000
    Path("model/config.json").write_text(json.dumps(olmo))
    two = ["--train.parallel.tensor", "2", "--placement.train_workers", "2"]
    assert plan(*two) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "train.parallel.tensor: found 2; the model normalizes queries and keys over all" in printed.err
    assert printed.err.endswith("[AG201]\n")
    assert plan("--placement.train_workers", "2") == 0


def test_a_critic_has_a_size_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    Path("critic").mkdir()
    reward_model = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    hf = {**QWEN3_4B, **reward_model, "num_hidden_layers": 9}
    Path("critic/config.json").write_text(json.dumps(hf))

    def others(*options: str) -> float:
        assert plan("--json", "--train.loss_memory_gib", "1", *options) == 0
        size: float = json.loads(capsys.readouterr().out)["train_bytes"]["others"]
        return size

    gae = ["--algorithm.advantage", "gae"]
    same, smaller = others(*gae) - others(), others(*gae, "--critic.path", "critic") - others()
    layers = (4.02e9 - 389e6) * 16
    assert same - smaller == pytest.approx(layers * 3 / 4, rel=0.01)
    two = ["--placement.train_workers", "2", "--critic.path", "critic", *gae]
    hf |= {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    Path("critic/config.json").write_text(json.dumps(hf))
    assert plan(*two, "--train.parallel.tensor", "2") == 1
    assert "train.parallel.tensor: found 2; the model normalizes" in capsys.readouterr().err


def test_keys_that_a_model_lacks_are_those_of_its_family(capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 3 ties its embeddings unless its config.json says otherwise."""
    hf = {**QWEN3_4B, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    del hf["tie_word_embeddings"]
    Path("model/config.json").write_text(json.dumps(hf))
    assert plan("--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == pytest.approx(4.02e9, rel=1e-3)
    init = ["init", "--model", "model", "--backend", "cuda", "--out", "first.toml"]
    assert main(init) == 0
    assert "for 4.02B parameters on" in Path("first.toml").read_text()


def test_the_head_of_a_dry_run_is_the_short_form(capsys: pytest.CaptureFixture[str]) -> None:
    dry = ["train", "c.toml", "--dry-run", "--no-file-check", "--backend", "cuda"]
    assert main(dry) == 0
    lines = capsys.readouterr().err.splitlines()
    start = lines.index("model: 4.02 B parameters on 1 x cuda (memory not known)")
    assert lines[start + 1].startswith("  32 prompts, 256 samples and at most 196,608 tokens a step; 1 x 13 ")
    assert lines[start + 2].startswith("  device memory, GiB: generate ")
    assert max(map(len, lines[start:])) <= 110
    Path("model/config.json").unlink()
    assert main(dry) == 0
    printed = capsys.readouterr()
    assert 'path = "model"' in printed.out
    assert printed.err.splitlines()[-1].startswith("no plan: A plan needs the sizes of model")


def test_a_dry_run_on_a_device_that_is_too_small_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anygauge_hooks.resources.read_memory", lambda: type("Memory", (), {"total": 2**35}))
    monkeypatch.setattr("anygauge.plugins.select_backend", lambda *_: (CPU, "for this test"))
    assert main(["train", "c.toml", "--dry-run", "--no-file-check"]) == 1
    printed = capsys.readouterr()
    assert printed.err.endswith("[AG203]\n")
    assert printed.out == ""
