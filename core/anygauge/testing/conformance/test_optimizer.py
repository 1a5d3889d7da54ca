"""The AdamW that a backend makes agrees with one in float64, and goes on as the engine asks it to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from anygauge.plugins import Plugins
from anygauge.testing.conformance.process_state import rng_untouched
from anygauge.testing.conformance.tolerances import TOLERANCES
from anygauge_hooks.types import BackendSpec, Device

pytestmark = pytest.mark.conformance

SIZES = (1, 7, 64, 1031)
SETTINGS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.98), "eps": 1e-3, "weight_decay": 0.3}
"""None is torch's default, so that an optimizer that forgets one differs."""
OTHERS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.7), "eps": 1e-8, "weight_decay": 0.01}
RATES = (0.1, 0.05, 0.2, 0.0, 0.15)
"""Learning rate of each step, as a schedule sets it."""
MOMENTS = ("exp_avg", "exp_avg_sq")
MANY, LARGE = 150, (1 << 20) + 3
"""More tensors, and larger ones, than one launch of a kernel may take."""

Groups = list[dict[str, Any]]


class Maker:
    """Makes the backend's optimizer, or torch's where it makes none."""

    def __init__(self, plugins: Plugins, backend: BackendSpec) -> None:
        self._plugins, self._backend = plugins, backend

    def __call__(self, weights: list[Tensor], **settings: Any) -> Any:
        """Return an optimizer of weights as :func:`two_groups` divides them."""
        return self.of_groups(two_groups(weights), **settings)

    def of_groups(self, groups: Groups, **settings: Any) -> Any:
        """Return an optimizer of groups."""
        settings = SETTINGS | settings
        made: Optimizer | None = self._plugins.first(
            "make_optimizer", backend=self._backend, param_groups=groups, **settings
        )
        return AdamW(groups, **settings) if made is None else made


@pytest.fixture
def weights(device: Device) -> list[Tensor]:
    return make_weights(device)


@pytest.fixture
def make(plugins: Plugins, backend: BackendSpec) -> Maker:
    return Maker(plugins, backend)


@pytest.fixture
def optimizer(make: Maker, weights: list[Tensor]) -> Optimizer:
    optimizer: Optimizer = make(weights)
    return optimizer


def make_weights(device: Device, sizes: Sequence[int] = SIZES) -> list[Tensor]:
    """Return shards of one buffer, which are views that start anywhere."""
    generator = torch.Generator().manual_seed(0)
    buffer = torch.randn(sum(sizes), generator=generator).to(device.torch_device)
    return list(torch.split(buffer, list(sizes)))


def two_groups(weights: list[Tensor]) -> Groups:
    """Return parameter groups of which the second does not decay."""
    return [{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.0}]


def in_float64(weights: list[Tensor], **settings: Any) -> tuple[list[Tensor], AdamW]:
    wide = [weight.cpu().double() for weight in weights]
    return wide, AdamW(two_groups(wide), **(SETTINGS | settings), foreach=False, fused=False)


def take_step(optimizer: Optimizer, step: int, *, without: Sequence[int] = ()) -> None:
    """Step with gradients and rates that depend on the number of the step; some gradients are tiny.

    :param without: Places of weights that have no gradient.
    """
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = RATES[step] / (1 + number)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for place, (weight, gradient) in enumerate(zip(weights, gradients_of(weights, step), strict=True)):
        weight.grad = None if place in without else gradient
    optimizer.step()


def gradients_of(weights: Sequence[Tensor], step: int) -> list[Tensor]:
    """Return gradients that are views of one buffer and start anywhere, as Megatron's are."""
    generator = torch.Generator().manual_seed(step)
    sizes = [1, *map(len, weights)]
    drawn = [torch.randn(size, generator=generator) ** 5 for size in sizes]
    return list(torch.split(torch.cat(drawn).to(weights[0]), sizes))[1:]


def assert_alike(actual: Tensor, expected: Tensor) -> None:
    relative, absolute = TOLERANCES["float32"]
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=relative, atol=absolute * scale)


def assert_states_alike(
    optimizer: Optimizer, weights: list[Tensor], expected: Optimizer, wide: list[Tensor]
) -> None:
    for weight, other in zip(weights, wide, strict=True):
        assert_alike(weight, other)
        assert (weight in optimizer.state) == (other in expected.state)
        if other in expected.state:
            state, theirs = optimizer.state[weight], expected.state[other]
            assert float(state["step"]) == float(theirs["step"])
            for name in MOMENTS:
                assert_alike(state[name], theirs[name])


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


# -------------------------------------------------------------------------
# Steps
# -------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [SETTINGS, OTHERS], ids=["settings", "others"])
def test_steps_are_those_of_adamw_in_float64(
    make: Maker, weights: list[Tensor], settings: dict[str, Any]
) -> None:
    wide, expected = in_float64(weights, **settings)
    optimizer, places = make(weights, **settings), [weight.data_ptr() for weight in weights]
    for step in range(len(RATES)):
        take_step(optimizer, step)
        take_step(expected, step)
        assert_states_alike(optimizer, weights, expected, wide)
    assert [weight.data_ptr() for weight in weights] == places, "the engine's are where they were"


def test_what_a_group_says_counts_at_each_step(make: Maker, weights: list[Tensor]) -> None:
    wide, expected = in_float64(weights)
    optimizer = make(weights)
    steps: list[dict[str, Any]]
    steps = [{"weight_decay": 0.5}, {"betas": (0.5, 0.9)}, {"eps": 0.1}, {"weight_decay": 0.0}]
    for step, changes in enumerate(steps):
        for each in (optimizer, expected):
            each.param_groups[step % 2].update(changes)
            take_step(each, step)
        assert_states_alike(optimizer, weights, expected, wide)


def test_weights_without_a_gradient_stay_as_they_are(make: Maker, weights: list[Tensor]) -> None:
    wide, expected = in_float64(weights)
    optimizer = make(weights)
    for step, without in enumerate(((1, 3), (), (0,), (1, 2, 3), ())):
        take_step(optimizer, step, without=without)
        take_step(expected, step, without=without)
        assert_states_alike(optimizer, weights, expected, wide)


def test_many_and_large_tensors_are_updated(make: Maker, device: Device) -> None:
    weights = make_weights(device, (*[3] * MANY, LARGE))
    wide, expected = in_float64(weights)
    optimizer = make(weights)
    for step in range(2):
        take_step(optimizer, step)
        take_step(expected, step)
    assert_states_alike(optimizer, weights, expected, wide)


def test_a_gradient_that_is_no_number_shows(optimizer: Optimizer, weights: list[Tensor]) -> None:
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    gradients = [weight.grad for weight in weights]
    weights[2].grad[5], weights[2].grad[6] = torch.nan, torch.inf  # type: ignore[index]
    before = [gradient.clone() for gradient in gradients if gradient is not None]
    optimizer.step()
    assert weights[2].isnan().nonzero().view(-1).tolist() == [5, 6]
    assert all(weight.isfinite().all() for index, weight in enumerate(weights) if index != 2)
    for gradient, old in zip(gradients, before, strict=True):
        assert gradient is not None
        torch.testing.assert_close(gradient, old, rtol=0, atol=0, equal_nan=True)


def test_steps_are_the_same_bits_each_time(make: Maker, device: Device) -> None:
    runs = []
    for _ in range(2):
        weights = make_weights(device)
        optimizer = make(weights)
        with rng_untouched(device):
            take_step(optimizer, 0)
            take_step(optimizer, 1)
        runs.append(weights)
    assert equal(*runs)


def test_optimizers_share_nothing(make: Maker, device: Device) -> None:
    alone, beside, other = (make_weights(device) for _ in range(3))
    optimizer, both = make(alone), [make(beside), make(other, **OTHERS)]
    for step in range(3):
        take_step(optimizer, step)
        take_step(both[0], step)
        take_step(both[1], step + 1)
    assert equal(alone, beside)
    wide, expected = in_float64(make_weights(device), **OTHERS)
    for step in range(3):
        take_step(expected, step + 1)
    assert_states_alike(both[1], other, expected, wide)


# -------------------------------------------------------------------------
# What the engine does with it
# -------------------------------------------------------------------------


def test_groups_are_as_they_were_given(make: Maker, weights: list[Tensor]) -> None:
    groups: Groups = [
        {"params": weights[:2], "wd_mult": 0.5, "lr": 0.7},
        {"params": weights[2:], "wd_mult": 0.0},
    ]
    given = [dict(group) for group in groups]
    optimizer = make.of_groups(groups)
    assert isinstance(optimizer, Optimizer)
    assert len(optimizer.param_groups) == 2
    for made, group in zip(optimizer.param_groups, given, strict=True):
        expected = SETTINGS | {name: value for name, value in group.items() if name != "params"}
        assert {name: made[name] for name in expected} == expected
        assert all(ours is theirs for ours, theirs in zip(made["params"], group["params"], strict=True))


def test_tensors_may_take_the_place_of_those_it_was_made_with(make: Maker, weights: list[Tensor]) -> None:
    """The engine's own are views, which torch refuses: an optimizer is made of detached ones."""
    wide, expected = in_float64(weights)
    optimizer = make([weight.clone() for weight in weights])
    for group, own in zip(optimizer.param_groups, two_groups(weights), strict=True):
        group["params"] = own["params"]
    for step in range(2):
        take_step(optimizer, step)
        take_step(expected, step)
    assert_states_alike(optimizer, weights, expected, wide)


def test_memory_goes_while_the_engine_sleeps(make: Maker, device: Device) -> None:
    weights, alone = make_weights(device), make_weights(device)
    optimizer, expected = make(weights), make(alone)
    for step in range(3):
        take_step(optimizer, step)
        take_step(expected, step)
        moments = [optimizer.state[weight][name] for weight in weights for name in MOMENTS]
        filler = move([weights[0], *moments])
    del filler
    assert equal(weights, alone)


def move(tensors: list[Tensor]) -> list[Tensor]:
    """Give storages other memory, and return tensors that may have taken the old."""
    storages: Any = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values()
    copies = [storage.cpu().clone() for storage in storages]
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    filler = [torch.full((size,), 255, dtype=torch.uint8, device=tensors[0].device) for size in sizes]
    for storage, copy, size in zip(storages, copies, sizes, strict=True):
        storage.resize_(size)
        storage.copy_(copy)
    return filler


# -------------------------------------------------------------------------
# State
# -------------------------------------------------------------------------


def test_state_has_the_names_of_torch_and_lies_on_the_device(
    optimizer: Optimizer, weights: list[Tensor], device: Device
) -> None:
    take_step(optimizer, 0)
    take_step(optimizer, 1)
    for weight in weights:
        state: Mapping[str, Any] = optimizer.state[weight]
        assert set(state) == {"step", *MOMENTS}
        assert float(state["step"]) == 2
        assert state["step"].dim() == 0
        for name in MOMENTS:
            assert state[name].shape == weight.shape
            assert state[name].dtype == torch.float32
            assert state[name].device.type == device.type
    places = [optimizer.state[weight][name].data_ptr() for weight in weights for name in MOMENTS]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("first", [1, 2])
def test_an_optimizer_goes_on_from_the_state_of_another(make: Maker, device: Device, first: int) -> None:
    weights = make_weights(device)
    optimizer = make(weights)
    for step in range(first):
        take_step(optimizer, step, without=(1,))
    copies = [weight.clone() for weight in weights]
    resumed = make(copies, **OTHERS)  # the state says what it had been made with
    take_step(resumed, 3)
    for copy, weight in zip(copies, weights, strict=True):
        copy.copy_(weight)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))  # it would share the tensors
    for group, other in zip(resumed.param_groups, optimizer.param_groups, strict=True):
        assert {name: group[name] for name in SETTINGS} == {name: other[name] for name in SETTINGS}
    for step in range(first, len(RATES)):
        take_step(optimizer, step)
        take_step(resumed, step)
        assert equal(weights, copies)


def test_a_checkpoint_gives_each_weight_tensors_of_its_own(make: Maker, device: Device) -> None:
    """The engine restores the state of one weight after the other, in any order."""
    weights = make_weights(device)
    optimizer = make(weights)
    for step in range(2):
        take_step(optimizer, step, without=(3,) if step else ())
    copies = [weight.clone() for weight in weights]
    resumed = make(copies)
    for weight, copy in reversed([*zip(weights, copies, strict=True)]):
        resumed.state.pop(copy, None)
        resumed.state[copy] = {name: value.clone() for name, value in optimizer.state[weight].items()}
    for step in range(2, len(RATES)):
        take_step(optimizer, step)
        take_step(resumed, step)
    assert equal(weights, copies)
    for weight, copy in zip(weights, copies, strict=True):
        assert float(resumed.state[copy]["step"]) == float(optimizer.state[weight]["step"])


def test_it_goes_on_after_very_many_steps(make: Maker, weights: list[Tensor]) -> None:
    wide, expected = in_float64(weights, **OTHERS)
    optimizer = make(weights, **OTHERS)
    for each, own in ((optimizer, weights), (expected, wide)):
        take_step(each, 0)
        for weight in own:
            each.state[weight]["step"].fill_(100_000)
    for step in range(1, 3):
        take_step(optimizer, step)
        take_step(expected, step)
    assert_states_alike(optimizer, weights, expected, wide)
