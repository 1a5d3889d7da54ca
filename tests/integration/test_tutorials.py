"""The commands of the tutorials, run in order as a reader runs them, with fewer steps and a tiny model.

Each page has a directory of its own. Its shell finds stand-ins for ``anygauge`` and ``python``, forked with
everything imported; ``make soak`` runs two pages as they are written, with processes of their own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge_tests.datasets import read_rows, write_gsm8k
from anygauge_tests.fork_server import ForkServers
from anygauge_tests.fork_server_commands import forked_commands

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.name: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}
DEADLINE_S = 230
MAKE_INPUTS = "python examples/arithmetic/make_inputs.py --out runs/arithmetic-inputs"

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
    "--placement.train_workers 1 --placement.threads_per_worker 1 --eval.max_prompts 4 "
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
    r"anygauge train examples/arithmetic_ppo\.toml.*": rf"\g<0> {FEW} --critic.warmup_steps 1",
    r"anygauge train examples/arithmetic_sft\.toml.*": rf"\g<0> {ONE} --run.steps 3",
    r"anygauge train (mine|examples/qwen3_0p6b_one_gpu)\.toml(?!.*--dry-run).*": rf"\g<0> {FEW} "
    "--run.steps 2 --rollout.max_new_tokens 8 --train.micro_batch_tokens 512",
    r"anygauge train examples/shapes_vlm_sft\.toml.*": r"\g<0> --run.steps 5",
    r"anygauge train examples/shapes_vlm\.toml.*": rf"\g<0> {FEW} --run.steps 3",
    r"anygauge eval .*": r"\g<0> --eval.max_prompts 4",
}
"""Replacements in every command that a pattern matches, one after the other."""
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
    """Commands that a reader of a tutorial runs."""

    run: list[Command]
    not_run: list[str]
    files: Mapping[str, str]
    """Texts to be written, by name."""
    paths: list[str]
    """Paths that exist at the end, according to the prose."""


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


def write_files(directory: Path) -> None:
    """Make what ``gsm8k.md`` has downloaded: a model, and rows that its tokenizer knows."""
    data = directory / "data" / "gsm8k"
    data.mkdir(parents=True)
    write_gsm8k(data)
    texts = [text for row in read_rows(data / "train.jsonl") for text in row.values()]
    model = directory / "models" / "Qwen3-1.7B"
    tiny_qwen3(model, tokenizer=tiny_tokenizer(model, texts=texts))


def write_cache(directory: Path) -> None:
    """Put the same where the hub's client keeps what ``one_gpu.md`` has downloaded."""
    home = directory / ".hf"

    def snapshot(name: str) -> Path:
        repository, commit = home / "hub" / name, "5f3c" * 10
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(commit)
        return repository / "snapshots" / commit

    shutil.copytree(directory / "models" / "Qwen3-1.7B", snapshot("models--Qwen--Qwen3-0.6B"))
    data = snapshot("datasets--openai--gsm8k") / "main"
    data.mkdir(parents=True)
    for name in ("train", "test"):
        rows = read_rows(directory / "data" / "gsm8k" / f"{name}.jsonl")
        pq.write_table(pa.Table.from_pylist(rows), data / f"{name}-00000-of-00001.parquet")


# -------------------------------------------------------------------------
# Sessions
# -------------------------------------------------------------------------


class Session:
    """A shell in which the commands of a page run, one after the other, until one fails.

    :param commands: Folder of those that are forked; ``None`` runs the page as it is written.
    """

    def __init__(self, page: Page, directory: Path, commands: Path | None = None) -> None:
        self.page = page
        self.directory = directory
        self._outputs = directory / ".outputs"
        self._outputs.mkdir()
        (directory / "examples").symlink_to(ROOT / "examples")
        for name, text in page.files.items():
            (directory / name).write_text(text)
        lines = [KILL_AFTER_A_SAVE] if commands else []
        for number, command in enumerate(page.run):
            text = shorter(command.text) if commands else command.text
            lines += [f"{{ {text}", f"}} > .outputs/{number} 2>&1"]
            lines += [f"found=$?; [ $found = {status(command.text)} ] || exit $(( found ? found : 1 ))"]
        self._shell = subprocess.Popen(
            ["bash", "-c", "\n".join(lines)],
            cwd=directory,
            env=environment(directory, commands),
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


def environment(directory: Path, commands: Path | None) -> dict[str, str]:
    """Return an environment in which this interpreter's commands are found and no name is looked up."""
    folders = [*([commands] if commands else []), Path(sys.executable).parent, os.environ["PATH"]]
    return {
        **os.environ,
        "PATH": ":".join(map(str, folders)),
        "HOME": str(directory),
        "HF_HOME": str(directory / ".hf"),
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="module")
def commands(fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of the commands that are forked."""
    with forked_commands(fork_servers, tmp_path_factory.mktemp("commands")) as folder:
        yield folder


@pytest.fixture(scope="module")
def inputs(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the inputs of the pages on arithmetic, which a reader makes once too."""
    directory = tmp_path_factory.mktemp("inputs")
    page = Page(run=[Command(MAKE_INPUTS)], not_run=[], files={}, paths=[])
    Session(page, directory, commands).wait(DEADLINE_S)
    return directory / "runs" / "arithmetic-inputs"


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


@pytest.mark.parametrize("name", PAGES)
def test_a_tutorial_does_what_it_says(name: str, commands: Path, inputs: Path, tmp_path: Path) -> None:
    page = read_page(PAGES[name])
    write_files(tmp_path)
    write_cache(tmp_path)
    if name != "grpo_arithmetic.md":  # which shows how they are made
        shutil.copytree(inputs, tmp_path / "runs" / "arithmetic-inputs")
    session = Session(page, tmp_path, commands)
    try:
        assert_kept_its_word(session, DEADLINE_S)
    finally:
        session.end()


def metric(run: Path, key: str) -> list[float]:
    return [row[key] for row in read_rows(run / "metrics.jsonl") if key in row]


@pytest.mark.soak
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    ("name", "run"), [("grpo_arithmetic.md", "first"), ("sft_arithmetic.md", "sft-then-grpo")]
)
def test_a_tutorial_as_it_is_written(name: str, run: str, tmp_path: Path) -> None:
    session = Session(read_page(PAGES[name]), tmp_path)
    try:
        assert_kept_its_word(session, 1800)
    finally:
        session.end()
    scores = metric(tmp_path / "runs" / run, "eval/held-out")
    assert scores[-1] > 0.75
    assert min(scores) == scores[0]
    if name == "sft_arithmetic.md":
        losses = metric(tmp_path / "runs" / "arithmetic-sft", "train/loss")
        assert max(losses) < 1.2 * losses[0], "the learning rate is warmed up"


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
    guides = [
        ROOT / "docs" / name for name in ("npu.md", "glm_omni.md")
    ]  # which tests of their own keep true
    pages = [*PAGES.values(), *guides]
    texts = [path.read_text(encoding="utf-8") for path in pages]
    recipes = [path.name for path in (ROOT / "examples").glob("*.toml")]
    assert [name for name in recipes if not any(f"examples/{name}" in text for text in texts)] == []
