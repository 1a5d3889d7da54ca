"""Render the diagrams of the documentation: ``python docs/diagrams/render.py``.

Each ``NAME.toml`` in this directory becomes ``NAME.svg``. Only the standard library is used. The output is
a function of the source, so a test compares the two byte by byte. Sizes and positions are in pixels of a
picture that is 800 wide. Text that does not fit into its box is an error.

Source format::

    title = "..."             # for screen readers
    height = 400
    [[box]]                   # id, at = [x, y], size = [w, h], title, lines, kind, center
    [[arrow]]                 # from = "id.side" or "id.side:0.3", to, via = [[x, y], ...],
                              # label = [lines], label_at = [x, y], dashed, both

A side is ``left``, ``right``, ``top`` or ``bottom``. The number after it is the position along the side,
0.5 by default. A line that starts with a backtick is set in a monospaced font.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

WIDTH = 800
TITLE_PX, TEXT_PX, CODE_PX, LABEL_PX = 14, 12.5, 11.5, 12
LINE = 17
PAD = 9
SANS, MONO = 0.53, 0.605
"""Mean width of a character in units of the font size; wide enough for the fonts that browsers substitute."""
STYLE = """
text { font: 12.5px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 14px; font-weight: 600 } .label { font-size: 12px; fill: #444c56 }
.code { font: 11.5px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace }
.page { fill: #ffffff } .halo { fill: #ffffff } .arrow { fill: none; stroke: #59636e; stroke-width: 1.5 }
.dashed { stroke-dasharray: 5 4 } marker path { fill: #59636e } rect.box { stroke-width: 1.3 }
.core { fill: #ddf4ff; stroke: #0969da } .worker { fill: #dafbe1; stroke: #1a7f37 }
.vendor { fill: #fff1e5; stroke: #bc4c00 } .user { fill: #fbefff; stroke: #8250df }
.data { fill: #f6f8fa; stroke: #59636e } .frame { fill: none; stroke: #8c959f; stroke-dasharray: 6 4 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .label { fill: #c3ccd6 } .page { fill: #0d1117 } .halo { fill: #0d1117 }
.arrow { stroke: #9198a1 } marker path { fill: #9198a1 }
.core { fill: #0c2d6b; stroke: #4493f8 } .worker { fill: #04361a; stroke: #3fb950 }
.vendor { fill: #5a1e02; stroke: #f0883e } .user { fill: #3c1e70; stroke: #ab7df8 }
.data { fill: #212830; stroke: #9198a1 } .frame { stroke: #656c76 }
}
"""

Point = tuple[float, float]


class Rectangle(NamedTuple):
    """A part of the picture."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Rectangle) -> bool:
        """Return whether the two share an area."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def text_width(text: str) -> float:
    """Return an upper estimate of the width of a line in a box."""
    if text.startswith("`"):
        return (len(text) - 2) * CODE_PX * MONO
    return len(text) * TEXT_PX * SANS


def box_area(box: Mapping[str, Any]) -> Rectangle:
    """Return where a box is."""
    (x, y), (width, height) = box["at"], box["size"]
    return Rectangle(x, y, x + width, y + height)


def label_area(arrow: Mapping[str, Any]) -> Rectangle:
    """Return where the label of an arrow is."""
    x, y = arrow["label_at"]
    half = max(len(line) for line in arrow["label"]) * LABEL_PX * SANS / 2
    return Rectangle(x - half, y - 11, x + half, y + LINE * (len(arrow["label"]) - 1) + 4)


def render(source: Mapping[str, Any]) -> str:
    """Return the SVG of a diagram.

    :raises ValueError: A text is larger than its box.
    """
    boxes = {box["id"]: box for box in source["box"]}
    height = source["height"]
    size = f'width="{WIDTH}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {size}'
    parts = [
        f'{head} role="img" aria-label={quoteattr(source["title"])}>',
        f"<style>{STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z"/></marker></defs>',
        f'<rect class="page" {size}/>',
        *(line for box in source["box"] for line in _box(box)),
        *(_arrow(arrow, boxes) for arrow in source.get("arrow", ())),
        *(line for arrow in source.get("arrow", ()) if "label" in arrow for line in _label(arrow)),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _box(box: Mapping[str, Any]) -> Iterator[str]:
    area, lines = box_area(box), box.get("lines", [])
    width, height = box["size"]
    widest = max([len(box["title"]) * TITLE_PX * SANS, *map(text_width, lines)])
    if widest + 2 * PAD > width:
        raise ValueError(f"{box['id']}: its text needs {widest + 2 * PAD:.0f} pixels, and it has {width}.")
    kind = box.get("kind", "core")
    needed = LINE * (len(lines) + 1) + PAD
    if needed > height:
        raise ValueError(f"{box['id']}: its lines need {needed} pixels of height, and it has {height}.")
    yield (
        f'<rect class="box {kind}" x="{area.left}" y="{area.top}" width="{width}" height="{height}" rx="6"/>'
    )
    centered = box.get("center", False)
    x = (area.left + area.right) / 2 if centered else area.left + PAD
    anchor = ' text-anchor="middle"' if centered else ""
    y = area.top + LINE + (0 if kind == "frame" else (height - needed) / 2) + 1
    yield f'<text class="title" x="{x:g}" y="{y:g}"{anchor}>{escape(box["title"])}</text>'
    for line in lines:
        y += LINE
        code = ' class="code"' if line.startswith("`") else ""
        yield f'<text{code} x="{x:g}" y="{y:g}"{anchor}>{escape(line.strip("`"))}</text>'


def _arrow(arrow: Mapping[str, Any], boxes: Mapping[str, Mapping[str, Any]]) -> str:
    points = [_end(arrow["from"], boxes), *map(tuple, arrow.get("via", ())), _end(arrow["to"], boxes)]
    path = "M" + " ".join(f"{x:.0f} {y:.0f}" for x, y in points)
    dashed = " dashed" if arrow.get("dashed") else ""
    start = ' marker-start="url(#head)"' if arrow.get("both") else ""
    return f'<path class="arrow{dashed}" d="{path}" marker-end="url(#head)"{start}/>'


def _end(place: str, boxes: Mapping[str, Mapping[str, Any]]) -> Point:
    name, _, side = place.partition(".")
    side, _, share = side.partition(":")
    area, part = box_area(boxes[name]), float(share or 0.5)
    x = area.left + part * (area.right - area.left)
    y = area.top + part * (area.bottom - area.top)
    return {
        "left": (area.left, y),
        "right": (area.right, y),
        "top": (x, area.top),
        "bottom": (x, area.bottom),
    }[side]


def _label(arrow: Mapping[str, Any]) -> Iterator[str]:
    area, (x, y) = label_area(arrow), arrow["label_at"]
    size = f'width="{area.right - area.left:g}" height="{area.bottom - area.top:g}"'
    yield f'<rect class="halo" x="{area.left:g}" y="{area.top:g}" {size}/>'
    for number, line in enumerate(arrow["label"]):
        at = f'x="{x:g}" y="{y + number * LINE:g}"'
        yield f'<text class="label" {at} text-anchor="middle">{escape(line)}</text>'


def sources(directory: Path) -> Sequence[Path]:
    """Return the sources of all diagrams."""
    return sorted(directory.glob("*.toml"))


def main() -> None:
    """Write the SVG of every source."""
    for path in sources(Path(__file__).parent):
        svg = render(tomllib.loads(path.read_text(encoding="utf-8")))
        path.with_suffix(".svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
