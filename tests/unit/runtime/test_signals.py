"""Requests to end become exceptions."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from anygauge.runtime.signals import postpone_first, terminate_as_exception


@pytest.fixture(autouse=True)
def hang_ups() -> Iterator[None]:
    """Let this process get hang-ups: one that was started with ``nohup`` ignores them, and is left alone."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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


def test_an_interrupt_raises_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), terminate_as_exception():
        signal_twice(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_block_within_a_block_ends_both_with_one_exception() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, terminate_as_exception():
        interrupt_within_and_while_that_ends()
    assert caught.value.__context__ is None


def interrupt_within_and_while_that_ends() -> None:
    try:
        with terminate_as_exception():
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_that_was_lost_comes_again() -> None:
    with pytest.raises(KeyboardInterrupt), terminate_as_exception():
        lose_one_interrupt_of_two()


def lose_one_interrupt_of_two() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_ended_the_process_is_ignored_for_good() -> None:
    before, other = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt), terminate_as_exception(for_good=True):
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is other
    finally:
        signal.signal(signal.SIGINT, before)


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


def test_in_another_thread_the_handlers_stay_as_they_are() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    inside: list[object] = []

    def work() -> None:
        with terminate_as_exception():
            inside.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == before


def test_a_postponed_signal_raises_at_the_end_of_the_block() -> None:
    done: list[str] = []
    with pytest.raises(SystemExit) as caught, terminate_as_exception():
        send_each([True], signal.SIGTERM, done)
    assert done == ["the block"]
    assert caught.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize("answers", [[False], [True, True]])
def test_a_refused_signal_and_a_second_one_raise_at_once(answers: list[bool]) -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), terminate_as_exception():
        send_each(answers, signal.SIGINT, done)
    assert done == []


def send_each(answers: list[bool], number: signal.Signals, done: list[str]) -> None:
    """Send a signal for each answer, and note if that ends nothing."""
    left = iter(answers)
    with postpone_first(lambda: next(left)):
        for _ in answers:
            os.kill(os.getpid(), number)
        done.append("the block")


def test_signals_after_the_block_are_not_postponed() -> None:
    with pytest.raises(KeyboardInterrupt), terminate_as_exception():
        interrupt_after_a_block()


def interrupt_after_a_block() -> None:
    with postpone_first(pytest.fail):
        pass
    os.kill(os.getpid(), signal.SIGINT)


def test_an_error_of_a_block_that_is_to_end_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), terminate_as_exception():
        interrupt_a_block_that_fails()


def interrupt_a_block_that_fails() -> None:
    with postpone_first(lambda: True):
        os.kill(os.getpid(), signal.SIGINT)
        _ = 1 / 0
