"""List what a worker's import of torch-npu replaces, as JSON: attribute, and module of what is there now."""

from __future__ import annotations

import json
import os
import sys
import warnings

from anygauge_npu.audit import Audit
from anygauge_npu.env import AUTOLOAD, import_vendor

os.environ[AUTOLOAD] = "0"  # torch alone first, to be looked at
import torch

AUDITED = {sys.__name__, warnings.__name__, torch.__name__}
"""Nothing else of Python, transformers, numpy or pydantic is changed."""


def main() -> None:
    """Watch the import."""
    audit = Audit(AUDITED)
    with audit.watching():
        import_vendor()
    replaced = {change.name: change.by for change in audit.changes() if change.kind == "replaced"}
    sys.stdout.write(json.dumps(replaced) + "\n")


if __name__ == "__main__":
    main()
