"""LoRA in whole runs: RL and SFT from the command line, resumed, and on one and two processes.

Divided models are in ``tests/distributed/test_parallel_lora.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from anygauge.cli import main
from anygauge.config import Config
from anygauge.plugins import load_plugins
from anygauge.runtime.worker_group import WorkerGroup
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge_tests.batches import plan_samples, random_samples
from anygauge_tests.observer import Rewarding, run_with_observer
from anygauge_tests.recipe import tiny_recipe

# peft 0.21.2 asks transformers 5.23.0 by an old name
pytestmark = [
    pytest.mark.usefixtures("forked_actors"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
SHARD = "model-00001-of-00001.safetensors"
LORA = {"train__lora__rank": 4, "train__lr": 0.02, "placement__train_workers": 2}


def metrics(root: Path) -> list[dict[str, Any]]:
    lines = (root / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "train/step" in line]


def merged_by_peft(root: Path) -> dict[str, torch.Tensor]:
    base = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, root / "run" / "hf" / "adapter")
    weights: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
    return weights


def check_export(root: Path) -> None:
    """Check that the merged weights are those that peft merges, and that they are others than the base's."""
    exported, merged = load_file(root / "run" / "hf" / SHARD), merged_by_peft(root)
    before = load_file(root / "model" / "model.safetensors")
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, merged[name], rtol=0, atol=1e-6)
        assert tensor.equal(before[name]) == (not name.endswith("_proj.weight")), name


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_an_rl_run_and_its_resume(tmp_path: Path, engine: str) -> None:
    """Rollouts come from the merged weights, and the reference is the base."""
    keys: dict[str, Any] = {"train__engine": engine}
    keys |= {"reward__function": "digits", "algorithm__kl_coef": 0.01, "run__resume": True, "save__every": 2}
    for steps, export in ((3, "merged"), (4, "both")):
        observer = Rewarding()
        keys |= {"run__steps": steps, "train__optimizer_steps": 2, "train__lora__export": export}
        run_with_observer(tiny_recipe(tmp_path, **LORA, **keys), observer)
        for step in observer.metrics:
            assert step["train/train_rollout_logprob_abs_diff"] < 1e-4
    check_export(tmp_path)
    steps_of_both = metrics(tmp_path)
    assert [step["train/step"] for step in steps_of_both] == [1, 2, 3, 4]
    assert steps_of_both[2]["train/kl_loss"] > 10 * steps_of_both[0]["train/kl_loss"] > 0
    start_from_its_adapter(tmp_path, engine)


@pytest.mark.fsdp
def test_an_rl_run_on_a_4_bit_base(tmp_path: Path) -> None:
    """Both ranks have all of it, the first rollouts have it too, and the reference is the base."""
    pytest.importorskip("bitsandbytes")
    keys: dict[str, Any] = {"train__engine": "fsdp", "train__lora__base": "nf4", "run__steps": 3}
    keys |= {"reward__function": "digits", "algorithm__kl_coef": 0.01}
    observer = Rewarding()
    run_with_observer(tiny_recipe(tmp_path, **LORA, **keys), observer)
    for step in observer.metrics:
        assert step["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert observer.metrics[0]["train/kl_loss"] < 1e-6
    assert observer.metrics[2]["train/kl_loss"] > 1e-4
    exported, before = (load_file(tmp_path / path) for path in (f"run/hf/{SHARD}", "model/model.safetensors"))
    for name, tensor in exported.items():
        assert tensor.equal(before[name]) == (not name.endswith("_proj.weight")), name


def start_from_its_adapter(root: Path, engine: str) -> None:
    """Check that the first rollouts of a run from an adapter have it, and that its reference does not."""
    (root / "run" / "hf" / "adapter").rename(root / "adapter")
    keys = {"reward__function": "digits", "algorithm__kl_coef": 0.01, "train__lora__rank": None}
    keys |= {"train__engine": engine}
    observer = Rewarding()
    run_with_observer(
        tiny_recipe(root, **{**LORA, **keys, "train__lora__path": root / "adapter"}, run__name="next"),
        observer,
    )
    assert observer.metrics[0]["train/train_rollout_logprob_abs_diff"] < 1e-4
    assert observer.metrics[0]["train/kl_loss"] > 1e-3


@pytest.mark.parametrize("engine", ["megatron", pytest.param("fsdp", marks=pytest.mark.fsdp)])
def test_an_sft_run_and_its_evaluation(tmp_path: Path, engine: str) -> None:
    texts = ["What is 1+2? It is 3."]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n}+2?"},
                {"role": "assistant", "content": f"It is {n + 2}."},
            ]
        }
        for n in range(8)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = tiny_recipe(
        tmp_path,
        model={"tokenizer": tiny_tokenizer(tmp_path / "model", texts=texts)},
        **LORA,
        train__engine=engine,
        run__task="sft",
        run__steps=3,
        data__train=[tmp_path / "chats.jsonl"],
        data__input_key="messages",
        data__label_key="none",
        data__apply_chat_template=True,
        reward__function=None,
        rollout__prompts_per_step=8,
        rollout__samples_per_prompt=None,
        rollout__max_new_tokens=None,
        train__dtype="float32",
        eval__data=[tmp_path / "chats.jsonl"],
        eval__interval=None,
    )
    assert main(["train", str(path), "--backend", "cpu"]) == 0
    losses = [step["train/loss"] for step in metrics(tmp_path)]
    assert losses[2] < 0.9 * losses[0]
    check_export(tmp_path)
    run = tmp_path / "run"
    adapter = ["--train.lora.path", str(run / "hf" / "adapter"), "--train.lora.rank", "none"]
    # What a directory has is merged, so that the adapter of the config is not added to it again.
    sources = (["--checkpoint", str(run)], ["--checkpoint", str(run / "hf"), *adapter], adapter)
    evaluated = []
    for number, source in enumerate(sources):
        out = tmp_path / f"evaluation-{number}.json"
        assert main(["eval", str(path), "--backend", "cpu", "--out", str(out), *source]) == 0
        evaluated.append(json.loads(out.read_text())["eval/chats-loss"])
    assert evaluated == pytest.approx([evaluated[0]] * 3, rel=1e-5)
    assert evaluated[0] < losses[2]


# -------------------------------------------------------------------------
# Two processes
# -------------------------------------------------------------------------


def config_of(model: Path, num_workers: int, dtype: str) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "ranks", "steps": 4, "task": "sft"},
            "model": {"path": model},
            "data": {"train": []},
            "train": {
                **{
                    "engine": "fsdp",
                    "dtype": dtype,
                    "lr": 0.02,
                    "micro_batch_tokens": 24,
                    "optimizer_steps": 2,
                },
                "lora": {"rank": 3, "modules_to_save": ["norm"], "targets": ["q_proj", "down_proj"]},
            },
            "placement": {"launcher": "local", "train_workers": num_workers, "threads_per_worker": 1},
        }
    )


def shares(num_workers: int) -> list[Any]:
    lengths = [(length, length - 2) for length in (9, 30, 5, 17, 12, 8)]
    samples = random_samples(lengths, 0, 18, seed=0)
    return [((share,), {}) for share in plan_samples(samples, 2, num_workers, "token_mean")]


def save(group: WorkerGroup, path: Path) -> None:
    path.mkdir()
    group.call("save_checkpoint", path=str(path))
    while not all(written is True for written in group.call("checkpoint_written")):
        pass


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-5), pytest.param("bfloat16", 3e-2, marks=pytest.mark.fsdp)],
)
def test_two_processes_train_as_one_and_read_its_checkpoints(
    launch_actors: Callable[..., WorkerGroup], tmp_path: Path, dtype: str, tolerance: float
) -> None:
    model, plugins = tiny_qwen3(tmp_path / "model", init_std=0.2), load_plugins()
    backend = plugins.get("register_backends", "cpu")
    trained = {}
    for count, other in ((1, 2), (2, 1)):
        with launch_actors(config_of(model, count, dtype), backend, plugins) as group:
            first = group.call("train", per_rank=shares(count))[0]
            save(group, tmp_path / f"of-{count}")
            group.call("save_hf", path=str(tmp_path / f"hf-{count}"))
            second = group.call("train", per_rank=shares(count))[0]
        with launch_actors(config_of(model, other, dtype), backend, plugins) as group:
            group.call("load_checkpoint", path=str(tmp_path / f"of-{count}"))
            group.call("save_hf", path=str(tmp_path / f"hf-read-{count}"))
            again = group.call("train", per_rank=shares(other))[0]
        for one, two in zip(second, again, strict=True):
            assert two == pytest.approx(one, rel=tolerance, abs=tolerance)
        trained[count] = [*first, *second]
    for one, two in zip(trained[1], trained[2], strict=True):
        assert two == pytest.approx(one, rel=tolerance, abs=tolerance)
    assert trained[1][-1]["loss"] < trained[1][0]["loss"]
    for file in (SHARD, "adapter/adapter_model.safetensors"):
        one, *others = (
            load_file(tmp_path / name / file) for name in ("hf-1", "hf-2", "hf-read-1", "hf-read-2")
        )
        for other in others:
            for name, tensor in one.items():
                torch.testing.assert_close(other[name], tensor, rtol=0, atol=tolerance, msg=name)
