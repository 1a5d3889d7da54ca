"""A tokenizer whose chats have reasoning and calls of tools, and a gateway on a script."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from anygauge_tests.scripted_gateway import Served, chat_tokenizer, serve_script

Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer that merges characters, and a template that shortens history."""
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def anthropic() -> Any:
    """Return Anthropic's client, a tenth of the imports of all tests: one process alone needs it."""
    return import_module("anthropic")


@pytest.fixture
def serve(tokenizer: Any) -> Serve:
    """Return a function that serves a script in a ``with`` block; it takes options of the gateway too."""
    return partial(serve_script, tokenizer)
