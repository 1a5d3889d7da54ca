"""The device scope, and what comes before the first import of Megatron."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode

import anygauge_cpu.plugin
from anygauge.engines.megatron import scope
from anygauge.engines.megatron.prepare import JIT_MODULE, prepare_megatron
from anygauge.plugins import Plugins, load_plugins
from anygauge_cpu.device import CpuDevice
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import MissedRedirectionError, ScopeError
from anygauge_hooks.types import BackendSpec, Device

# -------------------------------------------------------------------------
# Fixtures
# -------------------------------------------------------------------------


def make_plugins(*modules: object) -> Plugins:
    plugins = load_plugins(only=[])
    for module in modules:
        plugins.register(module, repr(module))
    return plugins


@pytest.fixture(autouse=True, scope="module")
def megatron() -> None:
    prepare_megatron(make_plugins(anygauge_cpu.plugin), anygauge_cpu.plugin.CPU)


def state_of_process() -> dict[str, Any]:
    found = {}
    for dotted in sorted(scope.scoped_attributes()):
        owner, name = scope._locate(dotted)
        found[dotted] = getattr(owner, name)
    return found


def changed(before: dict[str, Any]) -> set[str]:
    now = state_of_process()
    return {name for name, value in before.items() if now[name] is not value}


@pytest.fixture(autouse=True)
def nothing_left_behind(megatron: None) -> Iterator[None]:
    before = state_of_process()
    modes = torch._C._len_torch_function_stack()
    yield
    assert changed(before) == set()
    assert torch._C._len_torch_function_stack() == modes
    assert scope._process.entries == 0
    assert scope._thread.entries == 0


@pytest.fixture
def cpu() -> CpuDevice:
    return CpuDevice()


@pytest.fixture
def accelerator(cpu: CpuDevice) -> Device:
    """Stand for an accelerator with several indices; tensors of the meta device need no hardware."""
    assert cpu.scope_map is not None
    functions = dict(cpu.scope_map.functions) | {"current_device": lambda: 0}
    cpu.scope_map = dataclasses.replace(
        cpu.scope_map,
        device_type="meta",
        functions=functions,
        has_index=True,
        has_pinned_memory=True,
        is_accelerator=True,
    )
    return cpu


def in_thread(function: Callable[[], Any]) -> Any:
    """Return what a function returned or raised in a second thread."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except Exception as error:  # noqa: BLE001 - handed to the caller
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


# -------------------------------------------------------------------------
# Redirection
# -------------------------------------------------------------------------

LITERAL: dict[str, Callable[[], torch.Tensor]] = {
    "factory": lambda: torch.zeros(2, device="cuda"),
    "factory with an index": lambda: torch.zeros(2, device="cuda:3"),
    "factory with a device": lambda: torch.zeros(2, device=torch.device("cuda", 1)),
    "current device": lambda: torch.empty(2, device=torch.cuda.current_device()),
    "like": lambda: torch.ones_like(torch.ones(1), device="cuda"),
    "new": lambda: torch.ones(1).new_empty(1, device="cuda"),
    "tensor": lambda: torch.tensor([1], device="cuda", pin_memory=False),
    "to": lambda: torch.ones(1).to("cuda"),
    "to device": lambda: torch.ones(1).to(torch.device("cuda")),
    "to keyword": lambda: torch.ones(1).to(device="cuda", dtype=torch.int64),
    "cuda": lambda: torch.ones(1).cuda(),
    "cuda of the current device": lambda: torch.ones(1).cuda(torch.cuda.current_device()),
    "cuda of an index": lambda: torch.ones(1).cuda(0, non_blocking=True),
    "cuda keyword": lambda: torch.ones(1).cuda(device=torch.device("cuda", 0)),
    "module": lambda: torch.nn.Linear(2, 2).cuda().weight,
    "module to": lambda: torch.nn.Linear(2, 2).to("cuda").weight,
}


@pytest.mark.parametrize("make", LITERAL.values(), ids=LITERAL.keys())
def test_literal_device_is_redirected(make: Callable[[], torch.Tensor], cpu: CpuDevice) -> None:
    with scope.make_scope(cpu):
        assert make().device == torch.device("cpu")


def test_literal_device_context_is_redirected(cpu: CpuDevice) -> None:
    with scope.make_scope(cpu), torch.device("cuda"):
        assert torch.ones(1).device == torch.device("cpu")


class Recorder(TorchFunctionMode):
    """Keep the device that each call is finally made with: the meta device itself drops an index."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.devices += [
            value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.device)
        ]
        return func(*args, **(kwargs or {}))


def test_index_is_kept_where_a_device_has_one(accelerator: Device) -> None:
    recorder = Recorder()
    with recorder, scope.make_scope(accelerator):
        torch.zeros(2, device="cuda:3")
        torch.zeros(2).cuda(2)
        torch.zeros(2).to("cuda")
    assert recorder.devices == [torch.device("meta", 3), torch.device("meta", 2), torch.device("meta")]


def test_tensors_answer_for_the_redirected_device(cpu: CpuDevice) -> None:
    with scope.make_scope(cpu):
        tensor = torch.ones(1, device="cuda")
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.type("torch.cuda.HalfTensor").dtype is torch.float16
        assert tensor.type(torch.int64).dtype is torch.int64
        assert not tensor.is_cuda
        assert torch.tensor([1.0], pin_memory=True).pin_memory().is_pinned() is False


@pytest.mark.parametrize(
    ("types", "prefix"),
    [
        (("torch.FloatTensor",), "torch."),
        (("torch.FloatTensor", "torch.other.FloatTensor"), "torch.other."),
        (("torch.other.FloatTensor", "torch.FloatTensor"), "torch.other."),
    ],
)
def test_type_names_are_those_of_the_device(types: tuple[str, ...], prefix: str, cpu: CpuDevice) -> None:
    assert cpu.scope_map is not None
    scope_map = dataclasses.replace(cpu.scope_map, tensor_types={"fp32": types})
    assert scope._own_prefix(scope_map) == prefix


def test_an_accelerators_tensors_say_that_they_are_on_it(accelerator: Device) -> None:
    with scope.make_scope(accelerator):
        assert torch.ones(1, device="cuda").is_cuda
        assert not torch.ones(1).is_cuda


def test_tensor_types_are_the_devices(cpu: CpuDevice) -> None:
    from megatron.core.transformer import module

    with scope.make_scope(cpu):
        types = module._FLOAT_TYPES + module._HALF_TYPES + module._BF16_TYPES
        assert types == (torch.FloatTensor, torch.HalfTensor, torch.BFloat16Tensor)
        assert isinstance(torch.ones(1, device="cuda"), module._FLOAT_TYPES)


def test_type_names_are_given_to_one_who_passes_the_defaults(cpu: CpuDevice) -> None:
    """As torch-npu 2.10 does, whose own ``Tensor.type`` calls torch's."""
    with scope.make_scope(cpu):
        assert torch.ones(1).type(None, False) == torch.ones(1).type() == "torch.cuda.FloatTensor"


def test_torch_is_not_built_for_cuda_in_a_scope(cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with scope.make_scope(cpu):
        assert not torch.backends.cuda.is_built()
    assert torch.backends.cuda.is_built()


def test_streams_and_events_of_a_host_do_nothing(cpu: CpuDevice) -> None:
    with scope.make_scope(cpu):
        stream, event = torch.cuda.Stream(), torch.cuda.Event()
        with torch.cuda.stream(stream):
            event.record()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.default_stream().wait_event(stream.record_event())
        event.wait(stream)
        event.synchronize()
        stream.synchronize()
        torch.cuda.synchronize()
        assert stream.query()
        assert event.query()


def test_random_state_survives_a_round_trip(cpu: CpuDevice) -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    with scope.make_scope(cpu):
        torch.manual_seed(3)
        state = megatron_random._get_cuda_rng_state()
        first = torch.rand(3, device="cuda")
        megatron_random._set_cuda_rng_state(state)
        assert torch.equal(first, torch.rand(3, device="cuda"))
        torch.cuda.manual_seed(3)
        assert torch.equal(first, torch.rand(3, device="cuda"))


def test_device_without_a_map_needs_no_scope(cpu: CpuDevice) -> None:
    cpu.scope_map = None
    before = state_of_process()
    with scope.make_scope(cpu):
        assert changed(before) == set()
        assert torch._C._len_torch_function_stack() == 0


# -------------------------------------------------------------------------
# The fence
# -------------------------------------------------------------------------


def test_the_compiler_is_imported_before_a_scope_opens(
    cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On import it tables the functions of torch, which are others inside."""
    imported: list[str] = []
    monkeypatch.setattr(scope.importlib, "import_module", imported.append)
    made = scope.make_scope(cpu)
    assert imported == ["torch._dynamo"]
    with made:
        assert imported == ["torch._dynamo"]


def test_every_other_function_raises_and_names_itself(cpu: CpuDevice) -> None:
    fenced = scope.fenced_attributes()
    assert {
        "torch.cuda.memory_allocated",
        "torch.cuda.memory.mem_get_info",
        "torch.cuda._lazy_init",
    } <= fenced
    with scope.make_scope(cpu):
        for dotted in sorted(fenced):
            owner, name = scope._locate(dotted)
            with pytest.raises(MissedRedirectionError, match=rf"^{dotted} was called"):
                getattr(owner, name)()


BEYOND: dict[str, Callable[[], Any]] = {
    "legacy constructor": lambda: torch.cuda.FloatTensor(2),
    "storage": lambda: torch.ones(1).untyped_storage().cuda(),
    "load": lambda: torch.load(saved(torch.ones(1)), map_location="cuda"),
}


def saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("call", BEYOND.values(), ids=BEYOND.keys())
def test_what_the_mode_does_not_see_raises(call: Callable[[], Any], cpu: CpuDevice) -> None:
    with scope.make_scope(cpu), pytest.raises((RuntimeError, TypeError)):
        call()


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="holds in workers, from which the GPUs are hidden")
@pytest.mark.parametrize("make", [lambda: torch.Generator(device="cuda"), torch.cuda.CUDAGraph])
def test_what_no_function_guards_raises_without_a_device(make: Callable[[], Any], cpu: CpuDevice) -> None:
    with scope.make_scope(cpu), pytest.raises((RuntimeError, TypeError)):
        make()


def test_autocast_is_refused_unless_it_is_off(cpu: CpuDevice) -> None:
    with scope.make_scope(cpu):
        for autocast in (torch.autocast, torch.amp.autocast):
            with pytest.raises(MissedRedirectionError, match="autocast"):
                autocast("cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_errors_cross_a_process_boundary(cpu: CpuDevice) -> None:
    with scope.make_scope(cpu), pytest.raises(MissedRedirectionError) as caught:
        torch.cuda.memory_allocated()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


# -------------------------------------------------------------------------
# Opening and closing
# -------------------------------------------------------------------------


def test_nested_scopes_close_with_the_outermost(cpu: CpuDevice) -> None:
    before = state_of_process()
    outer = scope.make_scope(cpu)
    with outer:
        with scope.make_scope(CpuDevice()), outer:
            assert torch._C._len_torch_function_stack() == 1
        assert torch.ones(2, device="cuda").device.type == "cpu"
        assert changed(before) == set(before)
    assert changed(before) == set()


def test_exception_closes_every_scope(cpu: CpuDevice) -> None:
    with pytest.raises(KeyError, match="boom"), scope.make_scope(cpu), scope.make_scope(cpu):
        raise KeyError("boom")


def test_scope_of_another_device_is_refused(cpu: CpuDevice, accelerator: Device) -> None:
    other = scope.make_scope(accelerator)
    with scope.make_scope(CpuDevice()):
        refused = in_thread(other.__enter__)
        assert isinstance(refused, ScopeError)
        with pytest.raises(ScopeError, match="while one of 'cpu' is open"):
            other.__enter__()
        assert torch.ones(1, device="cuda").device.type == "cpu"
    with other:
        assert torch.ones(1, device="cuda").device.type == "meta"


def test_incomplete_map_is_refused(cpu: CpuDevice) -> None:
    assert cpu.scope_map is not None
    functions = dict(cpu.scope_map.functions)
    del functions["synchronize"]
    functions["memory_snapshot"] = print
    cpu.scope_map = dataclasses.replace(cpu.scope_map, functions=functions)
    with pytest.raises(ScopeError, match=r"lacks \['synchronize'\] and has \['memory_snapshot'\]"):
        scope.make_scope(cpu).__enter__()


def test_failure_half_way_through_the_entry_restores(cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import random as megatron_random

    before = state_of_process()
    with monkeypatch.context() as patch:
        patch.delattr(megatron_random, "_set_cuda_rng_state")
        with pytest.raises(AttributeError):
            scope.make_scope(cpu).__enter__()
    assert changed(before) == set()


def test_process_that_already_uses_the_vendors_device_is_refused(
    cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ScopeError, match="already uses"):
        scope.make_scope(cpu).__enter__()


# -------------------------------------------------------------------------
# Threads
# -------------------------------------------------------------------------


def literal_tensor() -> str:
    return str(torch.ones(1, device="cuda").device)


def test_thread_without_a_scope_raises(cpu: CpuDevice) -> None:
    with scope.make_scope(cpu):
        assert isinstance(in_thread(literal_tensor), MissedRedirectionError)


def test_thread_with_its_own_scope_is_redirected(cpu: CpuDevice) -> None:
    def own() -> str:
        with scope.make_scope(cpu):
            return literal_tensor()

    with scope.make_scope(cpu):
        assert in_thread(own) == "cpu"
        assert literal_tensor() == "cpu"


def test_checkpoint_thread_saves_while_another_trains(cpu: CpuDevice) -> None:
    state = {"weight": torch.arange(4.0)}

    def save() -> dict[str, torch.Tensor]:
        torch.cuda.synchronize()
        return torch.load(saved({name: tensor.cpu() for name, tensor in state.items()}))

    with scope.make_scope(cpu):
        loaded = in_thread(save)
    assert torch.equal(loaded["weight"], state["weight"])


def test_checkpoint_thread_outlives_the_scope_that_started_it(cpu: CpuDevice) -> None:
    opened, closed = threading.Event(), threading.Event()
    result: list[Any] = []

    def save() -> None:
        with scope.make_scope(cpu):
            opened.set()
            assert closed.wait(timeout=60)
            torch.cuda.synchronize()
            result.append(literal_tensor())

    thread = threading.Thread(target=save)
    before = state_of_process()
    with scope.make_scope(cpu):
        thread.start()
        assert opened.wait(timeout=60)
    assert changed(before) == set(before)
    closed.set()
    thread.join()
    assert result == ["cpu"]


def test_megatron_saves_asynchronously_while_training_goes_on(
    tmp_path: Path, start_script: Callable[..., Any]
) -> None:
    """Megatron's caller that forks a writer for each save.

    Its other one keeps a spawned process, which is in no scope and asks CUDA for its devices at once.
    """
    script, directory = Path(__file__).with_name("async_save.py"), tmp_path / "saved"
    directory.mkdir()
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process, output = start_script(script, str(directory), errors=2, env=env)
    assert process.wait(200) == 0
    trained, saved = [-2.0, -1.0, 0.0, 1.0], [0.0, 1.0, 2.0, 3.0]
    lines = [line for line in output.read_text().splitlines() if not line.startswith("[Gloo]")]  # torch 2.10
    assert lines == [f"[0] {trained} {saved}"]


def test_threads_open_and_close_at_once(cpu: CpuDevice) -> None:
    start = threading.Barrier(4)
    seen: list[str] = []

    def work() -> None:
        start.wait(timeout=60)
        for _ in range(50):
            with scope.make_scope(cpu):
                seen.append(literal_tensor())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["cpu"] * 200


# -------------------------------------------------------------------------
# Backward
# -------------------------------------------------------------------------


def scaled_sum(x: torch.Tensor) -> torch.Tensor:
    """Make a tensor on a literal device, as a recomputed layer does."""
    return (x * torch.full((3,), 2.0, device="cuda")).sum()


def run_engine(loss: torch.Tensor) -> None:
    """Call the engine as Megatron's pipeline schedule does, without ``backward()``."""
    Variable._execution_engine.run_backward(
        tensors=(loss,),
        grad_tensors=(torch.ones_like(loss),),
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


BACKWARD: dict[str, Callable[[torch.Tensor], None]] = {
    "Tensor.backward": lambda loss: loss.backward(),
    "autograd.backward": lambda loss: torch.autograd.backward(loss, grad_tensors=torch.ones_like(loss)),
    "engine": run_engine,
}


def megatron_checkpoint(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint(function, False, x)


def torch_checkpoint(use_reentrant: bool) -> Callable[..., torch.Tensor]:
    def run(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant)

    return run


CHECKPOINT: dict[str, Callable[..., torch.Tensor]] = {
    "megatron": megatron_checkpoint,
    "torch reentrant": torch_checkpoint(True),
    "torch non-reentrant": torch_checkpoint(False),
}


@pytest.mark.parametrize("recompute", CHECKPOINT.values(), ids=CHECKPOINT.keys())
@pytest.mark.parametrize("backward", BACKWARD.values(), ids=BACKWARD.keys())
def test_recompute_is_redirected(
    backward: Callable[[torch.Tensor], None], recompute: Callable[..., torch.Tensor], cpu: CpuDevice
) -> None:
    x = torch.ones(3, requires_grad=True)
    with scope.make_scope(cpu):
        backward(recompute(scaled_sum, x))
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_autograd_grad_is_redirected(cpu: CpuDevice) -> None:
    x = torch.ones(3, requires_grad=True)
    with scope.make_scope(cpu):
        (grad,) = torch.autograd.grad(torch_checkpoint(False)(scaled_sum, x), x)
    assert torch.equal(grad, torch.full((3,), 2.0))


def test_backward_fails_without_the_mode(cpu: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = torch.autograd._engine_run_backward
    x = torch.ones(3, requires_grad=True)
    with scope.make_scope(cpu), monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "_engine_run_backward", engine)
        loss = torch_checkpoint(True)(scaled_sum, x)
        with pytest.raises(MissedRedirectionError):
            loss.backward()


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recompute_with_dropout_equals_none(granularity: str, cpu: CpuDevice) -> None:
    def attention(x: torch.Tensor) -> torch.Tensor:
        mask = torch.tril(torch.ones(len(x), len(x), device="cuda"))
        return torch.nn.functional.dropout(mask @ x, 0.5, training=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (megatron_checkpoint(attention, x) if granularity == "selective" else attention(x)).sin() + x

    def gradient(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        cpu.seed(5)
        x = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
        run(x).sum().backward()
        assert x.grad is not None
        return x.grad

    def whole(x: torch.Tensor) -> torch.Tensor:
        return megatron_checkpoint(layer, x) if granularity == "full" else layer(x)

    with scope.make_scope(cpu):
        assert torch.equal(gradient(whole), gradient(lambda x: attention(x).sin() + x))


class Recompute(torch.autograd.Function):
    """A checkpoint inside a checkpoint, to a depth at which the engine changes threads."""

    threads: set[int]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        ctx.save_for_backward(x)
        return x * torch.full((3,), 2.0, device="cuda")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        Recompute.threads.add(threading.get_ident())
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            scale = torch.full((3,), 2.0, device="cuda")
            y = Recompute.apply(x, ctx.depth - 1) if ctx.depth else x * scale
        torch.autograd.backward(y, grad)
        return x.grad, None


def test_other_threads_of_the_engine_are_redirected(cpu: CpuDevice) -> None:
    Recompute.threads = set()
    x = torch.ones(3, requires_grad=True)
    with scope.make_scope(cpu):
        Recompute.apply(x, 70).sum().backward()
    assert len(Recompute.threads) > 1
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_exception_in_backward_keeps_the_scope_usable(cpu: CpuDevice) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("boom")

    x = torch.ones(3, requires_grad=True)
    with scope.make_scope(cpu):
        with pytest.raises(KeyError, match="boom"):
            Fails.apply(x).sum().backward()
        assert scope._thread.popped is None
        assert literal_tensor() == "cpu"


# -------------------------------------------------------------------------
# Before the first import
# -------------------------------------------------------------------------

CPU = anygauge_cpu.plugin.CPU


def test_megatron_uses_the_backends_fuser() -> None:
    from megatron.core import utils
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.jit import jit_fuser

    assert jit_fuser(utils.divide) is utils.divide
    assert not hasattr(fused_bias_swiglu.swiglu, "_torchdynamo_orig_callable")


def test_fuser_of_the_plugin_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    def fuser(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    class Plugin:
        @hookimpl
        def make_jit_fuser(self, backend: BackendSpec) -> Any:
            return fuser

    without_megatron(monkeypatch)
    prepare_megatron(make_plugins(Plugin()), CPU)
    assert sys.modules[JIT_MODULE].jit_fuser is fuser
    prepare_megatron(make_plugins(), CPU)
    assert sys.modules[JIT_MODULE].jit_fuser is fuser


def test_without_an_answer_functions_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    without_megatron(monkeypatch)
    prepare_megatron(make_plugins(), CPU)
    module = sys.modules[JIT_MODULE]
    module.enable_jit_fuser()
    module.disable_jit_fuser()
    assert module.jit_fuser(print) is module.noop_decorator(print) is print


def test_preparing_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, JIT_MODULE)
    with pytest.raises(ScopeError, match="imported before"):
        prepare_megatron(make_plugins(), CPU)


def test_preparing_for_two_backends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ScopeError, match="prepared for backend 'cpu'"):
        prepare_megatron(make_plugins(), dataclasses.replace(CPU, name="other"))


def without_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron.core", JIT_MODULE):
        monkeypatch.delitem(sys.modules, name)
