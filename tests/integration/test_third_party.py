"""An outside backend: built, installed and run as a stranger would, who has nothing of this checkout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from anygauge_hooks.kernels import KERNEL_OPS
from anygauge_hooks.megatron import REDIRECTED
from anygauge_tests.recipe import tiny_recipe

pytestmark = pytest.mark.timeout(600)  # the whole suite has more than a thousand cases

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "tests/backends/third_party"
SUPPORT = ROOT / "tests/support/anygauge_tests"
DOCUMENT = ROOT / "docs/backends.md"
BLOCK = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```", re.M | re.S)
OWN_KERNELS = {"rms_norm": ["float32", "bfloat16"], "swiglu": ["float32"]}
OWN_HOOKS = {
    "adjust_config",
    "make_device",
    "prepare_worker",
    "register_backends",
    "register_kernels",
    "worker_env",
}
ORIGINS = """
import json, sys
from importlib.metadata import entry_points
from anygauge.plugins import load_plugins
import anygauge.engines.megatron.engine, anygauge_abacus.device
load_plugins()
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
(found,) = entry_points(group="anygauge.backends", name="abacus")
print(json.dumps({
    "path": sys.path,
    "files": list(filter(None, files)),
    "distribution": found.dist.name,
    "functions": sorted(anygauge_abacus.device.scope_map().functions),
}))
"""

SFT = {
    **{"run__task": "sft", "run__steps": 3, "rollout__prompts_per_step": 12, "train__lr": 1e-2},
    **dict.fromkeys(("reward__function", "rollout__samples_per_prompt")),
}
"""Three steps on the same twelve sums: the loss must fall."""
TWO_WORKERS = ("--placement.train_workers", "2")
COMMAND = "anygauge_tests.fork_server_main"
IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
FORKED = """
import json
from pathlib import Path
from anygauge_tests.fork_server import ForkServers

def start(name, module, *arguments):
    with open(name + ".out", "wb") as output, open(name + ".err", "wb") as errors:
        outputs = {{"output": output.fileno(), "errors": errors.fileno()}}
        return processes.start(module, arguments, has_own=True, **outputs)

processes = ForkServers("abacus")
started = {{name: start(name, *command) for name, command in {commands}.items()}}
for name, process in started.items():
    assert process.wait(200) == 0, (name, Path(name + ".out").read_text(), Path(name + ".err").read_text())
print(json.dumps({{name: Path(name + ".out").read_text() for name in started}}))
processes.close()
"""
"""Runs commands at the same time, in processes that are forked from one that has imported the backend."""


def files() -> dict[str, str]:
    """Return the text of every file of the outside project."""
    paths = [path for path in PROJECT.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(PROJECT)): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def environment(
    make_environment: Callable[[], Any],
    artifacts: tuple[Path, Path],
    build_wheel: Callable[[Path], Path],
) -> Any:
    """Install the outside backend from its wheel, which asks for anygauge's."""
    environment = make_environment()
    environment.pip_resolve("anygauge-abacus", build_wheel(PROJECT), artifacts[0])
    copytree(SUPPORT, environment.site_packages / SUPPORT.name)  # forks the processes below
    return environment


def test_it_is_small() -> None:
    assert sum(len(text.splitlines()) for text in files().values()) < 200


def test_the_document_shows_every_file_of_it() -> None:
    shown = BLOCK.findall(DOCUMENT.read_text())
    assert sorted(shown) == sorted((name, text) for name, text in files().items() if text)


def suite(chosen: str) -> str:
    """Return a script that runs the conformance suite and prints what its process has imported then."""
    arguments = ["--pyargs", "anygauge.testing.conformance", "--backend", "abacus", "-k", chosen]
    options = ["-q", "-W", "error", "-W", IMPORTED, "-p", "no:cacheprovider"]
    return f"import pytest\nassert pytest.main({[*options, *arguments]}) == 0\n{ORIGINS}"


@pytest.fixture(scope="module")
def printed(environment: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run what is its own of the suite, and three commands; return what each printed."""
    script = environment.path / "suite.py"
    groups = "not test_collectives or 2-processes and float32"  # the CPU backend runs all of them on gloo
    script.write_text(suite(f"{' or '.join(OWN_KERNELS)} or not test_kernels and ({groups})"))
    trained, compared = (
        tiny_recipe(tmp_path_factory.mktemp(name), **SFT) for name in ("trained", "compared")
    )
    commands = {
        "suite": [str(script)],
        "hooks": [COMMAND, "hooks", "--backend", "abacus", "--json"],
        "doctor": [COMMAND, "doctor", "--json"],
        "train": [COMMAND, "train", str(trained), "--backend", "abacus", *TWO_WORKERS],
        "compare": [COMMAND, "train", str(compared), "--backend", "abacus"],
    }
    outputs: dict[str, str] = json.loads(environment.run_python(FORKED.format(commands=commands)))
    return outputs | {"trained": metrics(trained), "compared": metrics(compared)}


@pytest.fixture(scope="module")
def found(printed: dict[str, str]) -> dict[str, Any]:
    """Return what the process of the suite has imported."""
    found: dict[str, Any] = json.loads(printed["suite"].splitlines()[-1])
    return found


def test_nothing_of_this_checkout_is_imported(environment: Any, found: dict[str, Any]) -> None:
    assert found["distribution"] == "anygauge-abacus"
    ours = [Path(file) for file in found["files"] if "/anygauge" in file]
    assert len(ours) > 50
    assert all(file.is_relative_to(environment.path) for file in ours)
    sources = [ROOT / name for name in ("core", "hooks", "models", "backends", "tests")]
    seen = [Path(path) for path in (*found["path"], *found["files"])]
    assert not [path for path in seen if any(path.is_relative_to(source) for source in sources)]
    assert str(ROOT) not in found["path"]


def check_suite(printed: str) -> None:
    assert re.search(r"^\d{3,} passed", printed, re.M), printed
    assert "skipped" not in printed
    assert "NOT CHECKED" not in printed


def test_it_passes_what_is_its_own_of_the_suite(printed: dict[str, str]) -> None:
    """Kernels that it does not bring are the references, which have tests of their own."""
    check_suite(printed["suite"])


@pytest.mark.soak
def test_it_passes_the_whole_suite(environment: Any) -> None:
    check_suite(environment.run_python(suite("")))


def test_doctor_finds_it_beside_what_the_wheel_brings(printed: dict[str, str]) -> None:
    report = json.loads(printed["doctor"])
    assert report["backends"]["abacus"]["status"] == "PASS"
    assert report["backends"]["cpu"]["status"] == "PASS"
    assert not report["plugin_errors"]


def test_hooks_tells_what_is_its_own(printed: dict[str, str]) -> None:
    report = json.loads(printed["hooks"])
    own = [row for row in report["kernels"] if row["owner"] == "abacus"]
    assert {row["op"]: row["dtypes"] for row in own} == OWN_KERNELS
    assert {row["package"] for row in own} == {"anygauge-abacus"}
    assert {row["op"] for row in report["kernels"]} == set(KERNEL_OPS)
    hooks = {row["hook"] for row in report["hooks"] if row["package"] == "anygauge-abacus"}
    assert hooks == OWN_HOOKS


def test_its_scope_map_has_exactly_what_the_scope_redirects(found: dict[str, Any]) -> None:
    """The suite checks the names that a step needs; the scope takes neither fewer nor more."""
    assert found["functions"] == sorted(REDIRECTED)


def metrics(recipe: Path) -> str:
    return (recipe.parent / "run/metrics.jsonl").read_text()


def check_learning(trained: str, compared: str) -> None:
    """Compare two workers of the outside backend with one, which reduces nothing."""
    two, one = (
        [row for row in map(json.loads, lines.splitlines()) if "train/loss" in row]
        for lines in (trained, compared)
    )
    assert len(two) == 3
    for name in ("train/loss", "train/grad_norm"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=1e-4), name
    losses = [row["train/loss"] for row in two]
    assert losses[0] > losses[1] > losses[2]
    assert all(row["train/grad_norm"] > 0.1 for row in two)


def test_it_learns_and_two_workers_as_one(printed: dict[str, str]) -> None:
    check_learning(printed["trained"], printed["compared"])


@pytest.mark.soak
def test_it_trains_in_processes_that_import_everything(environment: Any, tmp_path: Path) -> None:
    recipes = [tiny_recipe(tmp_path / name, **SFT) for name in ("trained", "compared")]
    environment.run_anygauge("train", str(recipes[0]), "--backend", "abacus", *TWO_WORKERS)
    environment.run_anygauge("train", str(recipes[1]), "--backend", "cpu")
    check_learning(*map(metrics, recipes))
