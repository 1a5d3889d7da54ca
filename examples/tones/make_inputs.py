"""Make the inputs of ``examples/tones_audio.toml``: recordings of tones, a tokenizer, and random weights.

Each recording has one to three tones of one pitch; the answer says how many, and of which pitch: ``2 high``.
One in nine guesses is right. The warm-up's recordings are those of other rows, so that it teaches the form of
an answer and nothing else. The recordings lie in the rows, as the bytes of WAV files.

    python examples/tones/make_inputs.py --seed 0 --out runs/tones-inputs
"""

from __future__ import annotations

import argparse
import io
import json
import random
import wave
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

RATE = 16_000
SECONDS = 1.0
SLOTS = 4
"""Equal parts of a recording, each with one tone or none."""
PITCHES = {"low": (250, 350), "middle": (700, 1000), "high": (2000, 2800)}
"""Range of the frequencies of each pitch in Hz."""
MOST = 3
QUESTION = "<audio>Which tones ?"
WORDS = ("Which", "tones", "?", *map(str, range(1, MOST + 1)), *PITCHES)
MEDIA_TOKENS = {
    "audio": "<|pad|>",
    "audio_start": "<|begin_of_audio|>",
    "audio_end": "<|end_of_audio|>",
    **{f"{kind}_start": f"<|begin_of_{kind}|>" for kind in ("image", "video")},
    **{kind: f"<|{kind}|>" for kind in ("image", "video")},
    **{f"{kind}_end": f"<|end_of_{kind}|>" for kind in ("image", "video")},
}
"""Tokens of the family's template, by the config's name for each."""
FILES = {"warm_up": 1024, "train": 4096, "held_out": 512}
"""Rows of each Parquet file. The order gives each its seed."""
SPLIT_SEED = 20_260_201
"""The recordings are the same for every ``--seed``, so that runs can be compared."""


def sound(rng: random.Random, pitch: str, count: int) -> NDArray[np.float32]:
    """Return a recording of some tones: float32 ``[samples]`` in -1 to 1."""
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(round(RATE * SECONDS)) * 0.005
    length = len(noise) // SLOTS
    for slot in rng.sample(range(SLOTS), count):
        frequency, loudness = rng.uniform(*PITCHES[pitch]), rng.uniform(0.2, 0.6)
        duration = rng.randint(length // 2, length * 4 // 5)
        start = slot * length + rng.randint(0, length - duration)
        phase = 2 * np.pi * frequency * np.arange(duration) / RATE
        noise[start : start + duration] += loudness * np.sin(phase) * np.hanning(duration)
    return noise.astype(np.float32)


def wav(samples: NDArray[np.float32]) -> bytes:
    """Return a recording as the bytes of a file."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return stream.getvalue()


def rows(seed: int, number: int) -> list[dict[str, Any]]:
    """Return rows with the fields ``prompt``, ``label`` and ``audio``."""
    return [*_rows(random.Random(seed), number)]


def _rows(rng: random.Random, number: int) -> Iterator[dict[str, Any]]:
    for _ in range(number):
        pitch, count = rng.choice([*PITCHES]), rng.randint(1, MOST)
        recording = {"bytes": wav(sound(rng, pitch, count))}
        yield {"prompt": QUESTION, "label": f"{count} {pitch}", "audio": [recording]}


def swapped(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the recordings of their neighbors, which tell nothing about the labels."""
    recordings = [row["audio"] for row in table]
    return [
        row | {"audio": audio} for row, audio in zip(table, [*recordings[1:], recordings[0]], strict=True)
    ]


def write_files(out: Path, files: dict[str, int]) -> None:
    """Write the Parquet files, and the held-out rows with swapped recordings."""
    from pyarrow import Table, parquet

    tables = {name: rows(SPLIT_SEED + seed, length) for seed, (name, length) in enumerate(files.items())}
    tables["warm_up"] = swapped(tables["warm_up"])
    tables["swapped"] = swapped(tables["held_out"])
    for name, table in tables.items():
        parquet.write_table(Table.from_pylist(table), out / f"{name}.parquet")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for each word of question and answer."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*WORDS, "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.add_tokens([AddedToken(token, special=True, normalized=False) for token in MEDIA_TOKENS.values()])
    return fast


def model_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the family's tiny config with the tokenizer's tokens."""
    from anygauge_models.glm_omni.spec import GLM_OMNI

    hf: dict[str, Any] = dict(GLM_OMNI.tiny())
    media = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in MEDIA_TOKENS.items()
    }
    drawn = {
        "initializer_range": 0.06
    }  # recordings must differ in the first step, or there is nothing to learn
    text = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, **drawn}
    parts = {"text_config": hf["text_config"] | text, "audio_config": hf["audio_config"] | drawn}
    return {**hf, **media, **parts}


def write_model(directory: Path, seed: int) -> None:
    """Write a complete Hugging Face directory of a GLM-Omni with random weights in float32."""
    import torch
    from safetensors.torch import save_file

    from anygauge_models.glm_omni.composition import compose

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(directory)
    hf = model_config(tokenizer)
    (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
    torch.manual_seed(seed)
    model = compose(hf, torch.float32)
    save_file(
        {name: each.contiguous() for name, each in model.state_dict().items()},
        directory / "model.safetensors",
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Make the inputs."""
    parser = argparse.ArgumentParser(description="Make the inputs of examples/tones_audio.toml.")
    parser.add_argument("--out", type=Path, default=Path("runs/tones-inputs"), help="directory to make")
    parser.add_argument("--seed", type=int, default=0, help="seeds the weights")
    parser.add_argument("--rows", type=int, help="of each file; fewer, to try it")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    files = {name: min(args.rows or length, length) for name, length in FILES.items()}
    write_files(args.out, files)
    write_model(args.out / "model", args.seed)
    print(f"{args.out}: {', '.join(f'{length} rows in {name}' for name, length in files.items())}")


if __name__ == "__main__":
    from anygauge_cpu.env import prepare_imports

    prepare_imports()  # transformers imports what lies beside torch, and that may not fit it
    main()
