"""The names of ``[train.megatron]``: read from Megatron's source, checked before anything starts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from anygauge.engines.megatron.fields import config_fields, option_problems
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import load_plugins


def test_fields_are_those_of_the_classes() -> None:
    plugins = load_plugins()
    prepare_megatron(plugins, plugins.get("register_backends", "cpu"))
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    classes = {
        "transformer": TransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }
    for part, cls in classes.items():
        assert config_fields()[part] == {field.name for field in dataclasses.fields(cls) if field.init}


def test_fields_are_read_without_importing_megatron() -> None:
    code = (
        "import sys; from anygauge.engines.megatron.fields import config_fields; config_fields();"
        "assert not {'torch', 'megatron.core'} & sys.modules.keys(), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"layernorm_epsilom": 1e-5}, "close names: layernorm_epsilon"),
        ({"qqq": 1}, "no name is close"),
        ({"bf16": True}, "Use train.dtype."),
        ({"enable_autocast": True}, "use train.dtype"),
        ({"tensor_model_parallel_size": 2}, "Only data parallelism"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_name_is_explained(options: dict[str, object], hint: str) -> None:
    [problem] = option_problems(options)
    assert problem.path == f"train.megatron.{next(iter(options))}"
    assert hint in problem.hint


def test_good_names_are_no_problem() -> None:
    assert not list(option_problems({"overlap_grad_reduce": True, "tensor_model_parallel_size": 1}))
