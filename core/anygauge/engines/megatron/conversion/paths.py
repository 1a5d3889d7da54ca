"""Source and target paths of a conversion, checked before heavy imports."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from anygauge.disk import parse_toml
from anygauge_hooks.errors import CheckpointError

__all__ = ["Source", "check_source", "check_target", "conversion_error", "is_of_run"]

_NUMBER = re.compile(r"\(os error (\d+)\)")
_ROOM, _RIGHTS = (
    "Make room there: it needs as much as the weights.",
    "Name a directory that you may write to.",
)
_HINTS = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: "No file may be so large there: raise ulimit -f, or name another file system.",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOTDIR: _RIGHTS,
    errno.ENOTEMPTY: "Something was put there meanwhile: name another directory.",
    errno.EMFILE: "Too many files are open: raise the limit (ulimit -n).",
}


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a conversion."""

    weights: Path
    """Directory with the files of weights."""
    hf: Path
    """Directory with config and tokenizer."""


def check_source(source: Path, *, megatron: bool, model: Path | None = None) -> Source:
    """Refuse a source directory of the wrong kind; a run's checkpoint can be converted in both directions.

    :param megatron: Whether it must be a Megatron checkpoint of this project, or a Hugging Face directory.
    :param model: Config and tokenizer for a run's checkpoint; ``None`` takes the model of the run.
    :raises CheckpointError: It is none, or a run's without its model.
    """
    if not source.is_dir():
        raise CheckpointError(f"Cannot convert {source}: no such directory.", hint="Name a directory.")
    is_megatron, is_hf = _is_megatron(source), (source / "config.json").is_file()
    if not is_megatron and is_of_run(source):
        return Source(source, _model_of_run(source) if model is None else _directory_of_model(model, source))
    if model is not None:
        raise CheckpointError(
            f"{source} is not a checkpoint of a run, and has a config of its own.", hint="Leave --model out."
        )
    if megatron and not is_megatron:
        raise CheckpointError(
            f"{source} is not a Megatron checkpoint of anygauge: no model/metadata.json or hf/config.json.",
            hint="It is a Hugging Face directory; did you mean --to-megatron?"
            if is_hf
            else "Make one with `anygauge convert --to-megatron HF_DIR OUT`.",
        )
    if not megatron and not is_hf:
        raise CheckpointError(
            f"{source} is not a Hugging Face directory: it has no config.json.",
            hint="It is a Megatron checkpoint; did you mean --to-hf?"
            if is_megatron
            else "Name a directory with config.json, a tokenizer and *.safetensors.",
        )
    return Source(source / "model", source / "hf") if megatron else Source(source, source)


def is_of_run(directory: Path) -> bool:
    """Return whether a directory is a checkpoint of a run."""
    return any(directory.glob("rank-*.json"))


def _model_of_run(checkpoint: Path) -> Path:
    path = checkpoint.resolve().parent.parent / "config.toml"
    try:
        model = Path(parse_toml(path.read_text(encoding="utf-8"))["model"]["path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of a run, but {path} does not name its model: {error!r}.",
            hint="Name its Hugging Face directory: --model DIR.",
        ) from error
    return _directory_of_model(model, checkpoint)


def _directory_of_model(model: Path, checkpoint: Path) -> Path:
    if not (model / "config.json").is_file():
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of a run of {model}, which is not a Hugging Face directory here.",
            hint="Name the one with its config and tokenizer: --model DIR.",
        )
    return model


def _is_megatron(directory: Path) -> bool:
    return (directory / "model" / "metadata.json").is_file() and (directory / "hf" / "config.json").is_file()


def check_target(target: Path, source: Path) -> Path:
    """Refuse to overwrite anything, or to write into the source.

    :returns: The absolute path.
    :raises CheckpointError: ``target`` is a file, a link, a directory that holds something or that no other
        can take the place of, or in ``source``.
    """
    if target.is_symlink():
        raise _refusal(target, "a link", f"Name its target instead: {target.resolve()}.")
    if target.exists() and not target.is_dir():
        raise _refusal(target, "a file", "Name a new or empty directory, or remove it.")
    if target.is_dir() and any(target.iterdir()):
        raise _refusal(target, "not empty", "Name a new or empty directory, or remove it.")
    resolved = target.resolve()
    if source.resolve() in resolved.parents:
        raise _refusal(target, f"inside {source}", "Name a directory elsewhere.")
    if resolved == Path.cwd() or resolved.is_mount():
        kind = "the current directory" if resolved == Path.cwd() else "where a file system is mounted"
        kind += ", and a complete directory takes the place of OUT"
        raise _refusal(target, kind, f"Name a directory in it: {target / 'OUT'}.")
    return resolved


def _refusal(target: Path, kind: str, hint: str) -> CheckpointError:
    return CheckpointError(f"Cannot write to {target}: it is {kind}.", hint=hint)


def conversion_error(error: Exception, source: Path, target: Path) -> CheckpointError:
    """Return the error for an ``OSError`` during a conversion, with a hint.

    :param error: Error of the system, or of safetensors, which has the number in its text.
    """
    match = _NUMBER.search(str(error))
    number = getattr(error, "errno", None) or (int(match[1]) if match else None)
    name = getattr(error, "filename", None)
    if name is not None and source.resolve() in Path(os.fsdecode(name)).resolve().parents:
        return CheckpointError(f"Cannot convert {source}: {error}.", hint="Make it readable.")
    hint = _HINTS.get(number or 0, "Name a directory on another disk.")
    return CheckpointError(f"Cannot convert into {target}: {error}.", hint=hint)
