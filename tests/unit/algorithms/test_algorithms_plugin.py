"""Registrations of the core's algorithm plugin."""

from __future__ import annotations

from anygauge.algorithms import advantages, correction, losses, plugin, token_advantages


def test_register_advantage_estimators() -> None:
    assert {
        item.name: (item.fn, item.kind, item.needs) for item in plugin.register_advantage_estimators()
    } == {
        "grpo": (advantages.grpo, "group", ()),
        "dr_grpo": (advantages.dr_grpo, "group", ()),
        "rloo": (advantages.rloo, "group", ()),
        "gae": (token_advantages.gae, "token", ("values",)),
        "reinforce_plus_plus": (token_advantages.reinforce_plus_plus, "token", ()),
        "reinforce_plus_plus_baseline": (token_advantages.reinforce_plus_plus_baseline, "token", ()),
        "on_policy_distillation": (
            token_advantages.on_policy_distillation,
            "token",
            ("teacher_log_probs", "old_log_probs"),
        ),
    }


def test_register_policy_losses() -> None:
    registered = {item.name: item.fn for item in plugin.register_policy_losses()}
    assert registered == {
        "ppo_clip": losses.ppo_clip,
        "gspo": losses.gspo,
        "cispo": losses.cispo,
        "policy_gradient": losses.policy_gradient,
        "sft": losses.sft,
    }


def test_register_corrections() -> None:
    registered = {item.name: (item.fn, item.needs) for item in plugin.register_corrections()}
    names = ("tis", "icepop", "mis", "rejection", "veto", "metrics_only", "sequence_mask")
    assert set(registered) == set(names)
    for name, (fn, needs) in registered.items():
        assert fn is getattr(correction, name)
        assert needs == (() if name == "sequence_mask" else ("old_log_probs",))
