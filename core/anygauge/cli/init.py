"""``anygauge init``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anygauge.cli.recipe import DataFacts, Machine, ModelFacts

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Write a commented config for a model, with sizes that fit it and the devices."
GSM8K = "hf://datasets/openai/gsm8k/main/{}-00000-of-00001.parquet"
INPUT_KEYS = ("prompt", "messages", "question", "problem", "instruction", "input")
LABEL_KEYS = ("label", "answer", "solution", "response", "completion", "output", "target")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", metavar="MODEL", required=True, help="Hugging Face directory, or a name: Qwen/Qwen3-0.6B"
    )
    parser.add_argument("--devices", metavar="N", type=_count, default=1, help="default: 1")
    parser.add_argument("--backend", metavar="NAME", help="default: the only usable accelerator, else cpu")
    parser.add_argument("--task", choices=("rl", "sft"), default="rl", help="default: rl")
    parser.add_argument("--data", metavar="FILE", help="training data, local or by name; default: GSM8K")
    parser.add_argument("--out", metavar="FILE", default="config.toml", help="default: config.toml")
    parser.add_argument("--force", action="store_true", help="overwrite the file")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Write the config."""
    from anygauge.cli.recipe import recipe
    from anygauge_hooks.errors import ConfigError

    out = Path(args.out)
    if out.exists() and not args.force:
        hint = "--force overwrites it; --out FILE writes another one."
        raise ConfigError(f"{out} exists.", hint=hint)
    model, how = _model(args.model)
    machine = _machine(args.backend, args.devices)
    text = recipe(model, _data(args.data), machine, task=args.task, command=_command(args))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror}.", hint="Name a file with --out.") from error
    print(f"wrote {out}")
    for note in (how, *_notes(args, model, machine)):
        print(f"note: {note}")
    print(f"next: anygauge train {shlex.quote(str(out))}")
    return 0


def _command(args: argparse.Namespace) -> str:
    options = {"--backend": args.backend, "--data": args.data}
    chosen = [word for option, value in options.items() if value for word in (option, value)]
    words = ["anygauge", "init", "--model", args.model, "--devices", str(args.devices), "--task", args.task]
    return shlex.join([*words, *chosen])


# -------------------------------------------------------------------------
# The model
# -------------------------------------------------------------------------


def _model(text: str) -> tuple[ModelFacts, str]:
    """Return what is known of a model, and how."""
    from anygauge.cli.recipe import facts_of_config, facts_of_name
    from anygauge_hooks.errors import ConfigError

    directory = Path(text).expanduser()
    if not directory.exists():
        found = _cached(text)
        if found is None:
            return facts_of_name(text), f"{text} is not in the cache: sizes follow from its name alone"
        directory, name = found, text
    else:
        name = str(directory)
    try:
        hf = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if not isinstance(hf, dict):
            raise ValueError("it is no object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} is no Hugging Face directory: its config.json cannot be read: {error}.",
            hint="Name a directory with config.json, a tokenizer and *.safetensors, or a name on the hub.",
        ) from error
    facts = facts_of_config(name, hf, chat=_has_template(directory))
    return facts, f"sizes follow from {directory / 'config.json'}"


def _cached(text: str) -> Path | None:
    """Return the directory of a name that is in the cache.

    :raises ConfigError: It is no name.
    """
    from anygauge.config.schema import Hub
    from anygauge.hub import cached_model
    from anygauge.hub.names import model_name
    from anygauge_hooks.errors import ConfigError

    name = model_name("--model", Path(text))
    if name is None:
        raise ConfigError(
            f"--model {text}: no such directory, and no name of a model either.",
            hint="Name a Hugging Face directory that exists here, or OWNER/NAME on the hub.",
        )
    return cached_model(name, Hub())


def _has_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        tokenizer = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(tokenizer, dict) and bool(tokenizer.get("chat_template"))


# -------------------------------------------------------------------------
# The machine and the data
# -------------------------------------------------------------------------


def _machine(backend: str | None, devices: int) -> Machine:
    from anygauge.cli.recipe import DEVICE_GIB, GIB, Machine
    from anygauge.observability.host import read_memory
    from anygauge.plugins import find_backend, load_plugins, select_backend

    plugins = load_plugins()
    if backend is None:
        spec, reason = select_backend(plugins, None)
        print(f"backend: {spec.name} ({reason})", file=sys.stderr)
    else:
        spec = find_backend(plugins, plugins.named("register_backends"), backend)
    accelerator = spec.visible_devices_env is not None
    memory = DEVICE_GIB if accelerator else read_memory().total / GIB
    return Machine(backend=spec.name, accelerator=accelerator, devices=devices, memory_gib=memory)


def _data(path: str | None) -> DataFacts:
    from anygauge.cli.recipe import DataFacts

    if path is None:
        return DataFacts(
            train=GSM8K.format("train"),
            evaluation=GSM8K.format("test"),
            input_key="question",
            label_key="answer",
            note="",
        )
    row = _first_row(Path(path))
    return DataFacts(
        train=path,
        evaluation=None,
        input_key=next((key for key in INPUT_KEYS if key in row), "prompt"),
        label_key=next((key for key in LABEL_KEYS if key in row), "label"),
        note=f"of {', '.join(map(str, row))}" if row else "name the fields of your rows here",
    )


def _first_row(path: Path) -> Mapping[str, Any]:
    """Return the first row of a file of JSON lines, or nothing if it cannot be read here."""
    try:
        with path.open(encoding="utf-8") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def _notes(args: argparse.Namespace, model: ModelFacts, machine: Machine) -> Iterator[str]:
    """Yield what the user should know before the first run."""
    from anygauge.cli.recipe import state_gib
    from anygauge.hub.names import DATASETS

    if args.data and not args.data.startswith(DATASETS) and not Path(args.data.partition("@[")[0]).is_file():
        yield f"{args.data} does not exist yet"
    if model.billions is None:
        yield "the size of the model is not known: the batch sizes are those of 4B parameters"
        return
    needed = state_gib(model.billions, machine.devices)
    memory = machine.memory_gib if machine.accelerator else machine.memory_gib / machine.devices
    if needed > memory * 0.9:
        yield (
            f"weights, gradients and optimizer take about {needed:.0f} GiB of the {memory:.0f} GiB of each "
            "device: use more devices or a smaller model"
        )
