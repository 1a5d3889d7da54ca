"""Pages of docs/ as mkdocs needs them: they are written for the repository, where they are read as well."""

from __future__ import annotations

import os.path
import re
from pathlib import PurePosixPath
from typing import Any

LINK = re.compile(r"(\]\()(\.\./[^)\s]+)")
FENCE = re.compile(r"^```(\w+) [^\n]+$", re.M)
INLINE_CODE = re.compile(r"<code>[^<]+</code>")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links out of docs/ lead to the repository, and fences have a language alone."""
    folder = PurePosixPath("docs", page.file.src_uri).parent
    files = f"{config['repo_url']}/blob/main"
    markdown = LINK.sub(lambda link: link[1] + with_repository(link[2], folder, files), markdown)
    return FENCE.sub(r"```\1", markdown)


def with_repository(target: str, folder: PurePosixPath, files: str) -> str:
    """Return the address of a file of the repository, and a link within docs/ as it is."""
    path = os.path.normpath(folder / target)
    return target if path.startswith("docs/") else f"{files}/{path}"


def on_page_content(html: str, **_: Any) -> str:
    """Show the marks of reStructuredText in docstrings as a reader expects them, and options on one line."""
    html = ROLE.sub("", html).replace("::</p>", ":</p>")
    return INLINE_CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Say which pages are Chinese: browsers choose fonts by it, and screen readers voices."""
    return (
        output.replace('<html lang="en"', '<html lang="zh-CN"', 1) if page.url.startswith("zh/") else output
    )
