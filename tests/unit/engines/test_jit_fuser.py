"""``bench/jit_fuser.py`` makes a model of every family, also of those that see and hear."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import Plugins, load_plugins
from anygauge_hooks.engines import WorkerContext

BENCH = Path(__file__).parents[3] / "bench/jit_fuser.py"
FAMILIES = load_plugins(only=["models"]).named("register_models")


@pytest.mark.parametrize("family", [name for name in FAMILIES if FAMILIES[name].media is not None])
def test_calls_are_counted_of_families_with_towers(
    context: WorkerContext, plugins: Plugins, family: str
) -> None:
    prepare_megatron(plugins, context.backend)
    script = runpy.run_path(str(BENCH))
    fields = FAMILIES[family].tiny()
    engine = script["make_engine"](context, fields)
    script["train"](engine, fields.get("text_config", fields)["vocab_size"])
    assert engine.schedule.num_steps == 1
