"""A process with two simulated NPUs. Run by ``test_simulation.py``, inside the launcher."""

from __future__ import annotations

import copy
import ctypes
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from anygauge.plugins import load_plugins, select_backend
from anygauge_npu.probe import probe
from simulation import simulated

MIB = 1 << 20
FEW = torch.arange(24, dtype=torch.float32).reshape(4, 6)


@pytest.fixture(scope="session", autouse=True)
def simulation() -> None:
    plugins = load_plugins()
    backend, _ = select_backend(plugins, "npu")
    plugins.prepare_worker(backend, "actor", "before_vendor_import")


@pytest.fixture(autouse=True)
def first_device() -> Iterator[None]:
    torch.npu.set_device(0)
    yield
    torch.npu.synchronize()
    torch.npu.empty_cache()


# ---- devices, streams, events ----


def test_devices_say_that_they_are_simulated() -> None:
    assert torch.npu.device_count() == torch.accelerator.device_count() == 2
    assert torch.npu.get_device_name(1) == "Ascend910B3 (simulated)"
    assert probe().reason == "2 x Ascend910B3 (simulated)"


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RuntimeError, match="SIMULATED NPU: device 2 of 2"):
        torch.npu.set_device(2)


def test_the_current_device_is_the_threads() -> None:
    torch.npu.set_device(1)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(2, device="npu").add(1).cpu().tolist()))
    thread.start()
    thread.join()
    assert seen == [[2.0, 2.0]]
    assert torch.npu.current_device() == 1
    assert torch.ones(1, device="npu").device.index == 1


def test_events_take_time_and_must_be_recorded() -> None:
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    with torch.npu.stream(torch.npu.Stream()):
        start.record()
        torch.ones(4, device="npu").mul_(2)
        end.record()
    end.synchronize()
    assert end.query()
    assert 0 < start.elapsed_time(end) < 60_000
    with pytest.raises(RuntimeError, match="recorded"):
        start.elapsed_time(torch.npu.Event(enable_timing=True))


def test_what_is_queued_is_done_when_the_host_reads() -> None:
    pinned = FEW.pin_memory()
    assert pinned.is_pinned()
    moved = pinned.to("npu", non_blocking=True)
    assert torch.equal(moved.cpu(), FEW)


# ---- memory ----


def test_each_device_counts_its_memory() -> None:
    free, total = torch.npu.mem_get_info(1)
    assert total == 256 * MIB
    held = torch.ones(32 * MIB, dtype=torch.uint8, device="npu:1")
    assert torch.npu.memory_allocated(1) >= held.nbytes
    assert torch.npu.mem_get_info(1)[0] <= free - held.nbytes
    assert torch.npu.mem_get_info(0)[0] == total
    del held
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info(1)[0] == free


def test_memory_runs_out_and_comes_back() -> None:
    held = torch.ones(200 * MIB, dtype=torch.uint8, device="npu")
    with pytest.raises(torch.OutOfMemoryError, match=r"NPU 0; 256.00 MiB total capacity"):
        torch.ones(100 * MIB, dtype=torch.uint8, device="npu")
    del held
    assert torch.ones(100 * MIB, dtype=torch.uint8, device="npu").sum().item() == 100 * MIB


def test_memory_that_nobody_wrote_shows() -> None:
    fresh = torch.empty(64, dtype=torch.uint8, device="npu")
    assert fresh.cpu().tolist() == [0xA5] * 64


# ---- random numbers ----


def test_states_of_a_generator_save_and_restore() -> None:
    torch.npu.manual_seed(3)
    state = torch.npu.get_rng_state()
    first, second = torch.rand(8, device="npu").cpu(), torch.randn(8, device="npu").cpu()
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(8, device="npu").cpu(), first)
    assert torch.equal(torch.randn(8, device="npu").cpu(), second)
    assert not torch.equal(torch.randn(8, device="npu").cpu(), second)


def test_each_device_has_a_generator() -> None:
    torch.npu.manual_seed_all(5)
    first = torch.rand(8, device="npu:0").cpu()
    again = torch.rand(8, device="npu:0").cpu()
    assert torch.equal(torch.rand(8, device="npu:1").cpu(), first)
    assert not torch.equal(again, first)


def test_a_generator_that_is_given_is_drawn_from() -> None:
    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator("npu").manual_seed(seed)
        order = torch.randperm(16, generator=generator, device="npu")
        return torch.multinomial(torch.ones(16, device="npu"), 8, generator=generator).cpu() + order[:8].cpu()

    before = torch.npu.get_rng_state()
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.npu.get_rng_state(), before)


def test_the_hosts_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    torch.nn.functional.dropout(torch.ones(16, device="npu"))
    torch.npu.manual_seed(8)
    torch.empty(16, device="npu").uniform_()
    assert torch.equal(torch.rand(4), expected)


def test_recomputation_drops_the_same_elements() -> None:
    def dropped(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x * 2, 0.5)

    ones = torch.ones(1000, device="npu", requires_grad=True)
    kept = checkpoint(dropped, ones, use_reentrant=False)
    kept.sum().backward()
    assert ones.grad is not None
    assert 300 < int((kept > 0).sum()) < 700
    assert torch.equal(kept.detach() > 0, ones.grad > 0)


# ---- views, copies, casts ----


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[1:3, ::2].mul_(2),
        lambda x: x.t().add_(torch.arange(4.0, device=x.device)),
        lambda x: x.as_strided((2, 2), (7, 1), 3).fill_(-1),
        lambda x: x.view(-1)[5:].copy_(x.view(-1)[:-5].clone()),
        lambda x: x.index_put_((torch.tensor([0, 0]),), torch.ones(2, 6, device=x.device), accumulate=True),
        lambda x: x.masked_fill_(x > 7, 0.5),
        lambda x: torch.view_as_complex(x.view(4, 3, 2)).mul_(1j),
        lambda x: torch.nn.functional.pad(x, (1, 2))[:, 1:].zero_(),
        lambda x: x.contiguous().sub_(3),
        lambda x: x.unsqueeze_(0).squeeze_(0).resize_(2, 3),
    ],
)
def test_views_write_into_what_they_view(change: Any) -> None:
    host, npu = FEW.clone(), FEW.to("npu")
    change(host)
    change(npu)
    assert torch.equal(npu.cpu(), host)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:1].expand(5, 6) + 0,
        lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj(),
        lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().imag,
        lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
        lambda x: x.to(torch.bfloat16).float() + x.half().double() + x.long(),
        lambda x: x.nonzero(),
        lambda x: x.sort(descending=True)[1],
        lambda x: torch.nn.functional.one_hot(x.long(), 24),
        lambda x: x.new_zeros(0, 3).sum(0),
    ],
)
def test_results_are_the_hosts(make: Any) -> None:
    host, npu = make(FEW.clone()), make(FEW.to("npu"))
    assert npu.device.type == "npu"
    assert (npu.dtype, npu.stride()) == (host.dtype, host.stride())
    assert torch.equal(npu.cpu(), host)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[1:].copy_(x[:-1]),
        lambda x: x[:1].expand(4, 6).add_(1),
    ],
)
def test_overlaps_are_refused(call: Any) -> None:
    with pytest.raises(RuntimeError, match="unsupported operation"):
        call(FEW.to("npu"))


def row(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a row of numbers, a number and two indices on a device."""
    place = torch.device(device)
    return (
        torch.arange(6.0, device=place),
        torch.tensor(2.0, device=place),
        torch.tensor([0, 3], device=place),
    )


@pytest.mark.parametrize(
    ("call", "found"),
    [
        (lambda npu, other, cpu: npu[0] + other[0], "npu:0 and npu:1"),
        (lambda npu, other, cpu: npu[0] + cpu[0], "npu:0 and cpu"),
        (lambda npu, other, cpu: npu[0] + other[1], "npu:0 and npu:1"),
        (lambda npu, other, cpu: other[1] + npu[0], "npu:1 and npu:0"),
        (lambda npu, other, cpu: npu[1] + other[1], "npu:0 and npu:1"),
        (lambda npu, other, cpu: cpu[1].add_(npu[1]), "cpu and npu:0"),
        (lambda npu, other, cpu: torch.where(npu[0] > 2, other[1], npu[0]), "npu:0 and npu:1"),
        (lambda npu, other, cpu: npu[0][other[2]], "the tensor, npu:0, but are on npu:1"),
        (lambda npu, other, cpu: cpu[0][npu[2]], "the tensor, cpu, but are on npu:0"),
        (lambda npu, other, cpu: npu[0].index_put((npu[2],), other[0][:2]), "npu:0 and npu:1"),
        (lambda npu, other, cpu: npu[0].index_put((npu[2],), other[1]), "npu:0 and npu:1"),
        (lambda npu, other, cpu: npu[0].index_put_((npu[2],), cpu[0][:2]), "npu:0 and cpu"),
        (lambda npu, other, cpu: cpu[0].index_put_((cpu[2],), npu[0][:2]), "cpu and npu:0"),
        (lambda npu, other, cpu: torch._foreach_add([npu[0]], [other[0]]), "npu:0 and npu:1"),
        (lambda npu, other, cpu: torch._foreach_add([npu[0]], [cpu[0]]), "npu:0 and cpu"),
        (lambda npu, other, cpu: torch._foreach_add([npu[0], other[0]], [npu[0]] * 2), "npu:1 and npu:0"),
        (lambda npu, other, cpu: torch._foreach_mul([npu[0], other[0]], npu[1]), "npu:1 and npu:0"),
    ],
)
def test_tensors_of_two_devices_are_refused(call: Any, found: str) -> None:
    with pytest.raises(RuntimeError, match=f"on the same device.* {found}!"):
        call(row("npu:0"), row("npu:1"), row("cpu"))


@pytest.mark.parametrize(
    "call",
    [
        lambda npu, other, cpu: npu[0] + cpu[1],
        lambda npu, other, cpu: cpu[1] - npu[0],
        lambda npu, other, cpu: torch.where(npu[0] > 2, cpu[1], npu[0]),
        lambda npu, other, cpu: npu[0][cpu[2]],
        lambda npu, other, cpu: npu[0].index_put((cpu[2],), cpu[1]),
        lambda npu, other, cpu: npu[0].index_put((other[2],), npu[0][:2], accumulate=True),
        lambda npu, other, cpu: cpu[0].index_put((npu[2],), cpu[0][:2]),
        lambda npu, other, cpu: torch._foreach_add([npu[0], cpu[0]], [cpu[1], cpu[0]])[0],
        lambda npu, other, cpu: torch._foreach_add([npu[0], other[0]], [npu[0], other[0]])[1],
        lambda npu, other, cpu: torch._foreach_mul([npu[0], other[0]], cpu[1])[1],
    ],
)
def test_what_torch_takes_of_two_devices(call: Any) -> None:
    found = call(row("npu:0"), row("npu:1"), row("cpu"))
    assert torch.equal(found.cpu(), call(*[row("cpu")] * 3))


@pytest.mark.parametrize("device", ["npu:0", "cpu"])
def test_assignment_by_index_stays_where_it_is(device: str) -> None:
    values, number, _ = row(device)
    indices = row("npu:0")[2]
    assert values.index_put((indices,), number).device == values.device
    values[indices] = number
    assert values.tolist() == [2.0, 1.0, 2.0, 2.0, 4.0, 5.0]


def test_copies_between_devices_and_files() -> None:
    moved = FEW.to("npu:0").to("npu:1")
    assert (moved.device.index, torch.equal(moved.cpu(), FEW)) == (1, True)
    file = io.BytesIO()
    torch.save({"x": moved}, file)
    for place in (None, "npu:0", "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=place)["x"]
        assert str(loaded.device) == (place or "npu:1")
        assert torch.equal(loaded.cpu(), FEW)


# ---- training ----


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_training_has_the_hosts_digits(options: dict[str, bool]) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
    host = torch.nn.Sequential(*layers)
    npu = copy.deepcopy(host).to("npu")
    assert train(npu, "npu", **options) == train(host, "cpu", **options)


def train(model: torch.nn.Module, device: str, **options: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        inputs = torch.randn(32, 8, generator=generator).to(device)
        targets = torch.randint(0, 4, (32,), generator=generator).to(device)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: (x @ y[0]).sum() + (x[0] @ y.t()).sum() + (x @ y.t()).square().sum(),
        lambda x, y: torch.nn.functional.scaled_dot_product_attention(x[None], y[None], x[None]).sum(),
        torch.nn.functional.l1_loss,
        lambda x, y: torch.nn.functional.kl_div(x.log_softmax(-1), y.softmax(-1)),
        lambda x, y: torch.nn.functional.binary_cross_entropy_with_logits(x, y.detach().sigmoid()),
        lambda x, y: x.repeat_interleave(2, 0).square().sum() + y.gather(1, y.argsort(1)[:, :2]).sum(),
    ],
)
@pytest.mark.filterwarnings("ignore:reduction")
def test_gradients_of_what_torch_npu_differentiates_itself(loss: Any) -> None:
    host = [(FEW / 24).requires_grad_(), (1 - FEW / 12).requires_grad_()]
    npu = [x.detach().to("npu").requires_grad_() for x in host]
    loss(*host).backward()
    loss(*npu).backward()
    for one, other in zip(host, npu, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert other.grad is not None
            torch.testing.assert_close(other.grad.cpu(), one.grad)


# ---- what is not simulated ----

NEWER = pytest.mark.skipif(
    torch.__version__.startswith("2.10."),
    reason="torch-npu 2.10 cannot forbid fallbacks, and its allocator does not recover from a failed capture",
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (torch.ops.npu.npu_gelu, "aclnnGeluV2"),
        (torch.ops.npu.fast_gelu, "kernel FastGelu is not simulated"),
        pytest.param(torch.lgamma, "would execute its main computation on CPU", marks=NEWER),
        pytest.param(lambda x: x.log_normal_(), "would execute its main computation on CPU", marks=NEWER),
        pytest.param(
            lambda x: torch.npu.graph(torch.npu.NPUGraph()).__enter__(), "aclmdlRICaptureBegin", marks=NEWER
        ),
        (lambda x: torch.npu.Event(interprocess=True).ipc_handle(), "aclrtIpcGetEventHandle"),
    ],
)
def test_what_is_not_simulated_raises(call: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(FEW.to("npu"))


def test_a_reference_must_have_the_shapes_of_torch_npu() -> None:
    def wrong(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> Any:
        return x, x

    op = torch.ops.npu.npu_rms_norm.default
    with pytest.raises(AssertionError, match=r"result 1: the reference returns \(\(4, 6\), torch.float32\)"):
        simulated._run(op, wrong, FEW.to("npu"), torch.ones(6, device="npu"), 1e-6)


def test_the_libraries_are_the_simulations() -> None:
    assert ctypes.CDLL("libascendcl.so").simulated_npu() == 1
