"""Hugging Face directories to Megatron checkpoints and back, in one process on the host.

A converted checkpoint is a directory with ``model/``, a dist-checkpoint under canonical names that any
sharding can load, and ``hf/``, the config and tokenizer that the way back needs.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch.distributed as dist

from anygauge.config import Config
from anygauge.config.schema import Data, DType, Model, Reward, Run, Train
from anygauge.engines.megatron.hf import copy_other_files, read_config, write_directory
from anygauge.engines.megatron.layout import check_source, check_target
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.engines.megatron.scope import make_scope
from anygauge.plugins import Plugins
from anygauge_hooks.errors import CheckpointError

if TYPE_CHECKING:
    from anygauge.engines.megatron.model import Policy

__all__ = ["hf_to_megatron", "megatron_to_hf"]

HOST = "cpu"
TIMEOUT_S = 1800.0


def hf_to_megatron(source: Path, target: Path, plugins: Plugins) -> None:
    """Write the Megatron checkpoint of a Hugging Face directory.

    :param target: Must not exist or be empty; appears only when it is complete.
    :raises CheckpointError: ``source`` cannot be read, or ``target`` holds something or cannot be written.
    :raises WeightMappingError: The weights do not fit the architecture.
    """
    check_source(source, megatron=False)
    with _appearing(target) as partial, _built_policy(source, plugins) as policy:
        from megatron.core import dist_checkpointing

        (partial / "model").mkdir(parents=True)
        (partial / "hf").mkdir()
        copy_other_files(source, partial / "hf")
        dist_checkpointing.save(policy.model.sharded_state_dict(), str(partial / "model"))


def megatron_to_hf(source: Path, target: Path, plugins: Plugins) -> None:
    """Write the Hugging Face directory of a Megatron checkpoint.

    :param source: Made by :func:`hf_to_megatron`.
    :param target: Must not exist or be empty; appears only when it is complete.
    :raises CheckpointError: ``source`` is no such checkpoint, or ``target`` holds something or cannot be
        written.
    """
    check_source(source, megatron=True)
    with _appearing(target) as partial, _built_policy(source / "hf", plugins, load=False) as policy:
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(policy.model.sharded_state_dict(), str(source / "model"))
        policy.model.load_state_dict(state)
        dtype = policy.options.transformer.params_dtype
        write_directory(partial, source / "hf", policy.weights(), dtype)


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Yield a path where the block makes a directory, which then becomes ``target``."""
    check_target(target)
    work = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        yield work / "complete"
        if target.exists():
            target.rmdir()
        (work / "complete").rename(target)
    except OSError as error:
        raise CheckpointError(
            f"Cannot convert into {target}: {error}.", hint="Name a directory that you may write to."
        ) from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _built_policy(directory: Path, plugins: Plugins, *, load: bool = True) -> Iterator[Policy]:
    """Build the model on the host, in the precision that its config names, and clean up after it."""
    backend = plugins.get("register_backends", HOST)
    device = plugins.make_device(backend, 0)
    prepare_megatron(plugins, backend)
    from megatron.core import parallel_state

    from anygauge.engines.megatron.model import build_policy, initialize_parallel

    with make_scope(device), _lone_process(backend.dist_backend):
        had_groups = parallel_state.model_parallel_is_initialized()
        initialize_parallel(seed=0, timeout_s=TIMEOUT_S)
        try:
            yield build_policy(_config(directory), plugins, backend, device, load=load)
        finally:
            if not had_groups:
                parallel_state.destroy_model_parallel()


def _config(directory: Path) -> Config:
    hf = read_config(directory)
    dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    if dtype not in get_args(DType):
        raise CheckpointError(
            f"{directory} holds {dtype} weights, which would not come back as they are.",
            hint="Convert float32 or bfloat16 weights.",
        )
    return Config(
        run=Run(name="convert"),
        model=Model(path=directory),
        data=Data(train=()),
        reward=Reward(function="none"),
        train=Train.model_validate({"dtype": dtype}),
    )


@contextmanager
def _lone_process(dist_backend: str) -> Iterator[None]:
    """Be a process group of one, unless a group exists."""
    if dist.is_initialized():
        yield
        return
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but missing in torch's __all__
    dist.init_process_group(dist_backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
