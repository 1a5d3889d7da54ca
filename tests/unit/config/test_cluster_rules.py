"""Rules of ``[placement]`` and ``[cluster]``."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from anygauge.config import LoadedConfig
from anygauge_hooks.errors import ConfigError

Load = Callable[..., LoadedConfig]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["--cluster.address=head"],
            'cluster.address: found \'head\' on the command line; write "start", "auto"',
        ),
        (["--cluster.address=head:99999"], "cluster.address: found 'head:99999'"),
        (["--cluster.address=fd00::2:6379"], "an IPv6 address in brackets"),
        (["--cluster.address=auto", "--placement.launcher=local"], "has no effect with placement.launcher"),
        (
            ["--placement.rollout_workers=33"],
            "found 33 on the command line; leaves engines without a prompt: at most rollout.prompts",
        ),
        (
            ["--placement.rollout_workers=1", "--debug.mode=train_only", "--debug.replay_rollouts=dumps"],
            "placement.rollout_workers: found 1 on the command line; there is nothing",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(load: Load, overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=overrides, check_files=False)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "address", ["start", "auto", "head:6379", "10.0.0.1:6379", "[fd00::2]:6379", "ray://h:1"]
)
def test_an_address_of_each_kind_is_taken(load: Load, address: str) -> None:
    assert load({"cluster": f'address = "{address}"'}).config.cluster.address == address


def test_more_trainers_than_prompts_are_fine_where_others_generate(load: Load) -> None:
    given = ["--rollout.prompts_per_step=2", "--placement.train_workers=3", "--placement.rollout_workers=2"]
    assert load(overrides=given).config.placement.train_workers == 3
