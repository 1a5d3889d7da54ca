"""``python -m anygauge``."""

from __future__ import annotations

import sys

from anygauge.cli import main

if __name__ == "__main__":
    sys.exit(main())
