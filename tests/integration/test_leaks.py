"""A hundred steps with everything on leave nothing behind: no memory, no file, no thread, no process."""

from __future__ import annotations

import json
import tempfile
import threading
from collections import Counter
from pathlib import Path

import psutil
import pytest

from anygauge.config.load import load_config
from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge.trainer.run import train

STEPS, SETTLED = 100, 40
GROWTH_GIB = 8 / 1024
"""Pages that an allocator keeps come and go by a few MiB; 60 steps that leak a rollout each show more."""


def held() -> Counter[str]:
    """Return the files, threads and children of this process, and what is in shared and temporary places."""
    process = psutil.Process()
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    found = [file.path for file in process.open_files()]
    found += [f"thread {thread.name}" for thread in threading.enumerate()]
    found += [f"child {child.pid}" for child in process.children(recursive=True)]
    found += [str(path) for place in places for path in place.iterdir()]
    return Counter(found)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_hundred_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_qwen3(tmp_path / "model", init_std=0.3)
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(20) for b in range(20)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "leak_lengths.py").write_text("def length(response):\n    return len(response) / 8\n")
    (tmp_path / "run.toml").write_text(
        f"""
        run = {{name = "run", directory = "{tmp_path}", steps = {STEPS}}}
        model = "{model}"
        [data]
        train = ["{tmp_path}/sums.jsonl"]
        [reward]
        function = "leak_lengths:length"
        [rollout]
        prompts_per_step = 32
        samples_per_prompt = 4
        max_new_tokens = 8
        [eval]
        data = ["{tmp_path}/sums.jsonl@[:32]"]
        interval = 25
        [save]
        every = 5
        hf_every = 50
        [placement]
        launcher = "local"
        train_workers = 2
        threads_per_worker = 1
        """
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    plugins = load_plugins(only=["cpu", "models"])
    loaded = load_config(tmp_path / "run.toml", backend="cpu", plugins=plugins)
    train(loaded, plugins)  # warms up what is made once for a process
    loaded = load_config(tmp_path / "run.toml", [("run.overwrite", True)], backend="cpu", plugins=plugins)
    before = held()
    train(loaded, plugins)
    assert held() - before == Counter()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "train/step" in line]
    assert len(steps) == STEPS
    for name in ("perf/driver_rss_gib", "perf/worker_rss_gib"):
        early, late = (
            max(line[name] for line in part) for part in (steps[SETTLED - 20 : SETTLED], steps[-20:])
        )
        assert late - early < GROWTH_GIB, name
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == loaded.config.save.keep
