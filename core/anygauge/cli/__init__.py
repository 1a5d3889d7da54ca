"""The command line. Importing it is cheap: each command imports what it needs when it runs.

Exit status: 0 success, 1 error, 2 wrong usage, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from anygauge.runtime.signals import terminate_as_exception

__all__ = ["main"]

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status.

    :param argv: Without the program name. Default: that of the process, which is to end with the status.
    """
    try:
        with terminate_as_exception(for_good=argv is None):
            from anygauge.cli.entry import run  # here, where Ctrl-C is one line too

            return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        print("anygauge: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:
        # Ray replaces the handler by one that exits with the bare signal number.
        if stop.code not in (TERMINATED, signal.SIGTERM):
            raise
        print("anygauge: terminated", file=sys.stderr)
        return TERMINATED
