"""``anygauge launch``: print the commands that start a Ray cluster for a run, or run one of them."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anygauge.cli.arguments import positive, requested_backend
from anygauge_hooks.errors import PlacementError

if TYPE_CHECKING:
    from anygauge.config.schema import Cluster, Config
    from anygauge_hooks.types import BackendSpec

__all__ = ["HELP", "add_arguments", "run"]

HELP = "Print the commands that start a Ray cluster, or start this host's part of it."

TOKEN = Path(".ray") / "auth_token"
"""In the home directory: where Ray looks for the secret of a cluster."""
LARGEST_PORT = 65535
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(takes_config_keys=True)
    parser.usage = (
        "anygauge launch [CONFIG.toml] --nodes N --devices M [--head HOST[:PORT]] "
        "[--run head|worker | --print-head] [--backend NAME] [--section.key value ...]"
    )
    parser.add_argument("config", metavar="CONFIG.toml", nargs="?", help="config of the run")
    parser.add_argument("--nodes", metavar="N", type=positive, default=1, help="hosts (default 1)")
    parser.add_argument(
        "--devices",
        metavar="M",
        type=positive,
        help="devices per host; default: the config's workers, divided",
    )
    parser.add_argument(
        "--head", metavar="HOST[:PORT]", help="address of the head; default: this host and a free port"
    )
    parser.add_argument("--backend", metavar="NAME", help="default: the only usable accelerator, else cpu")
    parser.add_argument("--run", choices=("head", "worker"), help="start this part here, in the foreground")
    parser.add_argument(
        "--print-head",
        action="store_true",
        help="print only HOST:PORT of a head on this host",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A cluster to start."""

    backend: BackendSpec
    cluster: Cluster
    nodes: int
    devices: int
    host: str
    port: int
    train: list[str]
    """The command of the run."""
    needed: int | None
    """Devices that the run uses, if a config says so."""

    @property
    def head(self) -> list[str]:
        """The command of the head."""
        from anygauge.runtime.ray_commands import head_command

        return head_command(self.backend, self.devices, host=self.host, port=self.port)

    def worker(self, host: str | None = None) -> list[str]:
        """Return the command of another node."""
        from anygauge.runtime.ray_commands import join_address, worker_command

        return worker_command(self.backend, self.devices, head=join_address(self.host, self.port), host=host)


def run(args: argparse.Namespace) -> int:
    """Print the lines, or become one of them."""
    from anygauge.runtime.ray_commands import join_address

    if args.head is not None and (problem := _port_problem(args.head)):
        args.parser.error(f"argument --head: {problem}")
    if args.run == "worker" and (args.head is None or _port(args.head) is None):
        args.parser.error("--run worker needs --head HOST:PORT, as the head was started with")
    plan = _plan(args)
    if args.print_head:
        print(join_address(plan.host, plan.port))
    elif args.run is None:
        print("\n".join(_lines(plan)))
    else:
        _start(plan, args.run)
    return 0


def _plan(args: argparse.Namespace) -> _Plan:
    from anygauge.config.schema import Cluster
    from anygauge.plugins import load_plugins
    from anygauge.runtime.ray_commands import free_port

    plugins = load_plugins()
    backend = requested_backend(plugins, args.backend)
    config = _config(args, backend)
    cluster = config.cluster if config else Cluster()
    host = _host(args, cluster)
    return _Plan(
        backend=backend,
        cluster=cluster,
        nodes=args.nodes,
        devices=_devices(args, config),
        needed=_needed(config) if config else None,
        host=host,
        port=_port(args.head or "") or free_port(host),
        train=_train(args, config),
    )


def _train(args: argparse.Namespace, config: Config | None) -> list[str]:
    """Return the command of the run, which is to join the cluster."""
    command = ["anygauge", "train", args.config or "CONFIG.toml", *args.overrides]
    if config is not None and config.placement.launcher != "ray":
        command += ["--placement.launcher", "ray"]
    return [*command, "--cluster.address", "auto"]


def _config(args: argparse.Namespace, backend: BackendSpec) -> Config | None:
    from anygauge.api.start import find_local_modules
    from anygauge.config import load_config
    from anygauge.plugins import load_plugins

    if args.config is None:
        if args.overrides:
            args.parser.error(f"{args.overrides[0]} changes a config; name one")
        return None
    find_local_modules()
    loaded = load_config(
        args.config, args.overrides, backend=backend, plugins=load_plugins(), check_files=False
    )
    return loaded.config


def _devices(args: argparse.Namespace, config: Config | None) -> int:
    """Return the devices of each node.

    :raises PlacementError: The cluster would be too small for the run.
    """
    needed = _needed(config) if config else 1
    devices: int = args.devices or -(-needed // args.nodes)
    if devices * args.nodes < needed:
        raise PlacementError(
            f"The run has {needed} workers; {args.nodes} nodes with {devices} devices each have room for "
            f"{args.nodes * devices}.",
            hint="Raise --nodes or --devices, or lower placement.train_workers and rollout_workers.",
        )
    return devices


def _needed(config: Config) -> int:
    placement = config.placement
    return placement.train_workers + (0 if placement.colocated else placement.rollout_workers)


def _host(args: argparse.Namespace, cluster: Cluster) -> str:
    from anygauge.runtime.cluster import address_of, host_addresses

    if args.head is not None:
        port = _port(args.head)
        text: str = args.head if port is None else args.head.rpartition(":")[0]
        return text.strip("[]")
    return address_of(host_addresses(), cluster, single_host=args.nodes == 1)


def _port_problem(head: str) -> str:
    """Return what is wrong with the port of ``HOST:PORT``; empty if nothing is, or there is none."""
    host, colon, port = head.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")) or head.endswith("]"):
        return ""  # a host alone, or an IPv6 address without brackets
    is_port = port.isdecimal() and 0 < int(port) <= LARGEST_PORT
    return "" if is_port else f"the port of {head!r} must be a number from 1 to {LARGEST_PORT}"


def _port(head: str) -> int | None:
    """Return the port of ``HOST:PORT`` or ``[HOST]:PORT``, or ``None`` if there is none."""
    host, _, port = head.rpartition(":")
    return int(port) if host and port.isdecimal() and (":" not in host or host.startswith("[")) else None


# -------------------------------------------------------------------------
# Print
# -------------------------------------------------------------------------


def _lines(plan: _Plan) -> Iterator[str]:
    environment = ["export", "RAY_AUTH_MODE=token", "RAY_USAGE_STATS_ENABLED=0"]
    yield f"# {plan.nodes} node(s) with {plan.devices} device(s) each, backend {plan.backend.name}"
    total = plan.nodes * plan.devices
    if plan.needed is not None and plan.needed < total:
        yield f"# NOTE: the run uses {plan.needed} of these {total} devices: see placement.train_workers"
    yield "# 1. Once: the secret of the cluster. Every node needs the same file ~/.ray/auth_token."
    yield "(umask 077; test -s ~/.ray/auth_token || ray get-auth-token --generate > /dev/null)"
    yield "# 2. In the shell of every node."
    yield shlex.join([*environment, LOOPBACK_ONLY] if plan.nodes == 1 else environment)
    yield f"# 3. On the head, {plan.host}."
    yield shlex.join(plan.head)
    if plan.nodes > 1:
        yield f"# 4. On each of the {plan.nodes - 1} other node(s)."
        yield shlex.join(plan.worker())
    yield "# 5. On the head, once all nodes are there (ray status)."
    yield shlex.join(plan.train)
    yield "# 6. At the end, on every node."
    yield "ray stop"


# -------------------------------------------------------------------------
# Run
# -------------------------------------------------------------------------


def _start(plan: _Plan, part: str) -> None:
    """Replace this process by Ray's; it ends when Ray does.

    :raises PlacementError: A worker has no token to show.
    """
    from anygauge.runtime.cluster import address_of, host_addresses

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if plan.nodes == 1:
        name, _, value = LOOPBACK_ONLY.partition("=")
        os.environ.setdefault(name, value)
    if os.environ.setdefault("RAY_AUTH_MODE", "token") == "token":
        _ensure_token(may_make=part == "head")
    chosen = plan.cluster.interface or plan.cluster.ip_version != "any"
    own = address_of(host_addresses(), plan.cluster, single_host=False) if chosen else None
    if part == "head":
        _require_free_port(plan.host, plan.port)
    command = plan.head if part == "head" else plan.worker(own)
    print(shlex.join(command), file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", *command[1:], "--block"])


def _require_free_port(host: str, port: int) -> None:
    """Look whether a head can listen; Ray itself fails with a traceback.

    :raises PlacementError: It cannot.
    """
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise PlacementError(
            f"The head cannot listen on port {port} of {host}: {error.strerror}.",
            hint="Name an address of this host and a free port: --head HOST:PORT. If a cluster of an earlier "
            "run has it, end that with `ray stop`.",
        ) from error


def _ensure_token(*, may_make: bool) -> None:
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / TOKEN)
    if os.environ.get("RAY_AUTH_TOKEN") or path.is_file():
        return
    if not may_make:
        raise PlacementError(
            f"This node has no token for the cluster: there is no {path}.",
            hint="Copy the file from the head, or name its place in RAY_AUTH_TOKEN_PATH.",
        )
    from secrets import token_hex

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(token_hex(32))
