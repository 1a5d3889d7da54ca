"""The shape of an error's message, and what survives a process boundary."""

from __future__ import annotations

import pickle

import pytest

from anygauge_hooks.errors import AnygaugeError, ConfigError, DeadlineError, WorkerFailedError


def test_the_message_ends_with_hint_and_code() -> None:
    assert str(ConfigError("What was found.")) == "What was found.\n  [AG201]"
    assert str(ConfigError("What was found.", hint="Do this.")) == "What was found.\n  Do this.\n  [AG201]"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ConfigError("x"), ValueError),
        (DeadlineError("x"), TimeoutError),
        (WorkerFailedError("x"), RuntimeError),
    ],
)
def test_an_error_is_also_the_builtin_one(error: AnygaugeError, builtin: type[Exception]) -> None:
    assert isinstance(error, builtin)
    assert isinstance(error, AnygaugeError)


def test_attributes_that_a_raiser_adds_survive_pickling() -> None:
    class_and_state = WorkerFailedError("boom", hint="look")
    class_and_state.rank = 3  # type: ignore[attr-defined]
    again = pickle.loads(pickle.dumps(class_and_state))
    assert (again.rank, again.hint, again.args) == (3, "look", ("boom",))
