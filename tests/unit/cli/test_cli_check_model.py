"""``anygauge check-model`` as a command: its rows and its status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, PhiConfig

from anygauge.cli import main
from anygauge.testing.model_worker import CHECKS
from anygauge.testing.tiny import tiny_tokenizer

PROMPT = "1+2=3"


@pytest.fixture
def phi(tmp_path: Path) -> Path:
    """Return a directory of a tiny Phi, which transformers alone has."""
    size = len(tiny_tokenizer(tmp_path, alphabet="0123456789+-*/=."))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["max_position_embeddings"] = 64  # as the demo's model has
    config = PhiConfig(vocab_size=size, **sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def test_the_command_prints_a_row_for_each_check(phi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check-model", str(phi), "--backend", "cpu"]
    assert main([*arguments, "--engine", "fsdp", "--prompt", PROMPT, "--against", "transformers"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[9:24].strip() for line in lines] == list(CHECKS)
    assert {line.split()[0] for line in lines} == {"PASS"}


def test_the_command_says_what_train_says_of_an_architecture(
    phi: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-model", str(phi), "--backend", "cpu"]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL     configuration  model.path: ")
    assert "No model plugin registers the architecture PhiForCausalLM" in first
    assert "train.engine = 'fsdp' trains it without one." in first
    assert first.endswith("[AG201]")
    assert others == [f"NOT RUN  {name:<15}needs configuration to pass" for name in CHECKS[1:]]


def test_an_engine_to_compare_with_is_looked_up_before_the_checks(
    phi: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-model", str(phi), "--backend", "cpu", "--against", "vllm"]) == 1
    output = capsys.readouterr()
    assert "Unknown name 'vllm' for rollout engines; available: sglang" in output.err
    assert not output.out


def test_made_up_tokens_are_no_padding(phi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = phi / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 9}))
    arguments = ["check-model", str(phi), "--backend", "cpu", "--engine", "fsdp"]
    assert main([*arguments, "--prompt", "What?"]) == 1
    (failed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert failed.startswith("FAIL     tokenizer"), "the padding token has no gradient in transformers"
    assert failed.endswith("give a --prompt of its alphabet")


def test_a_model_is_cut_to_its_first_layers(phi: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["check-model", str(phi), "--backend", "cpu", "--engine", "fsdp", "--prompt", PROMPT]
    assert main([*arguments, "--layers", "1"]) == 0
    out = capsys.readouterr().out
    assert "1 layers, largest difference" in out
    assert main([*arguments, "--layers", "2"]) == 1
    assert "cannot be cut to 2 layers: its config.json has num_hidden_layers = 2" in capsys.readouterr().err
