"""The commands of the tutorials, run in order as a reader runs them, with fewer steps and a tiny model.

All pages run at once, each in a directory of its own: a command mostly waits for one process to start.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.name: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}
LONG = {
    "agent_arithmetic.md",
    "grpo_arithmetic.md",
    "one_gpu.md",
    "ppo_arithmetic.md",
    "sft_arithmetic.md",
    "shapes_vlm.md",
}
"""Pages that wait for ``make soak``: each start of a run takes 10 s of a core."""
DEADLINE_S = 230

NOT_RUN = {
    "README.md": {
        "make .venv/.cpu": "installs packages",
        "source .venv/bin/activate": "is of the environment that the line before makes",
    },
    "gsm8k.md": {
        "hf download Qwen/Qwen3-1.7B --local-dir models/Qwen3-1.7B": "downloads",
        "curl -L --create-dirs --remote-name-all --output-dir data/gsm8k https://raw.githubusercontent.com"
        "/openai/grade-school-math/master/grade_school_math/data/{train,test}.jsonl": "downloads",
        "anygauge train mine.toml": "needs eight accelerators; this config has generated and scored before",
    },
}
"""The commands that are marked ``no-test``, with the reason."""
STATUS = {"timeout -s KILL": 128 + signal.SIGKILL}
"""Exit status by the beginning of a command; 0 for all others."""
TWO_MORE = "$(( 2 + 10#$(ls runs/first/checkpoints | grep -o '[0-9]*$' | tail -n 1) ))"
"""Steps of a run that was killed somewhere."""
ONE = (
    "--placement.num_workers 1 --placement.threads_per_worker 1 --eval.max_prompts 4 "
    "--rollout.prompts_per_step 4"
)
FEW = f"{ONE} --rollout.samples_per_prompt 2 --train.optimizer_steps 1"
SHORTER = {
    r"shapes/make_inputs\.py": r"\g<0> --rows 64",
    r"shapes/choose\.py": r"\g<0> --least 0",
    r"arithmetic/make_inputs\.py": r"\g<0> --batch-size 32 --check-interval 2 --max-steps 2 --stop-score 0",
    r"--run\.steps \d+": "--run.steps 3",
    r"anygauge train examples/arithmetic_grpo\.toml.*": rf"\g<0> {FEW} --save.every 2",
    r"anygauge train .*--run\.name first --resume.*": rf"\g<0> --run.steps {TWO_MORE}",
    r"anygauge train .*--run\.name (dumped|replayed).*": r"\g<0> --save.hf_at_end false --run.report false",
    r"anygauge train examples/arithmetic_agent\.toml(?!.*--dry-run).*": rf"\g<0> {FEW} --run.steps 3",
    r"anygauge train examples/arithmetic_ppo\.toml.*": rf"\g<0> {FEW} --critic.only_steps 1",
    r"anygauge train examples/arithmetic_sft\.toml.*": rf"\g<0> {ONE} --run.steps 3",
    r"anygauge train (mine|examples/qwen3_0p6b_one_gpu)\.toml(?!.*--dry-run).*": rf"\g<0> {FEW} "
    "--run.steps 2 --rollout.max_new_tokens 8 --train.micro_batch_tokens 512",
    r"anygauge train examples/shapes_vlm_sft\.toml.*": r"\g<0> --run.steps 5",
    r"anygauge train examples/shapes_vlm\.toml.*": rf"\g<0> {FEW} --run.steps 3",
    r"anygauge eval .*": r"\g<0> --eval.max_prompts 4",
}
"""What is changed in every command that a pattern is found in, one after the other."""
KILL_AFTER_A_SAVE = """
timeout() {  # stands in for the command: kills the run as soon as it has something to go on from
  shift 3
  "$@" &
  until compgen -G 'runs/*/checkpoints/step-*' > /dev/null; do sleep 0.02; kill -0 $! || return 1; done
  kill -KILL $!
  wait $!
}
"""


# -------------------------------------------------------------------------
# Pages
# -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """A line that a reader types, and what the page shows below it."""

    text: str
    shown: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Page:
    """What a reader does with a tutorial."""

    run: list[Command]
    not_run: list[str]
    files: Mapping[str, str]
    """Texts to be written, by name."""
    paths: list[str]
    """What the prose says is there at the end."""


BLOCK = re.compile(r"^```(\w*)[ ]?(.*)\n((?s:.*?))^```$", re.M)


def read_page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    run: list[Command] = []
    not_run: list[str] = []
    files: dict[str, str] = {}
    for language, rest, content in BLOCK.findall(text):
        if language == "console":
            assert rest in ("", "no-test"), f"```console {rest}"
            commands = read_commands(content)
            run += [] if rest else commands
            not_run += [command.text for command in commands] if rest else []
        else:
            assert language in ("toml", "python"), f"```{language}: commands stand in ```console"
            assert rest, f"a block of {language} without the name of its file"
            files[rest] = content
    paths = re.findall(r"`(runs/[\w./-]+)`", BLOCK.sub("", text))
    return Page(run, not_run, files, paths)


def read_commands(content: str) -> list[Command]:
    lines = re.sub(r"\\\n *", "", content).splitlines()
    assert lines[0].startswith("$ "), lines[0]
    commands: list[Command] = []
    for line in lines:
        if line.startswith("$ "):
            commands.append(Command(line[2:]))
        else:
            commands[-1].shown.append(line)
    return commands


def shorter(command: str) -> str:
    for pattern, replacement in SHORTER.items():
        command = re.sub(pattern, replacement, command)
    return command


def status(command: str) -> int:
    return next((code for start, code in STATUS.items() if command.startswith(start)), 0)


# -------------------------------------------------------------------------
# Stand-ins for what a reader has and this place has not
# -------------------------------------------------------------------------

PROBLEMS = [
    {"question": f"Ann has {n} pens and buys {n + 2}.", "answer": f"{n} + {n + 2}\n#### {2 * n + 2}"}
    for n in range(240)
]


def write_model(directory: Path) -> None:
    texts = [text for row in PROBLEMS for text in row.values()]
    tiny_qwen3(directory, tokenizer=tiny_tokenizer(directory, texts=texts))


def write_files(directory: Path) -> None:
    """Make what ``gsm8k.md`` has downloaded."""
    write_model(directory / "models" / "Qwen3-1.7B")
    data = directory / "data" / "gsm8k"
    data.mkdir(parents=True)
    for name in ("train", "test"):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))


def write_cache(home: Path) -> None:
    """Make what ``one_gpu.md`` has downloaded, where the hub's client keeps it."""

    def snapshot(name: str) -> Path:
        repository, commit = home / "hub" / name, "5f3c" * 10
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        return repository / "snapshots" / commit

    write_model(snapshot("models--Qwen--Qwen3-0.6B"))
    data = snapshot("datasets--openai--gsm8k") / "main"
    data.mkdir(parents=True)
    for name in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(PROBLEMS), data / f"{name}-00000-of-00001.parquet")


# -------------------------------------------------------------------------
# Sessions
# -------------------------------------------------------------------------


class Session:
    """A shell in which the commands of a page run, one after the other, until one fails."""

    def __init__(self, page: Page, directory: Path, *, as_written: bool = False) -> None:
        self.page = page
        self.directory = directory
        self._outputs = directory / ".outputs"
        self._outputs.mkdir()
        (directory / "examples").symlink_to(ROOT / "examples")
        for name, text in page.files.items():
            (directory / name).write_text(text)
        lines = [] if as_written else [KILL_AFTER_A_SAVE]
        for number, command in enumerate(page.run):
            text = command.text if as_written else shorter(command.text)
            lines += [f"{{ {text}", f"}} > .outputs/{number} 2>&1"]
            lines += [f"found=$?; [ $found = {status(command.text)} ] || exit $(( found ? found : 1 ))"]
        self._shell = subprocess.Popen(
            ["bash", "-c", "\n".join(lines)],
            cwd=directory,
            env=environment(directory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self, timeout_s: float) -> None:
        try:
            end = f"exit status {self._shell.wait(timeout_s)}"
        except subprocess.TimeoutExpired:
            end = f"still running after {timeout_s:g} s"
        last = len(list(self._outputs.iterdir())) - 1
        assert end == "exit status 0", f"$ {self.page.run[last].text}\n{self.output(last)}\n{end}"
        assert last == len(self.page.run) - 1

    def output(self, number: int) -> str:
        return (self._outputs / str(number)).read_text(encoding="utf-8")

    def end(self) -> None:
        """Kill the shell and its commands, if it is still there; the workers of a run die with it."""
        if self._shell.poll() is None:
            os.killpg(self._shell.pid, signal.SIGKILL)
            self._shell.wait()


def environment(directory: Path) -> dict[str, str]:
    """Return an environment in which this interpreter's commands are found and no name is looked up."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(directory),
        "HF_HOME": str(directory / ".hf"),
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="module")
def sessions(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Session]]:
    """Begin with every page that was asked for, and return them by name."""
    asked = [item for item in request.session.items if request.fixturename in item.fixturenames]
    begun = {}
    with ExitStack() as stack:
        for name in [item.callspec.params["name"] for item in asked]:
            directory = tmp_path_factory.mktemp("tutorial")
            write_files(directory)
            write_cache(directory / ".hf")
            begun[name] = Session(read_page(PAGES[name]), directory)
            stack.callback(begun[name].end)
        yield begun


def form(line: str) -> str:
    """Return what stays of a line in another run."""
    line = re.sub(r"(?<![\w/])/[\w./-]+", "PATH", line)
    return " ".join(re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "#", line).split())


def assert_as_shown(command: Command, output: str) -> None:
    shown = [line for line in command.shown if line != "..."]
    if command.text.startswith("ls "):
        names = {name for line in shown for name in line.split()}
        assert {form(name) for name in names} == {form(name) for name in output.split()}, output
        return
    forms = {form(line) for line in output.splitlines()}
    assert [line for line in shown if form(line) not in forms] == [], f"$ {command.text}\n{output}"


def assert_kept_its_word(session: Session, timeout_s: float) -> None:
    session.wait(timeout_s)
    for number, command in enumerate(session.page.run):
        assert_as_shown(command, session.output(number))
    for path in session.page.paths:
        pattern = re.sub(r"\d{8}", "*", path)
        assert list(session.directory.glob(pattern)), f"{path} is not there"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name in LONG else []) for name in PAGES]
)
def test_a_tutorial_does_what_it_says(name: str, sessions: Mapping[str, Session]) -> None:
    assert_kept_its_word(sessions[name], DEADLINE_S)


@pytest.mark.soak
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("name", ["grpo_arithmetic.md", "sft_arithmetic.md"])
def test_a_tutorial_as_it_is_written(name: str, tmp_path: Path) -> None:
    session = Session(read_page(PAGES[name]), tmp_path, as_written=True)
    try:
        assert_kept_its_word(session, 1800)
    finally:
        session.end()
    runs = {"grpo_arithmetic.md": "first", "sft_arithmetic.md": "sft-then-grpo"}
    lines = (tmp_path / "runs" / runs[name] / "metrics.jsonl").read_text().splitlines()
    scores = [row["eval/held-out"] for row in map(json.loads, lines) if "eval/held-out" in row]
    assert scores[-1] > 0.75


# -------------------------------------------------------------------------
# Nothing is left out in silence
# -------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_only_what_cannot_run_here_is_left_out(name: str) -> None:
    page = read_page(PAGES[name])
    assert sorted(page.not_run) == sorted(NOT_RUN.get(name, {}))


def test_every_change_of_a_command_is_needed() -> None:
    commands = [command.text for path in PAGES.values() for command in read_page(path).run]
    for table in (SHORTER, {f"^{re.escape(start)}": "" for start in STATUS}):
        assert [pattern for pattern in table if not any(re.search(pattern, text) for text in commands)] == []


def test_every_recipe_has_a_tutorial() -> None:
    pages = [*PAGES.values(), ROOT / "docs" / "npu.md"]  # a guide, which tests of its own keep true
    texts = [path.read_text(encoding="utf-8") for path in pages]
    recipes = [path.name for path in (ROOT / "examples").glob("*.toml")]
    assert [name for name in recipes if not any(f"examples/{name}" in text for text in texts)] == []
