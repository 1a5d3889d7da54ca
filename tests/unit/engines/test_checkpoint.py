"""A checkpoint of the Megatron engine: the steps after loading are those that would have come, to the bit."""

from __future__ import annotations

import json
import os
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import anygauge_cpu.plugin
from anygauge.engines import checkpoint_files
from anygauge.engines.checkpoint_files import (
    FORMAT,
    Piece,
    PieceReader,
    RankFile,
    Region,
    open_pieces,
    write_rank,
)
from anygauge.engines.megatron.conversion.convert import hf_to_megatron, megatron_to_hf
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks.engines import LossInputs, WorkerContext
from anygauge_hooks.errors import CheckpointError, WeightMappingError
from anygauge_tests import batches
from anygauge_tests.batches import weights
from anygauge_tests.engine_config import engine_config
from anygauge_tests.optimizers import Joining, Rounding, Taking, taking

MakeEngine = Callable[..., Any]
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=64, init_std=0.2, tied=request.param)


ONE_MODEL = pytest.mark.parametrize("model", [False], ids=["untied"], indirect=True)
"""For schedules, generators and failing writes: whether two parameters are one changes nothing there."""


@pytest.fixture
def make_engine(context: WorkerContext, model: Path) -> MakeEngine:
    def make(path: Path = model, steps: int = 10, save: Any = None, **train: Any) -> Any:
        config = engine_config(
            path,
            run={"name": "test", "steps": steps},
            save=save or {},
            train={
                "lr": 1e-2,
                "weight_decay": 0.1,
                "lr_schedule": "cosine",
                "warmup_steps": 3,
                **train,
            },
        )
        return context.plugins.get("register_train_engines", "megatron").make(config, context)

    return make


def loss(inputs: LossInputs) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
    value = -(inputs.log_probs * inputs.advantages * inputs.loss_weights).sum()
    return value, {"loss": value.detach()}


def train(engine: Any, steps: range) -> list[Mapping[str, float]]:
    """Take steps, each on samples of its own, and return their metrics."""
    return [train_step(engine, step) for step in steps]


def train_step(engine: Any, step: int) -> Mapping[str, float]:
    generator = torch.Generator().manual_seed(step)
    samples = [
        batches.sample_of(
            torch.randint(0, 64, (length,), generator=generator).tolist(),
            length - 2,
            log_prob=-2.0,
            advantage=index % 2 - 0.3,
        )
        for index, length in enumerate((9, 17, 5))
    ]
    return batches.train_step(engine, samples, loss)


def save(engine: Any, directory: Path) -> Path:
    directory.mkdir()
    engine.save_checkpoint(str(directory))
    wait(engine)
    return directory


def wait(engine: Any) -> None:
    engine._checkpoint._write.exception()
    assert engine.checkpoint_written()


def same_bits(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return [each.hex() for step in one for each in step.values()] == [
        each.hex() for step in other for each in step.values()
    ]


def assert_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("overlap", [{}, OVERLAP], ids=["plain", "overlap"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_steps_after_loading_are_those_that_would_have_come(
    make_engine: MakeEngine, tmp_path: Path, dtype: str, overlap: dict[str, Any]
) -> None:
    engine = make_engine(dtype=dtype, megatron=overlap)
    train(engine, range(3))
    path = save(engine, tmp_path / "saved")
    expected = train(engine, range(3, 6))
    other = make_engine(dtype=dtype, megatron=overlap)
    other.load_checkpoint(str(path))
    assert same_bits(train(other, range(3, 6)), expected)
    assert_equal(weights(other), weights(engine))


@pytest.mark.parametrize(
    ("kinds", "overlap"),
    [((Rounding, Joining), OVERLAP), ((Joining, Rounding), {}), ((Joining, Joining), OVERLAP)],
    ids=["split", "joined", "both"],
)
def test_remainders_are_saved_as_float32_weights(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kinds: Sequence[type[Taking]],
    overlap: dict[str, Any],
) -> None:
    engines = []
    for kind in kinds:
        monkeypatch.setattr(anygauge_cpu.plugin, "fused_adamw", partial(taking, kind=kind))
        engines.append(make_engine(dtype="bfloat16", megatron=overlap))
    engine, other = engines
    train(engine, range(3))
    path = save(engine, tmp_path / "saved")
    other.load_checkpoint(str(path))
    again = save(other, tmp_path / "again")
    stored, copied = (load_file(each / "rank-00000.safetensors") for each in (path, again))
    assert {tensor.dtype for name, tensor in stored.items() if name.startswith("main/")} == {torch.float32}
    assert_equal(copied, stored)
    assert same_bits(train(other, range(3, 6)), train(engine, range(3, 6)))
    assert_equal(weights(other), weights(engine))


@pytest.mark.parametrize(
    "options",
    [{"decoupled_weight_decay": False}, {"use_distributed_optimizer": False}],
    ids=["torch-adam", "replicated"],
)
def test_other_optimizers_go_on_alike(
    make_engine: MakeEngine, tmp_path: Path, options: dict[str, Any]
) -> None:
    for dtype in ("float32", "bfloat16"):
        engine = make_engine(dtype=dtype, megatron=options)
        train(engine, range(2))
        path = save(engine, tmp_path / dtype)
        expected = train(engine, range(2, 4))
        other = make_engine(dtype=dtype, megatron=options)
        other.load_checkpoint(str(path))
        assert same_bits(train(other, range(2, 4)), expected)


def test_torch_adamw_goes_on_alike(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anygauge.engines.megatron.optimizer._replace_inner", lambda *arguments: None)
    engine = make_engine()
    train(engine, range(2))
    path = save(engine, tmp_path / "saved")
    expected = train(engine, range(2, 4))
    other = make_engine()
    other.load_checkpoint(str(path))
    assert same_bits(train(other, range(2, 4)), expected)


def test_every_parameter_has_a_step_of_its_own_after_loading(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    train(engine, range(2))
    path = save(engine, tmp_path / "saved")
    engine.load_checkpoint(str(path))
    states = engine.optimizer.optimizer.state.values()
    assert {state["step"].item() for state in states} == {2.0}
    assert len({state["step"].data_ptr() for state in states}) == len(states) > 5


def test_a_checkpoint_before_the_first_step(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(dtype="bfloat16")
    path = save(engine, tmp_path / "saved")
    expected = train(engine, range(3))
    engine.load_checkpoint(str(path))  # back in the same engine, whose optimizer has a state by now
    assert same_bits(train(engine, range(3)), expected)


@ONE_MODEL
def test_what_is_saved_is_what_was_there_when_save_returned(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = threading.Event()

    def slow(*arguments: Any) -> None:
        assert trained.wait(30)
        write_rank(*arguments)

    monkeypatch.setattr("anygauge.engines.background_save.write_rank", slow)
    engine = make_engine()
    train(engine, range(1))
    before = weights(engine)
    (tmp_path / "saved").mkdir()
    engine.save_checkpoint(str(tmp_path / "saved"))
    assert not engine.checkpoint_written()
    expected = train(engine, range(1, 3))
    trained.set()
    wait(engine)
    engine.load_checkpoint(str(tmp_path / "saved"))
    assert_equal(weights(engine), before)
    assert same_bits(train(engine, range(1, 3)), expected)


def test_weights_are_kept_once(make_engine: MakeEngine, tmp_path: Path) -> None:
    for dtype, kinds in (("float32", {"weight"}), ("bfloat16", {"weight", "main"})):
        engine = make_engine(dtype=dtype)
        train(engine, range(1))
        path = save(engine, tmp_path / dtype)
        kept = load_file(path / "rank-00000.safetensors")
        names = [name for name, _ in engine.policy.chunks[0].named_parameters()]
        assert {name.partition("/")[0] for name in kept} == kinds | {"exp_avg", "exp_avg_sq"}
        assert len(kept) == len(names) * (len(kinds) + 2)
        elements = sum(parameter.numel() for parameter in engine.policy.chunks[0].parameters())
        for kind in (*kinds, "exp_avg", "exp_avg_sq"):
            assert sum(t.numel() for name, t in kept.items() if name.startswith(f"{kind}/")) == elements


@ONE_MODEL
def test_random_generators_go_on(make_engine: MakeEngine, tmp_path: Path) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    def draw() -> list[Any]:
        name, state = sorted(get_cuda_rng_tracker().get_states().items())[0]
        tracked = torch.Generator()
        tracked.set_state(state)
        numbers = [random.gauss(0, 1), np.random.normal(), torch.rand(()).item()]
        return [*numbers, name, torch.rand((), generator=tracked).item()]

    engine = make_engine()
    draw()
    path = save(engine, tmp_path / "saved")
    expected = draw()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    get_cuda_rng_tracker().reset()
    engine.load_checkpoint(str(path))
    assert draw() == expected


@ONE_MODEL
def test_the_schedule_goes_on_with_more_steps(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(steps=4)
    train(engine, range(3))
    path = save(engine, tmp_path / "saved")
    longer, fresh = make_engine(steps=20), make_engine(steps=20)
    longer.load_checkpoint(str(path))
    rates = [each["lr"] for each in train(fresh, range(4))]
    assert train(longer, range(3, 4))[0]["lr"] == rates[3] > train(engine, range(3, 4))[0]["lr"]


@ONE_MODEL
@pytest.mark.parametrize(
    ("before", "optimizer", "same_layout"),
    [(0, "adam", True), (0, "stateless", False), (2, "adam", False), (4, "stateless", True)],
    ids=["untrained", "untrained-other-layout", "warm-up-other-layout", "decay"],
)
def test_no_load_moves_the_schedule_twice(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    optimizer: str,
    same_layout: bool,
) -> None:
    """Also where a checkpoint has no state of the optimizer: before its first step, and of an SGD without
    momentum, which never has any.
    """
    stateless = {"optimizer": "sgd", "sgd_momentum": 0.0, "use_distributed_optimizer": False}
    megatron = stateless if optimizer == "stateless" else {}
    engine = make_engine(megatron=megatron)
    train(engine, range(before))
    path = save(engine, tmp_path / "saved")
    undisturbed = [step["lr"] for step in train(engine, range(before, 7))]
    assert len(set(undisturbed)) == len(undisturbed)
    if not same_layout:
        checkpointer = "anygauge.engines.megatron.checkpoints.checkpoint.Checkpointer"
        monkeypatch.setattr(f"{checkpointer}._is_same_layout", lambda *_: False)
    fresh = make_engine(megatron=megatron)
    for resumed in (fresh, engine, engine):  # the last two have taken steps that the checkpoint has not
        resumed.load_checkpoint(str(path))
        assert [step["lr"] for step in train(resumed, range(before, 7))] == undisturbed


@ONE_MODEL
def test_a_failed_write_is_an_error_and_the_next_one_is_not(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.save_checkpoint(str(tmp_path / "absent"))
    engine._checkpoint._write.exception()
    with pytest.raises(CheckpointError, match=r"cannot be written: .*No such file"):
        engine.checkpoint_written()
    path = save(engine, tmp_path / "saved")
    engine.load_checkpoint(str(path))


def divide(path: Path, target: Path) -> Path:
    """Write a checkpoint of one rank again as three would have, each with a part of most parameters."""
    target.mkdir()
    tensors = load_file(path / "rank-00000.safetensors")
    whole = json.loads((path / "rank-00000.json").read_text())
    whole.pop("tensors")
    for rank in range(3):
        pieces, parts = [], {}
        for piece in whole["pieces"]:
            cuts = [0, piece["end"] // 3 + 1, piece["end"] - 1, piece["end"]]
            start, end = cuts[rank : rank + 2]
            pieces.append(Piece(**{**piece, "start": start, "end": end}))
            parts |= {
                f"{k}/{piece['name']}": tensors[f"{k}/{piece['name']}"][start:end] for k in piece["kinds"]
            }
        write_rank(target, RankFile(**{**whole, "rank": rank, "world_size": 3, "pieces": pieces}), parts)
    return target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_other_ranks_are_put_together(make_engine: MakeEngine, tmp_path: Path, dtype: str) -> None:
    engine = make_engine(dtype=dtype)
    train(engine, range(2))
    path = divide(save(engine, tmp_path / "saved"), tmp_path / "divided")
    expected = train(engine, range(2, 4))
    other = make_engine(dtype=dtype)
    other.load_checkpoint(str(path))
    assert same_bits(train(other, range(2, 4)), expected)


@ONE_MODEL
def test_parts_that_are_not_of_one_step_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    train(engine, range(1))
    path = divide(save(engine, tmp_path / "saved"), tmp_path / "divided")
    description = json.loads((path / "rank-00001.json").read_text())
    description["pieces"][0]["scalars"]["step"] += 1
    (path / "rank-00001.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="different steps"):
        engine.load_checkpoint(str(path))


def truncated(path: Path) -> None:
    data = path / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-5])


def torn_header(path: Path) -> None:
    data = path / "rank-00000.safetensors"
    data.write_bytes(b"\xff" * 16 + data.read_bytes()[16:])


def lost_data(path: Path) -> None:
    (path / "rank-00000.safetensors").unlink()


def lost_description(path: Path) -> None:
    (path / "rank-00000.json").unlink()


def half_a_description(path: Path) -> None:
    text = (path / "rank-00000.json").read_text()
    (path / "rank-00000.json").write_text(text[: len(text) // 2])


def changed(path: Path, **entries: Any) -> None:
    found = json.loads((path / "rank-00000.json").read_text())
    (path / "rank-00000.json").write_text(json.dumps({**found, **entries}))


def one_rank_less(path: Path) -> None:
    changed(path, world_size=2)


def a_hole(path: Path) -> None:
    pieces = json.loads((path / "rank-00000.json").read_text())["pieces"]
    pieces[3]["start"] += 1
    changed(path, pieces=pieces)


def later_format(path: Path) -> None:
    changed(path, format=99)


def other_groups(path: Path) -> None:
    changed(path, groups=[])


def without_a_tensor(path: Path) -> None:
    pieces = json.loads((path / "rank-00000.json").read_text())["pieces"]
    pieces[-1]["kinds"].append("momentum")
    changed(path, pieces=pieces)


def a_longer_piece(path: Path) -> None:
    pieces = json.loads((path / "rank-00000.json").read_text())["pieces"]
    last = pieces[-1]
    last["start"], last["end"] = 0, last["end"] + 1
    changed(path, pieces=pieces)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "bytes instead of"),
        (torn_header, "cannot be read"),
        (lost_data, "No such file"),
        (lost_description, "No such file"),
        (half_a_description, "cannot be read"),
        (one_rank_less, "rank-00001.json"),
        (a_hole, "lacks elements 0 to"),
        (later_format, "format 99"),
        (other_groups, "has 0 groups of parameters"),
        (without_a_tensor, "no momentum/"),
        (a_longer_piece, "is stored as F32 of shape"),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(
    make_engine: MakeEngine, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    engine = make_engine()
    train(engine, range(1))
    path = save(engine, tmp_path / "saved")
    train(engine, range(1, 2))
    before = weights(engine)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        engine.load_checkpoint(str(path))
    assert_equal(weights(engine), before)
    assert engine.schedule.num_steps == 2


def test_a_checkpoint_of_another_device_is_loaded_but_for_the_generators(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    train(engine, range(1))
    path = save(engine, tmp_path / "saved")
    changed(path, device="abacus")
    expected, other = train(engine, range(1, 3)), make_engine()
    torch.rand(3)
    state = torch.get_rng_state()
    other.load_checkpoint(str(path))
    assert torch.equal(torch.get_rng_state(), state)
    assert same_bits(train(other, range(1, 3)), expected)
    assert "the checkpoint was made on abacus, this is cpu" in caplog.text


def test_loading_holds_one_parameter_at_a_time(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = PieceReader.read

    def counted(reader: PieceReader, *arguments: Any) -> torch.Tensor | None:
        nonlocal most
        found = read(reader, *arguments)
        if found is not None:
            alive.append(weakref.ref(found))
        most = max(most, sum(each() is not None for each in alive))
        return found

    engine = make_engine()
    train(engine, range(1))
    path = save(engine, tmp_path / "saved")
    monkeypatch.setattr(PieceReader, "read", counted)
    engine.load_checkpoint(str(path))
    assert len(alive) > 20
    assert most <= 3  # the two moments of a parameter, and the tensor before


def test_buffers_of_every_type_are_kept_or_refused_at_once(make_engine: MakeEngine, tmp_path: Path) -> None:
    dtypes = (torch.bool, torch.int32, torch.int16, torch.int8, torch.float64)
    names = {str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in dtypes}
    region = Region.whole((3,))
    pieces = [Piece(name=name, region=region, start=0, end=3, kinds=["weight"], scalars={}) for name in names]
    whole = RankFile(
        format=FORMAT,
        rank=0,
        world_size=1,
        layout={},
        device="cpu",
        pieces=pieces,
        schedule={},
        groups=[],
        rng={},
    )
    write_rank(tmp_path, whole, {f"weight/{name}": tensor for name, tensor in names.items()})
    with open_pieces(tmp_path) as reader:
        for name, tensor in names.items():
            assert reader.dtype("weight", name, region, 0, 3) == tensor.dtype
            found = reader.read("weight", name, region, 0, 3)
            assert found is not None
            assert torch.equal(found, tensor)
    engine = make_engine()
    engine.policy.chunks[0].register_buffer("odd", torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match=r"odd is torch\.complex64"):
        engine._checkpoint.check()


@ONE_MODEL
@pytest.mark.parametrize("error", [KeyError("dtype"), MemoryError("16 GB")])
def test_any_failure_of_a_write_is_a_checkpoint_error(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def failing(*arguments: Any) -> None:
        raise error

    engine = make_engine()
    monkeypatch.setattr("anygauge.engines.background_save.write_rank", failing)
    engine.save_checkpoint(str(tmp_path))
    engine._checkpoint._write.exception()
    with pytest.raises(CheckpointError, match=type(error).__name__):
        engine.checkpoint_written()


@ONE_MODEL
def test_a_save_without_room_or_while_the_last_is_stuck_is_said_and_not_raised(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def slow(*arguments: Any) -> None:
        assert go_on.wait(30)

    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine._checkpoint, "_copy", lambda to_host: torch.empty(2**60))
        engine.save_checkpoint(str(tmp_path))
        with pytest.raises(CheckpointError, match="no room on the host"):
            engine.checkpoint_written()
    monkeypatch.setattr("anygauge.engines.background_save.write_rank", slow)
    monkeypatch.setattr("anygauge.engines.background_save.STUCK_S", 0.01)
    engine.save_checkpoint(str(tmp_path))
    engine.save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match="the write before has not ended"):
        engine.checkpoint_written()
    go_on.set()
    engine._checkpoint._write.exception()
    engine.save_checkpoint(str(tmp_path))
    wait(engine)


@ONE_MODEL
@pytest.mark.parametrize(
    ("error", "texts"),
    [
        (MemoryError(), ("there is no room on the host", "more host memory")),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ("no room on the host", "host memory")),
        (RuntimeError("CUDA error: an illegal access"), ("RuntimeError.*illegal access", "log of the rank")),
    ],
)
def test_a_copy_that_fails_says_why(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    texts: tuple[str, str],
) -> None:
    def failing(*arguments: Any) -> None:
        raise error

    engine = make_engine()
    monkeypatch.setattr(engine._checkpoint, "_to_host", failing)
    engine.save_checkpoint(str(tmp_path))
    with pytest.raises(CheckpointError, match=rf"cannot be written: .*{texts[0]}.*\n.*{texts[1]}") as caught:
        engine.checkpoint_written()
    assert ("no room" in str(caught.value)) == ("no room" in texts[0])


@ONE_MODEL
@pytest.mark.parametrize("every", [20, None])
def test_what_no_file_can_hold_is_said_at_the_start(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, every: int | None
) -> None:
    monkeypatch.delitem(checkpoint_files._DTYPES, torch.float32)
    if every is None:
        assert make_engine(save={"every": every})
        return
    with pytest.raises(CheckpointError, match=r"weight/.* is torch\.float32, which a checkpoint cannot hold"):
        make_engine(save={"every": every})


@ONE_MODEL
def test_a_state_that_no_file_can_hold_is_said_after_the_first_step(make_engine: MakeEngine) -> None:
    for state in (torch.zeros(7, 3), "text"):
        engine = make_engine()
        inner = engine.optimizer.optimizer
        take = inner.step

        def step(*arguments: Any, take: Any = take, inner: Any = inner, state: Any = state) -> Any:
            taken = take(*arguments)
            for each in inner.state.values():
                each["odd"] = state
            return taken

        inner.step = step
        with pytest.raises(CheckpointError, match=r"keeps odd of .* in an unknown form"):
            train(engine, range(1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_of_a_checkpoint_are_converted(
    make_engine: MakeEngine, model: Path, context: WorkerContext, tmp_path: Path, dtype: str
) -> None:
    engine = make_engine(dtype=dtype)
    train(engine, range(2))
    (tmp_path / "checkpoints").mkdir()
    step = save(engine, tmp_path / "checkpoints" / "step-00000002")
    with pytest.raises(CheckpointError, match=r"config.toml does not name its model.*\n.*--model"):
        megatron_to_hf(step, tmp_path / "hf", context.plugins)
    (tmp_path / "config.toml").write_text(f'model.path = "{model}"')
    assert megatron_to_hf(step, tmp_path / "hf", context.plugins, check=True) == {}
    assert_equal(load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors"), weights(engine))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == dtype
    hf_to_megatron(step, tmp_path / "megatron", context.plugins, check=True, model=model)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "again", context.plugins)
    assert_equal(load_file(tmp_path / "again" / "model-00001-of-00001.safetensors"), weights(engine))


def test_a_checkpoint_of_another_model_is_not_converted(
    make_engine: MakeEngine, context: WorkerContext, tmp_path: Path
) -> None:
    step = save(make_engine(), tmp_path / "step-00000002")
    deeper = tiny_qwen3(tmp_path / "deeper", vocab_size=64, layers=3)
    for convert in (megatron_to_hf, hf_to_megatron):
        with pytest.raises(WeightMappingError, match=r"decoder\.layers\.2\..*: missing in the checkpoint"):
            convert(step, tmp_path / "out", context.plugins, model=deeper)
    (step / "rank-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        megatron_to_hf(step, tmp_path / "out", context.plugins, model=deeper)
    assert not (tmp_path / "out").exists()


def test_an_export_is_on_the_disk_before_it_has_its_name(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bool]] = []
    fsync, target = os.fsync, tmp_path / "hf"

    def record(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").resolve().name, target.exists()))
        fsync(descriptor)

    engine = make_engine()
    monkeypatch.setattr(os, "fsync", record)
    engine.save_hf(str(target))
    before = {name for name, named in synced if not named}
    assert before >= {path.name for path in target.iterdir()}
    assert any(name.startswith(".hf.partial-") for name in before)
    assert synced[-1] == (tmp_path.name, True)


def test_a_checkpoint_of_another_model_or_precision(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = save(make_engine(), tmp_path / "saved")
    smaller = tiny_qwen3(tmp_path / "smaller", vocab_size=64, hidden=32)
    with pytest.raises(CheckpointError, match=r"of another model: .* parameters differ"):
        make_engine(smaller).load_checkpoint(str(path))
    with pytest.raises(CheckpointError, match="float32 for the weight"):
        make_engine(dtype="bfloat16").load_checkpoint(str(path))
