"""``anygauge init``."""

from __future__ import annotations

import argparse
import os
import shlex
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.cli.devices import add_device_arguments, backend_of_gpu, device_facts
from anygauge.disk import read_json
from anygauge.strict_json import parse_json

if TYPE_CHECKING:
    from anygauge.cli.recipe import DataFacts, Machine, ModelFacts
    from anygauge.config import Config
    from anygauge.planning.choose import Choice
    from anygauge_hooks.errors import ConfigError

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Write a commented config for a model, with sizes that fit it and the devices."
GSM8K = "hf://datasets/openai/gsm8k/main/{}-00000-of-00001.parquet"
MOST_DEVICES = 100_000
LONGEST_SHOWN = 20
INPUT_KEYS = ("prompt", "messages", "question", "problem", "instruction", "input")
MEDIA_KEYS = {
    "image": ("images", "image"),
    "video": ("videos", "video"),
    "audio": ("audios", "audio"),
}
LABEL_KEYS = ("label", "answer", "solution", "response", "completion", "output", "target")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--model", metavar="MODEL", required=True, help="Hugging Face directory, or a name: Qwen/Qwen3-0.6B"
    )
    parser.add_argument("--devices", metavar="N", type=_count, default=1, help="default: 1")
    parser.add_argument(
        "--backend", metavar="NAME", help="default: that of --gpu, else the only usable accelerator, else cpu"
    )
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="train engine: megatron or fsdp; default: megatron, never another one",
    )
    add_device_arguments(parser)
    parser.add_argument("--task", choices=("rl", "sft"), default="rl", help="default: rl")
    parser.add_argument("--data", metavar="FILE", help="training data, local or by name; default: GSM8K")
    parser.add_argument("--out", metavar="FILE", default="config.toml", help="default: config.toml")
    parser.add_argument("--force", action="store_true", help="overwrite the file")


def _count(text: str) -> int:
    short = text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_DEVICES))
    if not short or not 1 <= int(text) <= MOST_DEVICES:
        shown = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, and at most {MOST_DEVICES}, not {shown!r}"
        )
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Write the config."""
    from anygauge.cli.recipe import recipe
    from anygauge_hooks.errors import ConfigError

    _check_text(args)
    out = Path(args.out)
    _check_out(out, force=args.force)
    model, hf, how = _model(args.model, args.engine)
    supported = _check_engine(args.engine, hf)
    model = replace(model, accepts=_division_of(hf))
    machine = _machine(args)
    fits = _fits(args, model, machine)
    if not (hf or fits) and machine.accelerator and machine.devices > 1:
        raise _needs_sizes(args, model, machine)
    options = {"task": args.task, "engine": args.engine, "command": _command(args)}
    text = recipe(model, _data(args.data), machine, **options)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror}.", hint="Name a file with --out.") from error
    print(f"wrote {out}")
    for note in (how, *supported, *_notes(args, model, machine)):
        print(f"note: {note}")
    print(f"next: anygauge {'train' if fits else 'plan'} {shlex.quote(str(out))}")
    return 0


def _check_text(args: argparse.Namespace) -> None:
    """Raise what no config can hold, and what says nothing."""
    from anygauge_hooks.errors import ConfigError

    for option in ("model", "data", "out"):
        value: str | None = getattr(args, option)
        if value is None:
            continue
        if not value.strip():
            raise ConfigError(f"--{option} is empty.", hint="Name something, or leave the option out.")
        if not value.isprintable():
            shown = value.encode("unicode_escape").decode("ascii")
            hint = "Rename it: line ends, control characters and bytes that are not UTF-8 have no place here."
            raise ConfigError(f"--{option} {shown} has characters that cannot be printed.", hint=hint)


def _check_out(out: Path, *, force: bool) -> None:
    """Raise why a file cannot be written, before anything is looked up for it."""
    from anygauge_hooks.errors import ConfigError

    try:
        mode = out.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ConfigError(f"Cannot write {out}: {error.strerror}.", hint="Name a file with --out.") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise ConfigError(f"Cannot write {out}: it is {kind}.", hint="Name a file with --out.")
    if not force:
        hint = "--force overwrites it; --out FILE writes another one."
        raise ConfigError(f"{out} exists.", hint=hint)


def _command(args: argparse.Namespace) -> str:
    options = {"--engine": args.engine, "--backend": args.backend, "--data": args.data}
    options |= {"--gpu": args.gpu, "--device-memory": args.device_memory}
    chosen = [word for option, value in options.items() if value for word in (option, str(value))]
    words = ["anygauge", "init", "--model", args.model, "--devices", str(args.devices), "--task", args.task]
    return shlex.join([*words, *chosen])


# -------------------------------------------------------------------------
# The model
# -------------------------------------------------------------------------


def _model(text: str, engine: str | None) -> tuple[ModelFacts, Mapping[str, Any], str]:
    """Return the known facts about a model, its ``config.json`` if it is here, and the source of both."""
    from anygauge.cli.recipe import facts_of_config, facts_of_name
    from anygauge.config.families import with_defaults
    from anygauge.config.schema import Train
    from anygauge.plugins import load_plugins
    from anygauge_hooks.errors import ConfigError

    directory = Path(os.path.expanduser(text))
    if not os.path.exists(directory):
        cached = _cached(text)
        if cached is None:
            how = f"{text} is not in the cache: sizes follow from its name alone"
            return facts_of_name(text), {}, how
        directory, name = cached, text
    else:
        name = str(directory)
    if not directory.is_dir():
        hint = "Name the directory that holds the model's config.json, or a name on the hub."
        raise ConfigError(f"--model {text} is a file.", hint=hint)
    try:
        hf = read_json(directory / "config.json")
        if not isinstance(hf, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} is not a Hugging Face directory: its config.json cannot be read: {error}.",
            hint="Name a directory with config.json, a tokenizer and *.safetensors, or a name on the hub.",
        ) from error
    whole = with_defaults(load_plugins(), hf, engine or Train().engine)
    facts = facts_of_config(name, whole, chat=_has_template(directory))
    return facts, hf, f"sizes follow from {directory / 'config.json'}"


def _check_engine(engine: str | None, hf: Mapping[str, Any]) -> list[str]:
    """Return which train engines support a model, if its architecture is known.

    :raises ConfigError: The chosen one does not, or none does.
    """
    from anygauge.config.rules.architecture import engine_support, support_text
    from anygauge.config.schema import Train
    from anygauge.plugins import load_plugins
    from anygauge_hooks.errors import ConfigError

    plugins = load_plugins()
    chosen = engine or Train().engine
    plugins.get("register_train_engines", chosen)
    if not hf.get("architectures"):
        return []
    families, reasons = engine_support(plugins, hf)
    names = ", ".join(map(str, hf["architectures"]))
    if chosen in families:
        return [support_text(hf, families)]
    others = " or ".join(f"--engine {name}" for name in sorted(families))
    raise ConfigError(
        f"{names} is not supported by train.engine = {chosen!r}: {reasons[chosen]}",
        hint=f"Write {others}, which supports it." if others else "docs/models.md shows how to add a family.",
    )


def _division_of(hf: Mapping[str, Any]) -> Callable[[Config], bool]:
    """Return whether a config divides a model as its train engine can."""
    from anygauge.config.rules.model import division_rule
    from anygauge.plugins import load_plugins

    plugins = load_plugins()

    def accepts(config: Config) -> bool:
        problems = division_rule("model.path", config, hf, plugins)
        return not any(problem.path.startswith("train.parallel") for problem in problems)

    return accepts


def _cached(text: str) -> Path | None:
    """Return the directory of a name that is in the cache.

    :raises ConfigError: It is no name, or a path below a directory that is here.
    """
    from anygauge.config.schema import Hub
    from anygauge.hub import cached_model, sizes_command
    from anygauge.hub.names import did_you_mean, model_name
    from anygauge_hooks.errors import ConfigError

    path = Path(text)
    name = None if text.startswith("./") else model_name("--model", path)
    if name is None:
        meant = did_you_mean(path)
        raise ConfigError(
            f"--model {text}: no such directory, and not the name of a model either{meant or '.'}",
            hint="Name a Hugging Face directory that exists here, or OWNER/NAME on the hub.",
        )
    cached = cached_model(name, Hub())
    if cached is None and os.path.isdir(name.owner):
        raise ConfigError(
            f"--model {text}: {name.local_clause()}",
            hint=f"Name a directory that exists; if {name.repository} is a model on the hub, "
            f"run `{sizes_command(name, Hub())}` first.",
        )
    return cached


def _has_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        tokenizer = read_json(directory / "tokenizer_config.json")
    except (OSError, ValueError):
        return False
    return isinstance(tokenizer, dict) and bool(tokenizer.get("chat_template"))


# -------------------------------------------------------------------------
# The machine and the data
# -------------------------------------------------------------------------


def _machine(args: argparse.Namespace) -> Machine:
    from anygauge.cli.recipe import DEVICE_GIB, GIB, Machine
    from anygauge.plugins import find_backend, load_plugins, select_backend
    from anygauge.serving.sglang.installed import installed_sglang

    plugins = load_plugins()
    name = args.backend or backend_of_gpu(plugins, args.gpu)
    if name is None:
        spec, reason = select_backend(plugins, None)
        print(f"backend: {spec.name} ({reason})", file=sys.stderr)
    else:
        spec = find_backend(plugins, plugins.named("register_backends"), name)
    memory = device_facts(plugins, spec, args.gpu, args.device_memory).memory
    return Machine(
        backend=spec.name,
        accelerator=spec.visible_devices_env is not None,
        devices=args.devices,
        memory_gib=DEVICE_GIB if memory is None else memory / GIB,
        is_assumed=memory is None,
        master_bytes=spec.master_weight_bytes,
        has_servers=installed_sglang() is not None,
    )


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
    row = _first_row(_local(path))
    return DataFacts(
        train=path,
        evaluation=None,
        input_key=next((key for key in INPUT_KEYS if key in row), "prompt"),
        label_key=next((key for key in LABEL_KEYS if key in row), "label"),
        note=f"of {', '.join(map(str, row))}" if row else "name the fields of your rows here",
        media={kind: key for kind, keys in MEDIA_KEYS.items() for key in keys[::-1] if key in row},
    )


def _local(text: str) -> Path | None:
    """Return the file of this host that ``--data`` names, if it exists.

    :raises ConfigError: It can be no data file.
    """
    from anygauge.config.data_files import NO_FILE, split_slice, why_no_file
    from anygauge.hub.names import DATASETS, data_name
    from anygauge_hooks.errors import ConfigError

    try:
        path = Path(split_slice(text)[0])
    except ValueError as error:
        raise ConfigError(f"--data {text}: {error}.", hint="Correct it, or leave it out.") from error
    if text.startswith("hf:"):
        if data_name("--data", text) is None:
            hint = f"A data file's name is {DATASETS}OWNER/NAME/FILE."
            raise ConfigError(f"--data {text} is not a name on a hub.", hint=hint)
        return None
    problem = why_no_file(path)
    if problem not in (None, NO_FILE):
        raise ConfigError(f"--data {path} {problem}.", hint="Name a JSONL or Parquet file.")
    return None if problem else path


def _first_row(path: Path | None) -> Mapping[str, Any]:
    """Return the first row of a file of JSON lines, or nothing if it cannot be read here."""
    if path is None:
        return {}
    try:
        with path.open(encoding="utf-8") as file:
            row = parse_json(next(line for line in file if not line.isspace()), strict=False)
    except StopIteration:
        return {}
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}


def _notes(args: argparse.Namespace, model: ModelFacts, machine: Machine) -> Iterator[str]:
    """Yield notes for the user before the first run."""
    from anygauge.cli.recipe import choice_of

    if args.data and not args.data.startswith("hf:") and _local(args.data) is None:
        yield f"{args.data} does not exist yet"
    if machine.accelerator and machine.is_assumed:
        yield f"devices of {machine.memory_gib:.0f} GiB are assumed; say more with --gpu or --device-memory"
    choice = choice_of(model, machine, task=args.task, engine=args.engine)
    if choice is not None:
        yield from _fit(choice, machine)
        return
    if model.billions is None:
        yield "the size of the model is not known: the batch sizes are those of 4B parameters"
        return
    if not _fits(args, model, machine):
        yield f"{_state(args, model.billions, machine)}: use more devices or a smaller model"


def _fits(args: argparse.Namespace, model: ModelFacts, machine: Machine) -> bool:
    """Return whether a step fits the devices by what is known; true if the model's size is not."""
    from anygauge.cli.recipe import choice_of, state_gib

    choice = choice_of(model, machine, task=args.task, engine=args.engine)
    if choice is not None:
        return choice.fits
    needed = state_gib(model.billions or 0.0, machine.devices, engine=args.engine)
    return needed <= _device_gib(machine) * 0.9


def _device_gib(machine: Machine) -> float:
    return machine.memory_gib if machine.accelerator else machine.memory_gib / machine.devices


def _state(args: argparse.Namespace, billions: float, machine: Machine) -> str:
    """Return what a device would have to hold, as a clause."""
    from anygauge.cli.recipe import state_gib

    needed, memory = state_gib(billions, machine.devices, engine=args.engine), _device_gib(machine)
    return (
        f"weights, gradients and optimizer take about {needed:.0f} GiB of the {memory:.0f} GiB of each device"
    )


def _needs_sizes(args: argparse.Namespace, model: ModelFacts, machine: Machine) -> ConfigError:
    """Return the error for a model that must be divided but whose sizes are not known."""
    from anygauge.config.schema import Hub
    from anygauge.hub import sizes_command
    from anygauge.hub.names import model_name
    from anygauge_hooks.errors import ConfigError

    name = model_name("--model", Path(args.model))
    # Otherwise config.json was read, or nothing is known to be too large.
    assert name is not None
    assert model.billions is not None
    return ConfigError(
        f"{args.model} is not in the cache. Its name says {model.billions:g}B parameters: "
        f"{_state(args, model.billions, machine)}, unless they divide the model, which needs its sizes.",
        hint=f"Run `{sizes_command(name, Hub())}`, then this command again.",
    )


def _fit(choice: Choice, machine: Machine) -> Iterator[str]:
    """Yield how much of a device is planned, and what is missing."""
    from anygauge.cli.recipe import GIB

    needed, memory = choice.plan.needed / GIB, machine.memory_gib
    if choice.fits:
        yield f"planned: {needed:.0f} of {memory:.0f} GiB of each device; `anygauge plan` shows the parts"
    else:
        yield (
            f"a step needs about {needed:.0f} GiB of the {memory:.0f} GiB of each device: use more devices "
            "or a smaller model"
        )
    if choice.server_devices and not machine.has_servers:
        yield "the config needs SGLang, which is not installed: docs/sglang.md"
