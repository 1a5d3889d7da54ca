"""Copies of a sharded model are compared, and where they differ, named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from anygauge.config.load import load_config
from anygauge.engines.fsdp import mesh
from anygauge.engines.fsdp.mesh import ReplicaCheck, data_mesh, mesh_groups
from anygauge.engines.fsdp.weights import LocalShard
from anygauge.plugins import load_plugins
from anygauge_hooks.errors import ReplicaError
from anygauge_tests.recipe import tiny_recipe

TWO_BY_TWO: Any = SimpleNamespace(ndim=2, mesh=torch.tensor([[0, 1], [2, 3]]))
"""Ranks 0 and 1 shard the first copy of a model, 2 and 3 the second."""


def shard(values: list[float]) -> LocalShard:
    tensor = torch.tensor(values)
    tensor.grad = tensor + 1
    return LocalShard("layer.weight", tensor)


def flipped(values: list[int], index: int) -> list[int]:
    return [value + (position == index) for position, value in enumerate(values)]


@pytest.mark.parametrize(("index", "name"), [(0, "layer.weight"), (1, "gradient of layer.weight")])
def test_a_bit_that_differs_is_named(monkeypatch: pytest.MonkeyPatch, index: int, name: str) -> None:
    check = ReplicaCheck(TWO_BY_TWO, [shard([1.0, 2.0])], 2)
    seen: list[int] = []

    def gather(own: list[int], kind: Any) -> list[list[int]]:
        """Rank 3 has one bit of its own from the fourth step on; shards of one copy differ anyway."""
        seen.append(1)
        other = [value + 7 for value in own]
        return [own, other, own, flipped(other, index) if len(seen) > 2 else other]

    monkeypatch.setattr(mesh, "all_gather_values", gather)
    for step in (1, 2, 3):
        check.check(step)
    assert len(seen) == 2, "in the first step, and every second one"
    with pytest.raises(ReplicaError, match=rf"step 4: {name} \(rank 3\)\. They were equal in .* step 2"):
        check.check(4)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Be the first of some ranks, in a group whose collectives do nothing."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=request.param)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "replicas", "names"),
    [(6, 2, ["replicate", "shard"]), (6, 1, ["shard"]), (1, 1, [])],
    indirect=["ranks"],
)
@pytest.mark.usefixtures("ranks")
def test_weights_have_groups_of_their_own_and_all_are_tried(replicas: int, names: list[str]) -> None:
    default, *own = mesh_groups(data_mesh(replicas, "cpu", 9.0))
    assert [use.name for use in own] == names
    sizes = {"shard": 6 // replicas, "replicate": replicas}
    assert [use.group.size() for use in own] == [sizes[name] for name in names]
    assert dist.group.WORLD is default.group
    assert default.group not in [use.group for use in own]


def test_one_copy_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "all_gather_values", None)
    ReplicaCheck(SimpleNamespace(ndim=1), [shard([1.0])], 1).check(1)  # type: ignore[arg-type]  # a mesh
    ReplicaCheck(TWO_BY_TWO, [shard([1.0])], 0).check(1)


@pytest.mark.parametrize(
    ("engine", "text"),
    [("fsdp", "must be a multiple of it"), ("megatron", "copies the model to the workers")],
)
def test_copies_that_the_workers_cannot_hold_are_refused(tmp_path: Path, engine: str, text: str) -> None:
    path = tiny_recipe(tmp_path, train__engine=engine)
    keys = {"train.parallel.replicate": 2, "placement.train_workers": 3}
    with pytest.raises(Exception, match=text):
        load_config(path, list(keys.items()), backend="cpu", plugins=load_plugins())


def test_the_megatron_engine_gathers_nothing(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path)
    keys = {"train.parallel.reshard_after_forward": False}
    with pytest.raises(Exception, match=r"found False .* gathers no weights in its layers"):
        load_config(path, list(keys.items()), backend="cpu", plugins=load_plugins())
    load_config(path, [*keys.items(), ("train.engine", "fsdp")], backend="cpu", plugins=load_plugins())
