"""The config tree. Each field's string is its documentation; an unknown key is an error.

The same tree serves every backend: what differs goes into the tables ``[on.cpu]``, ``[on.cuda]`` and
``[on.npu]`` of the file, which :mod:`anygauge.config.load` lays over it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Algorithm",
    "Config",
    "DType",
    "Data",
    "Eval",
    "Model",
    "Placement",
    "Reference",
    "Reward",
    "Rollout",
    "Run",
    "Section",
    "Train",
]

DType = Literal["float32", "bfloat16"]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Probability = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A table of the config."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )


class Run(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Names the run directory."""
    directory: Path = Path("runs")
    """Run directories are made here."""
    steps: Positive = 100
    """RL steps: generate, score, train, sync."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seeds the data order, the sampling and the model's random state."""
    overwrite: bool = False
    """Delete an earlier run of the same name instead of stopping."""
    save_hf: bool = True
    """Write the trained model as a Hugging Face directory ``hf/`` when the run ends."""
    trackers: tuple[str, ...] = ("jsonl",)
    """Where metrics go."""
    progress: bool = True
    """Show live progress on a terminal."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Longest wait for any answer of a worker, in seconds."""


class Model(Section):
    """The policy."""

    path: Path
    """Hugging Face directory: config, tokenizer, safetensors."""


class Reference(Section):
    """The frozen policy of the KL term. Used only where ``algorithm.kl_coef`` is above 0."""

    path: Path | None = None
    """Hugging Face directory of the same architecture; ``None`` takes ``model.path``."""


class Data(Section):
    """Training prompts."""

    train: tuple[Path, ...]
    """Data files."""
    source: str = "jsonl"
    """Data source, by registered name."""
    input_key: str = "prompt"
    """Field of a row that holds the prompt: a string, or a list of chat messages."""
    label_key: str | None = "label"
    """Field that holds the expected answer; ``None`` if the reward needs none."""
    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template; a string becomes one user message."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the chat template, such as ``{enable_thinking = false}``."""
    system_prompt: str | None = None
    """System message put before a prompt that is a string; needs ``apply_chat_template``."""
    max_prompt_tokens: Positive | None = None
    """Rows with longer prompts are dropped and counted."""
    shuffle: bool = True
    """Draw rows in a new random order each epoch."""


class Rollout(Section):
    """Generation."""

    engine: str = "transformers"
    """Rollout engine, by registered name."""
    prompts_per_step: Positive = 32
    """Prompts drawn for each step."""
    samples_per_prompt: Positive = 8
    """Samples drawn for each prompt."""
    max_new_tokens: Positive = 256
    """Longest response, in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Divides the logits, in generation and in training alike."""
    top_p: Probability = 1.0
    """Nucleus sampling; 1 is off."""
    top_k: NonNegative = 0
    """Keep the likeliest tokens; 0 keeps all."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Tokens that end a response, beside the model's own."""
    max_batch_tokens: Positive = 262_144
    """Prompt and response tokens that one engine holds in its cache at once."""
    dtype: DType | None = None
    """Precision of the engine; ``None`` takes ``train.dtype``."""


class Reward(Section):
    """Scoring."""

    function: str
    """A registered name (``exact_match``, ``math``), or ``package.module:function``."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function."""


class Algorithm(Section):
    """The objective."""

    advantage: str = "grpo"
    """Advantage estimator, by registered name."""
    advantage_options: dict[str, Any] = {}
    """Keyword arguments of the estimator: ``{center = true, scale = true}`` for ``grpo``."""
    policy_loss: str = "ppo_clip"
    """Policy loss, by registered name."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below at ``1 - clip_low``."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above at ``1 + clip_high``; larger than ``clip_low`` is clip-higher."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the loss of a negative advantage at this ratio; ``None`` is off."""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL term against the reference in the loss."""
    kl_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of the KL term."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    aggregation: Literal["token_mean", "sample_mean"] = "token_mean"
    """Mean over all tokens of an optimizer step, or over samples of each sample's token mean."""
    old_log_probs: Literal["rollout", "recompute"] = "recompute"
    """What the ratio is taken against: the engine's log-probs, or the trainer's own before its first step."""


class Train(Section):
    """Training."""

    engine: str = "megatron"
    """Train engine, by registered name."""
    dtype: DType | None = None
    """Precision of the weights; the optimizer keeps float32. ``None`` lets the backend choose."""
    optimizer_steps: Positive = 1
    """Optimizer steps for each rollout; its samples are divided among them."""
    micro_batch_tokens: Positive = 16_384
    """Most tokens in one packed micro-batch; a longer sample is alone in its own."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at the end of a cosine schedule."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices and embeddings; norms and biases have none."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's moments."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to Adam's denominator."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 does not clip."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recompute: none, core attention, or every layer."""
    megatron: dict[str, Any] = {}
    """Any field of Megatron's TransformerConfig, DistributedDataParallelConfig or OptimizerConfig."""


class Eval(Section):
    """Evaluation: before the first step, every ``interval`` steps and after the last."""

    data: tuple[Path, ...] = ()
    """Data files; empty for no evaluation."""
    interval: Positive = 20
    """Steps between evaluations."""
    samples_per_prompt: Positive = 1
    """Samples drawn for each prompt."""
    max_prompts: Positive | None = None
    """Only the first rows; ``None`` for all."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """0 decodes greedily."""
    top_p: Probability = 1.0
    """Nucleus sampling; 1 is off."""
    max_new_tokens: Positive | None = None
    """``None`` takes ``rollout.max_new_tokens``."""


class Placement(Section):
    """Processes."""

    launcher: Literal["ray", "local"] = "ray"
    """``ray`` places workers on a cluster; ``local`` starts plain processes on this host."""
    num_workers: Positive = 1
    """Worker processes, each with one device."""
    threads_per_worker: NonNegative = 0
    """CPU threads of each worker; 0 divides the host's cores among them."""
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Longest wait for every worker to be placed and ready, in seconds."""
    ray_address: str | None = None
    """Address of a running Ray cluster (``auto`` to find one); ``None`` starts one for the run."""


class Config(Section):
    """A run, for any backend."""

    run: Run
    model: Model
    data: Data
    reward: Reward
    reference: Reference = Reference()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    train: Train = Train()
    eval: Eval = Eval()
    placement: Placement = Placement()
