"""Dumps of training batches, from which a step can be replayed.

``rollout-00000007.jsonl.gz`` holds the scored groups of a step, one line per group, before they are divided
among ranks. ``batch-00000007-dp-0.safetensors`` holds the samples that one data-parallel rank trained on,
with the log-probs of every pass. Both keep every bit of a number and name the model that they are for: a
rollout in its first line. ``media/`` holds the media, each content once.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from anygauge.data.media.store import MappedFiles
from anygauge.disk import read_json
from anygauge.hub.files import TOKENIZERS
from anygauge.strict_json import parse_json, plain_value
from anygauge_hooks.batch import TrainBatch
from anygauge_hooks.errors import CheckpointError, DataError, OutOfMemoryError
from anygauge_hooks.media import Media
from anygauge_hooks.models import text_config
from anygauge_hooks.rl import Group

if TYPE_CHECKING:
    from torch import Tensor

    from anygauge_hooks.engines import LossFunction, LossInputs
    from anygauge_hooks.media import MediaStore

__all__ = [
    "DIRECTORY",
    "ModelFacts",
    "RecordedLoss",
    "batch_path",
    "keep_media",
    "model_facts",
    "read_batch",
    "read_batches",
    "read_groups",
    "read_log_probs",
    "restore_media",
    "rollout_path",
    "write_batch",
    "write_groups",
]

DIRECTORY = "dumps"
"""In the run directory."""
MEDIA = "media"
"""In that directory."""
FORMAT = 3
FACTS = "anygauge"
"""Key of the metadata; one alone, since safetensors writes several in any order."""
PASSES = "log_probs."
"""Prefix of the name of a pass: ``old``, ``reference``, ``current``."""
DIGITS = 16
"""Hexadecimal digits of a digest."""
COMPRESSION = 1
"""Higher levels take several times as long and save little: most of a dump is digits of log-probs."""

T = TypeVar("T")
ModelFacts = Mapping[str, Any]
"""JSON facts that distinguish models whose token ids mean different things."""


def rollout_path(directory: Path, step: int) -> Path:
    """Return the file of a step's groups."""
    return directory / f"rollout-{step:08d}.jsonl.gz"


def batch_path(directory: Path, step: int, dp_rank: int) -> Path:
    """Return the file with the samples that a data-parallel rank trained on in a step."""
    return directory / f"batch-{step:08d}-dp-{dp_rank}.safetensors"


# -------------------------------------------------------------------------
# Which model
# -------------------------------------------------------------------------


@cache
def model_facts(directory: Path) -> ModelFacts:
    """Return the architecture of a Hugging Face directory, the size of its vocabulary, and its tokens.

    :param directory: Directory that was checked.
    """
    hf = read_json(directory / "config.json")
    return {
        "architectures": list(hf.get("architectures") or ()),
        "vocab_size": text_config(hf).get("vocab_size"),
        "tokens": _tokens(next(directory / name for name in TOKENIZERS if (directory / name).is_file())),
    }


def _tokens(path: Path) -> str:
    """Return a digest of a tokenizer's tokens and ids, which a file that was saved anew still has."""
    content = path.read_bytes()
    if path.name == "tokenizer.json":
        tokenizer = parse_json(content, strict=False)
        added = [(token["id"], token["content"]) for token in tokenizer.get("added_tokens") or ()]
        vocabulary = (tokenizer.get("model") or {}).get("vocab")
        content = json.dumps([vocabulary, sorted(added)], sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def _check_facts(where: Path, facts: Mapping[str, Any], model: ModelFacts | None) -> None:
    """Raise if a dump is of another format, or of another model than the one that would train on it."""
    if facts.get("format") != FORMAT:
        raise _unreadable(where, f"its format is {facts.get('format')}, not {FORMAT}")
    wrote = facts.get("model")
    if not isinstance(wrote, Mapping):
        raise _unreadable(where, "it does not name its model")
    if model is None or wrote == model:
        return
    differ = [
        f"{key} {wrote.get(key)} there, {value} here"
        for key, value in model.items()
        if wrote.get(key) != value
    ]
    raise DataError(
        f"{where} was written by a run of another model: {'; '.join(differ)}.",
        hint="Replay it with the model and the tokenizer of that run: model.path in its config.toml.",
    )


# -------------------------------------------------------------------------
# Rollouts
# -------------------------------------------------------------------------


def write_groups(path: Path, groups: Sequence[Group], model: ModelFacts) -> None:
    """Write groups, whole or not at all.

    Floats are written with as many digits as they need. What JSON does not know, in a label or in metadata,
    is written as text.

    :raises CheckpointError: The disk refuses.
    """
    records = ({FACTS: {"format": FORMAT, "model": model}}, *map(_record, groups))
    text = "".join(f"{json.dumps(record, default=plain_value)}\n" for record in records)
    _write(path, gzip.compress(text.encode("ascii"), COMPRESSION, mtime=0))


def _record(group: Group) -> dict[str, Any]:
    prompt = {field.name: getattr(group.prompt, field.name) for field in fields(group.prompt)}
    return {"prompt": prompt, "samples": [sample._asdict() for sample in group.samples]}


def read_groups(path: Path, model: ModelFacts | None = None) -> list[Group]:
    """Return the groups of a file that :func:`write_groups` wrote.

    :param model: Model that trains on them; ``None`` takes those of any.
    :raises DataError: There is no such file, it was cut short, a line is no group, or it is of another model.
    """
    try:
        first, *lines = gzip.decompress(_read(path)).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, str(error)) from error
    if not any(lines):
        raise _unreadable(path, "it holds no group")
    _check_facts(path, _facts(first), model)
    return [_group(f"{path}:{number}", line) for number, line in enumerate(lines, 2) if line]


def _facts(line: bytes) -> Mapping[str, Any]:
    """Return what the first line says of the file; nothing if it says nothing."""
    try:
        facts = parse_json(line, strict=False)[FACTS]
    except (ValueError, KeyError, TypeError):
        return {}
    return facts if isinstance(facts, Mapping) else {}


@cache
def _group_type() -> TypeAdapter[Group]:
    return TypeAdapter(Group)


def _group(where: str, line: bytes) -> Group:
    try:
        group = _group_type().validate_python(parse_json(line, strict=False))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise _unreadable(where, f"{field}: {first['msg']}") from error
    except ValueError as error:
        raise _unreadable(where, str(error)) from error
    for number, sample in enumerate(group.samples):
        values = (sample.log_probs, sample.loss_mask, sample.weight_versions)
        if any(len(value) != len(sample.response_tokens) for value in values):
            raise _unreadable(where, f"sample {number} has not one of each value per response token")
    return group


# -------------------------------------------------------------------------
# Batches
# -------------------------------------------------------------------------


def write_batch(
    path: Path,
    batch: TrainBatch,
    current: Sequence[Tensor],
    *,
    dp_rank: int,
    dp_size: int,
    model: ModelFacts,
) -> None:
    """Write the batch that a data-parallel rank trained on in a step, atomically.

    Values per token lie end to end, in the order of the samples; ``steps``, ``lengths`` and
    ``response_lengths`` say where each optimizer step and each sample ends. To train on them again estimates
    once more, from the group advantages.

    :param current: Log-probs ``[R]`` of each sample that the loss saw; none if the policy was not trained.
    :raises CheckpointError: The disk refuses.
    """
    passes = {
        "old": batch.old_log_probs,
        "reference": batch.reference_log_probs,
        "teacher": batch.teacher_log_probs,
        "current": torch.cat(list(current)) if current else None,
    }
    columns = {
        "steps": torch.tensor(batch.steps),
        "idle": torch.tensor(batch.idle),
        "lengths": torch.tensor(batch.lengths),
        "response_lengths": torch.tensor(batch.response_lengths),
        "tokens": batch.tokens.long(),
        "loss_mask": batch.loss_mask.long(),
        "rollout_log_probs": batch.rollout_log_probs,
        "advantages": batch.group_advantages,
        "estimated": batch.advantages,
        "rewards": batch.rewards,
        "baselines": batch.baselines,
        "weights": batch.loss_weights,
        **{PASSES + name: values for name, values in passes.items()},
    }
    facts = {"format": FORMAT, "share": dp_rank, "num_shares": dp_size, "model": model}
    if any(batch.media):
        facts["media"] = batch.media
    # safetensors refuses columns that are the same tensor
    tensors = {name: values.clone() for name, values in columns.items() if values is not None}
    _write(path, save(tensors, {FACTS: json.dumps(facts)}))


def read_batch(path: Path, *, dp_size: int, model: ModelFacts | None = None) -> TrainBatch:
    """Return the batch of a file that :func:`write_batch` wrote.

    :param dp_size: Data-parallel size of this run.
    :param model: Model that trains on it; ``None`` takes one of any.
    :raises DataError: There is no such file, it was cut short, or it is of a run with another
        data-parallel size or another model.
    """
    return _opened(path, lambda facts, tensors: _batch(path, facts, tensors, dp_size, model))


def read_batches(
    directory: Path, step: int, dp_size: int, model: ModelFacts | None = None
) -> list[TrainBatch]:
    """Return the batch of each data-parallel rank in a step.

    :raises DataError: As :func:`read_batch`.
    """
    return [
        read_batch(_dumped_batch(directory, step, dp_rank), dp_size=dp_size, model=model)
        for dp_rank in range(dp_size)
    ]


def _dumped_batch(directory: Path, step: int, dp_rank: int) -> Path:
    """Return the file of a batch; one that an earlier version wrote has another name."""
    path = batch_path(directory, step, dp_rank)
    older = path.with_name(path.name.replace("-dp-", "-share-"))
    return older if older.exists() and not path.exists() else path


def read_log_probs(path: Path) -> dict[str, list[Tensor]]:
    """Return the log-probs of each pass of a batch: one tensor ``[R]`` per sample, float32.

    :raises DataError: There is no such file, or it was cut short.
    """

    def read(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
        lengths = tensors["response_lengths"].tolist()
        names = [name for name in tensors if name.startswith(PASSES)]
        return {name.removeprefix(PASSES): list(torch.split(tensors[name], lengths)) for name in names}

    return _opened(path, read)


def _opened(path: Path, read: Callable[[Mapping[str, Any], Mapping[str, Tensor]], T]) -> T:
    """Return what is read of a batch: of the facts about it and its tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = parse_json((file.metadata() or {}).get(FACTS, "{}"), strict=False)
            return read(facts, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
    except FileNotFoundError as error:
        raise _missing(path) from error
    except KeyError as error:
        raise _unreadable(path, f"it has no tensor {error}") from error
    # the last two are what torch raises where lengths do not add up, and json and pydantic where it is none
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def _batch(
    path: Path,
    facts: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    dp_size: int,
    model: ModelFacts | None,
) -> TrainBatch:
    _check_facts(path, facts, model)
    if facts["num_shares"] != dp_size:
        raise DataError(
            f"{path} is of a run with {facts['num_shares']} data-parallel workers; this one has {dp_size}.",
            hint=f"Choose placement.train_workers and train.parallel so that it has {facts['num_shares']}, "
            "or replay the rollouts instead.",
        )
    lengths, responses, steps = (tensors[name].tolist() for name in ("lengths", "response_lengths", "steps"))
    count, size = len(lengths), sum(responses)
    if len(responses) != count or sum(steps) != count or len(tensors["tokens"]) != sum(lengths):
        raise ValueError("its steps and lengths do not match its samples and tokens")

    def column(name: str, rows: int) -> Tensor:
        return tensors[name].float().reshape(rows)

    return TrainBatch(
        tokens=tensors["tokens"].int(),
        lengths=lengths,
        response_lengths=responses,
        loss_mask=column("loss_mask", size).bool(),
        rollout_log_probs=column("rollout_log_probs", size),
        loss_weights=column("weights", size),
        group_advantages=column("advantages", size),
        rewards=column("rewards", count),
        baselines=column("baselines", count),
        rollouts=range(count),
        media=_media_type().validate_python(facts.get("media") or [()] * count),
        is_on_policy=[False] * count,
        steps=steps,
        idle=tensors["idle"].tolist(),
    )


@cache
def _media_type() -> TypeAdapter[list[tuple[Media, ...]]]:
    return TypeAdapter(list[tuple[Media, ...]])


class RecordedLoss:
    """A loss that records its log-probs, which are those of the weights being trained."""

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self._seen: dict[int, Tensor] = {}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute the loss."""
        if inputs.lengths:  # an engine need not say which samples it packed
            parts = torch.split(inputs.log_probs.detach().cpu(), list(inputs.lengths))
            self._seen.update(zip(inputs.samples, parts, strict=True))
        return self._loss(inputs)

    def take(self) -> list[Tensor]:
        """Return the log-probs ``[R]`` of each sample of an optimizer step, and forget them."""
        seen, self._seen = self._seen, {}
        return [seen[sample] for sample in sorted(seen)]


# -------------------------------------------------------------------------
# Media
# -------------------------------------------------------------------------


def keep_media(directory: Path, media: Iterable[Media], store: MediaStore) -> None:
    """Write the contents of media beside the dumps in a directory, each once.

    :raises CheckpointError: The disk refuses.
    """
    folder = directory / MEDIA
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    kept = MappedFiles(folder)
    for key in {each.key for each in media}:
        if not kept.has(key):
            content = store.get(key)
            with _writing(folder / key):
                kept.put(key, content)


def restore_media(directory: Path, media: Iterable[Media], store: MediaStore) -> None:
    """Load the media of dumps into a store.

    :raises DataError: One is not there.
    """
    kept = MappedFiles(directory / MEDIA)
    for medium in {medium.key: medium for medium in media}.values():
        if store.has(medium.key):
            continue
        try:
            store.put(medium.key, kept.get(medium.key))
        except KeyError as error:
            raise DataError(
                f"There is nothing to replay: {directory / MEDIA / medium.key}, the {medium.kind} "
                f"{medium.source or 'of a sample'}, does not exist.",
                hint="Keep the folder media/ with the dumps beside it.",
            ) from error


# -------------------------------------------------------------------------
# Files
# -------------------------------------------------------------------------


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(data)
        except OSError:
            partial.unlink(missing_ok=True)  # half of a dump would take up room
            raise
        os.replace(partial, path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, OutOfMemoryError) as error:  # the second for a medium
        raise CheckpointError(
            f"The dump {path} cannot be written: {error.__cause__ or error}.",
            hint="Free space on the disk, or turn off debug.dump_rollouts and debug.dump_batches; a run "
            "with a checkpoint continues with --resume.",
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _missing(path) from error


def _missing(path: Path) -> DataError:
    kind = path.name.partition("-")[0]
    names = sorted(other.name for other in path.parent.glob(f"{kind}-*")) if path.parent.is_dir() else []
    dumps = (
        f"the dumps there are {names[0]} to {names[-1]}" if names else f"there is no dump of a {kind} there"
    )
    return DataError(
        f"There is nothing to replay: {path} does not exist; {dumps}.",
        hint="Set run.steps to the last step that was dumped, or name the dumps/ of a run that wrote them.",
    )


def _unreadable(where: Path | str, reason: str) -> DataError:
    return DataError(
        f"{where} is not a dump that can be replayed: {reason}.",
        hint="Dump the run again: debug.dump_rollouts = true, or debug.dump_batches = true.",
    )
