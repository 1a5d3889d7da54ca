"""Small data sets in the format of published ones, made on the spot: rows, and pictures beside them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

__all__ = ["read_rows", "write_geo3k", "write_gsm8k"]

_NAMES = ("Ann", "Iñaki", "Mrs. O\u2019Hara", "Josh")
_THINGS = ("pens", "bolts of blue fiber", "\u201clucky\u201d eggs", "2\u00d74 boards")
_SHAPES = ("parallelogram M N P Q", "\\triangle A B C", "\\odot X")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_gsm8k(directory: Path) -> Path:
    """Write ``train.jsonl`` and ``test.jsonl`` with the fields ``question`` and ``answer`` of GSM8K.

    An answer has several lines, calculator annotations in most of them, and its result behind ``####``:
    a whole number, with commas from 1,000 on.
    """
    for name, seed, length in (("train", 0, 240), ("test", 1, 60)):
        rng = random.Random(seed)
        _write_rows(directory / f"{name}.jsonl", [_word_problem(rng) for _ in range(length)])
    return directory


def _word_problem(rng: random.Random) -> dict[str, str]:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    count, price = rng.randint(2, 40), rng.choice((3, 20, 450, 80_000))
    total, half = count * price, count * price // 2
    question = (
        f"{name} buys {count} {thing} for ${price:,} each.\u00a0 Half of the money, rounded down, comes back "
        f"\u2013 how many dollars is that?"
    )
    steps = [
        f"All of them cost {count}*{price:,}=$<<{count}*{price}={total}>>{total:,}",
        f"The half is {total:,} \u00f7 2, so {name} gets ${half:,} back.",
        f"#### {half:,}",
    ]
    return {"question": question, "answer": "\n".join(steps)}


def write_geo3k(directory: Path) -> Path:
    """Write ``train.jsonl`` with ten rows in the format of Geometry3K, and the diagrams that they name.

    The fields are ``problem`` (with ``<image>``), ``choices``, ``answer`` (a letter) and ``images``. The
    diagrams are PNGs with an alpha channel, each of another size.
    """
    rng = random.Random(0)
    _write_rows(directory / "train.jsonl", list(_geometry(rng, directory)))
    return directory


def _geometry(rng: random.Random, directory: Path) -> Iterator[dict[str, Any]]:
    for number in range(10):
        name, angle = f"{number}.png", rng.randint(10, 80)
        _draw(rng, (120 + 50 * number, 300 - 20 * number)).save(directory / name)
        choices = [f"{angle}", f"{2 * angle}", f"{angle / 2}", f"\\frac {{ {angle} }} {{ \\sqrt {{ 3 }} }}"]
        question = f"m \\angle M = {angle} x{' and A B = 30' * (number % 4)}. Find \\sin x."
        yield {
            "id": str(number),
            "problem": f"<image>In {rng.choice(_SHAPES)}, {question}",
            "answer": rng.choice("ABCD"),
            "choices": rng.sample(choices, len(choices)),
            "images": [name],
        }


def _draw(rng: random.Random, size: tuple[int, int]) -> Image.Image:
    diagram = Image.new("RGBA", size, (255, 255, 255, 0))
    corners = [(rng.randrange(size[0]), rng.randrange(size[1])) for _ in range(4)]
    ImageDraw.Draw(diagram).polygon(corners, outline=(0, 0, 0, 255), width=2)
    return diagram


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
