"""The names of ``[train.megatron]``: read from Megatron's source, checked before anything starts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from anygauge.config.schema import Config, Train
from anygauge.engines.megatron import config_fields as module
from anygauge.engines.megatron.config_fields import PASSED, TUNABLE, config_fields, option_problems
from anygauge.engines.megatron.plugin import check_config
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import load_plugins
from anygauge_hooks.megatron import megatron_model
from anygauge_hooks.models import ModelSpec


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
        "import sys; from anygauge.engines.megatron.config_fields import config_fields; config_fields();"
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
        ({"tensor_model_parallel_size": 2}, "Use train.parallel.tensor."),
        (
            {"rotary_interleaved": True},
            "The model family decides it from the config.json of model.path; leave it out.",
        ),
        (
            {"moe_router_topk": 4},
            "The model family decides it from the config.json of model.path; leave it out.",
        ),
        ({"moe_router_force_load_balancing": True}, "other experts than the rollout did"),
        ({"moe_pad_expert_input_to_capacity": True}, "or drop them"),
        ({"average_in_collective": True}, "Gradients are summed"),
        ({"num_distributed_optimizer_instances": 2}, "divided over all ranks"),
        ({"moe_aux_loss_coeff": 0.1}, "which an auxiliary loss would not be"),
        ({"moe_router_fusion": True}, "anygauge hooks shows"),
        ({"moe_shared_expert_overlap": True}, "one vendor's devices alone"),
        ({"moe_expert_capacity_factor": 1.0}, "Dropped tokens"),
        ({"mtp_num_layers": 1}, "multi-token prediction"),
        ({"overlap_p2p_comm_warmup_flush": True}, "without end"),
        ({"account_for_loss_in_pipeline_split": True}, "Use num_layers_in_first_pipeline_stage"),
        ({"fp32_residual_connection": True}, "float32"),
        ({"num_microbatches_with_partial_activation_checkpoints": 1}, "Use train.recompute"),
        ({"cp_comm_type": "p2p"}, "Context parallelism is the engine's own"),
        ({"optimizer_cpu_offload": True}, "placement.colocated"),
        ({"cuda_graph_impl": "local"}, "differ in length"),
        ({"tp_comm_overlap": True}, "does not set up"),
        ({"mamba_num_heads": 2}, "would change nothing"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_name_is_explained(options: dict[str, Any], hint: str) -> None:
    [problem] = option_problems(Train(megatron=options))
    assert problem.path == f"train.megatron.{next(iter(options))}"
    assert hint in problem.hint


@pytest.mark.parametrize("spec", load_plugins().collect("register_models"), ids=lambda spec: spec.name)
def test_what_a_family_sets_is_refused(spec: ModelSpec) -> None:
    fixed = megatron_model(spec).transformer_config(spec.tiny()).keys() - TUNABLE
    refused = {
        problem.path.rpartition(".")[2]
        for problem in option_problems(Train(megatron=dict.fromkeys(fixed, 3)))
    }
    assert refused == fixed


def test_every_name_that_is_refused_exists_and_does_not_pass() -> None:
    assert not module._REFUSED.keys() & PASSED
    assert module._REFUSED.keys() <= frozenset().union(*config_fields().values())


def test_what_a_family_may_not_set_no_user_may() -> None:
    assert module._KNOWN_VALUES.keys() <= module._REFUSED.keys()


def test_good_names_are_no_problem() -> None:
    assert not list(option_problems(Train(megatron={"overlap_grad_reduce": True})))


@pytest.mark.parametrize("role", ["train", "critic", "teacher"])
def test_the_table_of_every_role_is_checked(role: str) -> None:
    """Also what a field needs: a critic that is divided otherwise than the policy has settings of its own."""
    wrong = {"cp_comm_type": "p2p", "microbatch_group_size_per_vp_stage": 4, "bucket_sise": 1}
    tree: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "model"},
        "data": {"train": []},
        "train": {"parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    }
    own = {"megatron": wrong, "parallel": {"pipeline": 2}}
    tree[role] = {**tree.get(role, {}), **own}
    found = check_config(Config.model_validate(tree)) or ()
    assert [problem.path for problem in found] == [f"{role}.megatron.{name}" for name in wrong]
