"""Links resolve; every config key is documented."""

from __future__ import annotations

import doctest
import importlib
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from anygauge.config.keys import PAGES
from anygauge.config.validate import keys, sections
from anygauge_tests.code_blocks import blocks

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
SOURCES = [
    path for folder in ("core", "hooks", "models", "backends/cpu") for path in (ROOT / folder).rglob("*.py")
]
WITH_EXAMPLES = [path for path in sorted(SOURCES) if re.search(r"^ *>>> ", path.read_text(), re.M)]
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(path: Path) -> set[str]:
    """Return the fragments that a page's headings give, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if blocks(path, "bash")], ids=lambda p: p.name
)
def test_every_block_of_bash_is_bash(document: Path) -> None:
    for block in blocks(document, "bash"):
        done = subprocess.run(["bash", "-n", "-c", block], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_resolves(document: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (document.parent / name) if name else document
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert not broken


def test_links_out_of_the_site_lead_to_files_of_the_repository() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    change = runpy.run_path(str(ROOT / "docs/site/pages.py"))["on_page_markdown"]
    files = f"{site['repo_url']}/blob/main/"
    targets = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        file = SimpleNamespace(src_uri=page.relative_to(ROOT / "docs").as_posix())
        text = change(page.read_text(encoding="utf-8"), page=SimpleNamespace(file=file), config=site)
        targets += [link.removeprefix(files) for link in LINK.findall(text) if link.startswith(files)]
    assert len(targets) > 20
    assert [name for name in targets if not (ROOT / name.partition("#")[0]).is_file()] == []


def test_the_site_keeps_options_whole_and_says_which_pages_are_chinese() -> None:
    pages = runpy.run_path(str(ROOT / "docs/site/pages.py"))
    html = "<p>--prose <code>train --dry-run --run.steps 2 a--b</code></p><pre><code>x --y\n</code></pre>"
    option = '<span class="option">{}</span>'.format
    assert pages["on_page_content"](html) == (
        f"<p>--prose <code>train {option('--dry-run')} {option('--run.steps')} 2 a--b</code></p>"
        f"<pre><code>x {option('--y')}\n</code></pre>"
    )
    for url, language in (("zh/ascend/", "zh-CN"), ("npu/", "en")):
        page = pages["on_post_page"]('<html lang="en">', page=SimpleNamespace(url=url))
        assert page == f'<html lang="{language}">'


def test_every_config_key_is_documented() -> None:
    undocumented = [path for path, field in keys() if not (field.description or "").endswith((".", ".)"))]
    assert undocumented == []
    assert all(section.__doc__ for _, section in sections())


def test_the_page_of_config_keys_is_current_and_links_to_pages() -> None:
    script = runpy.run_path(str(ROOT / "bench/config_page.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run bench/config_page.py"
    assert all((ROOT / "docs" / f"{page}.md").exists() for page in PAGES.values())


def test_the_table_of_health_rules_is_current() -> None:
    script = runpy.run_path(str(ROOT / "bench/health_page.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run bench/health_page.py"


def test_the_pages_of_other_projects_are_current() -> None:
    script = runpy.run_path(str(ROOT / "bench/migrate_pages.py"))
    for name, folder in ((name, script["FOLDER"]) for name in script["PROJECTS"]):
        page = (folder / f"{name}.md").read_text(encoding="utf-8")
        assert page == script["page"](name), "run bench/migrate_pages.py"


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_in_a_docstring_is_true(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    package = next(index for index, part in enumerate(parts) if part.startswith("anygauge"))
    module = importlib.import_module(".".join(parts[package:]).removesuffix(".__init__"))
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
