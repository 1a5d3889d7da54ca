"""The report of a run in headless Chromium: it loads alone, without an error, and shows what was recorded.

Skipped where there is no Chromium, unless ``ANYGAUGE_REQUIRE_CHROMIUM`` is set.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from anygauge.config import Config
from anygauge.config.load import write_resolved
from anygauge.observability.jsonl import METRICS_FILE, JsonlTracker
from anygauge.observability.report import REPORT_FILE, plugin, write_report
from anygauge.plugins import find_backend, load_plugins
from anygauge.run_directory.capabilities import write_capabilities
from anygauge_hooks.rl import Group, Prompt
from anygauge_hooks.types import RunInfo
from anygauge_tests.scoring import sample

NAMES = ("chromium", "chromium-browser", "google-chrome")
STEPS = 120
# What a test adds to a copy of the page: it moves the pointer over a chart and the samples back by one step,
# and writes down what it saw. The copy has no content policy, so that what the policy stops would show here.
PROBE = """<script>
addEventListener("load", () => {
  const box = document.querySelector("#chart-reward .box");
  const { left, width, top } = box.getBoundingClientRect();
  const clientX = left + (width * 49) / 119;
  box.dispatchEvent(new PointerEvent("pointermove", { clientX, clientY: top + 5, bubbles: true }));
  document.querySelector("[data-move='-1']").click();
  const text = (selector) => [...document.querySelectorAll(selector)].map((e) => e.textContent);
  const values = text("#chart-reward output");
  const step = text(".stepper output"), steps = () => text("details.step:not([hidden]) > summary").length;
  const shown = steps(), search = document.querySelector("[type=search]");
  const tokens = document.querySelector("details.step:not([hidden]) details.tokens");
  tokens.dispatchEvent(new Event("toggle"));
  const find = (wanted) => {
    search.value = wanted;
    search.dispatchEvent(new Event("input"));
    const found = document.querySelectorAll("article.sample:not([hidden])").length;
    return [document.querySelector(".matches").textContent, steps(), found];
  };
  const range = document.querySelector("[type=range]"), folded = document.querySelector("#metrics details");
  const reloads = (change) => {
    change();
    const before = window.reloads;
    window.tick();
    return window.reloads - before;
  };
  const found = [find("BOLD"), find("log-prob of each"), find("the label"), find("")];
  const kept = [
    reloads(() => {}),
    reloads(() => { range.value = range.max; folded.open = true; }),
    reloads(() => { folded.open = false; document.querySelector("[name=to]").value = "5"; }),
    reloads(() => { document.querySelector("[name=to]").value = ""; }),
  ];
  const drawn = ({ x, from = "", to = "" }) => {
    const [choice, ...fields] = document.querySelectorAll(".controls select, .controls input");
    [choice.value, fields[0].value, fields[1].value] = [x, from, to];
    fields[1].dispatchEvent(new Event("change", { bubbles: true }));
    return text("#chart-entropy .x span");
  };
  const pointer = (type, step) => {
    const clientX = left + (width * (step - 1)) / 119;
    const place = { clientX, clientY: top + 5, pointerType: "mouse", bubbles: true };
    box.dispatchEvent(new PointerEvent(type, place));
  };
  const points = (id) => [...document.querySelectorAll(`#chart-${id} svg > path`)].map((path) => {
    return [path.getAttribute("class"), path.getAttribute("d").match(/[ML]/g).length];
  });
  const charts = () => {
    const parts = [...document.querySelectorAll(".chart svg, .x, .y, .left-out")];
    return parts.map((part) => part.innerHTML).join("");
  };
  const before = charts(), log = document.querySelector("#chart-loss .log"), changed = {};
  changed.seconds = drawn({ x: "seconds" });
  changed.tokens = drawn({ x: "tokens" });
  changed.faint = points("entropy");
  pointer("pointermove", 50);
  changed.at = text("#chart-reward .at output");
  changed.cursor = Math.round(parseFloat(box.querySelector(".cursor").style.left));
  pointer("pointerleave", 50);
  drawn({ x: "steps" });
  ["pointerdown", "pointermove", "pointerup"].forEach((type, index) => pointer(type, [8, 40, 106][index]));
  changed.zoomed = text("#chart-entropy .x span, #chart-entropy .y span, #chart-entropy .left-out");
  changed.floor = document.querySelector("#chart-entropy .y span").style.bottom;
  changed.points = [points("entropy"), points("phases").length];
  changed.kept = JSON.parse(sessionStorage.getItem(`anygauge ${location.pathname}`));
  document.querySelector(".controls button").click();
  log.click();
  changed.log = [log.getAttribute("aria-pressed"), ...text("#chart-loss .y span, #chart-loss .left-out")];
  changed.differs = charts() !== before;
  log.click();
  changed.restored = charts() === before;
  document.documentElement.dataset.seen = JSON.stringify({
    changed,
    values,
    step,
    shown,
    found,
    kept,
    tokens: [...tokens.querySelectorAll("span")].map((e) => [e.className, e.textContent]),
    resources: performance.getEntriesByType("resource").map((entry) => entry.name),
    overflow: document.documentElement.scrollWidth - innerWidth,
    errors: window.seen,
  });
});
</script></body>"""
LISTEN = """<head><script>
  window.seen = [];
  Element.prototype.setPointerCapture = () => {};  // knows no pointer that a script moves
  addEventListener("error", (e) => window.seen.push(e.message));
  window.setInterval = (tick) => { window.tick = tick; };
  window.reloads = 0;
  navigation.addEventListener("navigate", (e) => { window.reloads += 1; e.preventDefault(); });
</script>"""
Browse = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def chromium() -> str:
    """Return the browser."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.environ.get("ANYGAUGE_REQUIRE_CHROMIUM"):
        pytest.fail(f"none of {', '.join(NAMES)} is installed, and ANYGAUGE_REQUIRE_CHROMIUM is set")
    if found is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    return found


@pytest.fixture
def browse(chromium: str, tmp_path: Path) -> Browse:
    """Return a function that opens a page and returns what the browser said."""

    def run(page: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--no-first-run", "--disable-background-networking", "--disable-extensions"]
        command += [
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            *options,
            page.as_uri(),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)

    return run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of a run that its observers have seen from begin to end."""
    directory, model = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("model")
    words = WordLevel({"<b>": 0, "\0": 1}, unk_token="<b>")
    Tokenizer(words).save(str(model / "tokenizer.json"))
    config = Config.model_validate(
        {
            "run": {"name": "seen", "steps": STEPS},
            "model": {"path": str(model)},
            "data": {"train": ["train.jsonl"]},
            "reward": {"function": "math"},
        }
    )
    write_resolved(config, directory / "config.toml")
    (directory / "environment.json").write_text('{"python": "3"}')
    plugins = load_plugins(only=["cpu"])
    write_capabilities(directory, plugins, find_backend(plugins, plugins.named("register_backends"), "cpu"))
    run = RunInfo(name="seen", directory=str(directory), backend="cpu", total_steps=STEPS, config=config)
    plugin.before_train(run=run)
    tracker = JsonlTracker(directory / METRICS_FILE)
    for step in range(1, STEPS + 1):
        plugin.after_rollout(run=replace(run, step=step - 1), groups=[group(step)])
        tracker.log(metrics(step), step=step)
        if step % 30 == 0:
            tracker.log({"eval/math": step / 200, "eval/math-truncated_ratio": 0.0}, step=step)
    tracker.close()
    plugin.after_train(run=replace(run, step=STEPS))
    return directory / REPORT_FILE


def metrics(step: int) -> dict[str, float]:
    reward = step / 128  # exact in decimal too
    return {
        "train/loss": math.sin(step),
        "train/ppo_kl": 0.01,
        "train/entropy_loss": 1 / step if step != 90 else 1e6,
        "rollout/raw_reward": reward,
        "rollout/reward": reward - 0.125,
        "rollout/response_len/mean": 100 + step,
        "passrate/pass@1": reward,
        "perf/step_time": 2.0,
        "perf/rollout_time": 1.0,
        "perf/train_time": 0.75,
        "perf/overhead_time": 0.25,
        "perf/tokens_per_s": 1000.0 + step,
        "perf/host_memory_gib": 1.5,
    }


def group(step: int) -> Group:
    texts = [
        "<b>bold</b> & <script>document.title = 'broken'</script>",
        "\u202e\u05d0 \U0001f600 nul \0",
        f"{step}",
    ]
    shared = sample(
        response_tokens=(0, 1, 0),
        log_probs=(-0.5, 0.0, math.nan),
        loss_mask=(1, 0, 1),
        weight_versions=(step, step),
    )
    samples = tuple(shared._replace(text=text, reward=index / 2) for index, text in enumerate(texts))
    return Group(prompt=Prompt(index=0, tokens=(1,), text="x" * 2000, label="The label"), samples=samples)


def test_the_page_loads_without_an_error_and_draws_every_point(report: Path, browse: Browse) -> None:
    done = browse(report, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert "<title>seen \N{EN DASH} anygauge run report</title>" in done.stdout
    assert '<div class="stepper">' in done.stdout, "the page's own script did not run"
    figure = re.search(r'<figure[^>]*id="chart-reward".*?</figure>', done.stdout, re.S)
    assert figure is not None
    layers = re.findall(r'<path class="(\w+) c(\d)" data-points="(\d+)" d="([^"]*)"', figure[0])
    drawn = {(kind, color): len(re.findall("[ML]", path)) for kind, color, _, path in layers}
    assert drawn == {
        **{("faint", color): STEPS for color in "01"},
        **{("line", color): STEPS - 8 for color in "01"},  # a mean of nine points
        **{("line", "2"): 4, ("dots", "2"): 4},
    }


def test_an_sft_run_begins_with_its_losses(browse: Browse, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[run]\nname = "chats"\ntask = "sft"\n')
    tracker = JsonlTracker(tmp_path / METRICS_FILE)
    for step in (1, 2, 3):
        tracker.log({"train/loss": 1 / step, "train/tokens": step, "eval/held-out-loss": 2 / step}, step=step)
    tracker.close()
    done = browse(write_report(tmp_path), "--dump-dom")
    assert "CONSOLE" not in done.stderr
    charts = re.findall(r'<figure[^>]*id="chart-([\w-]+)"', done.stdout)
    assert charts == ["loss", "eval-loss", "trained-tokens"]


def test_the_pointer_reads_values_and_samples_change_by_step(
    report: Path, browse: Browse, tmp_path: Path
) -> None:
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", report.read_text())
    probed = tmp_path / "probed.html"
    live = page.replace("<html", '<html data-live="30"', 1).replace(
        "<main>", '<main><p data-made="0"></p>', 1
    )
    probed.write_text(live.replace("<head>", LISTEN, 1).replace("</body>", PROBE, 1))
    dom = browse(probed, "--dump-dom", "--window-size=500,900").stdout
    attribute = re.search(r'data-seen="([^"]*)"', dom)
    assert attribute is not None
    seen = json.loads(unescape(attribute[1]))
    lost = sum(metrics(step)["train/loss"] <= 0 for step in range(1, STEPS + 1))
    assert seen.pop("changed") == {
        "seconds": ["1 min", "2 min", "3 min", "4 min"],
        "tokens": ["50k", "100k", "150k", "200k", "250k"],
        "faint": [["faint c0", STEPS], ["line c0", STEPS - 8]],
        "at": ["52 \N{MIDDLE DOT} 107k tokens"],
        "cursor": 41,  # at 106,756 of 2,002 to 254,520 tokens
        "zoomed": [
            "1 point is outside this range.",
            "0",
            "0.05",
            "0.1",
            "0.15",
            *map(str, range(20, 101, 20)),
        ],
        "floor": "0%",  # no room below 0 for values that are never negative
        "points": [[["line c0", 101]], 3],  # of 99 steps, and of the next ones on both sides
        "kept": {"x": "steps", "from": 8, "to": 106, "log": []},
        "log": [
            "true",
            f"{lost} points are not above 0 and not shown.",
            *("0.02", "0.05", "0.1", "0.2", "0.5", "1"),
        ],
        "differs": True,
        "restored": True,
    }
    assert seen == {
        "values": ["50", "0.3906", "0.2656", "0.15"],
        "step": ["step 119"],
        "shown": 1,
        "found": [
            ["120 of 360 samples", 120, 120],
            ["0 of 360 samples", 0, 0],  # a text of the page
            ["360 of 360 samples", 120, 360],
            ["", 1, 360],
        ],
        "kept": [0, 0, 0, 1],  # not while an earlier step is shown, something is open or typed
        "tokens": [["token", "<b>"], ["given", " \\x00"], ["token broken", " <b>"]],
        "resources": [],
        "overflow": 0,
        "errors": [],
    }


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (500, "dark")])
def test_a_screenshot_shows_something(
    width: int, scheme: str, report: Path, browse: Browse, tmp_path: Path
) -> None:
    picture = tmp_path / "page.png"
    preference = f"--blink-settings=preferredColorScheme={('dark', 'light').index(scheme)}"
    browse(report, f"--screenshot={picture}", f"--window-size={width},2000", preference)
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (width, 2000)
    assert len(data) > 50_000  # an empty page of this size has less than 10,000
