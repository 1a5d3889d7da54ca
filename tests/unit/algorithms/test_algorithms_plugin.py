"""What the core's algorithm plugin registers."""

from __future__ import annotations

from anygauge.algorithms import advantages, losses, plugin


def test_register_advantage_estimators() -> None:
    assert {item.name: item.fn for item in plugin.register_advantage_estimators()} == {
        "grpo": advantages.grpo
    }


def test_register_policy_losses() -> None:
    registered = {item.name: item.fn for item in plugin.register_policy_losses()}
    assert registered == {"ppo_clip": losses.ppo_clip, "sft": losses.sft}
