"""Processes, and the cluster that they run on."""

from __future__ import annotations

from typing import Literal

from anygauge.config.schema.section import NonNegative, Positive, Seconds, Section

__all__ = ["Cluster", "Placement"]


class Placement(Section):
    """Processes."""

    launcher: Literal["ray", "local"] = "ray"
    """``ray`` places workers on a cluster; ``local`` starts plain processes on this host."""
    train_workers: Positive = 1
    """Worker processes, each with one device."""
    threads_per_worker: NonNegative = 0
    """CPU threads of each worker; 0 divides the host's cores among them."""
    start_timeout_s: Seconds = 300.0
    """Longest wait for every worker to be placed and ready, in seconds."""
    rollout_workers: NonNegative = 0
    """Dedicated rollout worker processes; 0 embeds an engine in each training worker."""
    colocated: bool = False
    """Run served engines on the devices of the training workers: engines and trainers alternate, and whoever
    sleeps keeps its memory on the host. Otherwise engines have devices of their own."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Whether colocated engines and trainers sleep: ``always``; ``auto``, which lets both stay awake where
    the first step has shown that both fit on their devices; or ``never``, which every ``rollout.schedule``
    but ``sync`` needs on shared devices."""

    @property
    def sleeps(self) -> bool:
        """Whether engines and trainers may have to release the memory of devices that they share."""
        return self.colocated and self.offload != "never"


class Cluster(Section):
    """The Ray cluster, where ``placement.launcher`` is ``ray``."""

    address: str = "start"
    """``start`` starts one on this host for the run, ``auto`` joins the one that runs here, or the
    address of one: ``HOST:PORT``, ``ray://HOST:PORT``."""
    interface: str | None = None
    """Network interface of collectives, such as ``eth0``; ``None`` lets the libraries choose."""
    ip_version: Literal["any", "4", "6"] = "any"
    """IP version of the addresses that nodes use among themselves."""
    check_packages: bool = True
    """Refuse to start unless every node has the same versions of the packages that a run depends on."""
