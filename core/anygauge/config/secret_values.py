"""Mask literal secrets of a config wherever it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from anygauge.config.tree import flatten
from anygauge_hooks.settings import RunConfig
from anygauge_hooks.types import ConfigProblem

__all__ = ["MASK", "mask_rule", "masked", "secret_values", "without_secrets"]

MASK = "***"
_NAME = re.compile(
    r"(^headers"
    r"|(api|access|admin|auth|private|secret|signing)[_-]?key"
    r"|(^|(api|access|auth|bearer|hf|hub|id|refresh|session)[_-]?)token"
    r"|secret|password|passwd|passphrase|credentials?|authorization|cookie)$",
    re.IGNORECASE,
)
"""Names of keys that hold a secret, or a table of them. ``input_key`` and ``eos_token`` do not."""
_NO_LITERAL = re.compile(r"|none|\*\*\*|(\S+ )?\$(\w+|\{\w+\})")
"""Values that are no secret: a name in the environment, such as ``Bearer $SCORER_TOKEN``."""
_PASSWORD = re.compile(r"(?<=://)([^/@\s:]*:)([^/@\s]+)(?=@)")
"""In an address: ``https://user:password@host``."""
_SHORTEST = 4
"""Characters of a secret that is looked for in a text; a shorter one would be found everywhere."""


def masked(tree: Any) -> Any:
    """Return a config tree with :data:`MASK` in place of each secret."""
    return _replaced(tree, lambda _: MASK)


def secret_values(config: RunConfig) -> tuple[str, ...]:
    """Return the secrets that a config contains as literal values."""
    values: dict[str, None] = {}

    def noted(value: str) -> str:
        values[value] = None
        return MASK

    _replaced(config.model_dump(mode="json"), noted)
    return tuple(values)


def without_secrets(text: str, secrets: Collection[str]) -> str:
    """Return a text with :data:`MASK` in place of each secret, however it is quoted."""
    for secret in sorted(secrets, key=len, reverse=True):
        for value in (secret, secret.rpartition(" ")[2]):  # also without the scheme, such as Bearer
            for form in (value, repr(value)[1:-1], json.dumps(value)[1:-1], value.replace("'", "'\"'\"'")):
                text = text.replace(form, MASK) if len(form) >= _SHORTEST else text
    return text


def mask_rule(config: RunConfig, user_keys: Collection[str]) -> Iterator[ConfigProblem]:
    """Yield the masks of a config that a run has written."""
    for key, value in flatten(config.model_dump(mode="json")).items():
        if value == MASK or f":{MASK}@" in str(value):
            yield ConfigProblem(
                path=key,
                found=value,
                hint="is a secret that was masked when a run wrote its config.toml; write it again, on the "
                "command line or as a variable of the environment",
            )


def _replaced(value: Any, replace: Callable[[str], str], *, is_secret: bool = False) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _replaced(item, replace, is_secret=is_secret or _NAME.search(key) is not None)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_replaced(item, replace, is_secret=is_secret) for item in value]
    if not isinstance(value, str):
        return value
    if is_secret:
        return value if _NO_LITERAL.fullmatch(value) else replace(value)
    return _PASSWORD.sub(lambda match: match[1] + replace(match[2]), value)
