"""Write rows of Geometry3K as questions with their choices; with ``--tiny`` a random model to try them with.

    python examples/geo3k_vlm_multi_turn/make_inputs.py --data /data/geo3k --tiny

``--data`` is a directory with ``train.jsonl``, whose rows have ``problem`` (with ``<image>``), ``choices``,
``answer`` (a letter) and ``images`` (files beside it). The diagrams stay where they are: rows name them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LETTERS = "ABCDEFGH"
LAST_LINE = "End with the letter of the right choice, such as: The answer is B."


def question(row: Mapping[str, Any]) -> str:
    """Return a problem and its choices."""
    choices = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=False)]
    return "\n".join([row["problem"], *choices, LAST_LINE])


def as_row(row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return what the recipes read: ``prompt``, ``label``, ``choices`` and ``images``."""
    return {
        "prompt": question(row),
        "label": row["answer"],
        "choices": row["choices"],
        "images": [str((folder / name).resolve()) for name in row["images"]],
    }


def make_model(directory: Path, texts: Sequence[str], seed: int) -> None:
    """Write a random Qwen3-VL of some hundred thousand parameters, with a tokenizer for these texts."""
    from transformers.utils.logging import disable_progress_bar

    from anygauge.testing.tiny import tiny_tokenizer
    from anygauge.testing.tiny_vision import CHAT_TEMPLATE, add_vision_tokens, tiny_qwen3_vl

    disable_progress_bar()
    tokenizer = add_vision_tokens(tiny_tokenizer(directory, texts=texts))
    tokenizer.chat_template = CHAT_TEMPLATE
    tiny_qwen3_vl(directory, tokenizer, pixels=(32 * 32, 64 * 64), seed=seed)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the rows, and a model if one is wanted."""
    parser = argparse.ArgumentParser(description="Make the inputs of examples/geo3k_vlm_multi_turn.")
    parser.add_argument("--data", type=Path, required=True, help="directory of train.jsonl and its diagrams")
    parser.add_argument("--out", type=Path, default=Path("runs/geo3k-inputs"), help="directory to make")
    parser.add_argument("--tiny", action="store_true", help="make a tiny model too")
    parser.add_argument("--seed", type=int, default=0, help="seeds its weights")
    args = parser.parse_args(argv)
    lines = (args.data / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [as_row(json.loads(line), args.data) for line in lines]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if args.tiny:
        make_model(args.out / "model", [row["prompt"] for row in rows], args.seed)
    print(f"{args.out}: {len(rows)} rows{' and a tiny model' if args.tiny else ''}")


if __name__ == "__main__":
    from anygauge_cpu.env import prepare_imports

    prepare_imports()  # transformers imports what lies beside torch, and that may not fit it
    main()
