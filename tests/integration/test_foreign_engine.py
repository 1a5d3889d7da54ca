"""A run on a rollout engine that is no SGLang: vLLM's HTTP API in a plugin, without a line in core."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from anygauge_tests import vllm_engine
from anygauge_tests.observer import Rewarding, run_with_observer
from anygauge_tests.recipe import tiny_recipe

pytestmark = pytest.mark.usefixtures("forked_actors")
FOLDER = Path(vllm_engine.__file__).parent


@pytest.fixture
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare the plugin to this process and its workers."""
    metadata = tmp_path / "site" / "vllm_engine-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-engine\nVersion: 1.0\n")
    entry = "[anygauge.plugins]\nvllm_engine = anygauge_tests.vllm_engine.plugin\n"
    (metadata / "entry_points.txt").write_text(entry)
    monkeypatch.syspath_prepend(str(metadata.parent))


@pytest.mark.usefixtures("_installed")
def test_another_engine_serves_a_run_and_takes_its_weights(tmp_path: Path) -> None:
    observer = Rewarding()
    keys = {
        "run__steps": 3,
        "run__timeout_s": 60,
        "rollout__engine": "vllm",
        "reward__function": "digits",
        "placement__rollout_workers": 1,
        "weight_sync__transport": "disk",
        "train__lr": 5e-3,  # so that stale weights are far from the trainer's
    }
    info = run_with_observer(tiny_recipe(tmp_path, **keys), observer)
    assert info.step == 3
    samples = [
        [sample for group in observer.groups[step : step + 4] for sample in group.samples]
        for step in (0, 4, 8)
    ]
    for step, drawn in enumerate(samples):
        assert len(drawn) == 16
        assert {version for each in drawn for version in each.weight_versions} == {step}
    assert min(metrics["train/grad_norm"] for metrics in observer.metrics[:2]) > 0, "both updates are some"
    # The engine's log-probs are the trainer's in each step: it has the weights of each version.
    assert max(metrics["health/logprob_abs_diff"] for metrics in observer.metrics) < 1e-4


def test_its_plugin_knows_nothing_but_the_contract() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.py")]
    imported = {
        name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [n.name for n in node.names]
        )
    }
    own = {name for name in imported if name.startswith("anygauge")}
    assert {name.partition(".")[0] for name in own} == {"anygauge_hooks", "anygauge_tests"}
    assert all("vllm_engine" in name for name in own if name.startswith("anygauge_tests"))
