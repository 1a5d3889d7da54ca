"""API keys of SGLang servers: random or from the environment, and in no file, log or command line."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from anygauge_hooks.errors import RolloutError
from anygauge_hooks.sglang import ServerKeys
from anygauge_hooks.types import ConfigProblem

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["KEYS", "HiddenKey", "key_problems", "key_variable", "named_keys", "own_keys", "set_keys"]

KEYS = "ANYGAUGE_SGLANG_KEYS"
"""Environment variable in which a server finds its keys. Other users see its command line, but not this."""
_NAME = re.compile(r"\$([A-Za-z_][A-Za-z0-9_]*)")
_KEY = re.compile(r"[!-~]+")
"""As a header can have it."""


class HiddenKey(str):
    """Key that is not shown where arguments are: SGLang writes all of its own to its log."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def named_keys(config: Config) -> ServerKeys:
    """Return the keys that the config names.

    :raises RolloutError: A variable is not set in this process.
    """
    rollout = config.rollout
    return ServerKeys(
        api=_value("api_key", rollout.api_key), admin=_value("admin_api_key", rollout.admin_api_key)
    )


def own_keys(config: Config) -> ServerKeys:
    """Return keys for a server of the run: the configured ones, else random ones."""
    named = named_keys(config)
    return ServerKeys(api=named.api or secrets.token_hex(32), admin=named.admin or secrets.token_hex(32))


def _value(key: str, name: str | None) -> str:
    if name is None:
        return ""
    if (problem := _problem(name)) is not None:
        raise RolloutError(f"rollout.{key}: {problem}.", hint="Set it on every host that has servers too.")
    return os.environ[name[1:]]


def key_problems(config: Config) -> Iterator[ConfigProblem]:
    """Yield keys that are written out, and variables that are not set."""
    for key in ("api_key", "admin_api_key"):
        name: str | None = getattr(config.rollout, key)
        if name is not None and (problem := _problem(name)) is not None:
            shown = name if _NAME.fullmatch(name) else "..."  # what is no name may be the key itself
            yield ConfigProblem(path=f"rollout.{key}", found=shown, hint=problem)


def _problem(name: str) -> str | None:
    """Return what is wrong with the name of a variable, or with its value."""
    if _NAME.fullmatch(name) is None:
        return "write $NAME, an environment variable that holds the key: a run keeps its config in a file"
    value = os.environ.get(name[1:])
    if not value:
        return f"the environment variable {name[1:]} is not set"
    if _KEY.fullmatch(value) is None:
        return f"the environment variable {name[1:]} holds what no header can: write visible ASCII, no spaces"
    return None


def key_variable(keys: ServerKeys) -> dict[str, str]:
    """Return the variable that hands keys to a server."""
    return {KEYS: json.dumps([keys.api, keys.admin])}


def set_keys(server_args: Any) -> None:
    """Give SGLang's arguments the keys of this process's server, which its children do not inherit.

    :param server_args: ``ServerArgs`` of SGLang. Those of 0.5.17 are sealed once they are made and have a
        method for later changes; those of 0.5.23 are open until the server starts.
    """
    api, admin = json.loads(os.environ.pop(KEYS))
    keys = {"api_key": HiddenKey(api), "admin_api_key": HiddenKey(admin)}
    if hasattr(server_args, "override"):
        server_args.override("anygauge", **keys)
    else:
        for name, key in keys.items():
            setattr(server_args, name, key)
