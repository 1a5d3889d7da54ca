"""Write docs/config.md: every config key with type, default, choices and meaning.

Run it after a change of the schema, or of what the core registers; a test fails until then:

    .venv/bin/python bench/config_page.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from anygauge.config.keys import EVAL, PART, Key, config_keys
from anygauge.plugins import load_plugins

PAGE = Path(__file__).resolve().parents[1] / "docs/config.md"
HEAD = """# Config keys

Use this page to look up a key of a config file. `anygauge keys WORD` prints the same in a terminal, with the
names that your own plugins register. `anygauge keys --schema > anygauge.schema.json` writes a JSON schema: an
editor with a TOML language server completes and checks the keys of a file that begins with
`#:schema ./anygauge.schema.json`.

A key is in a table of the file, or `--section.key value` on the command line. `NAME` is a name of your own,
`[]` an item of a list of tables. Values are TOML; `"none"` stands for null. `bench/config_page.py` writes the
tables.
"""
SAME = (f"{EVAL}reward.", "critic.parallel.", "teacher.parallel.", PART)
"""Beginnings of keys that are in the table of another section."""
NOTES = {
    "critic": "`critic.parallel.*` are the keys of `train.parallel.*`.",
    "eval": "`eval.datasets.NAME.reward.*` are the keys of `reward.*`.",
    "reward": "`reward.parts.NAME.*` are keys of `reward.*`; `weight` is the factor in the sum.",
    "teacher": "`teacher.parallel.*` are the keys of `train.parallel.*`.",
}


def page() -> str:
    """Return the page as the code has it: with the names of this project's plugins alone."""
    keys = [key for key in config_keys(load_plugins()) if not key.path.startswith(SAME)]
    return "\n".join([HEAD, *(line for part in groupby(keys, _section) for line in _table(*part))])


def _section(key: Key) -> str:
    return key.path.partition(".")[0]


def _table(section: str, keys: Iterator[Key]) -> Iterator[str]:
    yield f"## {section}\n"
    if section in NOTES:
        yield f"{NOTES[section]}\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        choices = f" One of {', '.join(f'`{each}`' for each in key.choices)}." if key.choices else ""
        name = re.sub(r"^docs/", "", key.page)
        default = "required" if key.default is None else f"`{key.default}`"
        cells = f"[`{key.path}`]({name})", key.kind, default, f"{_escaped(key.meaning)}{choices}"
        yield f"| {' | '.join(cells)} |"
    yield ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
