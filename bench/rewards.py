"""Time that scoring a step costs the driver: 128 groups of 8 samples, by kind of function."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from anygauge.config.schema import Reward
from anygauge.plugins import load_plugins
from anygauge.rollout.rewards import Scorer
from anygauge_hooks.rl import Group
from anygauge_tests.scoring import group

MODULE = """
def sync(response, label): return float(response == label)
async def later(response, label): return float(response == label)
def group(response, label): return [float(r == each) for r, each in zip(response, label)]
"""
GROUPS, SAMPLES, REPEATS = 128, 8, 50


def groups() -> list[Group]:
    """Return a step of right answers, each of three tokens."""
    return [group(*["59"] * SAMPLES, index=index, label="59", length=3) for index in range(GROUPS)]


def measure(reward: Reward) -> tuple[float, float]:
    """Return the least and the median milliseconds of a step."""
    step = groups()
    with Scorer(reward, load_plugins(only=[]), max_new_tokens=4, log=None) as scorer:
        scorer.score(step)
        times = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            scorer.score(step)
            times.append(1e3 * (time.perf_counter() - started))
    return min(times), sorted(times)[REPEATS // 2]


def main() -> None:
    """Print a line for each kind."""
    with TemporaryDirectory() as folder:
        Path(folder, "bench_rewards_module.py").write_text(MODULE)
        sys.path.append(folder)
        for function, table in (
            ("exact_match", {}),
            ("f1", {}),
            ("dapo", {}),
            ("bench_rewards_module:sync", {}),
            ("bench_rewards_module:sync", {"num_workers": 2}),
            ("bench_rewards_module:later", {}),
            ("bench_rewards_module:group", {"scope": "group"}),
            ("math", {}),
        ):
            label = {"function": function, **table}
            least, median = measure(Reward.model_validate(label))
            print(f"{GROUPS * SAMPLES} samples  {label}: {least:.2f} ms, median {median:.2f} ms")


if __name__ == "__main__":
    main()
