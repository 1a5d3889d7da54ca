"""Write docs/migrate/*.md: the arguments of slime, verl and TRL that `anygauge import` knows, with our keys.

Run it after a change of the tables in core/anygauge/migrate; a test fails until then:

    .venv/bin/python bench/migrate_pages.py

With `--try DIR`, a directory with checkouts named slime, verl and trl, it imports the scripts in TRIED
instead and prints each row that differs; the status is 1 if one does. TRIED is edited by hand.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from anygauge.cli.entry import run
from anygauge.cli.import_ import NO_SGLANG
from anygauge.config.keys import PAGES
from anygauge.migrate.table import PROJECTS, Row, rows

FOLDER = Path(__file__).resolve().parents[1] / "docs/migrate"
TITLES = {"slime": "slime", "verl": "verl", "trl": "TRL"}
PREFIXES = {"slime": "--", "verl": "", "trl": ""}
FILES = {
    "slime": "SCRIPT.sh",
    "verl": "SCRIPT.sh",
    "trl": "SCRIPT.py",
}
READ = {
    "slime": """This reads the shell script that calls `train.py` or `train_async.py`: arrays such as
`CKPT_ARGS=(... )`, and `--key value` arguments. Files that the script sources are not read. The
shape of a model comes from its `config.json`.""",
    "verl": """This reads a shell script or a YAML config. Of a shell script it takes the overrides
of the command (`actor_rollout_ref.actor.optim.lr=1e-6`). Of a YAML config it takes all keys but
nulls and values that refer to other keys (`${...}`); a file with aliases is refused. `$@` at the end
of a command is taken as empty.""",
    "trl": """This reads one of three kinds of files:

* a Python script: the arguments of the first `GRPOConfig`, `RLOOConfig` or `SFTConfig`, of its trainer
  and of `LoraConfig`. Values must be literals, names that the script assigns once, or
  `load_dataset("...")`;
* a shell script: the arguments of its command, as in `accelerate launch grpo.py --learning_rate 1e-5`
  or `trl grpo ...`;
* a YAML config of `trl grpo --config`.""",
}
COMMON = """The file is not executed. Variables of a shell script have the values that the script gives them,
in the order of the text. A default (`${NAME:-8}`) is used, `$HOME` is your home directory, and
the environment is not read. Branches and loops are not followed, so a variable that is set in
one is unknown. Of commands in `$(...)`, only `$(seq 16 8 256)` is known, up to 4,096 whole numbers.
If a value, or a part of a list, is unknown, nothing is written for it, and its key is listed for you
to set. A variable that adds arguments to a command, such as `$EXTRA`, is listed as a note. If a default
of the project differs from the one here, the config has the project's, so that a script means the
same here.

The config is written to `--out`, or to standard output. The terminal lists the arguments without a
counterpart, and then the keys that `anygauge train --dry-run --no-file-check` does not accept yet.
`bench/migrate_pages.py` writes this page."""
Tables = Mapping[str, tuple[str, Sequence[tuple[str, int, int, int, str]]]]
TRIED: Tables = {
    "slime": (
        "slime 0.3.1 (commit 624b824a8)",
        (
            (
                "scripts/run-qwen3-4B.sh",
                43,
                13,
                3,
                "train.parallel.tensor, placement.colocated, placement.rollout_workers",
            ),
            ("scripts/run-qwen3-4B-base-sft.sh", 28, 13, 3, "passes"),
            ("scripts/run-glm4-9B.sh", 43, 13, 1, "passes"),
            ("scripts/run-qwen3-30B-A3B.sh", 45, 13, 4, "passes"),
            ("scripts/run-deepseek-r1.sh", 56, 15, 7, "model, data.train"),
            ("tests/test_gspo.sh", 29, 1, 0, "passes"),
            ("examples/search-r1/run_qwen2.5_3B.sh", 38, 11, 3, "reward.function"),
            ("examples/train_infer_mismatch_helper/run-qwen3-4b-mis.sh", 48, 12, 4, "passes"),
        ),
    ),
    "verl": (
        "verl 0.7 (commit b178a3cd5)",
        (
            ("examples/grpo_trainer/run_deepseek7b_llm.sh", 28, 8, 4, "passes"),
            ("examples/grpo_trainer/run_qwen3-8b.sh", 28, 8, 4, "passes"),
            ("examples/grpo_trainer/run_deepseek671b_math_megatron_96gb.sh", 58, 31, 7, "passes"),
            ("examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh", 31, 11, 5, "passes"),
            ("examples/grpo_trainer/run_qwen2_5_vl-7b.sh", 30, 11, 5, "passes"),
            ("examples/gspo_trainer/test_gspo_3b_math.sh", 51, 21, 7, "passes"),
            ("examples/ppo_trainer/run_qwen2-7b_sglang_seq_balance.sh", 27, 12, 4, "passes"),
            ("examples/sft/gsm8k/run_qwen_05_peft.sh", 14, 1, 4, "passes"),
            ("verl/trainer/config/_generated_ppo_trainer.yaml", 87, 169, 27, "passes"),
        ),
    ),
    "trl": (
        "TRL of 2026-07-24 (commit f2cd57710)",
        (
            ("examples/scripts/rloo.py", 14, 3, 8, "data.train, reward.function"),
            ("examples/scripts/grpo_vlm.py", 3, 1, 10, "model, data.train, reward.function"),
            ("examples/scripts/gspo.py", 3, 1, 10, "model, data.train, reward.function"),
            ("examples/scripts/grpo_agent.py", 2, 0, 12, "model, data.train, reward.function"),
            ("examples/scripts/sft_gemma3.py", 7, 2, 5, "data.train"),
            ("examples/scripts/openenv/wordle.py", 6, 3, 16, "model, data.train, reward.function"),
        ),
    ),
}
"""Version; of each script: arguments converted, without need, without counterpart; what the check found."""


def page(project: str) -> str:
    """Return the page of a project as its table has it."""
    title, entries = TITLES[project], list(rows(project).values())
    return "\n".join(
        [
            f"# Coming from {title}\n",
            f"Use this page to run a script or config of {title}, or to find the key of an argument.\n",
            f"```\nanygauge import {project} {FILES[project]} --out config.toml\n```\n",
            *_introduction(project),
            "## Arguments with a key here\n",
            f"| {title} | key | how the value changes | default there, written if absent |",
            "|---|---|---|---|",
            *(_with_key(project, row) for row in entries if row.keys),
            "\n## Arguments that need no key\n",
            f"| {title} | why |",
            "|---|---|",
            *(
                f"| `{PREFIXES[project]}{row.name}` | {_escaped(row.unneeded)} |"
                for row in entries
                if row.unneeded
            ),
            "\n## Arguments without a counterpart\n",
            f"| {title} | why, or what to do instead |",
            "|---|---|",
            *(f"| `{PREFIXES[project]}{row.name}` | {_escaped(row.note)} |" for row in entries if row.note),
            "\n## Published scripts that were tried\n",
            *_tried(project),
            "",
        ]
    )


def _introduction(project: str) -> Iterator[str]:
    yield f"{READ[project]}\n"
    yield f"{COMMON}\n"


def _with_key(project: str, row: Row) -> str:
    keys = ", ".join(f"[`{key}`](../{_page(key)}.md)" for key in row.keys)
    values = ", ".join(f"`{theirs}` is `{_toml(ours)}`" for theirs, ours in row.values.items())
    change = "; ".join(filter(None, (values, _escaped(row.rule))))
    default = "" if row.default is None else f"`{_toml(row.default)}`"
    return f"| `{PREFIXES[project]}{row.name}` | {keys} | {change} | {default} |"


def _page(key: str) -> str:
    parts = key.split(".")
    beginnings = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(PAGES[each] for each in beginnings if each in PAGES)


def _tried(project: str) -> Iterator[str]:
    version, scripts = TRIED[project]
    yield (
        f"The scripts are those of {version}. Arguments without a counterpart that share a row above\n"
        "count once. SGLang was not installed, so its arguments were not checked.\n"
        "`bench/migrate_pages.py --try DIR` imports the scripts of checkouts in `DIR`, and prints the\n"
        "rows that differ.\n"
    )
    yield "| script | converted | no key needed | no counterpart | dry run, but for SGLang |"
    yield "|---|---|---|---|---|"
    for path, converted, unneeded, missing, needs in scripts:
        result = needs if needs == "passes" else "needs " + ", ".join(f"`{key}`" for key in needs.split(", "))
        yield f"| `{path}` | {converted} | {unneeded} | {missing} | {result} |"


def _toml(value: Any) -> str:
    return json.dumps(value)


def _escaped(text: str) -> str:
    return re.sub(r"<(?=\w)", "&lt;", text.replace("|", "\\|"))


def tried(project: str, file: Path) -> tuple[int, int, int, str]:
    """Return the counts of an import, and the keys that its dry run needs, as a row of TRIED has them."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as printed:
        status = run(["import", project, str(file)])
    text = printed.getvalue()
    counts = re.search(
        r"^converted: (\d+) arguments; (\d+) need no key\n(?:no counterpart: (\d+))?", text, re.M
    )
    if status or counts is None:
        return 0, 0, 0, text.strip()
    lines = text.partition("the config is not complete yet:\n")[2].splitlines()
    needs = [line.split(":")[0].strip() for line in lines if NO_SGLANG not in line]
    converted, unneeded, missing = (int(count or 0) for count in counts.groups())
    return converted, unneeded, missing, ", ".join(needs) or "passes"


def differences(checkouts: Path, tables: Tables = TRIED) -> Iterator[str]:
    """Yield the rows that differ from those of an import of the scripts."""
    for project, (version, scripts) in tables.items():
        for path, *row in scripts:
            if (now := [*tried(project, checkouts / project / path)]) != row:
                yield f"{project} {path}: {now}; in the table of {version}: {row}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--try", dest="checkouts", type=Path, metavar="DIR")
    if (checkouts := parser.parse_args().checkouts) is not None:
        sys.exit("\n".join(differences(checkouts)) or 0)
    FOLDER.mkdir(exist_ok=True)
    for name in PROJECTS:
        (FOLDER / f"{name}.md").write_text(page(name), encoding="utf-8")
