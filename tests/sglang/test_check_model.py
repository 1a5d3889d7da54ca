"""``anygauge check-model --against sglang``: a real server computes what the train engine does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]


def test_a_real_server_is_compared(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "anygauge", "check-model", str(tiny_model), "--backend", "cpu"]
    done = subprocess.run(
        [*command, "--prompt", "what is the weather", "--against", "sglang"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert ["PASS", "served"] in rows
