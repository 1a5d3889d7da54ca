"""``python -c CODE`` in a forked process."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
