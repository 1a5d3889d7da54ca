"""Commands that start a Ray cluster with the resources of a backend's workers. Nothing here imports Ray."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

from anygauge.distributed.addresses import in_url
from anygauge.runtime.placement import GPU
from anygauge_hooks.errors import PlacementError
from anygauge_hooks.types import BackendSpec

__all__ = ["free_port", "head_command", "join_address", "worker_command"]


def head_command(
    backend: BackendSpec, devices: int, *, host: str | None = None, port: int | None = None
) -> list[str]:
    """Return the command that starts the head of a cluster.

    :param devices: Number of devices that the node lends to the cluster.
    :param host: Address that the other nodes reach it at; ``None`` leaves the choice to Ray.
    :param port: ``None`` takes Ray's own.
    """
    command = ["ray", "start", "--head"]
    command += [f"--node-ip-address={host}"] if host else []
    command += [f"--port={port}"] if port else []
    return [*command, "--include-dashboard=false", *_resources(backend, devices)]


def worker_command(backend: BackendSpec, devices: int, *, head: str, host: str | None = None) -> list[str]:
    """Return the command that adds this node to a cluster.

    :param devices: Number of devices that the node lends to the cluster.
    :param head: ``HOST:PORT`` of the head.
    :param host: Address that the other nodes reach it at; ``None`` leaves the choice to Ray.
    """
    command = ["ray", "start", f"--address={head}"]
    command += [f"--node-ip-address={host}"] if host else []
    return [*command, *_resources(backend, devices)]


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 address."""
    return f"{in_url(host)}:{port}"


def free_port(host: str) -> int:
    """Return a port of this host that nobody listens on.

    :raises PlacementError: The address is not one of this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as listener:
            port: int = listener.getsockname()[1]
    except OSError as error:
        raise PlacementError(
            f"No free port can be looked for on {host}, which is no address of this host.",
            hint="Name the port too, --head HOST:PORT, or run this on the head.",
        ) from error
    return port


def _resources(backend: BackendSpec, devices: int) -> Sequence[str]:
    """Return the options that declare devices.

    No worker of a run takes a core, and Ray keeps an idle process ready for each core that it knows of.
    """
    resource = backend.scheduler_resource
    count = f"--num-gpus={devices}" if resource == GPU else f"--resources={json.dumps({resource: devices})}"
    return ["--num-cpus=1", count]
