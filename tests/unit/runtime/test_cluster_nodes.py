"""Checks that the nodes of a run are alike, and the rendezvous of its workers."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge.config.schema import Cluster, Config
from anygauge.runtime.cluster import (
    ClusterNode,
    NodeFacts,
    address_of,
    check_nodes,
    is_one_plain_host,
    make_rendezvous,
    marker_file,
    model_paths,
    node_facts,
    saves,
)
from anygauge.runtime.worker import HostInfo
from anygauge.runtime.worker_group import LaunchSpec, WorkerGroup
from anygauge_hooks.errors import PlacementError

BOTH = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.1", "fd00::1")}
RUN = Path("/runs/r")


def facts(
    packages: Mapping[str, str] | None = None,
    addresses: Mapping[str, Sequence[str]] | None = None,
    **more: Any,
) -> NodeFacts:
    return NodeFacts(packages=packages or {"torch": "2.13.0"}, addresses=addresses or BOTH, **more)


def place(found: NodeFacts, name: str = "b (10.0.0.1)") -> ClusterNode:
    return ClusterNode(name=name, ip="10.0.0.1", facts=found)


def config(**sections: Any) -> Config:
    given = {"run": {"name": "r"}, "model": "model", "data": {"train": []}, "reward": {"function": "math"}}
    return Config.model_validate({**given, **sections})


def test_nodes_that_are_alike_pass() -> None:
    check_nodes(Cluster(), facts({"torch": "2.13.0+cpu"}), [place(facts({"torch": "2.13.0+cu130"}))], RUN)


def test_every_difference_is_reported_with_its_node() -> None:
    driver = facts({"torch": "2.13.0", "ray": "2.60.0", "numpy": "2.0", "Python": "3.11"})
    others = [
        place(facts({"torch": "2.12.0", "ray": "2.60.0", "numpy": "2.0", "Python": "3.12"}), "b (10.0.0.2)"),
        place(facts({"torch": "2.13.0", "ray": "2.60.0", "Python": "3.11", "extra": "1"}), "c (10.0.0.3)"),
    ]
    with pytest.raises(PlacementError) as caught:
        check_nodes(Cluster(), driver, others, RUN)
    assert str(caught.value).splitlines()[:5] == [
        "The nodes do not match:",
        "  b (10.0.0.2): Python 3.12, but 3.11 on the driver's node",
        "  b (10.0.0.2): torch 2.12.0, but 2.13.0 on the driver's node",
        "  c (10.0.0.3): extra 1, but not installed on the driver's node",
        "  c (10.0.0.3): numpy is not installed, but 2.0 on the driver's node",
    ]
    assert "cluster.check_packages" in str(caught.value)
    check_nodes(Cluster(check_packages=False), driver, others, RUN)


def test_a_node_without_the_model_or_the_run_directory_is_named() -> None:
    lacking = place(facts(missing=("/models/m",), sees_marker=False))
    with pytest.raises(PlacementError) as caught:
        check_nodes(Cluster(), facts(), [place(facts(), "a"), lacking], RUN)
    assert "  b (10.0.0.1): no /models/m" in str(caught.value)
    assert "  b (10.0.0.1): does not see what the driver writes into /runs/r" in str(caught.value)
    assert "  a: " not in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "wanted"),
    [
        (Cluster(interface="eth9"), "no address on interface 'eth9'"),
        (Cluster(interface="eth0", ip_version="6"), "no IPv6 address on interface 'eth0'"),
        (Cluster(ip_version="6"), "no IPv6 address on any interface"),
    ],
)
def test_a_node_without_the_interface_or_the_family_shows_what_it_has(cluster: Cluster, wanted: str) -> None:
    node = place(facts(addresses={"lo": ("127.0.0.1",), "eth0": ("10.0.0.1",), "ib0": ()}))
    with pytest.raises(PlacementError) as caught:
        check_nodes(cluster, facts(), [node], RUN)
    assert f"{wanted}; it has lo: 127.0.0.1; eth0: 10.0.0.1; ib0: no address" in str(caught.value)
    assert "Set cluster.interface and cluster.ip_version" in str(caught.value)
    assert "same packages" not in str(caught.value), "they are"


@pytest.mark.parametrize(
    ("cluster", "single_host", "known", "address"),
    [
        (Cluster(), True, "10.0.0.1", "127.0.0.1"),
        (Cluster(ip_version="6"), True, "", "::1"),
        (Cluster(interface="eth0"), True, "", "10.0.0.1"),
        (Cluster(), False, "10.0.0.1", "10.0.0.1"),
        (Cluster(), False, "", "10.0.0.1"),
        (Cluster(ip_version="6"), False, "10.0.0.1", "fd00::1"),
        (Cluster(interface="lo"), False, "10.0.0.1", "127.0.0.1"),
    ],
)
def test_a_node_is_reached_where_the_config_says(
    cluster: Cluster, single_host: bool, known: str, address: str
) -> None:
    assert address_of(BOTH, cluster, single_host=single_host, known=known) == address


def test_one_host_meets_on_the_loopback_interface() -> None:
    rendezvous = make_rendezvous(Cluster(), ["a", "a"], [])
    assert ipaddress.ip_address(rendezvous.host).is_loopback
    assert rendezvous.single_host
    assert len(rendezvous.token) == 32
    assert make_rendezvous(Cluster(), ["a", "a"], []).token != rendezvous.token


def test_several_hosts_meet_on_an_address_of_the_first_and_know_all() -> None:
    second = ClusterNode(name="b", ip="10.0.0.2", facts=facts(addresses={"eth0": ("10.0.0.2",)}))
    rendezvous = make_rendezvous(Cluster(), ["a", "b"], [place(facts()), second])
    assert rendezvous.host == "10.0.0.1"
    assert not rendezvous.single_host
    assert set(rendezvous.peers) == {"127.0.0.1", "::1", "10.0.0.1", "fd00::1", "10.0.0.2"}


def test_only_one_plain_host_needs_no_look() -> None:
    assert is_one_plain_host(Cluster(), ["a", "a"], "a")
    assert not is_one_plain_host(Cluster(), ["b", "b"], "a")
    assert not is_one_plain_host(Cluster(), ["a", "b"], "a")
    assert not is_one_plain_host(Cluster(interface="lo"), ["a"], "a")
    assert not is_one_plain_host(Cluster(ip_version="4"), ["a"], "a")


def test_this_node_tells_its_packages_addresses_and_paths(tmp_path: Path) -> None:
    with marker_file(tmp_path) as marker:
        found = node_facts((str(tmp_path), str(tmp_path / "none")), marker)
    assert found.sees_marker
    assert found.missing == (str(tmp_path / "none"),)
    assert {"Python", "anygauge", "torch", "ray", "megatron-core"} <= found.packages.keys()
    assert "127.0.0.1" in found.addresses["lo"]
    assert list(tmp_path.iterdir()) == []


def test_a_marker_that_is_not_there_is_waited_for_and_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anygauge.runtime.cluster.MARKER_WAIT_S", 0.0)
    assert not node_facts((), str(tmp_path / "marker")).sees_marker


def test_each_worker_reads_the_model_and_the_reference_of_a_kl_term(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"model": str(tmp_path), "reference": {"path": str(tmp_path.parent)}}
    assert model_paths(config(**sections)) == [str(tmp_path)]
    assert model_paths(config(**sections, algorithm={"kl_coef": 0.1})) == [
        str(tmp_path),
        str(tmp_path.parent),
    ]
    assert model_paths(config(model="Some/Name")) == []
    lora = {"lora": {"path": str(tmp_path)}}
    assert model_paths(config(model="Some/Name", train=lora)) == [str(tmp_path)]


def test_each_node_is_asked_for_what_its_workers_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LaunchSpec(
        config=config(model=str(tmp_path)),
        backend=SimpleNamespace(name="cpu"),  # type: ignore[arg-type]
        worker_class="a:B",
        role="actor",
        num_workers=1,
        run_directory=tmp_path,
        env={},
        reads=[tmp_path / "step-1"],
    )
    asked: list[Sequence[str]] = []
    group = WorkerGroup(SimpleNamespace(), spec)

    def lifecycle(method: str, deadline: float, *, paths: Sequence[str], marker: str) -> list[NodeFacts]:
        asked.append(paths)
        return [replace(node_facts(), missing=tuple(paths[1:]))]

    monkeypatch.setattr(group, "_lifecycle", lifecycle)
    with pytest.raises(PlacementError, match=r"no .*step-1"):
        group._inspect([HostInfo(pid=1, host="b", ip="10.0.0.2", node="b")], 0.0)
    assert asked == [[str(tmp_path), str(tmp_path / "step-1")]]


@pytest.mark.parametrize(
    ("sections", "saved"),
    [
        ({}, True),
        ({"save": {"every": None, "hf_at_end": False}}, False),
        ({"save": {"every": None, "hf_at_end": False, "hf_every": 3}}, True),
        ({"debug": {"mode": "rollout_only"}}, False),
        ({"save": {"every": None, "hf_at_end": False}, "debug": {"dump_batches": True}}, True),
    ],
)
def test_a_run_that_saves_needs_a_shared_directory(sections: dict[str, Any], saved: bool) -> None:
    assert saves(config(**sections)) is saved
