"""Hugging Face directories to Megatron checkpoints and back, tensor by tensor, on the host.

A converted checkpoint is a directory with ``model/``, a dist-checkpoint under canonical names that any
sharding can load, and ``hf/``, with the config and tokenizer that the way back needs, and with the tensors
that no engine trains and exports keep. No model is built: the rules of its family say what every tensor is
made of. Processes share the work, each with files of its own.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from anygauge.disk import appearing, read_json
from anygauge.distributed.garbage import skip_last_collection
from anygauge.distributed.lifetime import die_with
from anygauge.engines.carried_weights import carried_weights, copy_carried
from anygauge.engines.dequantize import compare_weights, open_unquantized
from anygauge.engines.hf_directory import (
    FILE_BYTES,
    TensorReader,
    config_of_weights,
    read_config,
    reading_config,
    shard_names,
)
from anygauge.engines.megatron.conversion.dist_checkpoint import (
    plan_files,
    stored_key,
    write_file,
    write_index,
)
from anygauge.engines.megatron.conversion.paths import check_source, check_target, conversion_error, is_of_run
from anygauge.engines.megatron.conversion.sources import (
    CanonicalSource,
    open_canonical,
    open_weights,
    tensor_names,
)
from anygauge.engines.megatron.media.towers import with_modalities
from anygauge.engines.megatron.weights.mapping import (
    SHOWN,
    TensorRule,
    canonical_problem,
    canonical_shape,
    hf_tensors,
    left_out,
    mapping_error,
    model_rules,
    name_problems,
    tied_problem,
    tied_weights,
    unused_prefixes,
)
from anygauge.engines.megatron.weights.shapes import shape_problem
from anygauge.engines.megatron.weights.stacks import straight
from anygauge.hub.quantization import quantization
from anygauge.hub.weight_files import SINGLE, copy_other_files
from anygauge.hub.weight_files import write_index as write_hf_index
from anygauge.plugins import Plugins
from anygauge_hooks.errors import CheckpointError, WorkerDiedError
from anygauge_hooks.media import TowerSpec
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec

__all__ = ["hf_to_megatron", "megatron_to_hf"]

WORKER_BYTES = 1_000_000_000
"""Weights that another process is started for, and bytes of a file of a dist-checkpoint, whose tensors torch
keeps until it is written."""
_Tensors = list[tuple[TensorRule, Tensor]]
"""Tensors that are to be written; each has no elements, only type and shape."""
CARRIED = "model-carried.safetensors"
"""File of a Hugging Face directory with the tensors that a Megatron checkpoint has beside its config."""
MOST_PADDING = 128 * 64
"""Rows; Megatron pads a vocabulary to a multiple of 128 times the ranks of tensor parallelism."""


def hf_to_megatron(
    source: Path,
    target: Path,
    plugins: Plugins,
    *,
    workers: int | None = None,
    check: bool = False,
    model: Path | None = None,
) -> dict[str, int]:
    """Write the Megatron checkpoint of a Hugging Face directory, or of a run's checkpoint.

    :param target: Must not exist or be empty; appears only when it is complete.
    :param workers: Processes; ``None`` takes as many as there are processors and work for them.
    :param check: Whether to compare what was written with the source.
    :param model: Hugging Face directory of a run's model; ``None`` takes that which the run's config names.
    :returns: How many tensors of the source the model does not have, by the beginning of their names.
    :raises CheckpointError: ``source`` cannot be read, or ``target`` holds something or cannot be written.
    :raises WeightMappingError: The weights do not fit the architecture.
    """
    origin = check_source(source, megatron=False, model=model)
    target = check_target(target, source)
    with _converting(source, target) as partial:
        family = _read_family(origin.hf, plugins, origin.weights)
        tensors, unused = (_run_tensors if is_of_run(origin.weights) else _hf_tensors)(origin.weights, family)
        count = _count(workers, _total(tensors))
        shares = _partition(tensors, count)
        written = partial / "model"
        written.mkdir()
        (partial / "hf").mkdir()
        copy_other_files(origin.hf, partial / "hf")
        carried = copy_carried(origin.hf, partial / "hf" / SINGLE, family.carried)
        if quantization(read_config(origin.hf)) is not None:
            _state_weights(partial / "hf" / "config.json", _main_dtype(tensors))
        plans, rules = plan_files(shares), [[rule for rule, _ in share] for share in shares]
        with _processes(min(count, len(shares))) as run:
            calls = [(origin.weights, written, *each) for each in zip(plans, rules, strict=True)]
            write_index(written, plans, run(_write_part, calls))
            if check:
                _compare(run, origin.weights, written, rules)
        if check and carried:
            compare_weights(partial / "hf", carried_weights(origin.hf, family.carried))
    return unused


def megatron_to_hf(
    source: Path,
    target: Path,
    plugins: Plugins,
    *,
    workers: int | None = None,
    check: bool = False,
    model: Path | None = None,
) -> dict[str, int]:
    """Write the Hugging Face directory of a Megatron checkpoint, or of a run's checkpoint.

    :param source: ``model/``, saved from any sharding, and ``hf/`` with config and tokenizer; or a run's.
    :param target: Must not exist or be empty; appears only when it is complete.
    :param workers: Processes; ``None`` takes as many as there are processors and work for them.
    :param check: Whether to compare what was written with the source.
    :param model: Hugging Face directory of a run's model; ``None`` takes that which the run's config names.
    :returns: How many rows of padding are left out, by the name of the tensor.
    :raises CheckpointError: ``source`` is no such checkpoint or torn, or ``target`` holds something or cannot
        be written.
    :raises WeightMappingError: The weights do not fit the architecture.
    """
    origin = check_source(source, megatron=True, model=model)
    target = check_target(target, source)
    with _converting(source, target) as partial:
        family = _read_family(origin.hf, plugins, origin.weights)
        copy_other_files(origin.hf, partial)
        with open_canonical(origin.weights) as reader:
            _check_fit(reader, family)
            files = _plan_files(reader, family.rules)
            _state_weights(partial / "config.json", _main_dtype(_empty(reader, family.rules)))
            padding = {rule.canonical: _padding(rule, reader) for rule in family.rules}
        total = sum(sum(file.tensors.values()) for file in files)
        count = _count(workers, total)
        names = shard_names(len(files))
        shares = [file.rules for file in files]
        paths = [partial / name for name in names]
        held = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file.tensors}
        carried = copy_carried(origin.hf, partial / CARRIED, family.carried)
        held |= dict.fromkeys(carried, CARRIED)
        write_hf_index(partial, held, total + sum(carried.values()))
        with _processes(min(count, len(shares))) as run:
            run(_write_shard, [(origin.weights, *each) for each in zip(paths, shares, strict=True)])
            if check:
                _compare(run, partial, origin.weights, shares)
        if check and carried:
            compare_weights(partial, carried_weights(origin.hf, family.carried))
    return {name: rows for name, rows in padding.items() if rows}


@dataclass(frozen=True, slots=True)
class _Family:
    """Declarations of a model family."""

    rules: list[TensorRule]
    unused: tuple[str, ...]
    """Beginnings of names that its checkpoints may have and the model does not."""
    carried: tuple[str, ...]
    """Those of them that are kept beside the config."""
    tied: tuple[str, str] | None
    """Hugging Face names of the embedding and of the output layer that is the same."""
    fields: Mapping[str, Any]
    """Fields of ``TransformerConfig``."""
    owner: str
    """Path from the model to what has its decoder."""

    def problem(self, rule: TensorRule, shape: Sequence[int], dtype: torch.dtype) -> str | None:
        """Return why a canonical tensor cannot be one of the model's weights, if so."""
        if not dtype.is_floating_point:
            return f"of type {dtype}, where floating-point numbers belong"
        return shape_problem(rule, shape, self.fields, self.owner)


def _read_family(directory: Path, plugins: Plugins, weights: Path) -> _Family:
    hf = read_config(directory)
    _check_sizes(directory / "config.json", hf)
    spec: ModelSpec = plugins.model(hf.get("architectures") or ())
    with reading_config(directory):
        if spec.media is not None:  # a run of text has none of the towers
            names = tensor_names(weights)
            spec = with_modalities(spec, {kind for tower in _there(spec, hf, names) for kind in tower.kinds})
        return _Family(
            model_rules(spec, hf),
            unused_prefixes(spec, hf),
            tuple(spec.carried_weights(hf)),
            tied_weights(spec, hf),
            megatron_model(spec).transformer_config(hf),
            megatron_model(spec).output_owner,
        )


def _there(spec: ModelSpec, hf: Mapping[str, Any], names: Collection[str]) -> Iterator[TowerSpec]:
    """Yield the towers of which a checkpoint has something."""
    owner = megatron_model(spec).output_owner
    for tower in spec.media.towers(hf) if spec.media is not None else ():
        prefixes = (f"{owner}.{tower.name}.".lstrip("."), *tower.hf_prefixes)
        if any(name.startswith(prefixes) for name in names):
            yield tower


def _check_sizes(path: Path, hf: Mapping[str, Any]) -> None:
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        value = hf.get(key, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(
                f"{path} has {key} = {value!r}, which must be a number above 0.",
                hint="Download the file again, or correct it.",
            )


@contextmanager
def _converting(source: Path, target: Path) -> Iterator[Path]:
    """Yield a directory that becomes ``target`` when the block ends.

    :raises CheckpointError: The system refuses something.
    """
    try:
        with appearing(target) as partial:
            yield partial
    except (OSError, SafetensorError) as error:
        raise conversion_error(error, source, target) from error


# -------------------------------------------------------------------------
# What is to be done
# -------------------------------------------------------------------------


def _hf_tensors(source: Path, family: _Family) -> tuple[_Tensors, dict[str, int]]:
    """Return the canonical tensors of a directory that fits, and what is left out of it.

    :returns: The tensors, and the number of those that are left out by the beginning of their names.
    :raises WeightMappingError: It does not fit.
    """
    with open_unquantized(source) as reader:
        problems = list(name_problems(family.rules, reader.names, family.unused))
        forms = [] if problems else [_hf_form(rule, reader, family, problems) for rule in family.rules]
        if not problems:
            problems.extend(_mixed_stacks(family.rules, reader))
        if not problems and family.tied and (problem := tied_problem(*family.tied, reader)):
            problems.append(problem)
        lost = [prefix for prefix in family.unused if prefix not in family.carried]
        unused = left_out(family.rules, reader.names, lost)
    if problems:
        raise mapping_error(problems)
    return list(zip(family.rules, forms, strict=True)), unused


def _mixed_stacks(rules: Sequence[TensorRule], reader: TensorReader) -> Iterator[str]:
    """Yield which experts, that are to be one tensor, are of several types."""
    dtypes_of_keys: defaultdict[str, set[str]] = defaultdict(set)
    for rule in rules:
        dtypes_of_keys[stored_key(rule)].add(str(reader.dtype(rule.hf[0])))
    for key, dtypes in dtypes_of_keys.items():
        if len(dtypes) > 1:
            yield f"{key}: of several types, {', '.join(sorted(dtypes))}"


def _hf_form(rule: TensorRule, reader: TensorReader, family: _Family, problems: list[str]) -> Tensor:
    names = " + ".join(rule.hf)
    dtypes = {reader.dtype(name) for name in rule.hf}
    if len(dtypes) > 1:
        problems.append(f"{names}: of several types, {', '.join(sorted(map(str, dtypes)))}")
    dtype = dtypes.pop()
    try:
        shape = canonical_shape(rule, [straight(reader, rule).shape(name) for name in rule.hf])
    except ValueError as error:
        problems.append(f"{names}: {error}")
        shape = ()
    else:
        if problem := family.problem(rule, shape, dtype):
            problems.append(f"{names}: {problem}")
    return torch.empty(shape, dtype=dtype, device="meta")


def _run_tensors(source: Path, family: _Family) -> tuple[_Tensors, dict[str, int]]:
    """Return what :func:`_hf_tensors` does, of a run's checkpoint: nothing of it is left out."""
    with open_canonical(source) as reader:
        _check_fit(reader, family)
        return list(_empty(reader, family.rules)), {}


def _check_fit(reader: CanonicalSource, family: _Family) -> None:
    """Raise unless a checkpoint fits the rules.

    :raises WeightMappingError: It does not.
    """
    problems = list(reader.problems(family.rules))
    if not problems:
        problems = [text for rule in family.rules if (text := _dist_problem(rule, reader, family))]
    if problems:
        raise mapping_error(problems, hint="Check that the config.json belongs to this checkpoint.")


def _dist_problem(rule: TensorRule, reader: CanonicalSource, family: _Family) -> str | None:
    shape = reader.shape(rule)
    if problem := canonical_problem(rule, shape):
        return problem
    problem = family.problem(rule, shape, reader.dtype(rule)) or _padding_problem(rule, reader)
    return f"{rule.canonical}: {problem}" if problem else None


def _main_dtype(tensors: Iterable[tuple[TensorRule, Tensor]]) -> torch.dtype:
    """Return the type of most bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for _, tensor in tensors:
        sizes[tensor.dtype] += tensor.nbytes
    return sizes.most_common(1)[0][0]


def _state_weights(path: Path, dtype: torch.dtype) -> None:
    """Correct what a ``config.json`` says of the weights, if they are others."""
    config = read_json(path)
    stated = config_of_weights(config, dtype)
    said = {"dtype": config.pop("torch_dtype", stated["dtype"]), **config}  # as transformers 4 called it
    if said != stated:
        path.write_text(json.dumps(stated, indent=2) + "\n")


def _padding(rule: TensorRule, reader: CanonicalSource) -> int:
    return 0 if rule.rows is None else reader.shape(rule)[0] - rule.rows


def _padding_problem(rule: TensorRule, reader: CanonicalSource) -> str | None:
    rows = _padding(rule, reader)
    padding = f"{rows} rows beyond a vocabulary of {rule.rows}"
    if rows >= MOST_PADDING:
        return f"{padding}, which is more than any padding"
    if rows and reader.padding(rule).count_nonzero():
        return f"{padding}, which are not all 0: to keep them, set vocab_size to {reader.shape(rule)[0]}"
    return None


@dataclass(frozen=True, slots=True)
class _File:
    """A safetensors file that is to be written."""

    rules: list[TensorRule]
    tensors: dict[str, int]
    """Bytes by Hugging Face name."""


def _plan_files(reader: CanonicalSource, rules: Sequence[TensorRule]) -> list[_File]:
    files = [_File([], {})]
    pending: list[TensorRule] = []
    for rule in rules:
        pending.append(rule)
        if rule.is_stacked and rule.expert != rule.declared.experts - 1:
            continue  # the experts of a stack belong into one file
        tensors = {name: tensor.nbytes for name, tensor in hf_tensors(_empty(reader, pending))}
        if files[-1].rules and sum(files[-1].tensors.values()) + sum(tensors.values()) > FILE_BYTES:
            files.append(_File([], {}))
        files[-1].rules.extend(pending)
        files[-1].tensors.update(tensors)
        pending = []
    return files


def _empty(reader: CanonicalSource, rules: Sequence[TensorRule]) -> Iterator[tuple[TensorRule, Tensor]]:
    for rule in rules:
        tensor = torch.empty(reader.shape(rule), dtype=reader.dtype(rule), device="meta")
        yield rule, tensor if rule.rows is None else tensor[: rule.rows]


def _count(workers: int | None, size: int) -> int:
    return workers or max(1, min(len(os.sched_getaffinity(0)), size // WORKER_BYTES))


def _total(tensors: _Tensors) -> int:
    return sum(tensor.nbytes for _, tensor in tensors)


def _partition(tensors: _Tensors, count: int) -> list[_Tensors]:
    """Divide tensors, in order, into shares of about the same bytes, one for each file."""
    total = max(_total(tensors), 1)
    number = max(min(count, len(tensors)), math.ceil(total / WORKER_BYTES))
    shares: list[_Tensors] = [[] for _ in range(number)]
    before = 0
    for rule, tensor in tensors:
        shares[min((before + tensor.nbytes // 2) * number // total, number - 1)].append((rule, tensor))
        before += tensor.nbytes
    return [share for share in shares if share]


# -------------------------------------------------------------------------
# What a process does
# -------------------------------------------------------------------------


def _write_part(
    source: Path, directory: Path, plan: SavePlan, rules: Sequence[TensorRule]
) -> list[WriteResult]:
    with open_weights(source) as reader:
        return write_file(directory, plan, rules, reader.parts)


def _write_shard(source: Path, path: Path, rules: Sequence[TensorRule]) -> None:
    with open_canonical(source) as reader:
        tensors = hf_tensors((rule, reader.read(rule)) for rule in rules)
        save_file({name: tensor.contiguous() for name, tensor in tensors}, path, metadata={"format": "pt"})


def _compare(run: Run, one: Path, other: Path, shares: Sequence[Sequence[TensorRule]]) -> None:
    """Raise if a tensor has not the same bits in both."""
    differences = run(_differences, [(one, other, share) for share in shares])
    different = list(chain.from_iterable(differences))
    if different:
        shown = ", ".join(different[:SHOWN])
        raise CheckpointError(
            f"{len(different)} tensors changed in the conversion: {shown}.",
            hint="Has the source changed meanwhile? If not, check the disk.",
        )


def _differences(one: Path, other: Path, rules: Sequence[TensorRule]) -> list[str]:
    with open_weights(one) as first, open_weights(other) as second:
        pairs = (
            (rule, torch.cat(list(first.parts(rule))), torch.cat(list(second.parts(rule)))) for rule in rules
        )
        return [rule.canonical for rule, before, after in pairs if not _same_bits(before, after)]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


Run = Callable[[Callable[..., Any], Sequence[tuple[Any, ...]]], list[Any]]
"""Calls a function with each of several arguments."""


@contextmanager
def _processes(count: int) -> Iterator[Run]:
    """Yield what calls functions in so many processes, or here where one is enough."""
    if count == 1:
        yield lambda function, calls: [function(*call) for call in calls]
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_start, initargs=(os.getpid(),)) as pool:

        def run(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
            return [future.result() for future in [pool.submit(function, *call) for call in calls]]

        try:
            yield run
        except BrokenProcessPool as error:
            raise WorkerDiedError(
                "A process that converts weights died.", hint="Is there enough host memory? Try --workers 1."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start(parent: int) -> None:
    die_with(parent)
    skip_last_collection()
    torch.set_num_threads(1)
