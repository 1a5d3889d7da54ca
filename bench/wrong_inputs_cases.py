"""Wrong inputs, with what must be said of each; ``wrong_inputs.py`` runs them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["CASES", "Case"]


@dataclass(frozen=True, slots=True)
class Case:
    """One wrong input."""

    kind: str
    command: str
    """Arguments of ``anygauge``; a Python script of the kind ``api``. ``{port}`` is one that is taken."""
    says: tuple[str, ...]
    """Words that the message must have, with single spaces."""
    code: str = "AG201"
    """Code of the error; empty for a wrong use of the command line, and where the command goes on."""
    status: int = 1
    has_traceback: bool = False
    """Whether the message has the traceback of the user's own function."""
    never: tuple[str, ...] = ()
    """Words that it must not have, beside those that no message may have."""
    before: str = "true"
    """Shell commands that put the mistake in place; what they leave running ends with the case."""
    after: str = "true"
    """Shell commands that take it away."""
    strike: tuple[str, signal.Signals] | None = None
    """A signal for the command, once it has printed a text."""
    then: str = ""
    """Second command, whose message is judged instead."""
    then_status: int = 1
    limit_s: float = 60.0


DRY, TRAIN = "train run.toml --dry-run", "train run.toml"


def config_cases() -> Iterator[Case]:
    """Yield wrong values of keys, and keys that do not go together."""
    wrong: dict[str, tuple[str, ...]] = {
        "--run.steps ten": ("run.steps", "'ten' on the command line", "integer"),
        "--run.steps 2.5": ("run.steps", "2.5", "integer"),
        "--run.steps -1": ("run.steps", "-1", "greater than 0"),
        "--train.lr '\"high\"'": ("train.lr", "'high'", "number"),
        "--train.lr nan": ("train.lr", "nan", "finite number"),
        "--train.lr 1,5e-6": ("train.lr", "'1,5e-6'", "number"),
        "--train.lr": ("train.lr", "needs a value"),
        "--train.lr=": ("train.lr", "''", "number"),
        "--train.lr.max 1e-5": ("train.lr", "number"),
        "--train.dtype fp16": ("'fp16'", "'float32' or 'bfloat16'", "float16 is not supported"),
        "--train.dtype fp8": ("'fp8'", "'float32' or 'bfloat16'", "anygauge convert --to-bfloat16"),
        "--train.dtype int8": ("'int8'", "'float32' or 'bfloat16'"),
        "--rollout.temperature 0": ("rollout.temperature", "greater than 0"),
        "--rollout.samples_per_prompt 1": ("'grpo' compares", "2 or more"),
        "--algorithm.name grop": ("algorithm.name", "algorithm.advantage"),
        "--algorithm.advantage grop": ("'grop'", "did you mean grpo?", "rloo"),
        "--algorithm.kl_type k4": ("'k4'", "'k3'"),
        "--algorithm.policy_loss gspo2": ("'gspo2'", "did you mean gspo?"),
        "--rollout.engine vllm": ("'vllm'", "available: sglang, transformers"),
        "--rollout.max_new_tokens 4096": ("4097 tokens", "the model takes 4096"),
        "--train.adam_betas 0.9,0.99": ("'0.9,0.99'", "[0.9, 0.99]"),
        "--data.train rows.jsonl": ("data.train", '["rows.jsonl"]'),
        "--run.trackers wandb": ("run.trackers", '["wandb"]'),
        "--run.trackers '[\"mlflow\"]'": ("'mlflow'", "tensorboard", "package.module:function"),
        "--rollout.stop '</s>'": ("rollout.stop", '["</s>"]'),
        "--rollout.stop_token_ids '[999999]'": ("rollout.stop_token_ids[0]", "999999", "vocab_size is 18"),
        "--rollout.top_p 0.9": ("rollout.top_p", "write 1", "eval.top_p"),
        "--train.optimizer_steps 3": ("16 samples a step", "one of 1, 2, 4, 8, 16"),
        "--train.global_batch_size 7": ("train.global_batch_size", "must divide the 16 samples"),
        "--train.recompute everything": ("'everything'", "'selective'"),
        "--train.clip_grad -1": ("train.clip_grad", "greater than or equal to 0"),
        "--train.min_lr 1": ("train.min_lr", "at most train.lr"),
        "--train.engine deepspeed": ("'deepspeed'", "available: fsdp, megatron"),
        "--train.engine fsdp2": ("'fsdp2'", "did you mean fsdp?"),
        "--data.apply_chat_template yes": ("data.apply_chat_template", "'yes'", "true or false"),
        "--data.apply_chat_template True": ("'True'", "true or false"),
        "--data.apply_chat_template true": ("no chat template", "chat_template.jinja"),
        "--data.system_prompt 'be kind'": ("data.system_prompt", "data.apply_chat_template = true"),
        "--data.multimodal_keys '{image = \"images\"}'": ("image", "takes only text"),
        "--run.name a/b": ("run.name", "'a/b'", "letters, digits"),
        "--run.name ''": ("run.name", "letter or a digit"),
        "--run.seed 99999999999999999999": ("run.seed", "less than 9223372036854775808"),
        "--save.every 0": ("save.every", "greater than 0"),
        "--save.best eval/math": ("'eval/math'", "no evaluation has it", "eval/eval"),
        "--eval.temperature 0 --eval.samples_per_prompt 4": ("greedy decoding", "temperature above 0"),
        "--hub.source s3": ("'s3'", "'huggingface' or 'modelscope'"),
        "--placement.launcher slurm": ("'slurm'", "'ray' or 'local'"),
        "--placement.num_workers 1 --placement.train_workers 1": ("the old name of placement.train_workers",),
        "--reference.path chat --algorithm.kl_coef 0.1": ("reference.path", "'chat'", "policy's tokenizer"),
        "--run.task sft": ("rollout.samples_per_prompt", 'run.task = "sft"', "leave it out"),
        "--reward.function none": ("reward.function", "exact_match"),
        "--reward.parts '{a={function=\"math\"}}'": ("one function or parts",),
        "--reward.options '{loud=true}'": ("reward.options.loud", "known: strip"),
        '--reward.function none --reward.parts \'{a={function="math", weight="x"}}\'': (
            "reward.parts.a.weight",
            "number",
        ),
        # layouts
        "--placement.train_workers 0": ("placement.train_workers", "greater than 0"),
        "--train.parallel.tensor 2": ("train.parallel.tensor", "multiple of tensor * pipeline * context = 2"),
        "--placement.train_workers 3 --train.parallel.tensor 3": ("4 attention heads", "2 query groups"),
        "--placement.train_workers 4 --train.parallel.pipeline 4": ("divide the model's 2 layers",),
        "--placement.train_workers 2 --train.parallel.expert 2": ("no experts to divide",),
        "--placement.train_workers 2 --train.parallel.virtual_pipeline 2": (
            "train.parallel.pipeline above 1",
        ),
        "--placement.train_workers 2 --train.engine fsdp --train.parallel.tensor 2": (
            "only shards",
            "Megatron",
        ),
        "--placement.train_workers 2 --train.parallel.replicate 2": (
            "train.parallel.replicate",
            "leave it out",
        ),
        "--train.parallel.reshard_after_forward false": ("reshard_after_forward", "leave it out"),
        "--train.engine fsdp --train.megatron.overlap_grad_reduce true": ("no effect", "'fsdp'"),
        "--train.megatron '{overlap_grad_reduc = true}'": ("close names: overlap_grad_reduce",),
        "--train.megatron '{num_layers = 4}'": ("config.json of model.path", "leave it out"),
        "--train.megatron.moe_token_dispatcher_type allgather": (
            "the model of model.path has no experts",
            "leave it out",
        ),
        # served engines
        "--rollout.engine sglang --placement.rollout_workers 1": ("SGLang is not installed", "pip install"),
        "--rollout.sglang.mem_fraction_static 0.7": ("no effect", 'rollout.engine = "transformers"'),
        "--rollout.external '[\"http://127.0.0.1:9\"]'": (
            "rollout.external",
            "'transformers'",
            "leave it out",
        ),
        "--rollout.schedule async": ("rollout.schedule", "set placement.rollout_workers", "servers: sglang"),
        "--rollout.max_staleness 4": ('only with rollout.schedule = "async"',),
        "--placement.colocated true": ("needs engines that are servers", "choose from: sglang"),
        "--weight_sync.transport rdma": ("'rdma'", "available: adapter, delta, disk, distributed, tensor"),
        "--weight_sync.transport disk": ("weight_sync.transport", "no effect", "'transformers'"),
        "--rollout.filters '[\"nofilter\"]'": ("'nofilter'", "zero_variance"),
        "--rollout.function my_rollouts": ("'my_rollouts'", "multi_turn"),
        "--rollout.function multi_turn": ("rollout.function_options.tool", "'multi_turn' needs it"),
        "--rollout.function multi_turn --rollout.function_options.tool no_tools:calc": (
            "no module 'no_tools'",
        ),
        "--rollout.function agent": ("needs one of agent and command", "chat template"),
        # health and adapters
        "--run.stop_on '[\"entropy\"]'": ("'entropy'", "'entropy_collapse'"),
        "--health.limits '{no_rule = 1}'": ("'no_rule'", "'no_signal'"),
        "--health.limits.truncation high": ("health.limits.truncation", "number"),
        "--health.logprob_abs_diff_error -1": ("greater than 0 or 'auto'",),
        "--train.lora.rank 0": ("train.lora.rank", "greater than 0"),
        "--train.lora.r 8": ("train.lora.r", "known here: rank"),
        "--train.lora.alpha 16": ("no effect without train.lora.rank",),
        "--train.lora.rank 8 --train.lora.dropout 0.1": ("must be 0",),
        "--train.lora.path no/adapter": ("'no/adapter'", "no such directory"),
        # keys of other projects, and of nobody
        "--trian.lr 1e-4": ("did you mean train?",),
        "--train.lrr 1e-4": ("did you mean train.lr?",),
        "--Train.LR 1e-5": ("did you mean train?",),
        "--run.epochs 4": ("run.epochs", "known here", "steps"),
        "--actor_rollout_ref.rollout.n 8": ("write rollout.samples_per_prompt",),
        "--actor_rollout_ref.rollout.zzz 8": ("a table of verl", "anygauge import verl"),
        "--train.lerning_rate 1e-6": ("did you mean train.lr?",),
        "--data.train_batch_size 8": ("write rollout.prompts_per_step",),
        "--rollout.n 8": ("write rollout.samples_per_prompt",),
        "--algorithm.adv_estimator grpo": ("write algorithm.advantage",),
        "--train.per_device_train_batch_size 2": ("train.global_batch_size", "docs/migrate/trl.md"),
        "--train.learning_rate 1e-6": ("write train.lr",),
        "--train.beta 0.1": ("write algorithm.kl_coef",),
    }
    yield from (Case("config", f"{DRY} {options}", says) for options, says in wrong.items())
    usage: dict[str, tuple[str, ...]] = {
        "--num-rollout 100": ("--num-rollout", "run.steps", "docs/migrate/slime.md"),
        "--lr 1e-5": ("--lr", "train.lr"),
        "--learning-rate 1e-5": ("train.lr", "docs/migrate/trl.md"),
        "train.lr=1e-5": ("write --train.lr 1e-5",),
        "actor_rollout_ref.actor.optim.lr=1e-6": ("write --train.lr (",),
        "--learning_rate 1e-6": ("write --train.lr (",),
        "--device cuda": ("--backend",),
        "-train.lr 3": ("begins with two dashes: --train.lr",),
        "--dryrun": ("did you mean --dry-run?",),
        "--train 5": ("--train", "--section.key value"),
    }
    yield from (Case("config", f"{DRY} {options}", says, "", 2) for options, says in usage.items())
    yield Case("config", f"{DRY} --train.warmup_steps 50", ("train.warmup_steps", "2 optimizer steps"), "", 0)
    yield Case(
        "config", f"{TRAIN} --save.best raw_reward", ("save.best", "did you mean rollout/raw_reward"), "", 0
    )
    yield Case(
        "config", f"{TRAIN} --save.best eval/evaluation", ("save.best", "did you mean eval/eval"), "", 0
    )
    yield Case("config", f"{DRY} --backend gpus", ("'gpus'", "cpu, cuda, npu", "Did you mean gpu?"), "AG101")
    yield Case("config", f"{TRAIN} --backend cuda", ("built without CUDA", "in a clone"), "AG102")
    yield Case("config", f"{TRAIN} --run.trackers '[\"wandb\"]'", ("wandb login", 'mode = "offline"'))
    targets = ("'q_porj' matches no linear layer", "q_proj")
    yield Case("config", f"{TRAIN} --train.lora.rank 8 --train.lora.targets '[\"q_porj\"]'", targets)
    yield Case(
        "config", f"{TRAIN} --cluster.interface eth9", ("'eth9'", "eth0", "Set cluster.interface"), "AG704"
    )
    yield from file_cases()


def file_cases() -> Iterator[Case]:
    """Yield config files that are none, or hold something else."""
    files: dict[str, tuple[str, ...]] = {
        "printf '[run\\nname = \"x\"' > bad.toml": ("not valid TOML", "line 1", "brackets"),
        "printf '[run]\\nname = x' > bad.toml": ("line 2, column 8", "A string needs quotes"),
        "printf '[run]\\nsteps = 1\\n[run]\\nsteps = 1' > bad.toml": ("twice", "line 3"),
        "printf 'run: {name: x}' > bad.toml": ("not valid TOML", "line 1"),
        'printf \'{"run": {"name": "x"}}\' > bad.toml': ("not valid TOML", "line 1"),
        "printf 'steps = 3\\nlr = 1e-5\\n' > bad.toml": ("did you mean run.steps", "train.lr or critic.lr"),
        ": > bad.toml": ("model: not set", "data: not set", "reward.function: not set"),
        "printf '\\377\\376[run]' > bad.toml": ("not UTF-8",),
        "cp run.toml bad.toml; printf '[on.cdua.train]\\nlr = 1.0\\n' >> bad.toml": (
            "did you mean [on.cuda]?",
        ),
        "cp run.toml bad.toml; printf '[on.gpu.train]\\nlr = 1.0\\n' >> bad.toml": (
            "did you mean [on.cuda]?",
        ),
        "cp run.toml bad.toml; printf '[on.cpu.train]\\nlrr = 1.0\\n' >> bad.toml": ("lrr", "did you mean"),
    }
    for before, says in files.items():
        yield Case("config", "train bad.toml --dry-run", says, before=before)
    yield Case("config", "train nope.toml", ("nope.toml", "No such file", "run.toml"))
    yield Case("config", "train .", ("Is a directory", "run.toml"))


def data_cases() -> Iterator[Case]:
    """Yield rows and files that cannot be used."""
    row = '{"prompt": "1+2=", "label": "3"}'
    rows: dict[str, tuple[str, ...]] = {
        f'printf \'{row}\\n{{"prompt": "1+2=" "label"}}\\n\' > rows.jsonl': ("rows.jsonl:2", "',' delimiter"),
        'printf \'{"prompt": null, "label": "3"}\' > rows.jsonl': ("rows.jsonl:1", "'prompt' is null"),
        'printf \'{"prompt": "", "label": "3"}\' > rows.jsonl': ("field 'prompt' is empty",),
        'printf \'{"prompt": "1+2=", "label": NaN}\' > rows.jsonl': ("rows.jsonl:1", "NaN"),
        'printf \'{"prompt": "What?", "label": "3"}\' > rows.jsonl': ("tokenizer refuses 'What?'",),
        'printf \'{"prompt": "%04200d", "label": "3"}\' 1 > rows.jsonl': ("4200 tokens", "max_prompt_tokens"),
        'printf \'{"question": "1+2=", "answer": "3"}\' > rows.jsonl': (
            "'question', 'answer'",
            "data.input_key",
        ),
        'printf \'{"prompt": [{"role": "user", "content": "1"}], "label": "3"}\' > rows.jsonl': (
            "list of messages",
            "data.apply_chat_template = true",
        ),
        ": > rows.jsonl": ("rows.jsonl has no rows", "one JSON object per line"),
        f"printf '[{row},\\n{row}]' > rows.jsonl": ("one JSON array", "jq -c"),
        'printf \'[\\n  {\\n  "prompt": "1+2="}]\' > rows.jsonl': ("one JSON array", "jq -c"),
        "printf '\\377\\376{}' > rows.jsonl": ("not UTF-8", "iconv"),
        "gzip -c eval.jsonl > rows.jsonl": ("compressed with gzip", "gunzip"),
        "printf 'PK\\003\\004zip' > rows.jsonl": ("ZIP archive",),
        "printf 'version https://git-lfs.github.com/spec/v1\\noid sha256:0\\n' > rows.jsonl": (
            "Git LFS",
            "git lfs pull",
        ),
        "printf '<html>404</html>' > rows.jsonl": ("rows.jsonl:1", "is not JSON"),
        'printf \'{"\\\\u001b[31mprompt": 1, "label": "3"}\' > rows.jsonl': ("\\x1b[31mprompt",),
    }
    for before, says in rows.items():
        yield Case("data", TRAIN, says, "AG301", before=before)
    files: dict[str, tuple[str, tuple[str, ...]]] = {
        "printf 'question,answer\\n1+2=,3\\n' > rows.csv": ("rows.csv", ("'question', 'answer'",)),
        "printf 'prompt,label\\n1+2=,3,4\\n' > rows.csv": ("rows.csv", ("line 2", "3 cells")),
        "printf 'PAR1' > rows.parquet": ("rows.parquet", ("rows.parquet", "complete Parquet file")),
        "printf 'hello' > rows.txt": ("rows.txt", ("rows.txt:1", "is not JSON")),
        "true": ("rows.jsonl@[100:]", ("no rows in @[100:]", "it has 12")),
    }
    for before, (name, says) in files.items():
        yield Case("data", f"{TRAIN} --data.train '[\"{name}\"]'", says, "AG301", before=before)
    yield Case(
        "data", f"{TRAIN} --data.label_key answer", ("field 'answer' is missing", "11 more rows"), "AG301"
    )
    yield Case(
        "data", f"{TRAIN} --data.max_prompt_tokens 2", ("All 12 prompts", "max_prompt_tokens = 2"), "AG301"
    )
    names: dict[str, tuple[str, ...]] = {
        "row.jsonl": ("'row.jsonl'", "no such file in"),
        "*.jsonl": ("patterns are not expanded", "name each file"),
        "~/rows.jsonl": ("~ is not expanded",),
        "https://example.com/rows.jsonl": ("addresses are not read", "hf://datasets/"),
        "openai/gsm8k": ("hf://datasets/openai/gsm8k/FILE",),
        "hf://datasets/openai/gsm8k": ("hf://datasets/OWNER/NAME/FILE",),
        "runs": ("is a directory",),
        "rows.jsonl@[a:b]": ("not a slice", "whole numbers"),
        "rows.jsonl[0:4]": ("did you mean rows.jsonl@[0:4]?",),
    }
    for name, says in names.items():
        yield Case("data", f"{DRY} --data.train '[\"{name}\"]'", says)
    yield Case("data", f"{DRY} --data.train '[\"pipe\"]'", ("is a pipe",), before="mkfifo pipe")
    yield Case("data", f'{DRY} --data.train \'["rows.jsonl", "rows.jsonl"]\'', ("give it a name",))
    weights = '\'[{path="rows.jsonl",weight=2.0},"eval.jsonl"]\''
    yield Case("data", f"{DRY} --data.train {weights}", ("Give every file a weight, or none",))
    hub = "'[\"hf://datasets/openai/gsm8k/train.parquet\"]'"
    yield Case(
        "data", f"{TRAIN} --data.train {hub}", ("cannot be reached", "hub.endpoint", "hf download"), "AG503"
    )


def reward_cases() -> Iterator[Case]:
    """Yield functions of the user that cannot be called, fail, or return something else."""
    named: dict[str, tuple[str, ...]] = {
        "nothere:score": ("no module 'nothere'", "run from the directory that holds it"),
        "mine:raise": ("has no 'raise'", "mine.py", "Did you mean raises"),
        "mine.raises": ("is mine:raises",),
        "mine.py:raises": ("write mine:raises",),
        "./mine.py": ("is mine:FUNCTION",),
        "exactmatch": ("did you mean exact_match?",),
        "mine:NUMBER": ("it is not a function",),
        "broken:score": ("importing 'broken' raised SyntaxError", "broken.py", "Correct the module"),
    }
    yield from (Case("reward", f"{DRY} --reward.function {name}", says) for name, says in named.items())
    calls: dict[str, tuple[str, ...]] = {
        "mine:verl": ("needs 'data_source', 'solution_str', 'ground_truth'", "def reward(response, label"),
        "mine:trl": ("has no column answer", "label", "Rename"),
        "mine:raises": ("RuntimeError('judge is down') at mine.py:6", "were not tried", "max_failed_ratio"),
        "mine:nan": ("returned nan, which is not a finite number",),
        "mine:infinite": ("returned inf, which is not a finite number",),
        "mine:nothing": ("returned None, which is not a number",),
        "mine:text": ("returned '0.5', which is not a number",),
        "mine:pair": ("returned [0.5, 0.5], which is not a number",),
        "mine:parts": ("'score'", "set reward.key"),
        "mine:exits": ("its process exited with code 3",),
        "mine:leaves": ("raised SystemExit('bye')",),
        "mine:large": ("MemoryError", "reward.memory_gib"),
        "mine:colored": ("\\x1b[2J",),
        "mine:waits": ("the judge did not answer", "mine.py"),
        "mine:hangs --reward.timeout_s 0.5": ("did not return in 0.5 s", "scorer-0.log"),
        "mine:short --reward.scope group": ("returned 1 values for 4 samples",),
    }
    for name, says in calls.items():
        data = "--eval.data '[]'" if "group" in name else ""
        yield Case("reward", f"{TRAIN} --reward.function {name} {data}", says, "AG302")
    remote = f"{TRAIN} --eval.data '[]' --reward.function remote"
    yield Case("reward", f"{DRY} --reward.function remote", ("reward.options.url", "'remote' needs it"))
    answers: dict[str, tuple[str, ...]] = {
        "http://127.0.0.1:9/score": ("127.0.0.1:9", "Is the server up?"),
        "localhost:9": ("not a valid address", "http://HOST:PORT/PATH"),
        "http://127.0.0.1:{port}/garbage": ("garbage", "502 Bad Gateway"),
        "http://127.0.0.1:{port}/text": ("very good", "neither a number"),
        "http://127.0.0.1:{port}/nan": ("NaN",),
        "http://127.0.0.1:{port}/nested": ("nested",),
        "http://127.0.0.1:{port}/slow --reward.timeout_s 2": ("remote did not return in 2 s",),
        "http://127.0.0.1:{port}/500": ("500",),
    }
    for url, says in answers.items():
        yield Case("reward", f"{remote} --reward.options.url {url}", says, "AG302")
    yield Case(
        "reward",
        f"{TRAIN} --algorithm.policy_loss mine:loss_raises",
        ("mine.py", "ZeroDivisionError"),
        "AG702",
        has_traceback=True,
    )
    yield Case("reward", f"{TRAIN} --algorithm.policy_loss mine:loss_exits", ("exited with code 9",), "AG701")
    yield Case(
        "reward",
        f"{TRAIN} --rollout.filters '[\"mine:filter_raises\"]'",
        ("mine:filter_raises", "KeyError"),
        "",
    )
    yield Case("reward", f"{TRAIN} --rollout.function mine:rollout_raises", ("mine", "no tool"), "")
    yield from plugin_cases()


def plugin_cases() -> Iterator[Case]:
    """Yield plugins that do not load."""
    metadata = "Metadata-Version: 2.1\\nName: p\\nVersion: 1\\n"
    folder = f"mkdir p-1.dist-info; printf '{metadata}' > p-1.dist-info/METADATA"
    entry = "printf '[anygauge.plugins]\\nmy_plugin = {}\\n' > p-1.dist-info/entry_points.txt"
    plugins: dict[str, tuple[str, ...]] = {
        "mine:UnknownHook": ("my_plugin", "register_rewards", "register_reward_functions"),
        "mine:WrongArgument": ("my_plugin", "after_train_step", "metric"),
        "broken": ("my_plugin", "broken.py"),
    }
    for target, says in plugins.items():
        yield Case("reward", DRY, says, "", 0, before=f"{folder}; {entry.format(target)}")


def model_cases() -> Iterator[Case]:
    """Yield models that are not there, damaged, or something else."""
    config = "sed -i 's/{}/{}/' model/config.json"
    damaged: dict[str, tuple[str, ...]] = {
        "rm model/config.json": ("'model'", "has no config.json"),
        "printf '{' > model/config.json": ("readable config.json",),
        config.format("Qwen3ForCausalLM", "NoSuchForCausalLM"): (
            "NoSuchForCausalLM",
            "known: DeepseekV3ForCausalLM",
        ),
        config.format('"hidden_act": "silu"', '"hidden_act": "relu"'): ("hidden_act = 'relu'", "needs silu"),
        config.format('"vocab_size": [0-9]*', '"vocab_size": 9'): ("token ids up to 17", "only 9"),
        config.format('"architectures"', '"quantization_config": {"quant_method": "awq"}, "architectures"'): (
            "awq",
        ),
        "truncate -s 20000 model/model.safetensors": ("20000 bytes", "copy or download it again"),
        "printf 'version https://git-lfs.github.com/spec/v1' > model/model.safetensors": (
            "Git LFS",
            "git lfs pull",
        ),
        "rm model/model.safetensors; touch model/pytorch_model.bin": (
            "pytorch_model.bin is not read",
            "save_pretrained",
        ),
        "rm model/model.safetensors": ("no safetensors weights",),
        "rm model/tokenizer*.json": ("has no tokenizer", "tokenizer.json"),
        "rm model/*; printf '{}' > model/adapter_config.json": ("adapter of peft", "train.lora.path"),
    }
    for before, says in damaged.items():
        yield Case("model", DRY, says, before=before)
    late: dict[str, tuple[str, tuple[str, ...]]] = {
        "printf '{}' > model/tokenizer.json": (
            "AG501",
            ("cannot load a tokenizer from model", "tokenizer.json"),
        ),
        config.format('"num_hidden_layers": 2', '"num_hidden_layers": 3'): (
            "AG501",
            ("num_hidden_layers", "config.json"),
        ),
        config.format('"hidden_size": [0-9]*', '"hidden_size": 96'): (
            "AG502",
            ("do not fit", "config.json belongs"),
        ),
        "python not_a_number.py": (
            "",
            ("not finite",),
        ),
    }
    for before, (code, says) in late.items():
        yield Case("model", TRAIN, says, code, before=before)
    named: dict[str, tuple[str, ...]] = {
        "modle": ("'modle'", "no such directory", "OWNER/NAME"),
        "model/model.safetensors": ("is a file", "Hugging Face directory"),
        "runs/first": ("is a run", "runs/first/hf"),
        "runs/first/checkpoints/step-00000002": ("checkpoint of a run", "anygauge convert --to-hf"),
    }
    yield from (Case("model", f"{DRY} --model.path {path}", says) for path, says in named.items())
    yield Case("model", f"{DRY} --model.path models/chat", ("not checked", "did you mean chat?"), "", 0)
    yield Case(
        "model", f"{TRAIN} --model.path models/chat", ("not a directory in", "did you mean chat?"), "AG503"
    )
    chat = f"{TRAIN} --model.path chat --data.apply_chat_template true"
    templates: dict[str, tuple[str, ...]] = {
        "{% for m in messages %}{{ m.content }": ("chat template refuses it", "chat_template.jinja"),
        '{{ raise_exception("only tools") }}': ("only tools", "11 more rows"),
        "{% for i in range(100000000) %}x{% endfor %}": ("Range too big",),
        '{{ cycler.__init__.__globals__.os.system("touch owned") }}': ("unsafe",),
    }
    for text, says in templates.items():
        yield Case("model", chat, says, "AG301", before=f"printf '%s' '{text}' > chat/chat_template.jinja")


def command_cases() -> Iterator[Case]:
    """Yield wrong uses of each command."""
    usage: dict[str, tuple[str, ...]] = {
        "trian run.toml": ("did you mean train?",),
        "--resume": ("COMMAND",),
        "train": ("CONFIG.toml",),
        "train run.toml other.toml": ("other.toml",),
        "train run.toml --resume --overwrite": ("give one of them",),
        "train run.toml --no-file-check": ("needs --dry-run",),
        "eval run.toml --resume": ("--resume",),
        "convert": ("--to-megatron",),
        "convert --to-megatron model": ("expected 2 arguments",),
        "convert --to-megatron model out --workers 0": ("whole number of at least 1",),
        "init": ("--model",),
        "init --model model --devices 0": ("--devices", "above 0"),
        "init --model model --device-memory 0": ("--device-memory", "above 0"),
        "init --model model --task dpo": ("'dpo'", "'rl', 'sft'"),
        "plan": ("CONFIG.toml",),
        "plan run.toml --device-memory lots": ("'lots'", "GiB"),
        "doctor --timeout 0": ("--timeout", "above 0"),
        "keys --json --schema": ("leave out",),
        "check-model model --layers 0": ("--layers", "at least 1"),
        "parity cpu": ("required: B",),
        "launch --nodes 0": ("--nodes", "at least 1"),
        "launch --run worker": ("--head HOST:PORT",),
        "launch --head host:99999": ("'host:99999'", "1 to 65535"),
        "launch --head host:port": ("'host:port'", "1 to 65535"),
        "launch --train.lr 3": ("--train.lr changes a config; name one",),
        "demo --seed abc": ("--seed", "'abc'"),
        "demo run.toml": ("run.toml",),
        "import openrlhf run.sh": ("'openrlhf'", "'slime', 'verl', 'trl'"),
    }
    yield from (Case("command", text, says, "", 2) for text, says in usage.items())
    errors: dict[str, tuple[str, tuple[str, ...]]] = {
        "eval run.toml --checkpoint nowhere": ("AG501", ("nowhere is not a", "runs/NAME")),
        "eval run.toml --eval.data '[]'": ("AG201", ("no evaluation data", "eval.data")),
        "eval run.toml --checkpoint runs/first --out no/dir/x.json": (
            "AG201",
            ("no directory no/dir", "--out"),
        ),
        "eval runs/first": ("AG201", ("Is a directory", "runs/first/config.toml")),
        "convert --to-hf model out": ("AG501", ("did you mean --to-megatron?",)),
        "convert --to-megatron nowhere out": ("AG501", ("nowhere", "no such directory")),
        "convert --to-megatron model chat": ("AG501", ("chat", "not empty")),
        "convert --to-bfloat16 model out": ("AG501", ("no FP8 weights", "as it is")),
        "init --model nowhere": ("AG201", ("nowhere", "OWNER/NAME")),
        "init --model model --gpu RTX9": ("AG105", ("RTX9", "H200", "--device-memory")),
        "init --model model --out run.toml": ("AG201", ("run.toml exists", "--force")),
        "init --model model --engine deepspeed --out new.toml": ("AG105", ("'deepspeed'", "fsdp, megatron")),
        "init --model model --backend tpu --out new.toml": ("AG101", ("'tpu'", "cpu, cuda, npu")),
        "plan nope.toml": ("AG201", ("nope.toml", "run.toml")),
        "plan run.toml --gpu RTX9": ("AG105", ("RTX9", "--device-memory")),
        "plan run.toml --model.path nowhere": ("AG201", ("nowhere", "no such directory")),
        "plan run.toml --device-memory 0.00001": ("AG203", ("train.parallel.tensor", "train.lora.rank")),
        "doctor --backend tpu": ("AG101", ("'tpu'", "cpu, cuda, npu")),
        "hooks --backend tpu": ("AG101", ("'tpu'", "cpu, cuda, npu")),
        "check-model model --layers 9": ("AG201", ("9 layers", "num_hidden_layers = 2")),
        "check-model model --against vllm": ("AG105", ("'vllm'", "sglang, transformers")),
        "check-model model --backend cuda": ("AG102", ("built without CUDA",)),
        "parity cpu cpu": ("AG201", ("both are cpu", "cpu:kernels=reference")),
        "parity cpu tpu": ("AG101", ("'tpu'",)),
        "parity cpu cpu:dtype=fp16": ("AG201", ("train.dtype", "'fp16'", "'float32' or 'bfloat16'")),
        "parity cpu cpu:engin=fsdp": ("AG201", ("'engin'", "engine, dtype")),
        "parity cpu cpu:engine=fsdp --model nofamily": ("AG201", ("nofamily", "anygauge hooks")),
        "report nowhere": ("AG501", ("does not exist", "runs/NAME")),
        "report runs": ("AG501", ("not a run directory", "runs/first")),
        "report model": ("AG501", ("not a run directory",)),
        "report runs/first --out no/dir/x.html": ("AG501", ("no/dir/x.html", "No such file", "--out")),
        "launch nope.toml": ("AG201", ("nope.toml", "run.toml")),
        "launch --head no-such-host": ("AG704", ("no-such-host", "--head HOST:PORT")),
        "demo --seed -1": ("AG201", ("run.seed", "-1")),
        "demo --run.steps 0": ("AG201", ("run.steps", "greater than 0")),
        "import slime nope.sh": ("AG201", ("nope.sh", "No such file")),
        "import slime run.toml": ("AG201", ("no script or config of slime", "docs/migrate/slime.md")),
        "import trl mine.py": ("AG201", ("GRPOConfig", "docs/migrate/trl.md")),
        "import verl model/model.safetensors": ("AG201", ("cannot be read",)),
        "import verl model": ("AG201", ("not a regular file",)),
    }
    never = ("on the command line", "/tmp/tmp")
    for text, (code, says) in errors.items():
        yield Case("command", text, says, code, never=never if text.startswith("parity") else ())
    yield Case("command", "keys learning_rate", ("train.lr",), "", 0)
    yield Case("command", "keys nosuchword", ("No key has nosuchword",), "", 1)
    yield Case("command", "check-model nowhere", ("FAIL", "'nowhere'", "no such directory"), "AG201")
    unknown = ("FAIL tokenizer cannot encode the prompt", "PASS gradients")
    yield Case("command", "check-model model --prompt What?", unknown, "")
    idle = ("uses 1 of these 32 devices", "placement.train_workers")
    yield Case("command", "launch run.toml --nodes 4 --devices 8", idle, "", 0)
    yield Case(
        "command", "init --model model --data no.jsonl --out new.toml", ("no.jsonl does not exist",), "", 0
    )
    taken = ("cannot listen on port", "in use", "--head HOST:PORT")
    yield Case("command", "launch --run head --head 127.0.0.1:{port}", taken, "AG704")


def api_cases() -> Iterator[Case]:
    """Yield wrong calls from Python, which end in an exception of anygauge."""
    given = 'data="rows.jsonl", reward="exact_match"'
    calls: dict[str, tuple[str, tuple[str, ...]]] = {
        "train()": ("AG201", ("model: not set", "data: not set")),
        'train("model")': ("AG201", ("data: not set", "reward.function: not set")),
        'train("model", data=5, reward="exact_match")': ("AG301", ("The data is int", "list of dicts")),
        'train("model", data=[5], reward="exact_match")': ("AG301", ("row 0 is int, not a dict",)),
        'train("model", data=[], reward="exact_match")': ("AG301", ("the data has no rows",)),
        'train("model", data=(row for row in []), reward="exact_match")': (
            "AG301",
            ("the data has no rows",),
        ),
        'train("model", data=[{"prompt": "1+2=", "label": {3}}], reward="exact_match")': (
            "AG301",
            ("holds a set",),
        ),
        'train("model", data="rows.jsonl")': ("AG201", ("reward.function: not set",)),
        'train("model", data="rows.jsonl", reward=5)': ("AG201", ("reward is 5 (int)", "Give a function")),
        'train("model", data="rows.jsonl", reward=[("math", "half")])': (
            "AG201",
            ("('math', 'half')", "weight"),
        ),
        'train("model", data="rows.jsonl", reward=lambda text: 0.0)': (
            "AG302",
            ("needs 'text'", "response, label"),
        ),
        f'train("model", {given}, learning_rate=1e-6)': ("AG201", ("write train.lr",)),
        'train("model", train_dataset="rows.jsonl", reward_funcs=len)': (
            "AG201",
            ("write data.train", "write reward"),
        ),
        f'train("model", {given}, train={{"lr": "fast"}})': ("AG201", ("train.lr", "'fast'")),
        f'train("model", {given}, run=5)': ("AG201", ("run: found 5", "table")),
        f'train("model", {given}, steps=5)': ("AG201", ("did you mean run.steps",)),
        f'train("model", {given}, resume=True)': ("AG201", ('run={"name": "NAME"}',)),
        f'train("model", {given}, backend="tpu")': ("AG101", ("'tpu'",)),
        f"train(5, {given})": ("AG201", ("5 (int)", "neither a model nor a config")),
        f'train("modle", {given})': ("AG201", ("'modle'", "no such directory")),
        'train("run.toml", on_step=lambda step: 1)': ("AG201", ("on_step", "def on_step(step, metrics)")),
        'train("run.toml", algorithm={"advantage": lambda x: x})': (
            "AG201",
            ("algorithm.advantage", "in a module"),
        ),
        'Run.load("nowhere")': ("AG501", ("nowhere", "does not exist")),
        'Run.load("runs/first").generate(5)': ("AG301", ("prompts are 5", "Give a string")),
        'Run.load("runs/first").generate([5])': ("AG301", ("Prompt 0 is 5 (int), neither a string",)),
        'generate("model", ["1+2="], max_new_tokens=-1)': ("AG201", ("max_new_tokens", "-1")),
        'generate("model", ["1+2="], temperature=-1)': ("AG201", ("temperature", "-1")),
        'generate("model", ["1+2="], max_tokens=4)': (
            "AG201",
            ("'max_tokens'", "did you mean max_new_tokens?"),
        ),
        'Config(run={"nam": "x"})': ("AG201", ("did you mean run.name?", "model: not set")),
        'evaluate("model", data=[{"prompt": "1+2=", "label": "3"}])': (
            "AG201",
            ("reward.function: not set",),
        ),
        'evaluate("run.toml", checkpoint="nowhere")': ("AG501", ("nowhere",)),
    }
    for call, (code, says) in calls.items():
        yield Case(
            "api", f"from anygauge import Config, Run, evaluate, generate, train\n{call}\n", says, code
        )


def resume_cases() -> Iterator[Case]:
    """Yield runs that go on with something changed, or in a directory that is not theirs."""
    again = "train run.toml --run.name first"
    resume = f"{again} --resume --run.steps 4"
    yield Case("resume", again, ("not empty", "--resume", "--overwrite"), "AG501")
    yield Case("resume", f"{again} --resume --run.steps 1", ("at step 2", "run.steps = 1"), "AG501")
    changed = ("train.lr: 0.001 -> 0.0005", """--run.accept_changes '["train.lr"]'""")
    yield Case("resume", f"{resume} --train.lr 5e-4", changed, "AG501")
    yield Case(
        "resume",
        f"{resume} --model.path chat",
        ("model.path: 'model' -> 'chat'", "another --run.name"),
        "AG501",
    )
    yield Case(
        "resume", f"{resume} --run.accept_changes '[\"train.lrr\"]'", ("'train.lrr'", "it can change data")
    )
    rows = ("rows have changed", """--run.accept_changes '["data"]'""")
    yield Case("resume", resume, rows, "AG301", before="sed -i 's/1+2=/2+2=/' rows.jsonl")
    torn = "truncate -s 100 runs/first/checkpoints/step-00000002/*.safetensors"
    yield Case("resume", resume, ("skipped a damaged checkpoint", "resumed at step 1"), "", 0, before=torn)
    torn = "truncate -s 100 runs/first/checkpoints/*/manifest.json"
    yield Case(
        "resume", resume, ("No checkpoint of the run can be used", "--overwrite"), "AG501", before=torn
    )
    gone = ("nothing to resume", "starts from its beginning")
    yield Case("resume", resume, gone, "", 0, before="rm -r runs/first/checkpoints")
    none = ("cannot be resumed", "no config.toml")
    yield Case("resume", resume, none, "AG501", never=("deleted",), before="rm runs/first/config.toml")
    photos = "mkdir -p runs/photos; touch runs/photos/cat.png"
    mine = ("no run made it", "another --run.name")
    yield Case(
        "resume", "train run.toml --run.name photos", mine, "AG501", never=("--resume",), before=photos
    )
    kept = ("is not deleted", "another --run.name")
    yield Case("resume", "train run.toml --run.name photos --overwrite", kept, "AG501", before=photos)


def host_cases() -> Iterator[Case]:
    """Yield runs that the host, or another process, gets in the way of."""
    lock = 'python -c \'import fcntl, time; f = open("runs/first/.lock", "r+"); fcntl.flock(f, 2); '
    lock += 'open("locked", "w").close(); time.sleep(600)\' > /dev/null 2>&1 & '
    lock += "until [ -e locked ]; do sleep 0.05; done"
    for option in ("", "--resume", "--overwrite"):
        command = f"train run.toml --run.name first {option}"
        yield Case("host", command, ("in use by",), "AG501", never=("delete that",), before=lock)
    full = "mkdir full && mount -t tmpfs -o size=300k{} tmpfs full 2> /dev/null || exit 77"
    says = ("No space left on device", "no checkpoint of step", "Free space")
    unmount = "umount full 2> /dev/null || true"
    yield Case("host", f"{TRAIN} --run.directory full", says, "AG501", before=full.format(""), after=unmount)
    command = f"{TRAIN} --run.directory full"
    yield Case("host", command, ("full", "not writable"), before=full.format(",ro"), after=unmount)
    yield Case("host", f"{TRAIN} --run.directory /proc", ("/proc/new", "--run.directory"), "AG501")
    yield Case("host", f"{TRAIN} --run.directory rows.jsonl", ("'rows.jsonl'", "is a file"))
    yield Case("host", f"{TRAIN} --data.cache /proc/cache", ("/proc/cache", "cannot be written"), "", 0)
    ray = f"{TRAIN} --placement.launcher ray --cluster.address"
    yield Case("host", f"{ray} 127.0.0.1", ("HOST:PORT",))
    yield Case("host", f"{ray} 127.0.0.1:9", ("127.0.0.1:9", "refused", "ray start --head"), "AG704")
    long = f"{TRAIN} --run.steps 1000 --save.every 1000"
    stopped = ("interrupted", "saving step", "Ctrl-C again to stop at once", "resume with --resume from")
    yield Case("host", long, stopped, "", 130, strike=("step 3/", signal.SIGINT))
    killed = ("not empty", "--resume")
    yield Case("host", long, killed, "AG501", 0, strike=("step 3/", signal.SIGKILL), then=TRAIN)
    few = ("64 workers share", "processors", "placement.start_timeout_s", "Ranks ")
    many = "--placement.train_workers 64 --rollout.prompts_per_step 64 --placement.start_timeout_s 2"
    yield Case("host", f"{TRAIN} {many}", few, "AG703")


def all_cases() -> Iterator[Case]:
    """Yield every case."""
    for make in (config_cases, data_cases, reward_cases, model_cases, command_cases, api_cases, resume_cases):
        yield from make()
    yield from host_cases()


CASES: tuple[Case, ...] = tuple(all_cases())
assert len({(case.command, case.before, case.then) for case in CASES}) == len(CASES), "a case is there twice"
