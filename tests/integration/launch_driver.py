"""A driver that starts two workers and ends in the way that its argument says. Run by test_launch_endings."""

from __future__ import annotations

import sys
from pathlib import Path

from anygauge.config.schema import Config
from anygauge.plugins import find_backend, load_plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.signals import terminate_as_exception


def main(launcher: str, ending: str, directory: str, address: str) -> None:
    config = Config.model_validate(
        {
            "run": {"name": "endings", "timeout_s": 100},
            "model": {"path": "model"},
            "data": {"train": ["train.jsonl"]},
            "reward": {"function": "exact_match"},
            "placement": {"launcher": launcher, "train_workers": 2},
            "cluster": {"address": address or "start"},
        }
    )
    plugins = load_plugins(only=["cpu"])
    backend = find_backend(plugins, plugins.named("register_backends"), "cpu")
    with (
        terminate_as_exception(),
        launch_workers(
            config,
            backend,
            plugins,
            worker_class="anygauge_tests.workers:ProbeWorker",
            role="actor",
            run_directory=Path(directory),
        ) as group,
    ):
        sys.stdout.write(f"{' '.join(str(worker.pid) for worker in group.workers)}\n")
        sys.stdout.flush()
        if ending == "success":
            group.call("sum_ranks")
        elif ending == "error":
            group.call("fail", rank=1, kind="value")
        else:
            group.call("hang")


if __name__ == "__main__":
    main(*sys.argv[1:])
