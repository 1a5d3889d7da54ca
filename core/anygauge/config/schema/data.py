"""Training prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from anygauge.config.schema.section import Name, Positive, Section, path_alone

__all__ = ["Data", "DataFile", "DataFiles"]


class DataFile(Section):
    """A data file. A string is short for a table with this path."""

    path: str
    """A JSONL, Parquet or CSV file, local or ``hf://datasets/OWNER/NAME/FILE``; ``FILE@[a:b]`` takes rows a
    to b, as Python slices do."""
    name: Name | None = None
    """Name of the data set in metrics; ``None`` takes the file's name without its suffix."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the prompts that are drawn from this file, in relation to the others' weights; ``None`` for
    all files takes each row equally often."""


DataFiles = tuple[
    Annotated[DataFile, BeforeValidator(path_alone, json_schema_input_type=DataFile | str)], ...
]


class Data(Section):
    """Training prompts."""

    train: DataFiles
    """Data files: strings, or tables with ``path``, ``name`` and ``weight``."""
    source: str = "files"
    """Data source, by registered name."""
    input_key: str = "prompt"
    """Field of a row that holds the prompt: a string, or a list of chat messages. For SFT the messages
    hold the assistant's turns too, or the label is the answer to train on."""
    label_key: str | None = "label"
    """Field that holds the expected answer; ``None`` if the reward needs none."""
    metadata_key: str | None = None
    """Field with an object for the reward function; ``None`` gives it all fields but input and label."""
    tools_key: str | None = None
    """Field with the tools of the chat template: a list of JSON schemas."""
    multimodal_keys: dict[Literal["image", "video", "audio"], str] = {}
    """Fields that hold media, by kind: ``{image = "images"}``. A value is one medium or a list: a path, a
    ``data:`` address or base64, bytes in Parquet. Placeholders ``<image>``, ``<video>`` and ``<audio>`` in
    the prompt say where they stand."""
    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template; a string becomes one user message."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the chat template, such as ``{enable_thinking = false}``."""
    system_prompt: str | None = None
    """System message put before a prompt that is a string; needs ``apply_chat_template``."""
    max_prompt_tokens: Positive | None = None
    """Rows with longer prompts are dropped and counted."""
    shuffle: bool = True
    """Draw rows in a new random order each epoch."""
    cache: Path | None = None
    """Keeps the checked index of each file, so that a later start need not read it again; ``None`` takes
    ``ANYGAUGE_CACHE``, else ``~/.cache/anygauge``."""
