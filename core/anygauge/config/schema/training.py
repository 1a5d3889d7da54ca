"""Training and algorithm sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anygauge.config.schema.models import Parallel
from anygauge.config.schema.section import DType, NonNegative, Positive, Section

__all__ = ["Algorithm", "Lora", "Train"]


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
    kl_reward_coef: Annotated[float, Field(ge=0)] = 0.0
    """Penalty subtracted from each token's reward, per nat of log-ratio to the reference; for token-level
    estimators."""
    kl_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k3"
    """Estimator of the KL term."""
    entropy_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    normalize_advantages: bool = False
    """Whiten the advantages over all tokens of a step, whichever ranks have them."""
    distill_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the teacher's log-prob less the policy's, added to each token's advantage."""
    distill_kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight in the loss of the KL divergence of the teacher from the policy, over the teacher's top-k
    tokens."""
    distill_top_k: Positive = 64
    """Top-k tokens of the teacher that ``distill_kl_coef`` compares; all others count as one."""
    loss_aggregation: Literal["token_mean", "sample_mean", "constant_length"] = "token_mean"
    """Mean over all tokens of an optimizer step; over samples of each sample's token mean; or over samples of
    each sample's sum of tokens over ``rollout.max_new_tokens``."""
    old_log_probs: Literal["rollout", "recompute"] = "recompute"
    """Log-probs in the denominator of the ratio: the engine's, or the trainer's own before its first step."""
    correction: dict[str, dict[str, Any]] = {}
    """Off-policy corrections by registered name, each with its keyword arguments: ``{tis = {high = 2.0}, veto
    = {}}``. Their weights are multiplied."""
    mask_stale: NonNegative | None = None
    """Most versions between the weights that sampled a token and those being trained; older tokens are
    masked. ``None`` trains on all."""


class Lora(Section):
    """Low-rank adapters (LoRA), trained beside frozen weights. On where ``rank`` or ``path`` is set."""

    rank: Positive | None = None
    """Rank of each adapter; ``None`` takes that of ``path``, and without one trains all weights."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """Adapters are scaled by ``alpha / rank``; ``None`` takes that of ``path``, or twice the rank."""
    targets: tuple[str, ...] | str | None = None
    """Linear layers with an adapter: names such as ``["q_proj", "v_proj"]``, one regular expression that
    matches whole names, or ``all-linear``: all but the output layer. ``None`` takes those of ``path``, or
    ``all-linear``."""
    modules_to_save: tuple[str, ...] | None = None
    """Names of modules that are trained in full and saved beside the adapters, such as ``["lm_head"]``;
    ``None`` takes those of ``path``, or none."""
    dropout: float = 0.0
    """Only 0: log-probs of the passes of a step, and of the rollout engine, would differ."""
    path: Path | None = None
    """Directory of a peft adapter that training starts from; its rank, alpha, targets and modules apply."""
    export: Literal["both", "merged", "adapter"] = "both"
    """Content of an export: merged weights, a peft adapter in ``adapter/``, or both."""
    base: Literal["nf4"] | None = None
    """Storage of the frozen linear layers: ``nf4`` keeps them in 4 bits (QLoRA) and needs bitsandbytes;
    ``None`` keeps them in ``train.dtype``."""

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained, and not all weights."""
        return self.rank is not None or self.path is not None


class Train(Section):
    """Training."""

    engine: str = "megatron"
    """Train engine, by registered name."""
    dtype: DType | None = None
    """Precision of the weights; the optimizer keeps float32. ``None`` lets the backend choose."""
    optimizer_steps: Positive = 1
    """Optimizer steps for each rollout; its samples are divided among them."""
    global_batch_size: Positive | None = None
    """Samples in one optimizer step: another way to set ``optimizer_steps``, which is then the number of
    samples of a rollout divided by this. ``None`` uses ``optimizer_steps``."""
    micro_batch_tokens: Positive = 16_384
    """Most tokens in one packed micro-batch; a longer sample is alone in its own. Under context parallelism
    it counts whole sequences, of which each rank gets its part."""
    prefix_packing: bool = False
    """Compute the prompt of a group once for all of its samples in a micro-batch. Refused with the FSDP
    engine, context parallelism, router replay, media and layers with a recurrent state."""
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
    recompute: Literal["none", "elementwise", "selective", "full"] = "none"
    """Activation recompute: none; norms and gated activations; core attention too; or every layer."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained: parts of a multimodal model (``vision``, ``audio``, ``language``), or
    regular expressions that match whole names of the checkpoint's tensors."""
    replica_check_every: NonNegative = 10
    """Optimizer steps from one comparison of replicated weights and gradients among ranks to the next; the
    first step of a process is compared too. 0 never compares them."""
    router_replay: bool = False
    """Send tokens to the experts that the log-prob pass before the step chose for them."""
    provider: str | None = None
    """Library with layer modules or engine functions that replace the backend's own kernels; the backend
    defines which there are. ``None`` uses none."""
    provider_options: dict[str, Any] = {}
    """Options passed to the provider."""
    fused_loss: bool = True
    """Compute log-probs a tile of the logits at a time; ``false`` keeps those of a whole micro-batch."""
    loss_memory_gib: Annotated[float, Field(ge=0)] | None = None
    """GiB of logits that ``fused_loss`` keeps for the backward pass of a micro-batch; it computes the others
    twice. ``None`` takes a tenth of the device memory that is free when the first training pass reaches the
    loss."""
    lora: Lora = Lora()
    """Adapters that are trained in the place of all weights."""
    parallel: Parallel = Parallel()
    """How the model is divided among the workers."""
    megatron: dict[str, Any] = {}
    """Fields of Megatron's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig. Those that
    would change nothing here are refused with the reason."""
