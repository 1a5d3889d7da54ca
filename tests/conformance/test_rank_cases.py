"""The cases that ranks run together complain of collectives that lie; with one rank, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from anygauge.plugins import load_plugins
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.testing.conformance.collective_cases import CASES
from anygauge.testing.conformance.ranks import Case, Ranks, Verdict, missing_devices
from anygauge.testing.conformance.test_collectives import RunCase, alone
from anygauge.testing.conformance.trials import DTYPES, LARGEST, pattern
from anygauge_hooks.errors import DeadlineError
from anygauge_hooks.types import BackendSpec

COLLECTIVES = {
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_reduce_avg": "all_reduce",
    "all_reduce_max": "all_reduce",
    "all_reduce_min": "all_reduce",
    "all_reduce_sum": "all_reduce",
    "all_to_all": "all_to_all_single",
    "all_to_all_uneven": "all_to_all_single",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "scatter": "scatter",
}
"""Functions of torch by case; the other cases do nothing with one rank, or call several."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunCase]:
    plugins = load_plugins()
    backend = plugins.get("register_backends", "cpu")
    device = plugins.make_device(backend, 0)
    with alone(plugins, backend, device, tmp_path_factory.mktemp("alone")) as run_case:
        yield run_case


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("lie", ["clears", "writes past"])
def test_a_wrong_result_is_a_complaint(
    name: str, lie: str, run: RunCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = getattr(dist, COLLECTIVES[name])

    def lying(output: Any, *arguments: Any, **options: Any) -> Any:
        work = own(output, *arguments, **options)
        if work is not None:
            work.wait()
        parts = arguments[0] if name == "gather" else output
        result = parts[0] if isinstance(parts, list) else parts
        if lie == "clears":
            result.zero_()
        else:
            result.as_strided((1,), (1,), result.storage_offset() - 1).zero_()
        return SimpleNamespace(wait=lambda: None)  # some work of gloo writes its result in each wait

    monkeypatch.setattr(dist, COLLECTIVES[name], lying)
    (verdict,) = run(case_of(f"{name}-float32"))
    expected = "is wrong in 3 of 3 elements" if lie == "clears" else "memory before or behind a tensor"
    assert any(expected in complaint for complaint in verdict.complaints), verdict
    assert "3 x float32, group twin of ranks 0, asynchronously" in "".join(verdict.complaints)


@pytest.mark.parametrize(("hidden", "count"), [(torch.inf, 6), (torch.nan, 2)])
def test_an_overflow_that_a_reduction_hides_is_a_complaint(
    hidden: float, count: int, run: RunCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = dist.all_reduce

    def hiding(tensor: Any, *arguments: Any, **options: Any) -> None:
        own(tensor, *arguments, **options)
        tensor[tensor.isinf() if hidden == torch.inf else tensor.isnan()] = 0.0

    assert not run(case_of("not_finite"))[0].complaints
    monkeypatch.setattr(dist, "all_reduce", hiding)
    (verdict,) = run(case_of("not_finite"))
    assert len(verdict.complaints) == count, verdict


def test_what_no_run_needs_may_be_refused(run: RunCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such collective")

    monkeypatch.setattr(dist, "all_reduce", refuse)
    (needed,), (optional,) = run(case_of("all_reduce_sum-float32")), run(case_of("all_reduce_sum-bool"))
    assert "no such collective" in needed.error
    assert optional == Verdict([], refusal="RuntimeError: no such collective")


class Group:
    """Answers a call, or fails."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.ended = answer, False

    def call(self, method: str, **_: Any) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def end(self) -> None:
        self.ended = True


def test_nothing_runs_after_a_case_that_hangs_or_that_some_ranks_leave() -> None:
    case = case_of("barrier")
    hanging = Ranks(cast(WorkerGroup, Group(DeadlineError("rank 1 is at: ..."))), 2)
    with pytest.raises(pytest.fail.Exception, match="barrier with 2 processes: rank 1 is at"):
        hanging.run(case)
    left = Group([Verdict(), Verdict(error="Traceback")])
    parted = Ranks(cast(WorkerGroup, left), 2)
    assert parted.run(case)[1].error == "Traceback"
    assert left.ended
    for ranks in (hanging, parted):
        with pytest.raises(pytest.fail.Exception, match="not run: case barrier left these 2 processes"):
            ranks.run(case)


def test_processes_without_a_device_each_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    one = SimpleNamespace(device_count=lambda: 1)
    monkeypatch.setattr(torch, "get_device_module", lambda name: one)
    backend = cast(BackendSpec, SimpleNamespace(name="abacus", device_type="abacus"))
    assert missing_devices(backend, 1) is None
    expected = "NOT CHECKED: 2 processes of abacus need 2 devices, and 1 can be seen"
    assert missing_devices(backend, 2) == expected
    host = cast(BackendSpec, SimpleNamespace(name="abacus", device_type="cpu"))
    assert missing_devices(host, 4) is None


def test_numbers_tell_ranks_and_calls_apart() -> None:
    for dtype in DTYPES:
        patterns = [pattern(source, dtype, 10 * number) for source in range(4) for number in range(6)]
        assert all(not torch.equal(a, b) for i, a in enumerate(patterns) for b in patterns[:i]), dtype
        assert torch.stack(patterns[::6]).double().sum(0).abs().max() > LARGEST[dtype]
