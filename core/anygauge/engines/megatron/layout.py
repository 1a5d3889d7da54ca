"""What a conversion reads and writes, checked before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from anygauge_hooks.errors import CheckpointError

__all__ = ["check_source", "check_target"]


def check_source(source: Path, *, megatron: bool) -> None:
    """Refuse a directory that is not of the kind that is to be converted.

    :param megatron: Whether it must be a Megatron checkpoint of this project, or a Hugging Face directory.
    :raises CheckpointError: It is none.
    """
    if not source.is_dir():
        raise CheckpointError(f"Cannot convert {source}: no such directory.", hint="Name a directory.")
    is_megatron, is_hf = _is_megatron(source), (source / "config.json").is_file()
    if megatron and not is_megatron:
        raise CheckpointError(
            f"{source} is no Megatron checkpoint of anygauge: no model/metadata.json or hf/config.json.",
            hint="It is a Hugging Face directory; did you mean --to-megatron?"
            if is_hf
            else "Make one with `anygauge convert --to-megatron HF_DIR OUT`.",
        )
    if not megatron and not is_hf:
        raise CheckpointError(
            f"{source} is no Hugging Face directory: it has no config.json.",
            hint="It is a Megatron checkpoint; did you mean --to-hf?"
            if is_megatron
            else "Name a directory with config.json, a tokenizer and *.safetensors.",
        )


def _is_megatron(directory: Path) -> bool:
    return (directory / "model" / "metadata.json").is_file() and (directory / "hf" / "config.json").is_file()


def check_target(target: Path) -> None:
    """Refuse to overwrite anything.

    :raises CheckpointError: ``target`` is a file, or a directory that holds something.
    """
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        kind = "is not empty" if target.is_dir() else "is a file"
        raise CheckpointError(
            f"Cannot write to {target}: it {kind}.", hint="Name a new or empty directory, or remove it."
        )
