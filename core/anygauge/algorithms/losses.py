"""Policy losses, and the objective that adds a KL term and an entropy bonus to one.

Each is a function of :class:`~anygauge_hooks.engines.LossInputs`. Values of tokens are aggregated as
``sum(x * weights)``, so that the sum over micro-batches and data-parallel ranks does not depend on how a step
was split. Tokens outside ``loss_mask`` may hold anything, non-finite values included, since
:func:`policy_objective` puts 0 there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from anygauge.algorithms.kl import KlType, kl_divergence, top_k_kl
from anygauge.algorithms.sample_sums import sample_means
from anygauge_hooks.engines import LossFunction, LossInputs
from anygauge_hooks.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["bind_options", "cispo", "gspo", "policy_gradient", "policy_objective", "ppo_clip", "sft"]

Metrics = Mapping[str, "Tensor"]

_MAX_LOG_RATIO = 20.0
"""exp(20) is 4.9e8: far outside any clip range, and its square is still finite in float32."""


def ppo_clip(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return the clipped surrogate loss, https://arxiv.org/abs/1707.06347 equation 7, per token.

    :param inputs: Tokens of a micro-batch, ``[T]``.
    :param clip_low: The ratio is clipped below at ``1 - clip_low``.
    :param clip_high: The ratio is clipped above at ``1 + clip_high``; larger than ``clip_low`` is the
        clip-higher of https://arxiv.org/abs/2503.14476 equation 10.
    :param dual_clip: Bounds the loss of a negative advantage at ``-dual_clip * advantage``,
        https://arxiv.org/abs/1912.09729 equation 5; ``None`` is off.
    :returns: Scalar loss, and metrics that add up over micro-batches.
    """
    return _clipped_surrogate(_ratio(inputs), inputs, clip_low, clip_high, dual_clip)


def gspo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, Metrics]:
    """Return the clipped surrogate of one ratio per sample, https://arxiv.org/abs/2507.18071 section 4.3.

    ``s_i = exp(mean over the sample's tokens of (log p - log p_old))``, and each of its tokens has the loss
    ``-min(s_it A_t, clip(s_it, 1 - clip_low, 1 + clip_high) A_t)`` with ``s_it = sg(s_i) p_t / sg(p_t)``: the
    paper's GSPO-token, whose value is that of its equation 5. With one advantage per sample the gradient is
    too; advantages of tokens keep their own, which a ratio of the whole sample would average away. The
    paper's mean is that of ``algorithm.loss_aggregation = "sample_mean"``, its clip range 3e-4 and 4e-4.

    :param inputs: Tokens of whole samples, ``[T]``.
    :param clip_low: The ratio is clipped below at ``1 - clip_low``.
    :param clip_high: The ratio is clipped above at ``1 + clip_high``.
    :returns: Scalar loss, and metrics that add up over micro-batches.
    """
    x, log_probs = inputs, inputs.log_probs.detach()
    log_ratio = sample_means(log_probs - x.old_log_probs, x).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    # In this order the value is that of exp(log_ratio) to the last bit.
    return _clipped_surrogate((log_ratio + (x.log_probs - log_probs)).exp(), x, clip_low, clip_high)


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> tuple[Tensor, Metrics]:
    """Return REINFORCE with a clipped importance weight, https://arxiv.org/abs/2506.13585 equation 4.

    ``-sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A log p``: the weight is clipped and carries no gradient,
    so no token loses its own. The paper has no lower bound, which is what ``clip_low`` near 1 comes to.

    :param inputs: Tokens of a micro-batch, ``[T]``.
    :param clip_low: The weight is clipped below at ``1 - clip_low``.
    :param clip_high: The weight is clipped above at ``1 + clip_high``.
    :returns: Scalar loss, and metrics that add up over micro-batches.
    """
    ratio = _ratio(inputs).detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = _sum(-weight * inputs.advantages * inputs.log_probs, inputs)
    metrics = {"pg_clipfrac": (weight != ratio).to(ratio.dtype), "ratio": ratio}
    summed = {name: _metric(value, inputs) for name, value in metrics.items()}
    return loss, {"pg_loss": loss.detach(), **summed, **_log_prob_metrics(inputs)}


def policy_gradient(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Return REINFORCE, ``-A log p``, https://doi.org/10.1007/BF00992696 equation 2.

    It is meant for one optimizer step per rollout: it knows no ratio to the policy that sampled.

    :param inputs: Tokens of a micro-batch, ``[T]``.
    :returns: Scalar loss, and metrics that add up over micro-batches.
    """
    loss = _sum(-inputs.advantages * inputs.log_probs, inputs)
    ratio = _metric(_ratio(inputs).detach(), inputs)
    return loss, {"pg_loss": loss.detach(), "ratio": ratio, **_log_prob_metrics(inputs)}


def sft(inputs: LossInputs) -> tuple[Tensor, Metrics]:
    """Return the negative log-likelihood of the tokens; advantages and old log-probabilities are ignored.

    :param inputs: Tokens of a micro-batch, ``[T]``.
    :returns: Scalar loss in nats, and metrics that add up over micro-batches.
    """
    return _sum(-inputs.log_probs, inputs), {}


def bind_options(policy_loss: Callable[..., tuple[Tensor, Metrics]], **options: Any) -> LossFunction:
    """Bind the options that a policy loss accepts, and check its result in each call.

    A loss without clipping, such as :func:`sft`, does not have to take the clip range.

    :param policy_loss: ``fn(inputs, **options)``, a function of a module so that it can be pickled.
    :param options: The fields of the config's ``[algorithm]`` that belong to policy losses.
    :returns: A picklable function of the inputs alone.
    """
    parameters = inspect.signature(policy_loss).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    taken = {name: value for name, value in options.items() if takes_any or name in parameters}
    return _BoundLoss(policy_loss, taken)


@dataclass(frozen=True, slots=True)
class _BoundLoss:
    """Policy loss that :func:`bind_options` returns: an instance, because a closure cannot be pickled."""

    policy_loss: Callable[..., tuple[Tensor, Metrics]]
    options: Mapping[str, Any]

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        result = self.policy_loss(inputs, **self.options)
        problem = _result_problem(result)
        if problem is not None:
            name = getattr(self.policy_loss, "__qualname__", repr(self.policy_loss))
            raise PluginError(
                f"Policy loss {name!r} must return a scalar loss and a mapping of scalar metrics, all "
                f"tensors; {problem}.",
                hint="return loss, {}, with loss = (values * inputs.loss_weights).sum(); docs/hooks.md, "
                "register_policy_losses, has an example.",
            )
        return result


def _result_problem(result: Any) -> str | None:
    """Return how a policy loss's result breaks the contract, or ``None``."""
    from torch import Tensor

    if not isinstance(result, tuple | list) or len(result) != 2:
        return f"it returned {_described(result)}"
    loss, metrics = result
    if not isinstance(metrics, Mapping):
        return f"its metrics are {_described(metrics)}"
    scalars = {"loss": loss} | {f"metric {name!r}": value for name, value in metrics.items()}
    wrong = [name for name, value in scalars.items() if not isinstance(value, Tensor) or value.ndim]
    return f"its {wrong[0]} is {_described(scalars[wrong[0]])}" if wrong else None


def _described(value: Any) -> str:
    """Return a value for a message; a tensor by its shape."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} items"
    return f"{value!r:.80} ({type(value).__name__})"


def policy_objective(
    policy_loss: LossFunction,
    *,
    kl_coef: float = 0.0,
    kl_type: KlType = "k3",
    entropy_coef: float = 0.0,
    distill_kl_coef: float = 0.0,
) -> LossFunction:
    """Return a policy loss with further terms.

    ``policy_loss + kl_coef * KL(policy || reference) - entropy_coef * entropy``, and ``distill_kl_coef *
    KL(teacher || policy)`` over the teacher's top-k tokens.

    With :func:`ppo_clip` and advantages of a group it is the objective of https://arxiv.org/abs/2402.03300
    equation 3.

    :param policy_loss: A function of the inputs alone; see :func:`bind_options`.
    :param kl_coef: Above 0 the inputs must have ``reference_log_probs``.
    :param kl_type: Estimator of the KL term.
    :param entropy_coef: Above 0 the inputs' entropy must carry a gradient.
    :param distill_kl_coef: Weight of :func:`~anygauge.algorithms.kl.top_k_kl`; above 0 the inputs
        must have the teacher's top-k tokens.
    :returns: A picklable loss function.
    """
    return _Objective(policy_loss, kl_coef, kl_type, entropy_coef, distill_kl_coef)


@dataclass(frozen=True, slots=True)
class _Objective:
    """Loss that :func:`policy_objective` returns: an instance, because a closure cannot be pickled."""

    policy_loss: LossFunction
    kl_coef: float
    kl_type: KlType
    entropy_coef: float
    distill_kl_coef: float

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        x = _masked(inputs)
        loss, metrics = self.policy_loss(x)
        entropy = _sum(x.entropy, x)
        if self.entropy_coef:
            assert x.entropy.requires_grad or not x.log_probs.requires_grad, (
                "an entropy bonus without gradient"
            )
            loss = loss - self.entropy_coef * entropy
        terms = {"entropy_loss": entropy.detach()}
        if self.kl_coef:
            assert x.reference_log_probs is not None, "a KL term without reference log-probs"
            kl = _sum(kl_divergence(x.log_probs, x.reference_log_probs, self.kl_type), x)
            loss = loss + self.kl_coef * kl
            terms["kl_loss"] = kl.detach()
        if self.distill_kl_coef:
            assert x.top_k_log_probs is not None, "a distilled policy without a teacher"
            assert x.teacher_top_k_log_probs is not None, "a distilled policy without a teacher"
            kl = _sum(top_k_kl(x.top_k_log_probs, x.teacher_top_k_log_probs), x)
            loss = loss + self.distill_kl_coef * kl
            terms["distill_kl"] = kl.detach()
        return loss, {**metrics, **terms, "loss": loss.detach()}


def _clipped_surrogate(
    ratio: Tensor, x: LossInputs, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Metrics]:
    unclipped = -ratio * x.advantages
    clipped = -ratio.clamp(1 - clip_low, 1 + clip_high) * x.advantages
    losses = unclipped.maximum(clipped)
    shares = {"pg_clipfrac": clipped > unclipped}
    if dual_clip is not None:
        bound = -dual_clip * x.advantages
        shares["pg_clipfrac_lower"] = (x.advantages < 0) & (losses > bound)
        losses = losses.minimum(bound).where(x.advantages < 0, losses)
    loss = _sum(losses, x)
    metrics = {"pg_loss": loss.detach(), "ratio": _metric(ratio.detach(), x), **_log_prob_metrics(x)}
    return loss, metrics | {name: _metric(share.to(ratio.dtype), x) for name, share in shares.items()}


def _ratio(x: LossInputs) -> Tensor:
    return (x.log_probs - x.old_log_probs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _log_prob_metrics(x: LossInputs) -> dict[str, Tensor]:
    """Compare the three policies of a step: the engine's, the one the ratio is against, and the current."""
    log_probs = x.log_probs.detach()
    return {
        "ppo_kl": _metric(kl_divergence(x.old_log_probs, log_probs, "k1"), x),
        "log_probs": _metric(log_probs, x),
        "rollout_log_probs": _metric(x.rollout_log_probs, x),
        "rollout_kl": _metric(kl_divergence(x.rollout_log_probs, x.old_log_probs, "low_var_kl"), x),
        "train_rollout_logprob_abs_diff": _metric((x.old_log_probs - x.rollout_log_probs).abs(), x),
        "current_rollout_logprob_abs_diff": _metric((log_probs - x.rollout_log_probs).abs(), x),
    }


def _masked(inputs: LossInputs) -> LossInputs:
    """Put 0 wherever the mask is 0: 0 times a non-finite value would not be 0, forward or backward."""
    from torch import Tensor

    counts = inputs.loss_mask != 0
    masked: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            value = value.where(counts.view(-1, *(1 for _ in value.shape[1:])), 0.0)
        masked[field.name] = value
    return LossInputs(**masked)


def _sum(values: Tensor, inputs: LossInputs) -> Tensor:
    return (values * inputs.loss_weights).sum()


def _metric(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return the sum over the tokens as they were sampled, whatever a correction makes of their loss."""
    return (values * (inputs.loss_weights if inputs.metric_weights is None else inputs.metric_weights)).sum()
