"""Errors about trainers and engines that cannot share devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from anygauge.config.load import LoadedConfig
from anygauge.plugins import Plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec, TrainEngineSpec
from anygauge_hooks.errors import ConfigError
from anygauge_hooks.weights import WeightTransportSpec

Load = Callable[..., LoadedConfig]
SLEEPS = ["--placement.colocated=true", "--train.engine=sleeper", "--rollout.engine=server"]
TWO = ["--placement.train_workers=2", "--placement.rollout_workers=1"]


class Sleepers:
    """Engines that share devices, some that do not, and a transport that needs devices of its own."""

    @hookimpl
    def register_train_engines(self) -> Iterable[TrainEngineSpec]:
        return [
            TrainEngineSpec(name=name, make=none, supports_offload=name == "sleeper")
            for name in ("sleeper", "awake")
        ]

    @hookimpl
    def register_rollout_engines(self) -> Iterable[RolloutEngineSpec]:
        yield RolloutEngineSpec(name="server", serve=none, releases_memory=True, devices=lambda config: 2)
        yield RolloutEngineSpec(name="sleepless", serve=none)

    @hookimpl
    def register_weight_transports(self) -> Iterable[WeightTransportSpec]:
        return [WeightTransportSpec(name="ring", make=none, same_device=False)]


def none(config: object, context: object) -> None: ...


@pytest.fixture(autouse=True)
def sleepers(plugins: Plugins) -> None:
    plugins.register(Sleepers(), "sleepers")


def test_what_fits_is_taken(load: Load) -> None:
    assert load({}, [*SLEEPS, *TWO]).config.placement.colocated
    assert load({}, [*SLEEPS, *TWO, "--weight_sync.transport=ring"]), "the host is no accelerator"


def test_what_never_sleeps_generates_while_it_trains(load: Load) -> None:
    """And needs no engine that can sleep."""
    awake = ["--placement.offload=never", "--rollout.schedule=async"]
    sleepless = ["--train.engine=awake", "--rollout.engine=sleepless"]
    assert not load({}, [*SLEEPS, *TWO, *awake, *sleepless]).config.placement.sleeps
    assert load({}, [*SLEEPS, *TWO]).config.placement.sleeps


def test_a_replay_shares_devices_with_nobody(load: Load) -> None:
    replay = ["--debug.mode=train_only", "--debug.replay_rollouts=dumps", "--placement.rollout_workers=0"]
    assert load({}, [*SLEEPS, *replay], check_files=False).config.placement.colocated


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["--rollout.schedule=async"],
            "rollout.schedule: found 'async' on the command line; with placement.coloc",
        ),
        (
            ["--rollout.schedule=one_step_off"],
            'only if nobody sleeps: write placement.offload = "never" where both fit, or rollout.schedule',
        ),
        (
            ["--rollout.engine=sleepless"],
            "rollout.engine: found 'sleepless' on the command line; placement.colocated needs a server that",
        ),
        (["--rollout.engine=transformers"], "choose from: server"),
        (
            ["--train.engine=awake"],
            "train.engine: found 'awake' on the command line; never releases its memory",
        ),
        (
            ["--placement.rollout_workers=0"],
            "placement.colocated: found True on the command line; needs engines",
        ),
        (
            ["--placement.rollout_workers=2"],
            "2 servers of 2 devices each must fit on the devices of placement.train_",
        ),
    ],
)
def test_what_does_not_fit_is_refused(load: Load, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, [*SLEEPS, *TWO, *overrides], check_files=False)
    assert text in str(caught.value)


def test_a_communicator_cannot_have_an_accelerator_twice(load: Load) -> None:
    ring = [*SLEEPS, *TWO, "--weight_sync.transport=ring"]
    with pytest.raises(
        ConfigError, match=r"weight_sync.transport: .*cannot reach engines on the trainers' devices"
    ):
        load({}, ring, backend="fast", check_files=False)


def test_engines_without_these_marks_work_as_ever(load: Load) -> None:
    plain = ["--train.engine=awake", "--rollout.engine=sleepless", *TWO]
    assert not load({}, plain).config.placement.colocated
