"""The pytest plugin, which every pytest run of the environment loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

COLLECT = """
import json, sys, pytest

pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider"])
print(json.dumps(sorted(sys.modules)))
"""


def test_a_run_without_the_suite_imports_the_plugin_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", COLLECT], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    modules = json.loads(done.stdout.splitlines()[-1])
    ours = [name for name in modules if name.startswith("anygauge")]
    assert ours == ["anygauge", "anygauge.testing", "anygauge.testing.plugin", "anygauge.version"]
    assert "torch" not in modules
