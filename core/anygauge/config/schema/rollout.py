"""Generation, and how its engines get the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anygauge.config.schema.section import DType, Name, NonNegative, Positive, Probability, Seconds, Section

__all__ = ["POLICY", "Rollout", "RolloutClient", "RolloutGateway", "RolloutGroup", "WeightSync"]


POLICY = "policy"
"""Name of the model that is trained; weights are synced to its servers."""


class RolloutClient(Section):
    """How engines that are servers are talked to."""

    concurrency: Positive = 256
    """Requests that one data-parallel rank of an engine has under way at once; others wait for the first
    engine that has room. Set it to what the engine runs at once, or somewhat above."""
    request_timeout_s: Seconds = 1800.0
    """Longest time for one response from when an engine first gets the request, all attempts together."""
    control_timeout_s: Seconds = 60.0
    """Longest wait for the answer to a command that generates nothing: pause, resume, flush, abort."""
    attempts: Positive = 10
    """Most engines that a request is given to, one after the other, while they die, hang or fail on it."""
    pause_s: Annotated[float, Field(gt=0, le=60)] = 0.1
    """The first pause between two attempts is drawn from 0 to this; the range doubles each time."""
    probe_every_s: Seconds = 10.0
    """How often an engine that owes answers is asked whether it is well."""
    probe_timeout_s: Seconds = 30.0
    """An engine that does not say so in this time hangs: it counts as dead, and its requests go to others."""
    outage_timeout_s: Seconds = 600.0
    """Longest wait for an engine while none serves: all are paused, restarted or dead."""
    affinity: Annotated[float, Field(ge=1)] = 1.5
    """A session goes to the engine that has read its beginning, unless that one's load is above this many
    times the least one."""


class RolloutGroup(Section):
    """Servers that are alike. Without groups there is one: ``placement.rollout_workers`` of the policy."""

    kind: Literal["regular", "prefill", "decode", "encoder"] = "regular"
    """Task of the group's servers: whole requests, prefill alone, decode alone, or the encoding of images and
    audio alone."""
    servers: Positive = 1
    """How many there are; all groups together have ``placement.rollout_workers``."""
    model: Name = POLICY
    """Name of the model that it serves. Weights are synced to ``policy`` alone; a rollout function asks
    another as ``rollout.engines[NAME]``."""
    path: Path | None = None
    """Hugging Face directory of that model; ``None`` takes ``model.path``, which only ``policy`` may."""
    sglang: dict[str, Any] = {}
    """Arguments of these servers, laid over those in ``[rollout.sglang]``."""


class RolloutGateway(Section):
    """How agents are served: OpenAI's and Anthropic's API, for ``rollout.function = "agent"``."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen at, on a free port, and that agents are given. Only processes of the trainer's host
    reach the default; agents elsewhere need an address of this host that they can reach."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("policy",)
    """Names that agents may give the model; ``"*"`` takes any."""
    sampling: Literal["run", "refuse"] = "run"
    """Log-probs are taken at the run's temperature, so nothing else can be trained on. ``run`` samples as the
    run does, whatever temperature, top_p, top_k and penalties a request has; ``refuse`` answers 400 to a
    request that differs."""
    history: Literal["template", "append"] = "template"
    """Treatment of earlier turns that the template renders otherwise than they were sampled; Qwen3's, for
    example, leaves out earlier reasoning. ``template`` follows the template and starts a new sample;
    ``append`` always continues from the sampled tokens."""
    tool_format: str = "auto"
    """How the model writes calls of tools: ``hermes``, ``xml``, ``glm``, ``deepseek``, ``none``, or a
    ``ToolFormat`` as ``package.module:attribute``; ``auto`` takes what the chat template teaches."""
    reasoning: Literal["auto", "split", "keep"] = "auto"
    """``split`` tells reasoning apart from the answer, ``keep`` leaves it in the text; ``auto`` splits if the
    template knows reasoning."""
    max_requests: Positive | None = None
    """Generations under way at once; one more is answered with 429. ``None`` refuses none: those that the
    engines have no room for wait."""
    max_context_tokens: Positive | None = None
    """Longest prompt and response together; ``None`` takes what the model can. A request with more than 16
    characters for each of these tokens is refused before its chat is rendered."""
    max_body_bytes: Positive = 8 * 2**20
    """Largest body of a request, images that are sent as ``data:`` included; a larger one is answered with
    413."""
    timeout_s: Seconds = 1800.0
    """Longest time for one generation, waits included."""


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
    """Nucleus sampling; 1 is off, and all that training takes: log-probs are over the whole vocabulary."""
    top_k: NonNegative = 0
    """Keep the likeliest tokens; 0 keeps all, and is all that training takes, as for ``top_p``."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Tokens that end a response, beside the model's own."""
    max_batch_tokens: Positive = 262_144
    """Prompt and response tokens that one engine holds in its cache at once."""
    dtype: DType | None = None
    """Precision of the engine; ``None`` takes ``train.dtype``."""
    graphs: Literal["auto", False] = "auto"
    """For ``transformers``: have the device record the pass of a token and replay it, where it and the model
    can; ``false`` queues every pass again. Servers have arguments of their own for it."""
    schedule: Literal["sync", "one_step_off", "async"] = "sync"
    """When samples are generated: before each step with its weights; while the step before trains; or all the
    time, through updates of the weights. All but ``sync`` need engines that are servers."""
    max_staleness: Positive = 1
    """For ``async``: most weight versions between a sample's first token and the step that trains on it."""
    client: RolloutClient = RolloutClient()
    """How engines that are servers are talked to."""
    function: str = "single_turn"
    """Function that turns a prompt into a sample: a registered name (``single_turn``, ``multi_turn``,
    ``agent``), or ``package.module:function``."""
    function_options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    function_timeout_s: Seconds = 600.0
    """Longest time that the function may take for itself between two generations."""
    gateway: RolloutGateway = RolloutGateway()
    """How agents are served."""
    max_failed_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of a step's rollouts whose function may fail; they are left out. More end the run."""
    after_sample: tuple[str, ...] = ()
    """Functions ``package.module:function`` that see each finished sample before it is scored, in order; what
    they return instead of ``None`` takes its place."""
    filters: tuple[str, ...] = ()
    """Which groups are trained on: registered names (``zero_variance``), or ``package.module:function``. All
    must let a group pass; others are drawn in place of those that do not."""
    filter_options: dict[str, dict[str, Any]] = {}
    """Keyword arguments of the filters, by name."""
    max_rounds: Positive = 10
    """A step gives up once the filters have rejected this many times the groups that it needs."""
    shortage: Literal["error", "smaller_step"] = "error"
    """Action when ``max_rounds`` is reached: end the run with an error, or train the step on the groups that
    passed."""
    over_sampling: NonNegative = 0
    """Prompts that are started beyond those that a step needs; it ends with the first that are done."""
    partial_rollout: bool = False
    """Go on with unfinished samples in the next step, from the tokens that they have, instead of discarding
    them."""
    redraw: bool = True
    """Start the prompts of discarded groups again, first thing in the next step; ``false`` drops them."""
    sglang: dict[str, Any] = {}
    """Any argument of SGLang's server by its name, such as ``tp_size = 2``; checked against the installed
    one."""
    sglang_version: str | None = None
    """A tested version of SGLang that one which was not tested is taken for."""
    external: tuple[str, ...] = ()
    """Addresses ``http://HOST:PORT`` of engines that somebody else has started, instead of servers of the
    run. Their model and tokenizer are compared with the run's; they get its weights and are never ended."""
    api_key: str | None = None
    """Environment variable, as ``$NAME``, with the key that servers ask for: files and logs of the run hold
    its name alone. ``None`` gives each server of the run a random key, and shows ``external`` ones none."""
    admin_api_key: str | None = None
    """The same, for the key of requests that change a server: weights, cache, memory, pauses."""
    groups: tuple[RolloutGroup, ...] = ()
    """Groups of servers, where they are not all alike."""


class WeightSync(Section):
    """How engines that are servers get the trained weights."""

    transport: str = "tensor"
    """Way to the servers, by registered name: ``tensor`` (memory that processes of one host share, or one
    accelerator), ``distributed`` (broadcast), ``disk`` (a directory that all see), ``delta`` (changed bytes
    alone). Servers with devices of their own, or on other hosts, get ``distributed`` if nothing is said."""
    bucket_bytes: Annotated[int, Field(ge=4096)] = 2**30
    """Memory for what is sent at once, which is a little less. Two such buffers are held; a larger tensor has
    a bucket for itself. Each bucket costs a request, so larger ones are faster."""
    verify: Literal["none", "first", "always"] = "first"
    """Compare the checksums of what the servers hold with what was sent, tensor by tensor: never, after the
    first update of each server, or after every one."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """Treatment of in-flight requests: ``retract`` restarts them with the tokens sampled so far, ``in_place``
    continues them with the KV cache of the old weights, ``abort`` ends them with what they have."""
    deadline_s: Seconds = 300.0
    """Longest wait for a server to take one bucket, or to answer anything else, in seconds."""
    directory: Path | None = None
    """Directory of the weight versions, for ``disk``; ``None`` takes ``weights/`` in the run directory."""
