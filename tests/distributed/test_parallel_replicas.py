"""Faults of devices and of collectives, put into running engines: an error that names rank and tensor."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.timeout(300)]

CASES = Path(__file__).with_name("replica_cases.py")
VOCAB = 63
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 10_000}
REPLICATED = {"megatron": {"use_distributed_optimizer": False}}


@pytest.fixture
def run(crew: Any, make_model: Any) -> Any:
    """Return a function that runs a case and returns the texts of its errors, or its results."""
    model = str(make_model("qwen3", vocab_size=VOCAB, num_hidden_layers=4, tie_word_embeddings=True))

    def run(action: str, *, world: int = 2, every: int = 2, **case: Any) -> list[Any]:
        train = {"optimizer_steps": 6, "replica_check_every": every, **case.pop("train", {})}
        given = {"model": model, "vocab": VOCAB, "train": train, "since": 0, "ranks": (), **case}
        results = crew.run(world=world, action=f"{CASES}:{action}", **given)
        return [getattr(result, "text", result) for result in results]

    return run


@pytest.mark.parametrize(
    ("fault", "parallel", "train", "step", "tensor"),
    [
        ("flipped", {}, {}, 3, "decoder.layers.1.mlp.linear_fc1.weight (rank 1)"),
        ("flipped", {}, REPLICATED, 3, "decoder.layers.1.mlp.linear_fc1.weight (rank 1)"),
        ("gradients", {}, REPLICATED, 3, "the gradient of embedding.word_embeddings.weight (rank 1)"),
        ("gathered", {}, {}, 5, ".mlp.linear_fc2.weight (rank 1)"),
        ("norms", {"tensor": 2}, {}, 3, "the gradient of decoder.layers.0."),
        ("all_reduce", {"pipeline": 2}, {}, 3, "the gradient norm (rank 0: "),
    ],
    ids=["bit", "bit-replicated", "gradients", "own-part", "norms", "norm"],
)
def test_a_fault_during_training_is_found_at_the_next_check(
    run: Any, fault: str, parallel: dict[str, int], train: dict[str, Any], step: int, tensor: str
) -> None:
    """Step 1 is checked before the fault is there, and step 3 next."""
    errors = run("train", fault=fault, since=2, ranks=(1,), parallel=parallel, train=train)
    assert errors[0] == errors[1]
    assert "AG610" in errors[0]
    assert f"Replicas differ in optimizer step {step}: " in errors[0]
    assert tensor in errors[0]
    assert f"They were equal in optimizer step {step - 2}." in errors[0]


@pytest.mark.parametrize("fault", ["gradients", "halved", "misplaced"])
@pytest.mark.parametrize(
    "train",
    [{}, REPLICATED, {"megatron": OVERLAP}],
    ids=["sharded", "replicated", "overlapped"],
)
def test_a_reduction_that_goes_wrong_later_is_found(run: Any, fault: str, train: dict[str, Any]) -> None:
    """No copy of a weight or a gradient differs then, and the saved model is wrong."""
    errors = run("train", fault=fault, since=2, ranks=(0, 1), train=train)
    assert errors[0] == errors[1]
    differ = fault == "gradients" and train is REPLICATED  # copies on several ranks
    assert ("AG610" if differ else "AG611") in errors[0]
    assert " in optimizer step 3: " in errors[0]


@pytest.mark.parametrize(
    ("parallel", "megatron"),
    [({}, {}), ({}, OVERLAP), ({"tensor": 2}, {}), ({"pipeline": 2}, {}), ({"context": 2}, {})],
    ids=["dp", "overlap", "tp", "pp", "cp"],
)
def test_a_healthy_run_has_the_same_bits_with_and_without(
    run: Any, parallel: dict[str, int], megatron: dict[str, Any]
) -> None:
    case = {"fault": "flipped", "parallel": parallel, "train": {"megatron": megatron}}
    with_check, without = (run("train", every=n, **case) for n in (1, 0))
    assert with_check == without
    assert not any(isinstance(result, str) for result in with_check), "an error equals itself"


def test_the_weights_of_a_role_are_compared_where_they_are_used(run: Any) -> None:
    errors = run("ask_reference")
    assert errors[0] == errors[1]
    assert "Replicas differ in pass 3 of the reference: " in errors[0]
    assert "(rank 1). They were equal in pass 1 of the reference." in errors[0]


@pytest.mark.parametrize("world", [2, 3])
def test_known_results_find_each_wrong_collective(run: Any, world: int) -> None:
    results = run("known_results", world=world)
    for name in results[0]:
        wrong = [result[name] for result in results if result[name] is not None]
        assert bool(wrong) == (name != "none"), name
        called = {"stale": "all_reduce (SUM, float32)"}.get(name, name)
        assert all(called in text and "over the default group of ranks [0, 1" in text for text in wrong)


@pytest.mark.parametrize(
    ("fault", "train", "text"),
    [
        ("all_reduce", {}, "rank 0 expected [1, 8, 2, 9, 3, 10] and got [1, 0, 2, 0, 3, 0]"),
        (
            "gradients",
            REPLICATED,
            " gradients (torch.float32) over ranks [0, 1]: rank 0 expected 3 and got",
        ),
        (
            "gradients",
            {},
            " gradients (torch.float32) over ranks [0, 1]: rank 0 expected 3 and got 1",
        ),
        ("gradients", {"megatron": {"overlap_grad_reduce": True}}, "rank 0 expected 3 and got 1"),
        ("misplaced", {}, " gradients (torch.float32) over ranks [0, 1]: rank 0 expected"),
        ("reduce_scatter", {"engine": "fsdp"}, "reduce_scatter (SUM, float32) over the default group"),
    ],
    ids=["small", "gradients", "shards", "overlapped", "misplaced", "fsdp"],
)
def test_no_engine_is_built_on_wrong_collectives(
    run: Any, fault: str, train: dict[str, Any], text: str
) -> None:
    errors = run("build", fault=fault, train=train)
    assert errors[0] == errors[1]
    assert "AG611" in errors[0]
    assert text in errors[0]


def test_ranks_that_resume_from_other_files_are_named(run: Any, tmp_path: Path) -> None:
    """Gathering the weights after a load makes them equal, whoever has read something else."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    run("save", target=str(ours))
    copytree(ours, theirs)
    path = theirs / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    name = max(name for name in header if name.startswith("weight/"))
    data[start + header[name]["data_offsets"][0]] ^= 1
    path.write_bytes(data)
    errors = run("resume", sources=[str(ours), str(theirs)])
    assert errors[0] == errors[1]
    assert "Ranks start with different weights: " in errors[0]
    assert "(rank 1).\n" in errors[0]
    assert "is the checkpoint the same directory on each node?" in errors[0]
