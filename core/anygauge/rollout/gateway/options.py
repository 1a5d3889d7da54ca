"""How agents are served."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from anygauge.config.schema.section import Positive, Seconds, Section

__all__ = ["GatewayOptions"]


class GatewayOptions(Section):
    """How agents are served."""

    host: str = "127.0.0.1"
    """Address to listen at. Only processes of this host reach the default."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("policy",)
    """Names that agents may give the model; ``"*"`` takes any."""
    sampling: Literal["run", "refuse"] = "run"
    """Log-probs are taken at the run's temperature, so nothing else can be trained on. ``run`` samples as the
    run does, whatever temperature, top_p, top_k and penalties a request has; ``refuse`` answers 400 to a
    request that differs."""
    history: Literal["template", "append"] = "template"
    """What the model sees of earlier turns that the template shows otherwise than they were sampled, such as
    Qwen3's, which leaves out earlier reasoning. ``template`` shows what the template does, in a new sample;
    ``append`` always goes on from the tokens that were sampled."""
    tool_format: str = "auto"
    """How the model writes calls of tools: ``hermes``, ``xml``, ``glm``, ``deepseek``, ``none``, or a
    ``ToolFormat`` as ``module:attribute``; ``auto`` takes what the chat template teaches."""
    reasoning: Literal["auto", "split", "keep"] = "auto"
    """``split`` tells reasoning apart from the answer; ``auto`` does so if the template knows reasoning."""
    max_requests: Positive = 4096
    """Generations under way at once; one more is answered with 429."""
    max_context_tokens: Positive | None = None
    """Longest prompt and response together; ``None`` leaves it to the engine."""
    timeout_s: Seconds = 1800.0
    """Longest time for one generation, in seconds."""
