"""Tiny models and tokenizers, made on the spot, as complete Hugging Face directories."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from anygauge_hooks.models import transformers_model

if TYPE_CHECKING:
    from anygauge_hooks.models import ModelSpec, TransformersModel

__all__ = ["CHAT_TEMPLATE", "save_random", "tiny_family", "tiny_qwen3", "tiny_tokenizer"]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, the format of Qwen's models."""


def tiny_tokenizer(
    directory: str | Path,
    *,
    alphabet: str | None = None,
    texts: Sequence[str] | None = None,
    vocab_size: int = 512,
) -> PreTrainedTokenizerFast:
    """Make a tokenizer, write its files and return it.

    :param alphabet: One token per character, then ``<pad>`` and ``<eos>``; any other character is an error.
    :param texts: Texts to train a byte-level BPE on, with a chat template; any text can be encoded.
    :param vocab_size: Most tokens of the BPE, special ones and the 256 bytes included.
    """
    assert (alphabet is None) != (texts is None), "either an alphabet or texts"
    tokenizer = _characters(alphabet) if texts is None else _byte_pairs(texts, vocab_size)
    tokenizer.save_pretrained(str(directory))
    return tokenizer


def _characters(alphabet: str | None) -> PreTrainedTokenizerFast:
    assert alphabet
    assert len(set(alphabet)) == len(alphabet), "a character occurs twice"
    tokens = [*alphabet, "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _byte_pairs(texts: Sequence[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_family(directory: str | Path, spec: ModelSpec, **changes: Any) -> Path:
    """Write the tiny model of a family with random weights, without a tokenizer, and return its path.

    :param changes: Keys of its ``config.json``.
    """
    fields = {**spec.tiny(), **changes}
    if (own := transformers_model(spec)) is not None:
        return _write_own(own, fields, Path(directory))
    config = AutoConfig.for_model(fields.pop("model_type"), initializer_range=0.1, **fields)
    is_text = type(config) in AutoModelForCausalLM._model_mapping
    return save_random(AutoModelForCausalLM if is_text else AutoModelForMultimodalLM, config, Path(directory))


def _write_own(own: TransformersModel, fields: dict[str, Any], path: Path) -> Path:
    """Write the tiny model of a family that transformers has no class for."""
    _save(lambda: own.build({"initializer_range": 0.1, **fields}, torch.float32), path)
    (path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return path


def save_random(auto_class: Any, config: Any, path: Path) -> Path:
    """Write a model with weights that are far from uniform, norms other than 1 and biases other than 0."""
    return _save(lambda: auto_class.from_config(config, dtype=torch.float32), path)


def _save(build: Callable[[], Any], path: Path) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build()
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.dim() == 1 and tensor.is_floating_point():
                    scale = 0.02 if "correction" in name else 0.1
                    tensor.add_(torch.randn_like(tensor) * scale)
                if name.endswith("A_log"):
                    # With the initial ones a state is gone after a token, and so is its gradient.
                    tensor.sub_(3.0)
    model.save_pretrained(path)
    return path


def tiny_qwen3(
    directory: str | Path,
    *,
    vocab_size: int | None = None,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    mlp: int = 128,
    tied: bool = True,
    seed: int = 0,
    dtype: str = "float32",
    init_std: float = 0.02,
    max_positions: int = 4096,
    max_shard_size: str = "1GB",
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Write a complete Hugging Face directory of a randomly initialized Qwen3 and return its path.

    :param vocab_size: Rows of the embedding; ``None`` takes the size of the tokenizer.
    :param init_std: Standard deviation of the weights; larger ones make the logits differ more.
    :param max_shard_size: A small one, such as ``"100KB"``, splits the weights into files with an index.
    :param tokenizer: ``None`` takes the one in the directory; if there is none, one of characters is made.
    """
    path = Path(directory)
    tokenizer = _with_tokenizer(path, tokenizer)
    config = Qwen3Config(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        tie_word_embeddings=tied,
        initializer_range=init_std,
        max_position_embeddings=max_positions,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = _initialized(config, seed, getattr(torch, dtype))
    model.generation_config = GenerationConfig(
        do_sample=True, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def _with_tokenizer(path: Path, tokenizer: PreTrainedTokenizerFast | None) -> Any:
    if tokenizer is not None:
        tokenizer.save_pretrained(str(path))
        return tokenizer
    if (path / "tokenizer.json").is_file():
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return tiny_tokenizer(path, alphabet="0123456789+-*/=.")


def _initialized(config: Any, seed: int, dtype: torch.dtype) -> Any:
    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM._from_config(config, dtype=dtype)
