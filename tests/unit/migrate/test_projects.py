"""Scripts and configs in the form of slime, verl and TRL, and the keys that they become."""

from __future__ import annotations

import re
from typing import Any

import pytest

from anygauge.migrate.project import import_text

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
LORA = "GRPOTrainer(model='m', peft_config=LoraConfig(lora_alpha=32, target_modules='all-linear'))"
SPACE = "run.tracker_options.trackio.space_id"
TIS = {"level": "token", "high": 2.0}
SLIME = """
source "${DIR}/models/small.sh"
NUM=${NUM:-8}
CKPT_ARGS=(
   --hf-checkpoint /models/small
   # --load /old
   --save-interval 5
)
ROLLOUT_ARGS=( --prompt-data /data/a.jsonl --input-key q --label-key a --rm-type deepscaler
   --num-rollout 7 --rollout-batch-size 16 --n-samples-per-prompt 4 --global-batch-size 32
   --rollout-max-response-len 64 --over-sampling-batch-size 24 --partial-rollout
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std )
GRPO_ARGS=( --advantage-estimator gspo --use-kl-loss --kl-loss-coef 0.01 --eps-clip 0.1 --use-tis
   --adam-beta2 0.95 --lr-decay-style linear )
PERF_ARGS=( --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2
   --max-tokens-per-gpu 100 )
EVAL_ARGS=( --eval-prompt-data aime /data/aime.jsonl --eval-interval 3 )
SGLANG_ARGS=( --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.6 --sglang-cuda-graph-bs 1 2 4 )
ray job submit -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node ${NUM} --colocate \\
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${GRPO_ARGS[@]} ${PERF_ARGS[@]} ${EVAL_ARGS[@]} \\
   ${SGLANG_ARGS[@]} --odd 1
"""
VERL = """
adv=grpo
n=5
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \\
    algorithm.adv_estimator=${adv} data.train_files="['/d/gsm8k/train.parquet','/d/math/train.parquet']" \\
    data.val_files=/d/test.parquet data.train_batch_size=64 data.max_response_length=$((128 * 2)) \\
    actor_rollout_ref.model.path=org/model actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean +actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.n=$n \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 trainer.logger=['console','wandb'] \\
    trainer.project_name=p trainer.experiment_name=e trainer.save_freq=-1 trainer.test_freq=5 \\
    trainer.total_epochs=3 trainer.n_gpus_per_node=8 trainer.nnodes=2 $@
"""
TRL = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
NAME = "org/model"
def brief(completions, **kwargs):
    return [-len(each) for each in completions]
args = GRPOConfig(output_dir="out/brief", per_device_train_batch_size=4, gradient_accumulation_steps=2,
    steps_per_generation=4, num_generations=8, max_steps=10, beta=0.04, loss_type="dr_grpo",
    scale_rewards=False,     epsilon_high=0.28, lr_scheduler_type="cosine", learning_rate=compute(),
    report_to=["wandb"], use_vllm=True,
    vllm_importance_sampling_mode="token_truncate")
dataset = load_dataset("org/data", split="train")
trainer = GRPOTrainer(model=NAME, args=args, reward_funcs=[accuracy_reward, brief],
    train_dataset=dataset.map(f))
raise SystemExit("this was executed")
"""


ICEPOP = {"low": 0.0, "high": 2.0}


def keys_of(project: str, text: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    result = import_text(project, text, name)
    return result.keys, dict(result.missing)


def test_slime() -> None:
    keys, missing = keys_of("slime", SLIME, "run.sh")
    assert keys == {
        **{"run.task": "rl", "run.steps": 7, "run.seed": 42, "model.path": "/models/small", "save.every": 5},
        **{"data.train": ["/data/a.jsonl"], "data.input_key": "q", "data.label_key": "a"},
        **{"data.metadata_key": "metadata", "data.shuffle": False, "reward.function": "math"},
        **{"rollout.prompts_per_step": 16, "rollout.samples_per_prompt": 4, "train.global_batch_size": 32},
        **{"rollout.max_new_tokens": 64, "rollout.temperature": 1.0, "rollout.over_sampling": 8},
        **{"rollout.partial_rollout": True, "rollout.filters": ["zero_variance"], "rollout.engine": "sglang"},
        **{"rollout.sglang.mem_fraction_static": 0.6, "rollout.sglang.cuda_graph_bs": [1, 2, 4]},
        **{"rollout.sglang.tp_size": 2, "placement.rollout_workers": 4, "placement.train_workers": 8},
        **{"placement.colocated": True, "placement.launcher": "local", "train.engine": "megatron"},
        **{"algorithm.advantage": "grpo", "algorithm.policy_loss": "gspo", "algorithm.kl_coef": 0.01},
        **{"algorithm.kl_type": "k1", "algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1},
        **{"algorithm.correction": {"tis": {"low": 0.0, "high": 2.0}}, "train.lr": 1e-6},
        **{"algorithm.loss_aggregation": "sample_mean", "train.weight_decay": 0.01},
        **{"train.adam_betas": [0.9, 0.95], "train.parallel.tensor": 2, "train.parallel.sequence": True},
        **{"train.parallel.context": 2, "train.micro_batch_tokens": 200, "eval.interval": 3},
        **{"eval.data": [{"name": "aime", "path": "/data/aime.jsonl"}], "eval.temperature": 1.0},
    }
    assert set(missing) == {"odd", "lr-decay-style", "the file"}
    assert "constant, cosine" in missing["lr-decay-style"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--advantage-estimator ppo --lambd 0.95 --value-clip 0.3", {"algorithm.advantage": "gae"}),
        ("--advantage-estimator ppo --lambd 0.95", {"algorithm.advantage_options": {"lambd": 0.95}}),
        ("--advantage-estimator ppo --value-clip 0.3", {"critic.value_clip": 0.3}),
        ("--disable-grpo-std-normalization", {"algorithm.advantage_options": {"scale": False}}),
        ("--kl-loss-coef 0.1", {"algorithm.kl_coef": 0.0}),
        ("--rm-type boxed_f1", {"reward.function": "f1", "reward.extract": "boxed"}),
        ("--rm-type remote_rm --rm-url http://h:1", {"reward.options": {"url": "http://h:1"}}),
        (
            "--rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8",
            {"train.global_batch_size": None},
        ),
        ("--use-wandb --wandb-project p", {"run.trackers": ["jsonl", "wandb"]}),
        ("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 4", {"placement.rollout_workers": 2}),
        ("""--apply-chat-template-kwargs '{"a": 1}'""", {"data.chat_template_kwargs": {"a": 1}}),
        (
            "--use-tis --custom-tis-function-path a.icepop_function",
            {"algorithm.correction": {"icepop": ICEPOP}},
        ),
        ("--get-mismatch-metrics", {"algorithm.correction": {"metrics_only": {}}}),
        ("--debug-train-only", {"debug.mode": "train_only"}),
        ("--save-debug-rollout-data p", {"debug.dump_rollouts": True}),
        ("--rollout-function-path a.generate_rollout_fully_async", {"rollout.schedule": "async"}),
        ("--seed 3 --rollout-seed 4 --colocate False", {"run.seed": 4, "placement.colocated": False}),
        (
            "--rollout-stop a b --rollout-stop-token-ids 3",
            {"rollout.stop": ["a", "b"], "rollout.stop_token_ids": [3]},
        ),
        ("--rollout-external-engine-addrs h:1", {"rollout.external": ["http://h:1"]}),
        ("--use-opsm", {"algorithm.correction": {"sequence_mask": {"delta": 1e-4}}}),
    ],
)
def test_arguments_of_slime_together(arguments: str, expected: dict[str, Any]) -> None:
    keys, _ = keys_of("slime", f"python train.py {arguments}", "run.sh")
    assert {key: keys.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("project", "arguments", "key", "value"),
    [
        ("slime", '--lr 5e-6 $EXTRA "$@"', "train.lr", 5e-6),
        ("slime", '--lr 5e-6 --colocate "$@"', "placement.colocated", True),
        ("slime", "$EXTRA --colocate $EXTRA", "placement.colocated", True),
        ("slime", "--rollout-shuffle $EXTRA", "data.shuffle", True),
        ("slime", "--lr=5e-6 $EXTRA", "train.lr", 5e-6),
        ("trl", '--learning_rate 5e-6 $EXTRA "$@"', "train.lr", 5e-6),
        ("trl", '--beta 0 --trust_remote_code "$@"', "model.trust_remote_code", True),
    ],
)
def test_what_a_variable_adds_to_a_command_is_no_value(
    project: str, arguments: str, key: str, value: Any
) -> None:
    result = import_text(project, f"python train.py {arguments}", "run.sh")
    assert result.keys[key] == value
    notes = [why for name, why in result.missing if name == "the file"]
    assert any(" after --" in note for note in notes)
    assert {note.split()[0] for note in notes} == set(re.findall(r"\$\w+|\$@", arguments))
    assert not any("its value" in why for _, why in result.missing)


def test_an_unresolved_part_of_a_list_leaves_the_list_open() -> None:
    script = "python train.py --lr $LR --eval-prompt-data aime $FILE --rollout-seed 3"
    keys, missing = keys_of("slime", script, "run.sh")
    assert "its value $FILE is not known" in missing["eval-prompt-data"]
    assert "its value $LR is not known" in missing["lr"]
    assert not {"eval.data", "train.lr"} & set(keys)
    assert "run.trackers" not in keys_of("trl", "trl grpo --report_to wandb $X --beta 0", "a.sh")[0]


SIZES = "sglang-cuda-graph-bs"


@pytest.mark.parametrize(
    ("project", "name", "text", "argument", "key"),
    [
        ("slime", "a.sh", f"--{SIZES} 1 2 $(cat sizes)", SIZES, "rollout.sglang.cuda_graph_bs"),
        ("slime", "a.sh", f"--{SIZES} 1 `cat sizes`", SIZES, "rollout.sglang.cuda_graph_bs"),
        ("slime", "a.sh", f"--{SIZES} 1 2 ${{A[@]}}", SIZES, "rollout.sglang.cuda_graph_bs"),
        ("slime", "a.sh", f"--{SIZES} ${{A[@]}}", SIZES, "rollout.sglang.cuda_graph_bs"),
        ("slime", "a.sh", "--sglang-a 1 $X 3", "sglang-a", "rollout.sglang.a"),
        ("slime", "a.sh", "--sglang-a 1 2 $X", "sglang-a", "rollout.sglang.a"),
        (
            "slime",
            "a.sh",
            "--rollout-external-engine-addrs h:1 $X",
            "rollout-external-engine-addrs",
            "rollout.external",
        ),
        ("slime", "a.sh", "--multimodal-keys $X", "multimodal-keys", "data.multimodal_keys"),
        ("trl", "a.sh", "--report_to wandb trackio $X", "report_to", "run.trackers"),
        ("trl", "a.sh", "--lora_target_modules a $X --use_peft", "lora_target_modules", "train.lora.targets"),
        ("trl", "a.py", "GRPOConfig(report_to=['wandb', X])", "report_to", "run.trackers"),
        (
            "trl",
            "a.py",
            "GRPOTrainer('m', peft_config=LoraConfig(target_modules=['q', X]))",
            "lora_target_modules",
            "train.lora.targets",
        ),
        ("verl", "a.sh", "verl data.train_files=['a',$X]", "data.train_files", "data.train"),
        ("verl", "a.sh", "verl trainer.logger=['wandb',`a b`]", "trainer.logger", "run.trackers"),
    ],
)
def test_a_list_that_is_known_in_part_is_not_written(
    project: str, name: str, text: str, argument: str, key: str
) -> None:
    branch = "A=(3)\nif x; then A+=(4); fi\npython train.py --beta 0 --lr 1 "
    keys, missing = keys_of(project, text if name == "a.py" or project == "verl" else branch + text, name)
    assert key not in keys
    assert missing[argument].startswith("its value ")
    assert missing[argument].endswith(f"; set {key}")


def test_numbers_of_a_sequence_are_a_list() -> None:
    keys, _ = keys_of("slime", f"python train.py --{SIZES} 1 2 $(seq 16 8 32) --lr 1", "a.sh")
    assert keys["rollout.sglang.cuda_graph_bs"] == [1, 2, 16, 24, 32]


def test_a_variable_that_adds_overrides_is_a_note() -> None:
    script = f'python $MODULE verl {ROLLOUT}n=2 $EXTRA ${{EXTRA}} "$@"'
    result = import_text("verl", script, "a.sh")
    notes = [why.split()[0] for name, why in result.missing if name == "the file"]
    assert notes == ["$EXTRA", "${EXTRA}"]


def test_a_list_of_numbers_is_left_to_the_schema() -> None:
    keys, _ = keys_of("trl", "trl grpo --use_peft --lora_target_modules 1 2", "a.sh")
    assert keys["train.lora.targets"] == [1, 2]


def test_slime_with_sft_leaves_what_generates() -> None:
    script = "python train_async.py --loss-type sft_loss --rollout-batch-size 8 --calculate-per-token-loss"
    keys, _ = keys_of("slime", script, "run.sh")
    assert keys["run.task"] == "sft"
    assert keys["data.apply_chat_template"] is True
    assert [key for key in keys if key.startswith(("rollout.", "algorithm.", "reward.", "placement.co"))] == [
        "rollout.prompts_per_step",
        "algorithm.loss_aggregation",
    ]
    assert keys_of("slime", "python train_async.py --lr 1", "r.sh")[0]["rollout.schedule"] == "one_step_off"


def test_verl() -> None:
    keys, missing = keys_of("verl", VERL, "run.sh")
    expected = {
        "data.train": [
            {"name": "gsm8k-train", "path": "/d/gsm8k/train.parquet"},
            {"name": "math-train", "path": "/d/math/train.parquet"},
        ],
        **{"rollout.prompts_per_step": 64, "rollout.samples_per_prompt": 5, "train.global_batch_size": 80},
        **{"rollout.max_new_tokens": 256, "data.max_prompt_tokens": 512, "train.micro_batch_tokens": 1536},
        **{"algorithm.advantage": "grpo", "algorithm.kl_coef": 0.001, "algorithm.kl_type": "low_var_kl"},
        **{"algorithm.loss_aggregation": "sample_mean", "algorithm.dual_clip": 3.0},
        **{"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "rollout.sglang.tp_size": 4},
        **{
            "data.label_key": "ground_truth",
            "placement.train_workers": 16,
            "placement.rollout_workers": 4,
            "placement.launcher": "ray",
        },
        **{"placement.colocated": True, "train.engine": "fsdp", "train.recompute": "full"},
        **{"run.trackers": ["jsonl", "wandb"], "run.tracker_options.wandb.project": "p", "run.name": "e"},
        **{
            "save.every": "none",
            "eval.interval": 5,
            "eval.data": ["/d/test.parquet"],
            "eval.temperature": 0.0,
        },
    }
    assert {key: keys.get(key) for key in expected} == expected
    assert set(missing) == {
        "trainer.total_epochs",
        "reward_model.ground_truth",
        "reward_model.reward_manager",
    }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (f"{ACTOR}ulysses_sequence_parallel_size=2", {"train.parallel.context": 2}),
        (f"{ACTOR}fsdp_config.fsdp_size=4", {"train.parallel.replicate": 2}),
        ("data.image_key=images", {"data.multimodal_keys": {"image": "images"}}),
        (
            "trainer.test_freq=2 data.val_files=[a.jsonl] " + f"{ROLLOUT}val_kwargs.n=3",
            {"eval.samples_per_prompt": 3},
        ),
        ("algorithm.filter_groups.max_num_gen_batches=4", {"rollout.max_num_gen_batches": 4}),
        ("algorithm.rollout_correction.rollout_is=token", {"algorithm.correction": {"tis": TIS}}),
        (f"{ACTOR}tis_imp_ratio_cap=3", {"algorithm.correction": {"tis": {"high": 3}}}),
        ("algorithm.use_kl_in_reward=True", {"algorithm.kl_reward_coef": 0.001}),
        (f"{ROLLOUT}name=hf", {"rollout.engine": "transformers", "rollout.sglang.mem_fraction_static": None}),
        ("actor_rollout_ref.model.lora_rank=8", {"train.lora.rank": 8, "train.lora.targets": "all-linear"}),
        ("custom_reward_function.path=a/b.py custom_reward_function.name=f", {"reward.function": "b:f"}),
        ("algorithm.adv_estimator=gae algorithm.lam=0.9", {"algorithm.advantage_options": {"lambd": 0.9}}),
        ("reward_model.reward_manager=dapo", {"reward.function": "dapo", "data.apply_chat_template": True}),
        ("actor_rollout_ref.model.lora_rank=8", {"train.lora.alpha": 16}),
        (f"{ACTOR}optim.min_lr_ratio=0.1", {"train.min_lr": 1e-7}),
        (f"{ACTOR}optim.lr_warmup_steps=3", {"train.warmup_steps": 3}),
    ],
)
def test_overrides_of_verl_together(overrides: str, expected: dict[str, Any]) -> None:
    keys, _ = keys_of("verl", f"python -m verl.trainer.main_ppo {ROLLOUT}n=2 {overrides}", "run.sh")
    assert {key: keys.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "",
            {
                "run.task": "sft",
                "rollout.prompts_per_step": 256,
                "train.lr": 1e-5,
                "data.max_prompt_tokens": 1024,
            },
        ),
        ("data.train_batch_size=8 optim.lr=1e-4", {"rollout.prompts_per_step": 8, "train.lr": 1e-4}),
        (
            "data.prompt_key=extra data.prompt_dict_keys=['q']",
            {"data.input_key": "q", "data.label_key": "answer"},
        ),
        ("data.multiturn.enable=true", {"data.input_key": "messages", "data.label_key": "none"}),
        ("data.response_key=r", {"data.label_key": "r", "rollout.engine": None, "algorithm.advantage": None}),
    ],
)
def test_sft_of_verl(overrides: str, expected: dict[str, Any]) -> None:
    script = f"torchrun -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=org/model {overrides}"
    keys, _ = keys_of("verl", script, "run.sh")
    assert {key: keys.get(key) for key in expected} == expected


def test_what_has_no_counterpart_is_said() -> None:
    for project, name, text, argument in (
        (
            "slime",
            "a.sh",
            "python train.py --use-tis --custom-tis-function-path a.b",
            "custom-tis-function-path",
        ),
        ("slime", "a.sh", "python train.py --rm-type ifbench", "rm-type"),
        ("slime", "a.sh", "python train.py --multimodal-keys x", "multimodal-keys"),
        ("slime", "a.sh", "python train.py --lr 1", "rollout-num-gpus"),
        ("verl", "a.sh", f"run {ROLLOUT}n=2 trainer.val_before_train=False", "trainer.val_before_train"),
        ("verl", "a.sh", f"run {ROLLOUT}n=2 {ROLLOUT}name=vllm", f"{ROLLOUT}name"),
        ("verl", "a.sh", f"run {ROLLOUT}n=2 algorithm.adv_estimator=remax", "algorithm.adv_estimator"),
        ("trl", "a.py", "GRPOTrainer(model='m')", "lr_scheduler_type"),
        ("trl", "a.py", "GRPOConfig(loss_type='sapo')", "loss_type"),
        ("trl", "a.py", "GRPOConfig(scale_rewards='batch')", "scale_rewards"),
        ("trl", "a.py", "GRPOConfig(chat_template_kwargs={1: b'x'}, stop=2)", "chat_template_kwargs"),
        ("trl", "a.py", "GRPOConfig(top_k=[x, 1])", "top_k"),
    ):
        assert argument in keys_of(project, text, name)[1]


def test_an_argument_that_needs_no_key_is_no_loss() -> None:
    script = "python train.py --balance-data --hidden-dropout 0 --colocate --lr-decay-style constant"
    result = import_text("slime", script, "a.sh")
    assert result.converted == ["colocate", "lr-decay-style"]
    assert result.unneeded == ["balance-data", "hidden-dropout"]
    assert result.missing == []


def test_a_yaml_config_of_verl() -> None:
    text = (
        "actor_rollout_ref:\n  model: {path: org/model}\n  actor:\n    optim: {lr: 1e-5}\n"
        "    strategy: megatron\n    use_dynamic_bsz: true\n"
        "    megatron: {tensor_model_parallel_size: 2, context_parallel_size: 2}\n"
        "  rollout: {n: 4, name: '???', max_model_len: null, top_k: -1, prompt_length: '${data.x}'}\n"
    )
    keys, _ = keys_of("verl", text, "c.yaml")
    expected = {"train.lr": 1e-5, "train.engine": "megatron", "train.parallel.tensor": 2, "rollout.top_k": 0}
    assert {key: keys[key] for key in expected} == expected
    assert keys["train.micro_batch_tokens"] == 2 * 16384
    assert keys["algorithm.advantage"] == "gae"
    assert keys["critic.lr"] == 1e-5


def test_trl() -> None:
    keys, missing = keys_of("trl", TRL, "run.py")
    expected = {
        **{"model.path": "org/model", "run.name": "brief", "run.steps": 5, "train.engine": "fsdp"},
        **{"rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 8, "train.global_batch_size": 8},
        **{"algorithm.kl_coef": 0.04, "algorithm.kl_type": "k3", "algorithm.clip_high": 0.28},
        **{"algorithm.loss_aggregation": "constant_length", "algorithm.advantage_options": {"scale": False}},
        **{"algorithm.correction": {"tis": {"level": "token", "low": 0.0, "high": 3.0}}},
        **{"data.label_key": "solution", "run.trackers": ["jsonl", "wandb"]},
        **{"rollout.engine": "sglang", "placement.colocated": True, "train.lr_schedule": "cosine"},
    }
    assert {key: keys.get(key) for key in expected} == expected
    assert not {"train.lr", "reward.function"} & keys.keys()
    assert "set train.lr" in missing["learning_rate"]
    assert "brief" in missing["reward_funcs"]
    assert "hf://datasets/org/data/" in missing["train_dataset"]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.py",
            "SFTTrainer(model='m', args=SFTConfig(max_length=9))",
            {"run.task": "sft", "train.lr": 2e-5},
        ),
        ("a.py", "GRPOTrainer(model='m', peft_config=LoraConfig(r=4))", {"train.lora.rank": 4}),
        (
            "a.py",
            "trl.RLOOTrainer(model='m')",
            {"algorithm.advantage": "rloo", "rollout.samples_per_prompt": 2},
        ),
        (
            "a.sh",
            "accelerate launch --num_processes 4 grpo.py --num_generations 2",
            {"placement.train_workers": 4},
        ),
        (
            "a.sh",
            "trl grpo --num_generations 2 --beta 0.1",
            {"rollout.prompts_per_step": 4, "algorithm.kl_coef": 0.1},
        ),
        (
            "a.sh",
            "trl sft --model_name_or_path m --learning_rate 1e-4",
            {"run.task": "sft", "train.lr": 1e-4},
        ),
        ("a.py", "SFTTrainer(model='m')", {"data.input_key": "messages", "data.label_key": "none"}),
        ("a.py", "GRPOTrainer(model='m')", {"rollout.engine": "transformers", "data.label_key": "none"}),
        ("a.py", "GRPOTrainer(model='m')", {"data.apply_chat_template": True, "train.lr_schedule": "cosine"}),
        ("a.sh", "trl grpo --use_vllm --vllm_tensor_parallel_size 2", {"rollout.sglang.tp_size": 2}),
        ("a.sh", "trl grpo --use_vllm", {"rollout.sglang.mem_fraction_static": 0.3}),
        ("a.sh", "trl grpo --use_vllm --vllm_max_model_length 9", {"rollout.sglang.context_length": 9}),
        ("a.sh", "trl sft --report_to trackio --trackio_space_id s", {SPACE: "s"}),
        ("a.py", LORA, {"train.lora.rank": 8, "train.lora.alpha": 32, "train.lora.targets": "all-linear"}),
        ("a.py", "SFTTrainer('m', peft_config=LoraConfig())", {"train.lora.rank": 8, "train.lora.alpha": 8}),
        ("a.py", "RLOOTrainer('m', accuracy_reward)", {"model.path": "m", "reward.function": "math"}),
        ("a.py", "SFTTrainer('m', SFTConfig('out/x'))", {"model.path": "m", "run.name": "x"}),
        ("a.sh", "trl grpo --use_peft --lora_alpha 8", {"train.lora.rank": 16, "train.lora.alpha": 8}),
        ("a.yaml", "learning_rate: 1e-4\nmodel_name_or_path: m", {"train.lr": 1e-4, "model.path": "m"}),
    ],
)
def test_files_of_trl(name: str, text: str, expected: dict[str, Any]) -> None:
    keys, _ = keys_of("trl", text, name)
    assert {key: keys.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "argument", "why"),
    [
        ("LR = 1\nLR = 2\nGRPOConfig(learning_rate=LR)", "learning_rate", "its value LR is not known"),
        ("def f(LR): LR\nLR = 2\nGRPOConfig(learning_rate=LR)", "learning_rate", "its value LR is not known"),
        ("for LR in x: LR = 2\nGRPOConfig(learning_rate=LR)", "learning_rate", "its value LR is not known"),
        ("a = GRPOConfig(learning_rate=1)\na.learning_rate = 2", "learning_rate", "a.learning_rate = ..."),
        ("GRPOTrainer('m', f, a)\na.learning_rate = 2", "learning_rate", "a.learning_rate = ..."),
        ("GRPOConfig(learning_rate=1, **cfg)", "the file", "line 1: arguments of **cfg are not known"),
        (
            "kw = dict(beta=1)\nkw['beta'] = 2\nGRPOConfig(lr=1, **kw)",
            "the file",
            "arguments of **kw are not",
        ),
        ("kw = {'beta': 1}\nkw.update(x)\nGRPOConfig(lr=1, **kw)", "the file", "arguments of **kw are not"),
        ("GRPOConfig(learning_rate=f(1) + 2)", "learning_rate", "its value f(1) + 2 is not known"),
        ("GRPOTrainer('m', lambda x: 0.0)", "reward_funcs", "lambda x: 0.0: move the function"),
        ("GRPOTrainer('m', f, *rest)", "the file", "positional arguments are not all read"),
        ("LoraConfig('CAUSAL_LM')\nGRPOTrainer('m')", "the file", "positional arguments are not all read"),
        (
            "load_dataset('a')\nload_dataset('b')\nGRPOTrainer('m', train_dataset=d)",
            "train_dataset",
            "its value d is not",
        ),
    ],
)
def test_what_a_python_script_does_not_tell_is_said(text: str, argument: str, why: str) -> None:
    keys, missing = keys_of("trl", text, "a.py")
    assert why in missing[argument]
    assert "train.lr" not in keys or argument != "learning_rate"


@pytest.mark.parametrize(
    "given", ["dict(num_generations=N, beta=0.04)", "{'num_generations': N, 'beta': 0.04}"]
)
def test_a_dict_of_a_python_script_is_unpacked(given: str) -> None:
    keys, missing = keys_of("trl", f"N = 4\nkw = {given}\nGRPOConfig(learning_rate=1, **kw)", "a.py")
    assert (keys["rollout.samples_per_prompt"], keys["algorithm.kl_coef"]) == (4, 0.04)
    assert "the file" not in missing


def test_nothing_else_of_a_python_script_is_taken() -> None:
    call = "GRPOTrainer('m', f, args=GRPOConfig(learning_rate=1))"
    script = f"{call}\nb.seed = f().seed = 3\nLoraConfig(bias='none')"
    keys, missing = keys_of("trl", script, "a.py")
    assert (keys["train.lr"], keys["run.seed"]) == (1, 42)
    assert set(missing) == {"lr_scheduler_type", "num_processes", "num_train_epochs", "reward_funcs"}
    assert "model" not in keys_of("trl", "GRPOTrainer(*rest, 'm', seed=1)", "a.py")[1]


@pytest.mark.parametrize("other", ["SFTConfig(seed=8, learning_rate=2)", "GRPOConfig(learning_rate=2)"])
def test_the_first_run_of_a_python_script_is_read(other: str) -> None:
    script = f"def f():\n    return SFTConfig(learning_rate=1)\n{other}\nf()"
    keys, missing = keys_of("trl", script, "a.py")
    assert (keys["run.task"], keys["train.lr"], keys["run.seed"]) == ("sft", 1, 42)
    assert missing["the file"].startswith(f"{other.partition('(')[0]} in line 3 is not read")


def test_variables_of_the_environment_are_no_arguments() -> None:
    script = f"PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo {ROLLOUT}n=2 odd=1"
    assert "odd" in (missing := keys_of("verl", script, "a.sh")[1])
    assert "PYTHONUNBUFFERED" not in missing


def test_a_config_named_on_the_command_line_is_to_be_imported_too() -> None:
    assert (
        "`anygauge import trl FILE.yaml`" in keys_of("trl", "trl grpo --config c.yaml", "a.sh")[1]["config"]
    )


@pytest.mark.parametrize(
    ("project", "text", "argument", "why"),
    [
        ("trl", "trl grpo --beta 0", "num_train_epochs", "3 by default"),
        ("trl", "trl grpo --beta 0 --max_steps -1", "num_train_epochs", "3 by default"),
        ("trl", "trl grpo --beta 0 --max_steps 4", "num_train_epochs", ""),
        ("verl", f"run {ROLLOUT}n=2", "trainer.total_epochs", "30 by default"),
        ("verl", f"run {ROLLOUT}n=2 trainer.total_training_steps=4", "trainer.total_epochs", ""),
        ("slime", "python train.py --lr 1", "lr-decay-style", "linear has no counterpart"),
        ("slime", "python train.py --lr 1 --lr-decay-style constant", "lr-decay-style", ""),
    ],
)
def test_a_default_without_a_counterpart_is_said(project: str, text: str, argument: str, why: str) -> None:
    missing = keys_of(project, text, "a.sh")[1]
    assert why in missing[argument] if why else argument not in missing


@pytest.mark.parametrize(
    ("project", "name", "text", "message"),
    [
        ("slime", "a.sh", "echo hello", "neither calls train.py nor has arrays"),
        ("verl", "a.sh", "echo hello", "no overrides"),
        ("verl", "a.yaml", "a: &a [1]\nb: *a", "aliases"),
        ("verl", "a.yaml", "a: 1", "none of its arguments is in the table of verl"),
        ("verl", "a.yaml", "[1, 2]", "not a YAML mapping"),
        ("verl", "a.yaml", "a: [" * 3000, "not YAML"),
        ("verl", "a.yaml", "a: !!python/object/apply:os.system [x]", "not YAML"),
        ("trl", "a.py", "print('hello')", "calls no GRPOConfig"),
        ("trl", "a.py", "GRPOConfig(", "not Python"),
        ("trl", "a.py", "GRPOConfig(a=" + "-" * 50_000 + "1)", "not Python"),
        ("trl", "a.py", "x\0", "not Python"),
        ("trl", "a.py", "LoraConfig(r=4)", "calls no GRPOConfig"),
        ("trl", "a.sh", "echo hello", "neither trl nor a Python script"),
        ("trl", "a.sh", f"python3 prepare.py --to x\n{VERL}", "neither trl nor a Python script"),
        ("trl", "a.sh", "python3 train.py --hf-checkpoint m --lr 1 --seed 3", "`anygauge import slime FILE`"),
    ],
)
def test_other_texts_are_refused(project: str, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_text(project, text, name)
