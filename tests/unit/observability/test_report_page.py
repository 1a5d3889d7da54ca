"""The page of a run: complete in itself, true to the files, and safe with whatever they hold."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anygauge.cli import main
from anygauge.config import Config
from anygauge.config.load import write_resolved
from anygauge.health.record import HEALTH_FILE, health_of, write_health
from anygauge.health.rules import RULES, Limit
from anygauge.health.watch import CALM, watch_rules
from anygauge.observability.control_characters import visible
from anygauge.observability.distributions import value_counts
from anygauge.observability.phases import PhaseTime, Row
from anygauge.observability.report import REPORT_FILE, write_report
from anygauge.observability.report.catalog import SECTIONS, SFT_SECTIONS
from anygauge.observability.report.charts import COLORS, MOST_POINTS
from anygauge.observability.report.histograms import draw_histograms
from anygauge.observability.report.page import render_page
from anygauge.observability.report.run_files import read_run
from anygauge.observability.report.texts import MOST_CHARACTERS, sample_steps
from anygauge.observability.timeline import TIMELINE_FILE, Timeline
from anygauge_hooks.errors import CheckpointError

VOID = {"meta", "input", "br", "hr", "img", "link", "base", "path"}
LOADING = {
    "src",
    "srcset",
    "href",
    "xlink:href",
    "action",
    "formaction",
    "data",
    "poster",
    "background",
    "ping",
}
MakeRun = Callable[..., Path]


class Page(HTMLParser):
    """Elements of a page with their attributes and their texts, and whether its tags are balanced."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def ids(self) -> set[str | None]:
        return {attributes["id"] for _, attributes in self.elements if "id" in attributes}

    def text(self) -> str:
        return "".join(text for tag, text in self.texts if tag not in ("script", "style"))

    def all_of(self, tag: str, css_class: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.elements if t == tag and css_class in (a.get("class") or "").split()]

    def script(self, index: int) -> str:
        return [text for tag, text in self.texts if tag == "script"][index]


@pytest.fixture
def config() -> Config:
    return Config.model_validate(
        {
            "run": {"name": "demo", "steps": 40},
            "model": {"path": "models/tiny"},
            "data": {"train": ["data/train.jsonl"]},
            "reward": {"function": "math"},
            "train": {"lr": 0.25},
        }
    )


@pytest.fixture
def make_run(tmp_path: Path, config: Config) -> MakeRun:
    """Return a function that writes a run directory, of which everything may be left out."""

    def make(
        metrics: Sequence[Mapping[str, Any]] | None = None,
        samples: Sequence[Any] | None = None,
        record: Mapping[str, Any] | None = None,
        **objects: Any,
    ) -> Path:
        write_resolved(config, tmp_path / "config.toml")
        for name, rows in (("metrics", metrics), ("samples", samples)):
            if rows is not None:
                lines = "".join(json.dumps(row) + "\n" for row in rows)
                (tmp_path / f"{name}.jsonl").write_text(lines)
        for name, value in {"run": record, **objects}.items():
            if value is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return tmp_path

    return make


NAMES = (
    *(
        "train/loss",
        "train/pg_loss",
        "train/ppo_kl",
        "train/kl_loss",
        "train/entropy_loss",
        "train/pg_clipfrac",
    ),
    *("train/train_rollout_logprob_abs_diff", "train/grad_norm", "train/lr"),
    *("rollout/raw_reward", "rollout/reward", "rollout/zero_std_ratio", "rollout/failed_ratio"),
    *("rollout/response_len/mean", "rollout/response_len/max", "rollout/truncated_ratio"),
    *("rollout/lag/mean", "train/correction/tis/effective_samples"),
    *(
        "rollout/a/raw_reward",
        "rollout/b/raw_reward",
        "passrate/pass@1",
        "passrate/pass@8",
        "passrate/math-pass@4",
    ),
    *("multi_turn/rounds/mean", "multi_turn/response_len_without_observations/mean"),
    *("rollout/media_tokens", "data/media_decode_s", "reward/format/has_box", "custom/mine"),
    *("eval/math", "eval/math-truncated_ratio", "perf/step_time", "perf/rollout_time", "perf/train_time"),
    *(
        "perf/overhead_time",
        "perf/tokens_per_s",
        "perf/tflops",
        "perf/host_memory_gib",
        "perf/worker_rss_gib",
    ),
    "perf/device_memory_gib",
)


def rows(steps: int, names: Sequence[str] = NAMES) -> list[dict[str, float | None]]:
    """Return lines of a metrics file with every metric that a chart shows."""
    groups = {name.partition("/")[0] for name in names}
    return [
        {
            **{f"{group}/step": step for group in groups},
            **{name: 1.0 + math.sin(step * (index + 1)) / 3 for index, name in enumerate(names)},
        }
        for step in range(1, steps + 1)
    ]


def sample(**fields: Any) -> dict[str, Any]:
    known = {"chosen": "best", "prompt": "1+1=", "response": "2", "reward": 1.0, "raw_reward": 1.0}
    return known | {"error": None, "length": 1, "finish_reason": "stop", "label": "2"} | fields


# -------------------------------------------------------------------------
# Complete in itself
# -------------------------------------------------------------------------


def test_nothing_is_loaded_from_anywhere(make_run: MakeRun) -> None:
    link = "see https://example.com/x.png <img src=//example.com/y.png> url(http://example.com)"
    directory = make_run(rows(5), [{"step": 1, "samples": [sample(response=link)]}], environment={"a": link})
    page = Page(write_report(directory))
    for tag, attributes in page.elements:
        assert tag not in {
            "link",
            "img",
            "iframe",
            "object",
            "embed",
            "base",
            "audio",
            "video",
            "form",
            "use",
        }
        for name in LOADING & attributes.keys():
            assert (attributes[name] or "").startswith("#"), (tag, name, attributes[name])
        assert "url(" not in (attributes.get("style") or "")
    styles = "".join(text for tag, text in page.texts if tag == "style")
    assert not re.search(r"url\(|@import|https?:|image-set|src\s*:", styles)
    assert not re.search(r"https?:|fetch|XMLHttp|import\(|WebSocket|sendBeacon|\.src\b", page.script(1))
    # Texts of a run become nodes of text, never markup or code.
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", page.script(1)
    )
    assert "https://example.com/x.png" in page.text()


def test_a_policy_lets_only_its_own_script_run(make_run: MakeRun) -> None:
    page = Page(write_report(make_run()))
    (policy,) = [a["content"] or "" for _, a in page.elements if "http-equiv" in a]
    own = base64.b64encode(hashlib.sha256(page.script(1).encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'; ")
    assert [a for t, a in page.elements if t == "script"] == [{"type": "application/json", "id": "data"}, {}]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]


# -------------------------------------------------------------------------
# True to the files
# -------------------------------------------------------------------------


def test_the_data_equal_the_metrics_file(make_run: MakeRun) -> None:
    lines = rows(30)
    lines[3]["train/loss"] = None
    again = [row | {"train/loss": 7.0} for row in rows(30)[20:25]]
    data = json.loads(Page(write_report(make_run([*lines, *again]))).script(0))
    expected: dict[str, dict[int, Any]] = {}
    for row in [*lines, *again]:
        for name, value in row.items():
            if not name.endswith("/step"):
                expected.setdefault(name, {})[int(row[f"{name.partition('/')[0]}/step"] or 0)] = value
    columns = data["metrics"].items()
    found = {name: dict(zip(data["axes"][a], values, strict=True)) for name, (a, values) in columns}
    assert found == expected
    assert data["every"] == 1


def test_every_chart_is_drawn_where_its_metric_is(make_run: MakeRun) -> None:
    page = Page(write_report(make_run(rows(5))))
    keys = {f"chart-{chart.key}" for section in SECTIONS for chart in section.charts} | {"chart-phases"}
    assert keys == {name for name in page.ids() if (name or "").startswith("chart-")}
    assert "Not recorded" not in page.text()


@pytest.mark.parametrize(
    "chart", [chart for section in SECTIONS for chart in section.charts], ids=lambda c: c.key
)
def test_a_chart_without_its_metrics_is_named_and_not_drawn(chart: Any, make_run: MakeRun) -> None:
    own = {name for lines in chart.lines for name, _ in lines.find(dict.fromkeys(NAMES))}
    names = [name for name in NAMES if name not in own]
    page = Page(write_report(make_run(rows(5, names))))
    assert f"chart-{chart.key}" not in page.ids()
    (note,) = [text for _, text in page.texts if "Not recorded" in text and chart.title in text]
    assert note


def test_controls_wait_for_the_script_and_know_the_ranges(make_run: MakeRun) -> None:
    page = Page(write_report(make_run(rows(5))))
    assert [a["hidden"] for a in page.all_of("div", "controls")] == [None]
    figures = {a["id"]: a for a in page.all_of("figure", "chart")}
    assert {figure["data-x"] for figure in figures.values()} == {"1 5"}
    assert all(len((figure["data-y"] or "").split()) == 2 for figure in figures.values())
    stacked = [name for name, figure in figures.items() if "data-stacked" in figure]
    assert stacked == ["chart-phases"]
    buttons = page.all_of("button", "log")
    assert len(buttons) == len(figures) - 1
    assert all("hidden" in button for button in buttons)


def test_an_sft_run_shows_its_losses_and_no_reward_where_there_is_none(make_run: MakeRun) -> None:
    names = [
        "train/loss",
        "train/entropy_loss",
        "train/grad_norm",
        "train/lr",
        "eval/math-loss",
        "custom/mine",
    ]
    names += [f"train{of}/{name}" for of in ("", "/chats") for name in ("tokens", "sequence_len/mean")]
    names += ["perf/step_time", "perf/train_time", "perf/tokens_per_s", "perf/tflops", "perf/host_memory_gib"]
    directory = make_run(rows(5, names))
    config = directory / "config.toml"
    config.write_text(config.read_text().replace('task = "rl"', 'task = "sft"'))
    page = Page(write_report(directory))
    keys = {f"chart-{chart.key}" for section in SFT_SECTIONS for chart in section.charts}
    assert {name for name in page.ids() if (name or "").startswith("chart-")} == (
        keys - {"chart-eval", "chart-eval-pass"} | {"chart-phases"}
    )
    assert "Not recorded in this run: Evaluation, pass@k in evaluation." in page.text()
    assert [a["title"] for a in page.all_of("div", "tile")][:2] == ["train/loss", "eval/math-loss"]
    assert "Evaluation loss: math" in page.text()
    assert "samples" not in page.ids()
    assert "samples.jsonl" not in page.text()


@pytest.mark.parametrize(("steps", "kinds"), [(1, ["line"]), (100, ["line"]), (101, ["faint", "line"])])
def test_many_points_are_faint_behind_a_smoothed_line(
    steps: int, kinds: list[str], make_run: MakeRun
) -> None:
    page = Page(write_report(make_run(rows(steps, ["train/entropy_loss"]))))
    layers = [a for t, a in page.elements if t == "path" and "data-points" in a]
    assert [(a["class"] or "").split()[0] for a in layers] == kinds
    points = [len(re.findall(r"[ML]", layer["d"] or "")) for layer in layers]
    assert points == [steps, steps - 8][: len(kinds)]  # nine points are averaged


def test_a_long_series_is_drawn_with_few_points(make_run: MakeRun) -> None:
    page = Page(write_report(make_run(rows(3000, ["train/entropy_loss", "perf/train_time"]))))
    drawn = [re.findall(r"[ML]", a["d"] or "") for _, a in page.elements if "data-points" in a]
    assert len(drawn) == 3
    assert all(100 < len(points) <= MOST_POINTS for points in drawn)


def test_more_series_than_colors_are_named(make_run: MakeRun) -> None:
    names = [f"eval/set{index:02}" for index in range(COLORS + 2)]
    page = Page(write_report(make_run(rows(3, names))))
    assert len(page.all_of("path", "dots")) == 2 * COLORS  # among the rewards, and alone
    assert "Not drawn: set08, set09." in page.text()


def test_headline_numbers_are_those_of_the_metrics(make_run: MakeRun) -> None:
    lines: list[dict[str, float]] = [
        {"rollout/step": step, "rollout/raw_reward": step / 40, "perf/step": step, "perf/step_time": 2.0}
        for step in range(1, 41)
    ]
    lines += [{"eval/step": 0, "eval/math": 0.25}, {"eval/step": 40, "eval/math": 0.75}]
    text = " ".join(Page(write_report(make_run(lines))).text().split())
    assert "Reward 0.887 from 0.138, means over 10 steps" in text
    assert "Evaluation: math 0.75 from 0.25 at step 0" in text
    assert "Step time 2 s median of 40 steps" in text
    assert "Finished all 40 steps. Evaluation of math rose from 0.25 to 0.75." in text


def test_the_verdict_names_the_best_evaluation_and_what_is_wrong(make_run: MakeRun) -> None:
    lines = [{"eval/step": step, "eval/math": value} for step, value in ((0, 0.25), (10, 0.75), (20, 0.5))]
    directory = make_run(lines)
    stale = watch_rules({rule.name: Limit(0.0, "key") for rule in RULES})
    stale.step(20, {"rollout/lag/max": 3.0})
    write_health(directory, health_of(stale, 20, []))
    page = Page(write_report(directory))
    assert page.all_of("p", "warned")
    text = " ".join(page.text().split())
    assert "demo not known to have ended, 1 warning" in text
    best = "Evaluation of math rose from 0.25 to 0.5; its best was 0.75 at step 10."
    assert f"{best} Health: 1 warning (stale_weights)." in text


def test_what_never_changes_is_a_line_of_text_and_what_is_equal_one_curve(make_run: MakeRun) -> None:
    lines = [
        {"train/step": s, "train/lr": 0.5, "rollout/step": s, "rollout/raw_reward": s, "rollout/reward": s}
        for s in (1, 2, 3)
    ]
    page = Page(write_report(make_run(lines)))
    assert "chart-learning-rate" not in page.ids()
    assert "The same at every step: Learning rate (0.5)." in page.text()
    assert "as scored, as trained on" in page.text()
    (items,) = [a for t, a in page.elements if t == "li" and "data-metric" in a]
    assert items["data-metric"] == "rollout/raw_reward"


def test_histograms_set_the_last_recorded_steps_against_the_first(make_run: MakeRun) -> None:
    directory = make_run()
    lines = [{"step": s, "reward": [[0.0, 4 - s], [1.0, s]], "length": [[9.0, 4]]} for s in (1, 3)]
    broken = {"step": 2, "reward": [["x", 1], [1e300, 1], [0.5]], "advantage": "?"}
    text = "".join(json.dumps(line) + "\n" for line in (lines[0], broken, lines[1]))
    (directory / "distributions.jsonl").write_text(text)
    page = Page(write_report(directory))
    assert {name for name in page.ids() if "histogram" in (name or "")} == {
        "chart-histogram-reward",
        "chart-histogram-length",
    }
    shapes = {a["class"]: a["d"] for t, a in page.elements if t == "path" and a.get("data-points") == "2"}
    assert shapes == {  # of 3/4 and 1/4, with room of 8 % above
        "area c0": "M0 691.4L500 691.4L500 74.07L1000 74.07L1000 1000L500 1000L500 1000L0 1000Z",
        "outline c7": "M0 74.07L500 74.07L500 691.4L1000 691.4L1000 1000L500 1000L500 1000L0 1000Z",
    }
    assert "step 1step 3" in page.text().replace("\n", "").replace(" ", "").replace("step", "step ")


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        (range(1, 37), 18),  # two lengths in each
        (range(1, 101), 24),  # in intervals of two
        ([0, 1000], 2),
        ([each / 8 for each in range(9)], 9),
        ([each / 1000 for each in range(6400)], 24),
    ],
)
def test_a_histogram_of_equal_counts_is_flat(values: Sequence[float], bars: int) -> None:
    (chart,) = draw_histograms({1: {"length": json.loads(json.dumps(value_counts(values)))}})
    (layer,) = chart.layers
    heights = [float(each) for each in re.findall(r"[ML]\S+ ([\d.]+)", layer.path)][: 2 * bars]
    assert layer.points == bars
    assert max(heights) - min(heights) <= 1


def test_values_far_apart_keep_their_bars_beside_those_in_intervals() -> None:
    drawn = draw_histograms({1: {"reward": [[0.0, 1], [0.3, 1], [1.0, 2]]}, 2: {"reward": [[0.5, 4, 1.0]]}})
    first, last = (
        [float(y) for y in re.findall(r"[ML]\S+ ([\d.]+)", each.path)] for each in drawn[0].layers[::-1]
    )
    assert [24 - first[:48:2].count(1000.0), 24 - last[:48:2].count(1000.0)] == [3, 24]


def test_a_histogram_has_the_first_and_the_last_tenth_of_the_steps() -> None:
    (chart,) = draw_histograms({step: {"reward": [[step / 8, 1]]} for step in range(1, 21)})
    assert [line.label for line in chart.lines] == ["steps 1 to 2", "steps 19 to 20"]


def test_a_running_page_reloads_itself_and_no_other_does(make_run: MakeRun, tmp_path: Path) -> None:
    started = datetime.now(UTC) + timedelta(hours=1)
    part = {"host": socket.gethostname(), "pid": os.getpid(), "started": started.isoformat()}
    page = Page(write_report(make_run(rows(3), record={"parts": [part]})))
    assert dict(page.elements)["html"]["data-live"] == "30"
    assert "Running: step 3 of 40" in page.text()
    elsewhere = Page(write_report(make_run(), tmp_path / "look.html"))
    assert "data-live" not in dict(elsewhere.elements)["html"]
    config = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(config.replace("report = true", "report = false"))
    assert "data-live" not in dict(Page(write_report(tmp_path)).elements)["html"]
    ended = make_run(record={"parts": [part | {"outcome": "finished"}]})
    page = Page(write_report(ended))
    assert "data-live" not in dict(page.elements)["html"]
    assert not page.all_of("p", "live")


def test_the_timeline_is_drawn_with_its_breaks(make_run: MakeRun) -> None:
    directory = make_run()
    timeline = Timeline(directory / TIMELINE_FILE)
    timeline.add(Row("driver"), [PhaseTime("train", 0.0, 30.0), PhaseTime("lost", 9e4, 30.0)])
    timeline.close()
    page = Page(write_report(directory))
    assert "each server did in 1 min 00 s." in page.text()
    assert "nothing ran for 1 d 0 h" in page.text()
    drawn = [a["d"] for name in ("c1", "c8", "break") for a in page.all_of("path", name)]
    assert drawn == ["M0 0h300v1h-300z", "M300 0h300v1h-300z", "M300.0 0v1"]


def test_tokens_are_data_of_the_page(make_run: MakeRun) -> None:
    texts, log_probs = ["a", "</script>", "b", "c", "d"], [-0.5, None, "nan", -math.inf, 10**400]
    own = sample(tokens=texts, log_probs=log_probs)
    page = Page(write_report(make_run(None, [{"step": 3, "samples": [sample(), own]}])))
    assert json.loads(page.script(0))["tokens"] == {
        "3/1": [texts, [-0.5, None, "nan", "-Infinity", f"1{'0' * 400}"]]
    }
    assert [a["data-sample"] for a in page.all_of("details", "tokens")] == ["3/1"]


def test_health_comes_first_with_what_fires_what_was_over_and_every_rule(make_run: MakeRun) -> None:
    directory = make_run(rows(3))
    assert "health" not in Page(write_report(directory)).ids()  # of a version that had no health file
    watch = watch_rules({rule.name: Limit(rule.limit or 0.0, "<b>key</b>") for rule in RULES})
    write_health(directory, health_of(watch, 1, []))
    page = Page(write_report(directory))
    order = [attributes.get("id") for _, attributes in page.elements]
    assert order.index("health") < order.index("summary")
    assert "No warning after step 1: 0 of" in page.text()
    stale, well = {"rollout/lag/max": 3.0}, {"rollout/lag/max": 0.0}
    changes = [
        change
        for step, metrics in enumerate([stale, *[well] * CALM, stale], 1)
        for change in watch.step(step, metrics)
    ]
    write_health(directory, health_of(watch, 7, changes))
    page = Page(write_report(directory))
    (told,) = [text for tag, text in page.texts if tag == "li" and "Step 7: tokens were" in text]
    assert "above <b>key</b> = 0 versions." in told
    assert "1 of 1 rules fires after step 7: stale_weights." in page.text()
    assert "stale_weights fired at step 1 and was over at step 6." in page.text()
    assert "fires since step 7" in page.text()
    write_health(directory, health_of(watch, 7, changes, "stale_weights"))
    assert "Stopped by the rule stale_weights after step 7." in Page(write_report(directory)).text()
    (directory / HEALTH_FILE).write_text("[]")
    assert "health.json cannot be read." in Page(write_report(directory)).text()


def test_the_phases_divide_the_step(make_run: MakeRun) -> None:
    lines = [
        {"perf/step": s, "perf/step_time": 4.0, "perf/rollout_time": 1.0, "perf/train_time": 3.0}
        for s in (1, 2)
    ]
    page = Page(write_report(make_run(lines)))
    text = " ".join(page.text().split())
    assert "rollout1 s1 s25.0 %" in text
    assert "train3 s3 s75.0 %" in text
    assert len(page.all_of("path", "area")) == 2


def test_config_environment_and_capabilities_are_shown(make_run: MakeRun) -> None:
    kernel = {
        "op": "rms_norm",
        "source": "fast.rms",
        "dtypes": ["float32"],
        "package": "fast",
        "version": "1.2",
    }
    where = {"location": "/site/fast/rms.py:3", "is_reference": True}
    hooks = [
        {"hook": "make_device", "plugin": "fast", "package": "fast", "version": "1.2"},
        {"hook": "on_error"},
    ]
    page = Page(
        write_report(
            make_run(
                environment={"python": "3.11"},
                capabilities={"kernels": [kernel | where], "hooks": hooks, "plugin_errors": {"bad": "boom"}},
            )
        )
    )
    text = " ".join(page.text().split())
    assert "rms_norm reference fast.rms float32 fast 1.2 site/fast/rms.py:3".replace(" ", "") in text.replace(
        " ", ""
    )
    assert "Hooks: 2, of which 1 have implementations" in text
    assert "Plugin bad failed to load: boom" in text
    changed = [text for tag, text in page.texts if tag == "span" and text.startswith(("lr = 0", "min_lr = "))]
    assert changed == ["lr = 0.25", "min_lr = 0.0"]
    marked = len(page.all_of("span", "set"))
    assert marked == 8  # name, steps, model.path, data.train on three lines, reward.function, lr
    assert "3.11" in text


# -------------------------------------------------------------------------
# Safe
# -------------------------------------------------------------------------

HOSTILE = (
    "</script><script>alert(1)</script>",
    "</style></textarea><!-- --><svg onload=alert(1)>",
    "\" onmouseover='alert(1)' x=\"{{ 7*7 }}{% raw %}&amp;",
    "\u202eright to left\u2066 \u05d0\u05d1 \u0627 \U0001f600 \u2028\u2029",
    "nul \0 escape \x1b[31m bell \x07 cr \r\n c1 \x85 lone \ud800 non \uffff",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_are_text(text: str, make_run: MakeRun) -> None:
    directory = make_run(
        [{"train/step": 1, f"train/{text}": 1.0, "custom/step": 1, f"custom/{text}": 1.0}],
        [{"step": 1, "samples": [sample(prompt=text, response=text, error=text, label=text, chosen=text)]}],
        {"name": text, "parts": [{"outcome": "failed", "error": text, "started": text, "host": text}]},
        environment={text: text},
        capabilities={
            "kernels": [{"op": text, "source": text, "dtypes": [text]}],
            "plugin_errors": {text: text},
        },
    )
    (directory / "logs").mkdir()
    (directory / "logs" / "driver.log").write_text(text, encoding="utf-8", errors="replace")
    page = Page(write_report(directory))
    assert [a for t, a in page.elements if t == "script"] == [{"type": "application/json", "id": "data"}, {}]
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    shown = page.text()
    assert shown.count(visible(text)) >= 7
    assert visible(raw := (directory / REPORT_FILE).read_text()) == raw
    names = list(json.loads(page.script(0))["metrics"])
    assert names == [f"train/{text}", f"custom/{text}"]
    charted = [json.loads(f'"{a["data-metric"]}"') for t, a in page.elements if "data-metric" in a]
    assert charted == [name for name in names[1:] if re.fullmatch("custom/(.+)", name)]


def test_long_texts_are_folded_and_cut(make_run: MakeRun) -> None:
    long = "a" * 100_000 + "THE END"
    page = Page(write_report(make_run(None, [{"step": 1, "samples": [sample(prompt=long, response=long)]}])))
    assert len(page.all_of("details", "long")) == 2
    assert page.text().count("THE END") == 2
    assert len(page.text()) < 30_000
    assert "94,007 characters" in page.text()


def test_samples_of_many_steps_are_thinned_evenly() -> None:
    rows = {step: [sample(response="r" * 5000)] for step in range(1, 1001)}
    steps = [each.step for each in sample_steps(rows)]
    assert len(steps) * 5000 < MOST_CHARACTERS
    assert steps == list(range(1000 - 6 * (len(steps) - 1), 1001, 6))
    own = sample(tokens=["t"] * 400, log_probs=[-0.5] * 400)  # 4.4 million characters in all
    assert [each.step for each in sample_steps({step: [own] for step in range(1, 1001)})][:2] == [5, 10]


def test_the_last_record_of_a_step_is_shown(make_run: MakeRun) -> None:
    samples = [
        {"step": s, "samples": [sample(response=f"{n} of {s}")]}
        for n, s in (("old", 2), ("new", 2), ("new", 1))
    ]
    text = Page(write_report(make_run(None, samples))).text()
    assert ("new of 2" in text, "new of 1" in text, "old of 2" in text) == (True, True, False)
    assert text.index("new of 2") < text.index("new of 1")


def test_samples_without_a_reward_say_why(make_run: MakeRun) -> None:
    failed = sample(reward=None, raw_reward=None, error="ZeroDivisionError: by zero", chosen="failed")
    page = Page(
        write_report(make_run(None, [{"step": 1, "samples": [failed, sample(raw_reward={"a": 0.5})]}]))
    )
    text = page.text()
    assert "not scored" in text
    assert "ZeroDivisionError: by zero" in text
    assert '{"a": 0.5}' in text


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
NAME = st.sampled_from(NAMES) | st.text(max_size=20).map("train/{}".format)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(metrics=st.lists(st.dictionaries(NAME, FLOATS | st.integers(-(10**6), 10**6), max_size=6), max_size=8))
def test_any_numbers_make_a_page(metrics: list[dict[str, Any]], make_run: MakeRun) -> None:
    groups = {name.partition("/")[0] for row in metrics for name in row}
    lines = [{**{f"{group}/step": step for group in groups}, **row} for step, row in enumerate(metrics)]
    page = render_page(read_run(make_run(lines)))
    assert not re.search(r"[ML-](nan|inf)| (nan|inf)[LMhZ\"]", page)


# -------------------------------------------------------------------------
# Runs of all kinds
# -------------------------------------------------------------------------


def test_a_run_of_which_nothing_is_there_but_its_config(make_run: MakeRun) -> None:
    page = Page(write_report(make_run()))
    text = page.text()
    for name in ("metrics.jsonl", "samples.jsonl", "environment.json", "capabilities.json", "run.json"):
        assert f"There is no {name}" in text
    assert "demo" in text
    assert "not known to have ended" in text


def test_the_header_has_what_is_known_of_the_devices(make_run: MakeRun) -> None:
    run = make_run(record={"backend": "abacus", "parts": []}, environment={"abacus": "2 x beads", "cpu": "8"})
    assert "abacus (2 x beads)" in Page(write_report(run)).text()


def test_a_run_without_its_config(make_run: MakeRun) -> None:
    directory = make_run(rows(3))
    (directory / "config.toml").unlink()
    text = Page(write_report(directory)).text()
    assert directory.name in text
    assert "There is no config.toml" in text


def test_files_that_cannot_be_read_are_named(make_run: MakeRun) -> None:
    directory = make_run(rows(3), [{"step": 1}, [2], "x", {"step": math.inf, "samples": []}], environment=[1])
    for name in ("config.toml", "run.json", "capabilities.json"):
        (directory / name).write_bytes(b"\xff{")
    text = Page(write_report(directory)).text()
    for message in (
        "config.toml cannot be read: ",
        "capabilities.json cannot be read: ",
        "environment.json cannot be read: it holds no object.",
        "samples.jsonl: 4 lines cannot be read.",
        "There is no run.json",
    ):
        assert message in text


def test_the_command_writes_where_it_is_told(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = make_run(rows(2))
    assert main(["report", str(directory)]) == 0
    assert main(["report", str(directory), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(directory / REPORT_FILE), str(tmp_path / "page.html")]
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert not list(tmp_path.glob(".*"))


def test_what_is_no_run_is_named_with_what_could_be_meant(make_run: MakeRun, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    make_run()
    (tmp_path / "config.toml").rename(run / "config.toml")
    for wrong, found in ((tmp_path / "runs", "has neither"), (tmp_path / "runs" / "m", "does not exist")):
        with pytest.raises(CheckpointError, match=found) as caught:
            write_report(wrong)
        assert str(run) in str(caught.value.hint)
    with pytest.raises(CheckpointError, match="it is a file"):
        write_report(run / "config.toml")


def test_a_page_that_cannot_be_written_is_an_error(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written to .*missing"):
        write_report(make_run(), tmp_path / "missing" / "page.html")


@pytest.mark.parametrize("content", ['{"step": 1}', "<!doctype html>", "# anygauge run report</title>"])
def test_a_file_that_is_not_a_report_is_not_overwritten(
    content: str, make_run: MakeRun, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text(content)
    (tmp_path / "link").symlink_to("mine")
    for name in ("mine", "link"):
        with pytest.raises(CheckpointError, match=f"{name}: the file exists and is not a report") as caught:
            write_report(make_run(), tmp_path / name)
        assert "Choose another name" in str(caught.value.hint)
    assert (tmp_path / "mine").read_text() == content


def test_an_earlier_report_an_empty_file_and_the_target_of_a_link_are_written(
    make_run: MakeRun, tmp_path: Path
) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link"
    link.symlink_to("page.html")
    for steps, out in ((1, link), (2, link), (3, page)):
        write_report(make_run(rows(steps)), out)
        assert json.loads(Page(page).script(0))["axes"] == [list(range(1, steps + 1))]
    assert link.is_symlink()
    page.write_text("")
    write_report(make_run(), page)
    assert page.stat().st_size > 10_000


def test_a_fifo_receives_the_page(make_run: MakeRun, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 2**20)  # room for the page: nothing reads before it is written
    try:
        write_report(make_run(rows(2)), fifo)
        assert os.read(reader, 2**20).endswith(b"</html>")
    finally:
        os.close(reader)
    assert fifo.is_fifo()
    with pytest.raises(CheckpointError, match="Is a directory"):
        write_report(make_run(), tmp_path)


@pytest.mark.soak
def test_a_long_run_makes_a_page_that_is_small_and_quick(make_run: MakeRun) -> None:
    directory = make_run(
        rows(10_000), [{"step": s, "samples": [sample(response="r" * 3000)] * 4} for s in range(200)]
    )
    started = time.process_time()
    page = write_report(directory)
    assert time.process_time() - started < 3
    assert page.stat().st_size < 5e6
