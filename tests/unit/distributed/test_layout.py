"""Which rank has which part: the order is Megatron's, and sizes that do not fit are errors."""

from __future__ import annotations

from typing import Any

import pytest

from anygauge.config.rules.parallel import size_problems
from anygauge.config.schema import Parallel
from anygauge.distributed.layout import Layout
from anygauge.engines.megatron.model_checks import model_problems
from anygauge_hooks.errors import ConfigError
from anygauge_tests.ranks import coordinates


def test_neighbors_divide_matrices_then_sequences_then_samples_then_layers() -> None:
    layout = Layout(16, Parallel(tensor=2, context=2, pipeline=2))
    found = [coordinates(layout, rank) for rank in range(16)]
    assert [each.tensor for each in found] == [0, 1] * 8
    assert [each.context for each in found] == [0, 0, 1, 1] * 4
    assert [each.data for each in found] == [0, 0, 0, 0, 1, 1, 1, 1] * 2
    assert [each.pipeline for each in found] == [0] * 8 + [1] * 8
    assert (layout.data, layout.reporting_ranks()) == (2, [8, 12])


def test_experts_divide_the_ranks_of_a_stage() -> None:
    layout = Layout(16, Parallel(tensor=4, pipeline=2, expert=4, expert_tensor=2))
    found = [coordinates(layout, rank) for rank in range(16)]
    assert [each.expert_tensor for each in found] == [0, 1] * 8
    assert [each.expert for each in found] == [0, 0, 1, 1, 2, 2, 3, 3] * 2


def test_without_parallelism_every_rank_has_a_share() -> None:
    layout = Layout(3, Parallel())
    assert (layout.dp_ranks(), layout.reporting_ranks()) == ([0, 1, 2], [0, 1, 2])


@pytest.mark.parametrize(
    ("ranks", "sizes", "path", "hint"),
    [
        (3, {"tensor": 2}, "tensor", "must be a multiple of tensor * pipeline * context = 2"),
        (4, {"tensor": 2, "context": 4}, "context", "= 8"),
        (4, {"pipeline": 2, "expert": 4}, "expert", "must divide the 2 workers of a pipeline stage"),
        (2, {"virtual_pipeline": 2}, "virtual_pipeline", "needs train.parallel.pipeline above 1"),
        (2, {"sequence": True}, "sequence", "needs train.parallel.tensor above 1"),
    ],
)
def test_sizes_that_do_not_fit(ranks: int, sizes: dict[str, Any], path: str, hint: str) -> None:
    problems = list(size_problems(ranks, Parallel(**sizes)))
    assert [problem.path for problem in problems] == [f"train.parallel.{path}"]
    assert hint in problems[0].hint
    with pytest.raises(ConfigError, match=path):
        Layout(ranks, Parallel(**sizes))


MODEL = {
    "num_layers": 12,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "num_moe_experts": 6,
    "moe_ffn_hidden_size": 40,
}


@pytest.mark.parametrize(
    ("sizes", "changes", "found"),
    [
        ({"tensor": 2, "pipeline": 4, "virtual_pipeline": 3, "expert": 3}, {}, []),
        ({"tensor": 4}, {}, []),
        ({"tensor": 4}, {"num_attention_heads": 12, "num_query_groups": 6}, [("tensor", "6 query groups")]),
        ({"tensor": 2}, {"ffn_hidden_size": 97}, [("tensor", "97 rows of its MLP")]),
        ({"expert": 4}, {}, [("expert", "6 experts")]),
        ({"expert": 2}, {"num_moe_experts": None}, [("expert", "no experts")]),
        ({"tensor": 2, "sequence": False}, {}, [("sequence", "experts under tensor > 1")]),
        ({"tensor": 2, "sequence": False}, {"num_moe_experts": None}, []),
        ({"expert_tensor": 3}, {}, [("expert_tensor", "40 rows of each expert")]),
        ({"tensor": 2, "context": 2}, {"linear_num_key_heads": 4}, []),
        (
            {"context": 4},
            {"linear_num_key_heads": 6},
            [("context", "tensor * context = 4 must divide the model's 6 key heads of linear attention")],
        ),
        ({"tensor": 2, "context": 2}, {"linear_num_key_heads": 2}, [("tensor", "tensor * context = 4")]),
        ({"pipeline": 5}, {}, [("pipeline", "12 layers")]),
        ({"pipeline": 2, "virtual_pipeline": 4}, {}, [("virtual_pipeline", "12 layers")]),
    ],
)
def test_sizes_that_do_not_divide_the_model(
    sizes: dict[str, int], changes: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    problems = list(model_problems(Parallel(**sizes), {**MODEL, **changes}, {}))
    assert [problem.path for problem in problems] == [f"train.parallel.{path}" for path, _ in found]
    assert all(text in problem.hint for problem, (_, text) in zip(problems, found, strict=True))


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"pipeline": 5}, {FIRST: 4}),
        ({"pipeline": 4}, {FIRST: 3, LAST: 1}),
        ({"pipeline": 2}, {FIRST: 5, LAST: 7}),
        ({"pipeline": 2, "virtual_pipeline": 2}, {LAST: 8}),
        ({"pipeline": 2}, {LAYOUT: "Et*7|t*5L"}),
        ({"pipeline": 4, "virtual_pipeline": 2}, {LAYOUT: "E,t*2|(tt|)*5,|L"}),
    ],
)
def test_layers_that_stages_divide_unevenly(sizes: dict[str, int], options: dict[str, int]) -> None:
    assert not list(model_problems(Parallel(**sizes), MODEL, options))


@pytest.mark.parametrize(
    ("sizes", "options", "hint"),
    [
        ({"pipeline": 5}, {FIRST: 2}, "leaves 10 of the model's 12 layers to 4 pipeline stages"),
        ({"pipeline": 4}, {FIRST: 6, LAST: 6}, "leaves 0 of the model's 12 layers to 2 pipeline stages"),
        ({"pipeline": 2}, {FIRST: 5, LAST: 5}, "leaves 2 of the model's 12 layers to 0 pipeline stages"),
        ({"pipeline": 4}, {FIRST: 13}, "leaves -1 of the"),
        ({}, {FIRST: 6}, "leaves 6 of the"),
        ({"pipeline": 4}, {FIRST: 0}, "must be at least one"),
        ({"pipeline": 4}, {LAST: "3"}, "must be at least one"),
        ({"pipeline": 2, "virtual_pipeline": 2}, {LAST: 7}, "a positive multiple of virtual_pipeline = 2"),
        ({"pipeline": 2}, {LAYOUT: "garbage"}, "must be a string such as 'Et*6|t*6L'"),
        ({"pipeline": 2}, {LAYOUT: [["embedding"], ["loss"]]}, "must be a string"),
        ({"pipeline": 2}, {LAYOUT: "Et*6|t*6"}, "must be a string"),
        ({"pipeline": 2}, {LAYOUT: "Et*6|t*7L"}, "has 13 layers (t), the model 12"),
        ({"pipeline": 2}, {LAYOUT: "Et*4|t*4|t*4L"}, "has 3 parts (|), pipeline * virtual_pipeline is 2"),
        ({"pipeline": 2}, {LAYOUT: "Et*6|t*6L", FIRST: 6}, "already decides this"),
    ],
)
def test_layers_that_do_not_fit_their_stages(
    sizes: dict[str, int], options: dict[str, Any], hint: str
) -> None:
    [problem] = model_problems(Parallel(**sizes), MODEL, options)
    assert problem.path.removeprefix("train.megatron.") in options
    assert hint in problem.hint
