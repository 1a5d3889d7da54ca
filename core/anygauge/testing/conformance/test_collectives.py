"""Collectives of the backend's ``torch.distributed`` backend, and what calls them, with 1, 2 and 4 processes.

Each rank has numbers of its own. The processes are started as a run starts those that train, once for all
cases; with one process the cases run in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # documented, but not listed

from anygauge.distributed.process_groups import (
    destroy_process_group,
    init_process_group,
)
from anygauge.plugins import Plugins
from anygauge.testing.conformance import collective_cases, logprob_cases
from anygauge.testing.conformance.ranks import (
    SIZES,
    TIMEOUT_S,
    Case,
    Rank,
    Verdict,
    make_groups,
    missing_devices,
    started,
    verdict,
)
from anygauge.testing.plugin import NOT_CHECKED
from anygauge_hooks.types import BackendSpec, Device

pytestmark = [
    pytest.mark.conformance,
    # torch 2.13 deprecates the names that Megatron calls and that 2.10 has
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:barrier:UserWarning"),  # the device is the current one, as it guesses
]

RunCase = Callable[[Case], Sequence[Verdict]]
CASES = (*collective_cases.CASES, *logprob_cases.CASES)


@contextmanager
def alone(plugins: Plugins, backend: BackendSpec, device: Device, directory: Path) -> Iterator[RunCase]:
    """Run cases in this process, as the only rank."""
    store = TCPStore("127.0.0.1", 0, is_master=True)  # port 0: the system picks a free one
    init_process_group(plugins, backend, store, rank=0, world_size=1, timeout_s=TIMEOUT_S, single_host=True)
    rank = Rank(
        rank=0,
        size=1,
        device=device,
        backend=backend,
        plugins=plugins,
        directory=directory,
        groups=[*make_groups(0, 1)],
    )
    yield lambda case: [verdict(case, rank)]
    destroy_process_group()


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size}-processes")
def run(
    request: pytest.FixtureRequest,
    plugins: Plugins,
    backend: BackendSpec,
    device: Device,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunCase]:
    """Return a function that runs a case on so many processes."""
    size, directory = request.param, tmp_path_factory.mktemp("ranks")
    if reason := missing_devices(backend, size):
        pytest.skip(reason)
    if size == 1:
        with alone(plugins, backend, device, directory) as run_case:
            yield run_case
    else:
        with started(plugins, backend, size, directory) as ranks:
            yield ranks.run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_get_what_they_should(run: RunCase, case: Case, backend: BackendSpec) -> None:
    verdicts = run(case)
    refusals = [each.refusal for each in verdicts if each.refusal]
    problems = [problem for each in verdicts for problem in (each.error, *each.complaints) if problem]
    if len(refusals) == len(verdicts) and not problems:
        pytest.skip(f"{NOT_CHECKED}{backend.name} refuses {case.name}, which no run needs: {refusals[0]}")
    assert not [*refusals, *problems], "\n".join([*refusals, *problems])


def test_options_of_a_group_have_its_timeout(plugins: Plugins, backend: BackendSpec, device: Device) -> None:
    """A backend that makes options must say there how long a collective may take."""
    if not plugins.implementations("make_process_group_options", backend):
        return
    for timeout_s in (7.0, 77.0):
        options = plugins.first(
            "make_process_group_options", backend=backend, group_name="default", timeout_s=timeout_s
        )
        assert options is not None, "make_process_group_options gives the default group no options"
        assert options._timeout == timedelta(seconds=timeout_s)
