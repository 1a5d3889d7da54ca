"""MindSpeed, where a run chooses it: loaded first, applied again once the config is known, and audited.

It works by replacing functions of torch, Megatron and others while it is imported. Names and signatures are
those of its public branch core_r0.16.0, commit e4772499f7eb9fa9a68919dd1eaddef00e915b2d, which has only run
on a simulated NPU.

MindSpeed takes every module with "mindspeed" in its name for one of its own and does not restore what it
replaced there. This module therefore binds no function that MindSpeed replaces, such as
``importlib.metadata.version``.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args

from anygauge_hooks.errors import ProviderError
from anygauge_hooks.host import installed
from anygauge_hooks.settings import RunConfig
from anygauge_hooks.types import ConfigProblem
from anygauge_npu.audit import Audit, Change, unknown_changes

__all__ = [
    "INSTALL",
    "NAME",
    "Modules",
    "arguments",
    "expected",
    "is_chosen",
    "load",
    "means_the_npu",
    "missing",
    "option_problems",
    "reapply",
    "requirements_missing",
]

NAME = "mindspeed"
ADAPTOR = "mindspeed.megatron_adaptor"
LINEARS = "mindspeed.te.pytorch.module.linear"
REQUIREMENTS = (
    *("einops", "scipy", "triton-ascend", "pybind11"),
    "protobuf",  # imported by torch-npu's torchair, which MindSpeed imports
    *("ninja", "regex", "six"),
)
"""Distributions that MindSpeed needs beside torch-npu and Megatron: the first row is imported with it,
pybind11 by triton-ascend, and ninja compiles its operators. Its own list would replace numpy."""
INSTALL = (
    "git clone --branch core_r0.16.0 https://gitcode.com/Ascend/MindSpeed.git && "
    "pip install --no-deps ./MindSpeed && "
    f"pip install {' '.join(name for name in REQUIREMENTS if name != 'triton-ascend')}, and triton-ascend "
    "from its releases page; what PyPI calls mindspeed is a placeholder"
)
WATCHED = (
    *("torch", "megatron", "transformers", "safetensors", "accelerate", "importlib", "math"),
    *("anygauge", "anygauge_hooks", "anygauge_models", "anygauge_npu"),
)
"""Packages whose attributes are compared."""
TRANSFER = "torch_npu.contrib.transfer_to_npu"
"""Module that the adaptor imports first: it makes torch's literal CUDA names mean the NPU."""
TRANSFERRED = ("torch.cuda.*", "torch._dynamo.variables.*.__new__raw")
"""Names that torch-npu fills with objects from elsewhere: imports of its modules, a method that it sets
aside."""
AUTHORS = ("torch_npu",)
"""Packages that may replace anything: that function is in torch-npu, which changes much of torch."""
OPTIONS: Mapping[str, tuple[type, str]] = {
    "strict": (bool, "true or false"),
    "allow": (list, "a list of names, in which * stands for anything"),
    "linears": (bool, "true or false"),
    "arguments": (dict, "a table of MindSpeed's command-line arguments, spelled with _"),
}
_ROLES_WITHOUT = ("rollout",)
_VERSIONS = "It is made for one version of Megatron and of torch-npu: `anygauge doctor --backend npu`."

_log = logging.getLogger(__name__)


class _State:
    """Attributes of this process as they were before the library replaced them."""

    audit: Audit | None = None


def is_chosen(config: RunConfig | None, role: str) -> TypeGuard[RunConfig]:
    """Return whether a worker loads the library: it trains, and its run names it."""
    return config is not None and config.train.provider == NAME and role not in _ROLES_WITHOUT


def means_the_npu() -> bool:
    """Return whether torch's literal CUDA names already mean the NPU in this process."""
    return TRANSFER in sys.modules


def load(config: RunConfig, log: str | None) -> None:
    """Import the library, and write down what that replaced.

    :param log: File of the process's output; the list goes beside it.
    :raises ProviderError: It is not installed, does not load, or replaced what the config does not allow.
    """
    _check_installed()
    _State.audit = audit = Audit(WATCHED)
    try:
        with audit.watching(), _no_arguments():
            importlib.import_module(ADAPTOR)
    except Exception as error:
        absent = requirements_missing()
        hint = f"It needs {', '.join(absent)}, which are not installed. {_VERSIONS}" if absent else _VERSIONS
        raise ProviderError(f"MindSpeed {_version()} does not load: {error!r}.", hint=hint) from error
    _report(config, log, "import")


def reapply(config: RunConfig, log: str | None) -> None:
    """Apply the library again with the arguments of the run, and record its replacements.

    :raises ProviderError: It was not loaded before, fails, or replaced what the config does not allow.
    """
    if _State.audit is None:
        raise ProviderError(
            "MindSpeed was not loaded before the config was applied.",
            hint="prepare_worker is called with before_vendor_import first, then with after_config.",
        )
    try:
        with _State.audit.watching():
            sys.modules[ADAPTOR].repatch(arguments(config))  # it takes a mapping, though it says args
    except Exception as error:
        raise ProviderError(
            f"MindSpeed {_version()} does not take the arguments of the run: {error!r}.", hint=_VERSIONS
        ) from error
    _report(config, log, "config")


def arguments(config: Any) -> dict[str, Any]:
    """Return MindSpeed's arguments, by the names of Megatron's command line.

    They say how the run is divided and how it computes. MindSpeed also gives those that are fields of
    ``TransformerConfig`` to every such config that does not set them, so none is here that a model decides.
    """
    train, sizes = config.train, config.train.parallel
    return {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "sequence_parallel": sizes.tensor > 1 if sizes.sequence is None else sizes.sequence,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,  # the experts are modules of ours, on the kernel table
        "use_distributed_optimizer": True,
        "bf16": train.dtype == "bfloat16",
        "tokenizer_type": None,
        "use_legacy_models": False,
        **train.megatron,
        **train.provider_options.get("arguments", {}),
    }


def option_problems(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield problems of ``train.provider_options``."""
    if config.train.provider != NAME:
        return
    for name, value in config.train.provider_options.items():
        path = f"train.provider_options.{name}"
        if name not in OPTIONS:
            hint = f"unknown to {NAME}; known: {', '.join(OPTIONS)}"
            yield ConfigProblem(path=path, found=value, hint=hint)
        elif not (isinstance(value, OPTIONS[name][0]) and _has_names(value)):
            yield ConfigProblem(path=path, found=value, hint=f"must be {OPTIONS[name][1]}")


def missing(config: RunConfig) -> Iterator[ConfigProblem]:
    """Yield a problem if the library is chosen but not installed, without importing it."""
    if config.train.provider == NAME and not _is_installed():
        yield ConfigProblem(path="train.provider", found=NAME, hint=f"it is not installed: {INSTALL}")


def requirements_missing() -> list[str]:
    """Return the distributions that the library needs and this environment has not."""
    return [name for name in REQUIREMENTS if installed(name) is None]


def _has_names(value: Any) -> bool:
    """Return whether the elements of a list, or the keys of a table, are strings."""
    return isinstance(value, bool) or all(isinstance(each, str) for each in value)


class Modules:
    """MindSpeed's linears, in the place of the engine's. All other parts of a layer stay as they are."""

    def column_parallel_linear(self) -> Any:
        """Return the linear whose output is split."""
        return importlib.import_module(LINEARS).TEColumnParallelLinear

    def row_parallel_linear(self) -> Any:
        """Return the linear whose input is split."""
        return importlib.import_module(LINEARS).TERowParallelLinear


def expected() -> frozenset[str]:
    """Return the names that the branch is known to replace, and patterns of them."""
    text = files("anygauge_npu").joinpath("mindspeed_replaces.txt").read_text(encoding="utf-8")
    return frozenset([*text.split(), *TRANSFERRED])


# -------------------------------------------------------------------------
# Loading
# -------------------------------------------------------------------------


def _is_installed() -> bool:
    """Return whether the package has the adaptor: the placeholder on PyPI has none."""
    package = importlib.util.find_spec(NAME)
    folders = package.submodule_search_locations if package is not None else None
    return folders is not None and importlib.machinery.PathFinder.find_spec(ADAPTOR, folders) is not None


def _check_installed() -> None:
    if not _is_installed():
        raise ProviderError(
            "train.provider is 'mindspeed', which is not installed in this environment.",
            hint=f"{INSTALL}. Without the key the backend's own kernels are used.",
        )


def _version() -> str:
    try:
        return importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"


@contextmanager
def _no_arguments() -> Iterator[None]:
    """Hide the command line: the adaptor parses it as its own."""
    before = sys.argv
    sys.argv = before[:1]
    try:
        yield
    finally:
        sys.argv = before


# -------------------------------------------------------------------------
# The audit
# -------------------------------------------------------------------------

Phase = Literal["import", "config"]


def _report(config: RunConfig, log: str | None, phase: Phase) -> None:
    """Write the list and say how long it is; in a strict run refuse what is not expected.

    :param phase: After which the list is taken; the later one takes the place of the earlier.
    """
    assert phase in get_args(Phase)
    assert _State.audit is not None
    options = config.train.provider_options
    changes = _State.audit.changes()
    unknown = unknown_changes(changes, {*expected(), *options.get("allow", ())}, AUTHORS)
    path = Path(log).with_suffix(f".{NAME}.json") if log else None
    if path is not None:
        path.write_text(json.dumps(_listed(changes, unknown, phase), indent=1) + "\n", encoding="utf-8")
    where = f", listed in {path}" if path else ""
    _log.info(
        "MindSpeed %s replaced %d attributes (%d unexpected) after %s%s",
        *(_version(), len(changes), len(unknown), phase, where),
    )
    if unknown and options.get("strict", False):
        names = ", ".join(change.name for change in unknown[:5])
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        raise ProviderError(
            f"MindSpeed {_version()} replaced what its list does not have: {names}{more}.",
            hint="Add them to train.provider_options.allow once you know what they do"
            + (f"; all are in {path}." if path else "."),
        )


def _listed(changes: list[Change], unknown: list[Change], phase: Phase) -> dict[str, Any]:
    unexpected = {change.name for change in unknown}
    return {
        "library": NAME,
        "version": _version(),
        "after": phase,
        "replaced": [
            {
                "name": change.name,
                "kind": change.kind,
                "by": change.by,
                "expected": change.name not in unexpected,
            }
            for change in changes
        ],
    }
