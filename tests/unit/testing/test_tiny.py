"""Tiny models and tokenizers are complete Hugging Face directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer

ALPHABET = "0123456789+=\n"


def test_character_tokenizer_has_one_token_per_character(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path, alphabet=ALPHABET)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("37+58=\n").input_ids
    assert ids == [ALPHABET.index(character) for character in "37+58=\n"]
    assert tokenizer.decode(ids) == "37+58=\n"
    assert len(tokenizer) == len(ALPHABET) + 2
    assert {tokenizer.pad_token_id, tokenizer.eos_token_id} == {13, 14}
    assert tokenizer.decode([*ids, 14, 13], skip_special_tokens=True) == "37+58=\n"


def test_character_tokenizer_refuses_other_characters(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="UNK"):
        tiny_tokenizer(tmp_path, alphabet=ALPHABET)("a")


def test_bpe_tokenizer_encodes_any_text(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path, texts=["the answer is 42, the question is not known"] * 4, vocab_size=300)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "the answer: \u00e9\u4e2d\U0001f600\n  is"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer("the answer is").input_ids) < len("the answer is") / 2
    assert 259 < len(tokenizer) <= 300


def test_bpe_tokenizer_renders_chats(tmp_path: Path) -> None:
    tiny_tokenizer(tmp_path, texts=["hello"], vocab_size=270)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == expected
    ids = tokenizer(expected).input_ids
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert tokenizer.eos_token == "<|im_end|>"
    assert "<|im" not in tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_loads_with_its_shape(tmp_path: Path, tied: bool) -> None:
    tiny_qwen3(
        tmp_path, vocab_size=40, hidden=32, layers=3, heads=4, kv_heads=1, head_dim=8, mlp=48, tied=tied
    )
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert type(model).__name__ == "Qwen3ForCausalLM"
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert shapes["model.embed_tokens.weight"] == (40, 32)
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == (8, 32)
    assert shapes["model.layers.2.mlp.gate_proj.weight"] == (48, 32)
    shared = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert shared == tied


def test_qwen3_directory_names_its_architecture_and_its_end(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path, alphabet=ALPHABET)
    tiny_qwen3(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["vocab_size"] == len(tokenizer)
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == tokenizer.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()


def test_qwen3_is_drawn_from_its_seed_and_leaves_the_random_state(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    paths = [tiny_qwen3(tmp_path / str(index), seed=seed) for index, seed in enumerate((3, 3, 4))]
    assert torch.equal(torch.get_rng_state(), state)
    first, same, other = ((path / "model.safetensors").read_bytes() for path in paths)
    assert first == same
    assert first != other


def test_qwen3_can_be_sharded_and_in_low_precision(tmp_path: Path) -> None:
    tiny_qwen3(tmp_path, dtype="bfloat16", max_shard_size="60KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16
