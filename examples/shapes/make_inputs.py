"""Make the inputs of ``examples/shapes_vlm.toml``: pictures, a tokenizer of words, and random weights.

Each picture shows one to four shapes of one kind, of any size, place and color; the answer says how many,
and of what kind: ``3 circles``. One in twelve guesses is right. The pictures of each file are drawn with a
seed of their own and lie in the rows, as the bytes of PNGs.

    python examples/shapes/make_inputs.py --seed 0 --out runs/shapes-inputs
"""

from __future__ import annotations

import argparse
import io
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIDE = 48
"""Side of an image in pixels: three cells of 16."""
CELL = SIDE // 3
KINDS = ("circle", "square", "triangle")
MOST = 4
QUESTION = "<image>What is there ?"
WORDS = ("What", "is", "there", "?", *map(str, range(1, MOST + 1)), *KINDS, *(f"{kind}s" for kind in KINDS))
FILES = {"warm_up": 8192, "train": 8192, "validation": 256, "held_out": 512}
"""Rows of each Parquet file. The order gives each its seed."""
SPLIT_SEED = 20_260_101
"""Which pictures there are is the same for every ``--seed``, so that runs can be compared."""


def draw(rng: random.Random, kind: str, count: int) -> Image.Image:
    """Return a picture of some shapes in different cells."""
    picture = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    pen = ImageDraw.Draw(picture)
    for cell in rng.sample(range(9), count):
        size = rng.randint(CELL // 2, CELL - 2)
        left = cell % 3 * CELL + rng.randint(0, CELL - size - 1)
        top = cell // 3 * CELL + rng.randint(0, CELL - size - 1)
        box = (left, top, left + size, top + size)
        color = (rng.randint(0, 140), rng.randint(0, 140), rng.randint(0, 140))
        if kind == "circle":
            pen.ellipse(box, fill=color)
        elif kind == "square":
            pen.rectangle(box, fill=color)
        else:
            pen.polygon([(left, box[3]), (box[2], box[3]), (left + size // 2, top)], fill=color)
    return picture


def answer(kind: str, count: int) -> str:
    """Return what is right: ``1 circle``, ``3 circles``."""
    return f"{count} {kind}" + "s" * (count > 1)


def png(picture: Image.Image) -> bytes:
    """Return a picture as the bytes of a file."""
    stream = io.BytesIO()
    picture.save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def rows(seed: int, number: int) -> Iterator[dict[str, Any]]:
    """Yield rows with the fields ``prompt``, ``label`` and ``images``."""
    rng = random.Random(seed)
    for _ in range(number):
        kind, count = rng.choice(KINDS), rng.randint(1, MOST)
        picture = png(draw(rng, kind, count))
        yield {"prompt": QUESTION, "label": answer(kind, count), "images": [{"bytes": picture}]}


def write_files(out: Path, files: dict[str, int]) -> None:
    """Write the Parquet files, of which no two share a picture, and the held-out rows with swapped ones."""
    from pyarrow import Table, parquet

    seen: set[bytes] = set()
    for number, (name, length) in enumerate(files.items()):
        table = list(rows(SPLIT_SEED + number, length))
        pictures = {row["images"][0]["bytes"] for row in table}
        assert not pictures & seen, f"{name} has a picture of another file"
        seen |= pictures
        parquet.write_table(Table.from_pylist(table), out / f"{name}.parquet")
        if name == "held_out":
            parquet.write_table(Table.from_pylist(swapped(table)), out / "swapped.parquet")


def swapped(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the pictures of their neighbors: who does not look is as good there as anywhere."""
    pictures = [row["images"] for row in table]
    return [row | {"images": images} for row, images in zip(table, [*pictures[1:], pictures[0]], strict=True)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word of question and answer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from anygauge.testing.tiny_vision import add_vision_tokens

    tokens = [*WORDS, "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return add_vision_tokens(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    )


def make_inputs(out: Path, seed: int, files: dict[str, int]) -> None:
    """Write every input into ``out``."""
    from transformers.utils.logging import disable_progress_bar

    from anygauge.testing.tiny_vision import tiny_qwen3_vl

    disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    write_files(out, files)
    tiny_qwen3_vl(out / "model", make_tokenizer(), max_positions=64, seed=seed)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the inputs."""
    parser = argparse.ArgumentParser(description="Make the inputs of examples/shapes_vlm.toml.")
    parser.add_argument("--out", type=Path, default=Path("runs/shapes-inputs"), help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="seeds the weights")
    parser.add_argument("--rows", type=int, help="of each file; fewer, to try it")
    args = parser.parse_args(argv)
    files = {name: min(args.rows or length, length) for name, length in FILES.items()}
    make_inputs(args.out, args.seed, files)
    print(f"{args.out}: {', '.join(f'{length} rows in {name}' for name, length in files.items())}")


if __name__ == "__main__":
    from anygauge_cpu.env import prepare_imports

    prepare_imports()  # transformers imports what lies beside torch, and that may not fit it
    main()
