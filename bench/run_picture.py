"""Draw docs/images/run.svg: the terminal of a run of the demo, without its steps.

anygauge demo --backend cpu 2>&1 | tee demo.log
python bench/run_picture.py demo.log
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[1] / "docs/images/run.svg"
COMMAND = "anygauge demo --backend cpu"
KEPT = re.compile(r"making |runs/|backend: |starting |run \S+: \d+ steps on|eval |done: ")
"""Lines that are the same in every run of the demo; durations depend on the host."""
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.S)
"""Rich links fonts of another host, which a picture must not load."""


def lines(log: Sequence[str]) -> Iterator[Text]:
    """Yield what the terminal shows: command, start, evaluations and end. The bars are added here."""
    yield Text.assemble(("$ ", "bold green"), (COMMAND, "bold"))
    for line in filter(KEPT.match, log):
        score = re.fullmatch(r"(eval at step )(\d+)(  held-out )(\S+)", line)
        if score is None:
            yield Text(re.sub(r"(?<=in )/\S+/(?=runs/)| in \d+ s(?=,)", "", line))
        else:
            bar = "\N{FULL BLOCK}" * round(40 * float(score[4]))
            shown = (f"{score[4]:<7}", "bold cyan"), (bar, "cyan")
            yield Text.assemble(f"{score[1]}{score[2]:>3}{score[3]}", *shown)


def main() -> None:
    """Write the picture."""
    log = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    with open("/dev/null", "w", encoding="utf-8") as nothing:
        console = Console(record=True, width=100, file=nothing)
        for line in lines(log):
            console.print(line)
        console.print()  # room for the last line, whose font may be a larger one
    svg = console.export_svg(title="anygauge demo", theme=MONOKAI, unique_id="run")
    PICTURE.write_text(FONTS.sub("", svg), encoding="utf-8")


if __name__ == "__main__":
    main()
