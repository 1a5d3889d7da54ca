"""Cleanup after a failure, and the errors of background threads."""

from __future__ import annotations

import threading

import pytest

from anygauge.failures import in_background, on_failure


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_is_cleaned_up_after_and_raised(error: type[BaseException]) -> None:
    cleaned: list[str] = []
    with pytest.raises(error), on_failure(lambda: cleaned.append("up")):
        raise error
    assert cleaned == ["up"]


def test_a_block_that_ends_well_is_left_alone() -> None:
    with on_failure(lambda: pytest.fail("nothing failed")):
        pass


def test_a_background_thread_keeps_no_process_alive_and_its_result_is_there() -> None:
    result = in_background(threading.current_thread, "a name").result(10)
    assert (result.name, result.daemon) == ("a name", True)


def test_what_a_background_thread_raises_is_raised_where_its_result_is_asked_for() -> None:
    def stop() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        in_background(stop, "ends").result(10)
