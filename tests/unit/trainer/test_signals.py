"""Requests to end become exceptions."""

from __future__ import annotations

import os
import signal

import pytest

from anygauge.trainer.signals import terminate_as_exception


def signal_twice(number: signal.Signals) -> None:
    """Send a signal to this process, and again during the shut-down, which must not be disturbed."""
    try:
        os.kill(os.getpid(), number)
    finally:
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_once_with_the_code_of_a_shell(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as caught, terminate_as_exception():
        signal_twice(number)
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminate_as_exception():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_code_survives_a_library_that_replaces_it() -> None:
    with pytest.raises(SystemExit) as caught, terminate_as_exception():
        exit_with_another_code()
    assert caught.value.code == 128 + signal.SIGTERM


def exit_with_another_code() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as error:
        raise SystemExit(1) from error


def test_an_exit_of_its_own_is_left_alone() -> None:
    with pytest.raises(SystemExit) as caught, terminate_as_exception():
        raise SystemExit(3)
    assert caught.value.code == 3
