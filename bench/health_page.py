"""Write the table of rules in docs/health.md, from the rules themselves.

Run it after a change of a rule; a test fails until then:

    .venv/bin/python bench/health_page.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from anygauge.config.rules.health import LOGPROBS
from anygauge.health.rules import RULES, Rule, format_value

PAGE = Path(__file__).resolve().parents[1] / "docs/health.md"
BEGIN, END = "<!-- rules -->", "<!-- end of the rules -->"
OF_THE_SCHEDULE = "what the schedule allows"


def page() -> str:
    """Return the page with the table that the code gives."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return "\n".join([before + BEGIN, *_table(), END]) + rest.partition(END)[2]


def _table() -> Iterator[str]:
    yield "| rule | metrics | value | fires | why this limit | what to do |"
    yield "|---|---|---|---|---|---|"
    for rule in RULES:
        metrics = ", ".join(f"`{name}`" for name in (*rule.metrics, *rule.others))
        side = "below" if rule.is_floor else "above"
        cells = (f"`{rule.name}`", metrics, rule.over, f"{side} {_limit(rule)}", rule.reason, rule.advice)
        yield f"| {' | '.join(cells)} |"


def _limit(rule: Rule) -> str:
    if rule.name == "logprob_abs_diff":
        return ", ".join(
            f"{format_value(each.warning or 0, rule.unit)} in {name}" for name, each in LOGPROBS.items()
        )
    return OF_THE_SCHEDULE if rule.limit is None else format_value(rule.limit, rule.unit)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
