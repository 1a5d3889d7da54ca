"""``anygauge init`` writes a config that loads, and overwrites nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from anygauge.cli import main
from anygauge.cli.recipe import DataFacts, Machine, facts_of_config, facts_of_name, recipe, state_gib
from anygauge.config import Config, load_config
from anygauge.plugins import load_plugins
from anygauge_tests.published_sizes import QWEN3_30B_A3B

BACKENDS = ("cpu", "cuda", "npu")
NAME = "Qwen/Qwen3-0.6B"
QWEN3_8B = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty directory, with an empty cache."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def load(backend: str, path: str = "config.toml") -> Config:
    """Return a config as a dry run checks it."""
    return load_config(path, backend=backend, plugins=load_plugins(), download=False).config


def written(*options: str) -> dict[str, Any]:
    """Return the TOML that a command line writes."""
    assert main(["init", "--model", NAME, "--backend", "cuda", *options]) == 0
    return tomllib.loads(Path("config.toml").read_text())


@pytest.mark.parametrize("task", ["rl", "sft"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("devices", [1, 3, 16])
def test_what_is_written_loads_for_every_backend(backend: str, task: str, devices: int) -> None:
    options = ["--backend", backend, "--task", task, "--devices", str(devices)]
    assert main(["init", "--model", NAME, *options]) == 0
    for other in BACKENDS:
        config = load(other)
        assert (str(config.model.path), config.run.task) == (NAME, task)
    assert load(backend).placement.train_workers == devices or backend == "cpu"


def test_every_line_that_is_not_obvious_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    written()
    lines = [line for line in Path("config.toml").read_text().splitlines() if " = " in line]
    assert sum("# " in line for line in lines) > len(lines) / 2
    out = capsys.readouterr().out
    assert "wrote config.toml" in out
    assert f"{NAME} is not in the cache" in out
    assert out.endswith("next: anygauge train config.toml\n")


def test_nothing_is_overwritten_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.toml").write_text("mine")
    assert main(["init", "--model", NAME]) == 1
    assert "--force overwrites it" in capsys.readouterr().err
    assert Path("config.toml").read_text() == "mine"
    assert written("--force")["model"] == NAME


def test_the_file_may_be_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--model", NAME, "--backend", "cuda", "--out", "my runs/a.toml"]) == 0
    assert "next: anygauge train 'my runs/a.toml'" in capsys.readouterr().out
    load("cpu", "my runs/a.toml")
    Path("file").write_text("")
    assert main(["init", "--model", NAME, "--backend", "cpu", "--out", "file/a.toml"]) == 1
    assert "Cannot write file/a.toml" in capsys.readouterr().err


def test_a_local_directory_gives_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path("models/mine")
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(QWEN3_8B | {"max_position_embeddings": 640}))
    assert main(["init", "--model", "models/mine", "--backend", "cuda", "--devices", "8"]) == 0
    assert "sizes follow from models/mine/config.json" in capsys.readouterr().out
    tree = tomllib.loads(Path("config.toml").read_text())
    assert tree["rollout"]["max_new_tokens"] + tree["data"]["max_prompt_tokens"] <= 640
    assert tree["rollout"]["max_batch_tokens"] == 65536
    assert (tree["train"]["micro_batch_tokens"], tree["train"]["recompute"]) == (4096, "elementwise")
    assert tree["train"]["parallel"] == {"tensor": 2}
    assert "apply_chat_template" not in tree["data"]
    (directory / "chat_template.jinja").write_text("")
    assert main(["init", "--model", "models/mine", "--backend", "cuda", "--force"]) == 0
    tree = tomllib.loads(Path("config.toml").read_text())
    assert tree["data"]["apply_chat_template"] is True
    assert tree["data"]["chat_template_kwargs"] == {"enable_thinking": False}


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_directory_that_is_no_model(text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    if text is not None:
        Path("mine/config.json").write_text(text)
    assert main(["init", "--model", "mine", "--backend", "cpu"]) == 1
    assert "mine is not a Hugging Face directory" in capsys.readouterr().err
    assert not Path("config.toml").exists()


def test_what_is_neither_a_directory_nor_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--model", "/models/none", "--backend", "cpu"]) == 1
    assert "no such directory, and not the name of a model either" in capsys.readouterr().err


def test_a_name_in_the_cache_gives_the_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    repository = tmp_path / "cache/models--Qwen--Qwen3-0.6B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots/abc").mkdir(parents=True)
    (repository / "snapshots/abc/config.json").write_text(json.dumps(QWEN3_8B))
    assert written()["train"]["recompute"] == "full"
    assert "snapshots/abc/config.json" in capsys.readouterr().out


def test_the_fields_of_own_data_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.jsonl").write_text('{"id": 1, "problem": "1+1", "solution": "2"}\n')
    tree = written("--data", "own.jsonl")
    data = tree["data"]
    assert (data["train"], data["input_key"], data["label_key"]) == (["own.jsonl"], "problem", "solution")
    assert "eval" not in tree
    written("--data", "later.jsonl", "--force")
    assert "later.jsonl does not exist yet" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for name, devices, fits in (("o/M-7B", "1", False), ("o/M-7B", "32", True), ("o/M-0.5B", "1", True)):
        assert main(["init", "--model", name, "--backend", "cuda", "--devices", devices, "--force"]) == 0
        out = capsys.readouterr().out
        assert ("use more devices" not in out) is fits
        assert f"next: anygauge {'train' if fits else 'plan'} config.toml" in out
    assert main(["init", "--model", "o/unsized", "--backend", "cuda", "--force"]) == 0
    assert "the size of the model is not known" in capsys.readouterr().out


def test_a_model_that_must_be_divided_needs_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """A name tells parameters, and not what divides them."""
    options = ["--model", "Qwen/Qwen3-30B-A3B", "--devices", "8", "--gpu", "H200"]
    assert main(["init", *options]) == 1
    error = capsys.readouterr().err
    assert "take about 265 GiB of the 140 GiB of each device" in error
    assert "Run `hf download Qwen/Qwen3-30B-A3B config.json`, then this command again." in error
    assert not Path("config.toml").exists()
    assert main(["init", *options, "--engine", "fsdp"]) == 0
    assert state_gib(30.0, 8, engine="fsdp") < 140


@pytest.mark.parametrize("command", ["init", "plan"])
def test_a_gpu_means_its_backend(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("mine", QWEN3_8B)
    Path("run.toml").write_text('model = "mine"\n[run]\ntask = "sft"\n[data]\ntrain = ["a"]\n')
    arguments = {"init": ["--model", "mine"], "plan": ["run.toml", "--json"]}[command]
    main([command, *arguments, "--gpu", "H200"])
    out = capsys.readouterr().out
    if command == "plan":
        assert json.loads(out)["device"]["backend"] == "cuda"
    else:
        assert "on 1 x cuda, devices of 140 GiB" in Path("config.toml").read_text()


@pytest.mark.parametrize("devices", ["0", "-1", "two", "\u0663", "1000000", "9" * 5000])
def test_devices_are_counted_from_one(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["init", "--model", NAME, f"--devices={devices}"])
    assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert "must be a number above 0" in errors
    assert len(errors) < 500


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize(
    ("out", "problem"),
    [
        (".", "it is a directory"),
        ("pipe", "it is not a regular file"),
        ("x" * 300, "File name too long"),
        ("", "--out is empty"),
        ("a\0b", "cannot be printed"),
    ],
)
def test_what_cannot_be_written(
    out: str, problem: str, force: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo("pipe")
    assert main(["init", "--model", NAME, "--backend", "cpu", "--out", out, *force]) == 1
    assert problem in capsys.readouterr().err


def test_a_link_to_nothing_is_not_followed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.toml").symlink_to("elsewhere.toml")
    assert main(["init", "--model", NAME, "--backend", "cpu"]) == 1
    assert "File exists" in capsys.readouterr().err
    assert not Path("elsewhere.toml").exists()


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("", "--model is empty"),
        ("file", "--model file is a file"),
        ("../x/y", "no such directory, and not the name"),
        (
            "tiny/y",
            "did you mean tiny/x?\n  Name a directory that exists; if tiny/y is a model on the hub, run `hf",
        ),
        ("./tinny/x", "--model ./tinny/x: no such directory, and not the name of a model either; did you "),
        ("x" * 300, "no such directory, and not the name"),
        ("owner/" + "x" * 300, "no such directory, and not the name"),
        ("~nobody-here/x", "no such directory, and not the name"),
        ("o/m\n", "cannot be printed"),
        ("\udcff/x", "cannot be printed"),
    ],
)
def test_what_is_no_model(model: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").touch()
    Path("tiny/x").mkdir(parents=True)
    assert main(["init", "--model", model, "--backend", "cpu"]) == 1
    assert problem in capsys.readouterr().err
    assert not Path("config.toml").exists()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("", "--data is empty"),
        ("pipe", "is a pipe"),
        ("/dev/zero", "is a device"),
        (".", "is a directory without data files"),
        ("x" * 300, "File name too long"),
        ("a.jsonl@[5]", "is not a slice"),
        ("hf://datasets/x", "is not a name on a hub"),
        ("a\n.jsonl", "cannot be printed"),
    ],
)
def test_what_is_no_data(data: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo("pipe")
    assert main(["init", "--model", NAME, "--backend", "cpu", "--data", data]) == 1
    assert problem in capsys.readouterr().err
    assert not Path("config.toml").exists()


def test_the_fields_are_those_of_the_first_row_that_is_not_blank() -> None:
    Path("own.jsonl").write_text('\n{"problem": "1+1", "solution": "2"}\n')
    assert written("--data", "own.jsonl@[:1]")["data"]["input_key"] == "problem"


def test_a_config_with_nonsense_for_sizes() -> None:
    hf = {"num_hidden_layers": -2, "hidden_size": 1024, "vocab_size": -5, "max_position_embeddings": True}
    facts = facts_of_config("m", hf, chat=False)
    assert (facts.billions, facts.context, facts.vocabulary > 0) == (None, None, True)
    assert facts_of_name("o/m-0B").billions is None


def test_sizes_of_known_models() -> None:
    facts = facts_of_config("m", QWEN3_8B, chat=True)
    assert facts.billions == pytest.approx(8.19, rel=0.01)
    assert facts.kv_bytes == 36 * 8 * 128 * 4
    assert facts_of_config("m", {"model_type": "qwen3", "text_config": QWEN3_8B}, chat=True) == facts
    small = QWEN3_8B | {"num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16}
    small |= {"intermediate_size": 3072, "tie_word_embeddings": True}
    assert facts_of_config("m", small, chat=True).billions == pytest.approx(0.596, rel=0.01)
    assert state_gib(1.0, 1) == pytest.approx(20e9 / 2**30)
    assert [facts_of_name(name).billions for name in ("o/A-1.5B-Instruct", "o/b-270m", "o/v3", "o/x4b2")] == [
        1.5,
        0.27,
        None,
        None,
    ]


@pytest.mark.parametrize("context", [2, 32, 500, 4096, None])
def test_lengths_fit_any_context(context: int | None) -> None:
    hf = QWEN3_8B | {"max_position_embeddings": context}
    data = DataFacts(train="a", evaluation=None, input_key="prompt", label_key="label", note="")
    machine = Machine(backend="x", accelerator=True, devices=2, memory_gib=64)
    text = recipe(facts_of_config("m", hf, chat=False), data, machine, task="rl", command="c")
    tree = tomllib.loads(text)
    prompt, response = tree["data"]["max_prompt_tokens"], tree["rollout"]["max_new_tokens"]
    assert min(prompt, response) >= 1
    assert prompt + response <= (context or 1536)


@pytest.mark.parametrize("hf", [QWEN3_8B, QWEN3_8B | {"model_type": "qwen3_vl", "vision_config": {}}])
def test_a_model_that_sees_is_given_the_fields_of_images(hf: dict[str, Any]) -> None:
    sees = "vision_config" in hf
    data = DataFacts(
        train="a", evaluation=None, input_key="p", label_key="l", note="", media={"image": "images"}
    )
    machine = Machine(backend="x", accelerator=True, devices=1, memory_gib=64)
    tree = tomllib.loads(recipe(facts_of_config("m", hf, chat=True), data, machine, task="rl", command="c"))
    assert tree["data"].get("multimodal_keys") == ({"image": "images"} if sees else None)
    assert ("chat_template_kwargs" in tree["data"]) != sees
    names = ("Qwen/Qwen3-VL-8B-Instruct", "zai-org/GLM-4.5V", "Qwen/Qwen3-Omni-30B", "Qwen/Qwen3-8B", "o/v3")
    assert [facts_of_name(name).has_vision for name in names] == [True, True, True, False, False]


def test_nothing_heavy_is_imported() -> None:
    code = (
        f"import sys; from anygauge.cli import main; assert main(['init', '--model', '{NAME}', '--backend', "
        "'cpu']) == 0; assert not {'torch', 'transformers', 'ray'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_sizes_are_written_in_units_that_fit() -> None:
    data = DataFacts(train="a", evaluation=None, input_key="prompt", label_key="label", note="")
    machine = Machine(backend="x", accelerator=False, devices=1, memory_gib=64)
    tiny = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64}
    tiny["intermediate_size"] = 1
    for hf, count, cache in ((tiny, "8.38K", "128 bytes"), (QWEN3_8B, "8.19B", "144 KiB")):
        text = recipe(facts_of_config("m", hf, chat=False), data, machine, task="rl", command="c")
        assert f"# for {count} parameters on" in text
        assert f"# KV cache of {cache} per token" in text


def test_a_model_without_a_family_gets_another_engine_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is never chosen silently."""
    Path("phi").mkdir()
    hf = {**QWEN3_8B, "architectures": ["PhiForCausalLM"], "model_type": "phi"}
    Path("phi/config.json").write_text(json.dumps(hf))
    options = ["init", "--model", "phi", "--backend", "cuda"]
    assert main(options) == 1
    error = capsys.readouterr().err
    assert "PhiForCausalLM is not supported by train.engine = 'megatron'" in error
    assert "Write --engine fsdp, which supports it." in error
    assert not Path("config.toml").exists()
    assert main([*options, "--engine", "fsdp"]) == 0
    assert "PhiForCausalLM is supported by train.engine = 'fsdp'" in capsys.readouterr().out
    written = tomllib.loads(Path("config.toml").read_text())
    assert (written["train"]["engine"], written["train"]["recompute"]) == ("fsdp", "full")


def test_a_model_that_no_engine_supports_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("llava").mkdir()
    hf = {**QWEN3_8B, "architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}
    Path("llava/config.json").write_text(json.dumps(hf))
    assert main(["init", "--model", "llava", "--backend", "cpu", "--engine", "fsdp"]) == 1
    assert "takes images or sound, and no family prepares them for it" in capsys.readouterr().err
    assert main(["init", "--model", NAME, "--backend", "cpu", "--engine", "deepspeed"]) == 1
    assert "deepspeed" in capsys.readouterr().err


def test_every_engine_of_a_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("qwen3").mkdir()
    hf = {**QWEN3_8B, "architectures": ["Qwen3ForCausalLM"]}
    Path("qwen3/config.json").write_text(json.dumps(hf))
    assert main(["init", "--model", "qwen3", "--backend", "cpu"]) == 0
    engines = "'fsdp' (family qwen3) and 'megatron' (family qwen3)"
    assert f"Qwen3ForCausalLM is supported by train.engine = {engines}" in capsys.readouterr().out


def load_alone(backend: str) -> Config:
    """Return a config whose model has no weights here."""
    plugins = load_plugins()
    return load_config("config.toml", backend=backend, plugins=plugins, check_files=False).config


def make_model(name: str, hf: dict[str, Any]) -> None:
    Path(name).mkdir()
    Path(name, "config.json").write_text(json.dumps(hf))


def test_a_large_mixture_of_experts_gets_a_config_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    make_model("moe", QWEN3_30B_A3B)
    options = ["--model", "moe", "--backend", "cuda", "--devices", "8", "--gpu", "H100"]
    assert main(["init", *options]) == 0
    assert "of 80 GiB of each device" in capsys.readouterr().out
    config = load_alone("cuda")
    sizes = config.train.parallel
    assert (sizes.tensor, sizes.expert) == (1, 8), "fewer micro-batches, whose time is the host's"
    assert (config.rollout.engine, config.placement.colocated) == ("sglang", True)
    assert main(["plan", "config.toml", "--backend", "cuda", "--gpu", "H100", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    limit = plan["device"]["bytes"]
    assert plan["parameters"] == pytest.approx(30.5e9, rel=0.01)
    assert all(sum(phase.values()) < 0.94 * limit for phase in plan["phase_bytes"].values())
    assert plan["engine_bytes"]["cache_tokens"] > 30 * 1536
    assert plan["warnings"] == []


@pytest.mark.parametrize(
    ("gpu", "devices", "chosen"),
    [
        ("H200", 1, (1, "none", 16_384, "transformers")),
        ("H200", 8, (1, "none", 16_384, "transformers")),
        ("A100", 8, (1, "none", 8192, "transformers")),
        ("L40S", 8, (2, "none", 8192, "transformers")),
    ],
)
def test_sizes_follow_from_the_memory_of_the_devices(
    gpu: str, devices: int, chosen: tuple[int, str, int, str]
) -> None:
    make_model("4b", QWEN3_8B | {"hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True})
    options = ["--model", "4b", "--backend", "cuda", "--devices", str(devices), "--gpu", gpu]
    assert main(["init", *options]) == 0
    config = load_alone("cuda")
    found = config.train.parallel.tensor, config.train.recompute, config.train.micro_batch_tokens
    assert (*found, config.rollout.engine) == chosen


def test_a_model_with_norms_over_all_heads_is_not_divided_among_tensor_ranks() -> None:
    """Another model of its size is, on devices so small."""
    olmo = {**QWEN3_8B, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "rms_norm_eps": 1e-6}
    for name, hf, is_divided in (("qwen", QWEN3_8B, True), ("olmo", olmo | {"rope_theta": 500_000}, False)):
        make_model(name, hf)
        options = ["--model", name, "--backend", "cuda", "--devices", "8", "--device-memory", "64", "--force"]
        assert main(["init", *options]) == 0
        assert (load_alone("cuda").train.parallel.tensor > 1) == is_divided


def test_device_memory_that_nobody_tells_is_assumed_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    make_model("mine", QWEN3_8B)
    assert main(["init", "--model", "mine", "--backend", "npu", "--devices", "16"]) == 0
    assert "devices of 64 GiB are assumed" in capsys.readouterr().out
    assert (
        "# for 8.19B parameters on 16 x npu, devices of 64 GiB, assumed." in Path("config.toml").read_text()
    )
    assert main(["init", "--model", "mine", "--backend", "npu", "--device-memory", "32", "--force"]) == 0
    out = capsys.readouterr().out
    assert "GiB of the 32 GiB of each device: use more devices or a smaller model" in out
    assert "assumed" not in out


def test_servers_are_chosen_where_sglang_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anygauge.serving.sglang.installed.installed_sglang", object)
    make_model("mine", QWEN3_8B)
    assert main(["init", "--model", "mine", "--backend", "cuda", "--devices", "2", "--gpu", "H200"]) == 0
    tree = tomllib.loads(Path("config.toml").read_text())
    assert tree["rollout"]["engine"] == "sglang"
    assert "max_batch_tokens" not in tree["rollout"]
    assert (tree["placement"]["rollout_workers"], tree["placement"]["colocated"]) == (2, True)
    assert "cpu" not in tree.get("on", {})
