"""Deadlines whose errors name the tensor, the bucket and the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from anygauge.failures import in_background
from anygauge_hooks.errors import DeadlineError

if TYPE_CHECKING:
    from anygauge_hooks.weights import WeightBucket

__all__ = ["describe", "within"]

T = TypeVar("T")
POLL_S = 0.02


def describe(bucket: WeightBucket | None, version: int) -> str:
    """Return the name of a bucket and its update, for messages."""
    if bucket is None:
        return f"the update to version {version}"
    names = [each.name for each in bucket.tensors]
    held = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "nothing"
    return f"bucket {bucket.index} of version {version} ({held})"


def within(
    deadline_s: float,
    work: Callable[[], T],
    *,
    what: str,
    release: Callable[[], None],
    given_up: Callable[[], BaseException | None] = lambda: None,
) -> T:
    """Run blocking work with a deadline, and return its result.

    The work runs in a thread that may outlive the call; ``release`` is what lets it go, such as closing the
    group whose collective it hangs in.

    :param what: Name of the work in errors, as a clause: ``"a broadcast of bucket 3 to http://..."``.
    :param release: Called once the wait is over without a result.
    :param given_up: Returns an error once there is no reason to wait any more, such as a server's refusal.
    :raises DeadlineError: It took longer.
    """
    result = in_background(work, "weight-sync-wait")
    problem = _wait(result, deadline_s, given_up)
    if problem is None and result.done():
        return result.result()
    release()
    if problem is not None:
        raise problem
    raise DeadlineError(
        f"{what} did not end in {deadline_s:g} s.",
        hint="See the engine's log, or raise weight_sync.deadline_s.",
    )


def _wait(
    result: Future[T], deadline_s: float, given_up: Callable[[], BaseException | None]
) -> BaseException | None:
    """Wait for the result, the deadline or a reason to give up, which is returned."""
    ends = time.monotonic() + deadline_s
    while (left := ends - time.monotonic()) > 0:
        if wait([result], min(POLL_S, left)).done:
            return None
        problem = given_up()
        if problem is not None:
            return problem
    return None
