"""The arguments of the installed SGLang's server, read from its source.

A config is checked on the driver, where importing SGLang would cost seconds and take the vendor's libraries
with it.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from anygauge.serving.sglang.versions import LISTED
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.types import BackendSpec

__all__ = [
    "Argument",
    "Installed",
    "Kind",
    "how_to_install",
    "installed_sglang",
    "missing",
    "read_arguments",
]

NEWEST = max(LISTED, key=lambda version: [int(part) for part in version.split(".")])

Kind = Literal["flag", "switch", "int", "float", "str", "list", "text"]
"""``flag`` can only be set, ``switch`` also has a ``--no-`` form; ``text`` is what SGLang reads in its own
way."""
_SCALARS: Mapping[str, Kind] = {"int": "int", "float": "float", "str": "str"}
_NOTHING = ast.Constant(None)
_SETTING_ACTIONS = (
    "store_true",
    "DeprecatedStoreTrueAction",
    "DeprecatedAction",
    "DeprecatedStoreConstAction",
)


class Argument(NamedTuple):
    """An argument of the server."""

    name: str
    """As the server's own records call it: ``tp_size``."""
    options: tuple[str, ...]
    """How a command line may spell it, the usual way first: ``--tp-size``, ``--tensor-parallel-size``."""
    kind: Kind
    choices: tuple[Any, ...] = ()
    """All values, where the source lists them; empty for any."""


class Installed(NamedTuple):
    """An SGLang that this Python can start."""

    version: str
    arguments: Mapping[str, Argument]
    """Arguments by name, and by each other spelling with underscores."""


@cache
def installed_sglang() -> Installed | None:
    """Return the installed SGLang, or ``None``, without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    srt = Path(next(iter(spec.submodule_search_locations))) / "srt"
    sources = [srt / "server_args.py", *sorted((srt / "arg_groups" / "fields").glob("*.py"))]
    try:
        version = metadata.version("sglang")
        return Installed(version, read_arguments(path.read_text() for path in sources))
    except (metadata.PackageNotFoundError, OSError, SyntaxError):
        return None


def missing(backend: BackendSpec) -> RolloutError:
    """Return the error to raise where SGLang is not installed."""
    return RolloutError(
        'rollout.engine = "sglang" needs SGLang, which this Python does not have.',
        hint=f"Install it: {how_to_install(backend)}. docs/sglang.md says more.",
    )


def how_to_install(backend: BackendSpec) -> str:
    """Return the command that installs a listed version for a backend."""
    return backend.engine_installs.get("sglang", f"pip install sglang=={NEWEST}")


def read_arguments(sources: Iterable[str]) -> dict[str, Argument]:
    """Return the arguments that source files declare, by each of their spellings.

    :param sources: Texts of the modules that hold the annotated fields and the parser.
    """
    arguments: dict[str, Argument] = {}
    for source in sources:
        for argument in _declared(ast.parse(source)):
            spellings = (option.lstrip("-").replace("-", "_") for option in argument.options)
            for spelling in (argument.name, *spellings):
                arguments.setdefault(spelling, argument)
    return arguments


def _declared(tree: ast.Module) -> Iterator[Argument]:
    for node in ast.walk(tree):
        argument = None
        if isinstance(node, ast.AnnAssign):
            argument = _field(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            argument = _added(node) if node.func.attr == "add_argument" else None
        if argument is not None:
            yield argument


# -------------------------------------------------------------------------
# Annotated fields
# -------------------------------------------------------------------------


def _field(node: ast.AnnAssign) -> Argument | None:
    annotation, target = node.annotation, node.target
    if not (isinstance(annotation, ast.Subscript) and isinstance(target, ast.Name)):
        return None
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
    if ast.unparse(annotation.value) not in ("A", "Annotated") or len(parts) < 2:
        return None
    options = _metadata(parts[1:])
    if options is None or _literal(options.get("no_cli")) is True:
        return None
    usual = _literal(options.get("cli_name")) or "--" + target.id.replace("_", "-")
    kind, choices = _kind(parts[0], options)
    return Argument(target.id, (usual, *(_literal(options.get("aliases")) or ())), kind, choices)


def _metadata(parts: list[ast.expr]) -> dict[str, ast.expr] | None:
    """Return the keywords of ``Arg(...)``, empty for a mere text; ``None`` where it is no argument."""
    for part in parts:
        if isinstance(part, ast.Constant | ast.JoinedStr | ast.BinOp):
            return {}
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "Arg":
            return {word.arg: word.value for word in part.keywords if word.arg}
    return None


def _kind(annotation: ast.expr, options: Mapping[str, ast.expr]) -> tuple[Kind, tuple[Any, ...]]:
    text = _without_none(ast.unparse(annotation))
    choices = tuple(_literal(options.get("choices")) or ())
    if "action" in options:
        if "BooleanOptionalAction" in ast.unparse(options["action"]):
            return "switch", ()
        return ("list" if "nargs" in ast.unparse(options.get("action_kwargs", _NOTHING)) else "text"), ()
    if text.startswith("Literal["):
        values = _literal(ast.parse(f"[{text[8:-1]}]", mode="eval").body) or ()
        if None in values:  # the parser spells it in its own way
            return "text", ()
        return ("int" if all(type(value) is int for value in values) else "str"), tuple(values)
    if "type_parser" in options:
        return "text", ()
    if text.lower().startswith("list") or _literal(options.get("nargs")) in ("+", "*"):
        return "list", choices
    return ("flag", ()) if text == "bool" else (_SCALARS.get(text, "text"), choices)


def _without_none(text: str) -> str:
    if text.startswith("Optional[") and text.endswith("]"):
        return text[9:-1]
    return text.removesuffix(" | None")


# -------------------------------------------------------------------------
# Calls of add_argument
# -------------------------------------------------------------------------


def _added(node: ast.Call) -> Argument | None:
    options = [_literal(each) for each in node.args]
    if not options or not all(isinstance(each, str) and each.startswith("--") for each in options):
        return None
    words = {word.arg: word.value for word in node.keywords if word.arg}
    name = _literal(words.get("dest")) or str(options[0]).lstrip("-").replace("-", "_")
    action = ast.unparse(words["action"]).strip("'\"") if "action" in words else ""
    takes_value = "choices" in words or "nargs" in words or action not in _SETTING_ACTIONS
    kind: Kind = "text" if takes_value else "flag"
    # a field of another name would shadow it: the spelling of an old option is a name of its own
    own = str(options[0]).lstrip("-").replace("-", "_")
    return Argument(own if "dest" in words else name, tuple(map(str, options)), kind)


def _literal(node: ast.expr | None) -> Any:
    """Return the value of an expression that is written out, else ``None``."""
    if node is None:
        return None
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None
