"""Write a Llama model of a GGUF file as a Hugging Face directory in bfloat16.

python gguf_to_hf.py FILE.gguf DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

READ_ONLY_HERE = ("quantization_config", "_name_or_path", "transformers_version", "architectures", "dtype")
"""Keys of the config that describe the GGUF file and not the model."""


def convert(file: Path, target: Path) -> None:
    """Write the directory; the weights of the file are 4 bits wide and become what they stand for."""
    given = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **given)
    source = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **given)
    config = {key: value for key, value in source.config.to_dict().items() if key not in READ_ONLY_HERE}
    # Another instance: the one that was loaded refuses to be saved, for it was quantized.
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
    model.load_state_dict({name: each.to(torch.bfloat16) for name, each in source.state_dict().items()})
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
