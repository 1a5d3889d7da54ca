"""Attacks by the chat template of a model that somebody else has made."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from anygauge.config.schema import Data
from anygauge.data import template, time_limit
from anygauge.data.source import FileSource
from anygauge.data.time_limit import OverrunError, TimeLimit
from anygauge.rollout.gateway.messages import Chat, Message
from anygauge.rollout.gateway.refusals import Refusal
from anygauge_hooks.errors import ConfigError
from anygauge_tests.scripted_gateway import chat_tokenizer, serve_script

LOOPS = """
{%- for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}
{%- endfor %}{% endfor %}{% endfor %}{{ messages[0].content }}
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    looping = chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    looping.chat_template = LOOPS
    return looping


@pytest.fixture(autouse=True)
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "LIMIT_S", 0.05)
    monkeypatch.setattr(time_limit, "_POLL_S", 0.01)


def test_a_template_that_loops_ends_the_run_at_its_first_row(tokenizer: Any, tmp_path: Path) -> None:
    """And not once for each row, as one that refuses a conversation does."""
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"prompt": "one"}) + "\n") * 10_000)
    table = Data.model_validate({"train": [str(path)], "apply_chat_template": True, "label_key": None})
    with pytest.raises(ConfigError, match=r"not rendered 1 messages in 0\.05 s"):
        FileSource(table, tokenizer).next(1)


def test_a_template_that_loops_is_told_to_the_agent(tokenizer: Any) -> None:
    async def main() -> None:
        async with serve_script(tokenizer, []) as served:
            with pytest.raises(Refusal, match="has not rendered 1 messages") as caught:
                await served.session.count(Chat((Message("user", "one"),)), 3)
            assert caught.value.status == 400

    asyncio.run(main())


def loop_until(ended: threading.Event) -> None:
    while not ended.is_set():
        pass


def loop_and_handle_errors() -> None:
    with TimeLimit(0.01), suppress(Exception):
        loop_until(threading.Event())


def end_as_the_watchdog_strikes(error: Exception | None) -> None:
    with TimeLimit(1000):
        time_limit._ends.clear()  # it has decided, and its exception is on the way
        threading.Timer(0.05, time_limit._interrupt, [threading.get_ident()]).start()
        if error is not None:
            raise error


def test_a_limit_ends_its_own_block_alone() -> None:
    ended = threading.Event()
    other = threading.Thread(target=loop_until, args=[ended])
    other.start()
    with pytest.raises(OverrunError):
        loop_and_handle_errors()
    assert other.is_alive()
    ended.set()
    other.join()
    with TimeLimit(1000):
        pass
    assert not time_limit._ends


@pytest.mark.parametrize("error", [None, ValueError("its own")])
def test_an_overrun_at_the_very_end_hits_nothing_behind_the_block(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(time_limit, "_watch", lambda: None)
    with pytest.raises(OverrunError):
        end_as_the_watchdog_strikes(error)
