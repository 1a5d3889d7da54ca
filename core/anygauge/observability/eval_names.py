"""Names of an evaluation's metrics: which of them are results, and which are details.

``eval/math`` is the mean reward of the data set ``math``, ``eval/math-loss`` its loss. What else is said of
it has another suffix or a further slash, and is for the trackers alone.
"""

from __future__ import annotations

__all__ = ["EVAL_LOSS", "EVAL_MEAN", "EVAL_RESULT", "SUFFIXES"]

DETAILS = ("truncated_ratio", "failed_ratio", "samples")
SUFFIXES = (*DETAILS, "loss")
"""Behind the name of a data set and a dash; no data set's name may end in one."""


def _result(*but: str) -> str:
    """Return the pattern of a data set's name, or of one with a suffix that is not left out."""
    return rf"(?!step$)(?![^/]*-(?:{'|'.join(but)})$)[^/]+"


EVAL_MEAN = rf"eval/({_result(*SUFFIXES)})"
"""Pattern of a mean reward; its group is the data set."""
EVAL_LOSS = r"eval/([^/]+)-loss"
"""Pattern of a loss; its group is the data set."""
EVAL_RESULT = rf"eval/({_result(*DETAILS)})"
"""Pattern of either; its group is what comes after the slash."""
