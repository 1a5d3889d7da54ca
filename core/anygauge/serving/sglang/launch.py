"""Main module of a server: prepares the process as the backend needs it, then runs SGLang.

The processes that the server starts import this module too, under another name, before anything of SGLang.
"""

from __future__ import annotations

import os
import sys
import tempfile

from anygauge.distributed.lifetime import die_with
from anygauge.serving.sglang.keys import set_keys
from anygauge.serving.sglang.supervisor import SUPERVISOR

__all__ = ["BACKEND", "HOLD", "ROLE"]

BACKEND = "ANYGAUGE_SGLANG_BACKEND"
"""Environment variable of a server: name of the backend whose processes these are."""
HOLD = "ANYGAUGE_SGLANG_HOLD"
"""Environment variable of a server that imports and checks its arguments, and then waits for the end of its
standard input: until then the trainers use its devices."""
ROLE = "sglang"
"""Role of these processes, for ``worker_env`` and ``prepare_worker``."""
INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's variable: where the processes of a server meet."""


def _prepare(backend: str) -> None:
    from anygauge.plugins import find_backend, load_plugins

    plugins = load_plugins()
    spec = find_backend(plugins, plugins.named("register_backends"), backend)
    plugins.prepare_worker(spec, ROLE, "before_vendor_import")


def _serve(arguments: list[str]) -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(arguments)
    set_keys(server_args)
    if server_args.dp_size == 1:  # copies of the model meet in one place each
        # the store behind --nccl-port listens on every interface, to everybody; this directory is the user's
        os.environ.setdefault(INIT_METHOD, f"file://{tempfile.gettempdir()}/meeting")
    if HOLD in os.environ:
        sys.stdin.read()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__") and BACKEND in os.environ:
    if __name__ == "__main__":
        die_with(int(os.environ[SUPERVISOR]))
    _prepare(os.environ[BACKEND])
    if __name__ == "__main__":
        _serve(sys.argv[1:])
