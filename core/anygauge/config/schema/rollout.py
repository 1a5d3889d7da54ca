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
    """HTTP client of served engines."""

    concurrency: Positive | None = None
    """Most requests in flight for one data-parallel rank of an engine; others wait for the first engine with
    room. ``None`` takes the engine's own limit of running requests, or 256 if it does not tell one."""
    request_timeout_s: Seconds = 1800.0
    """Longest time for one response since an engine first got the request, all attempts included."""
    control_timeout_s: Seconds = 60.0
    """Longest wait for a control command: pause, resume, flush, abort."""
    attempts: Positive = 10
    """Most attempts of a request, each on another engine, while engines die, hang or fail on it."""
    pause_s: Annotated[float, Field(gt=0, le=60)] = 0.1
    """Initial retry pause: drawn from 0 to this; the range doubles with each attempt."""
    probe_every_s: Seconds = 10.0
    """Interval of health probes to an engine with requests in flight."""
    probe_timeout_s: Seconds = 30.0
    """Timeout of a health probe. An engine that misses two in a row counts as dead, and its requests go to
    others."""
    outage_timeout_s: Seconds = 600.0
    """Longest wait for an engine while none serves: all are paused, restarted or dead."""
    affinity: Annotated[float, Field(ge=1)] = 1.5
    """Prefix affinity: a session goes to the engine that has its prefix cached, unless that engine's load
    exceeds the lowest load by this factor."""


class RolloutGroup(Section):
    """Servers with the same settings. Without groups there is one group: ``placement.rollout_workers``
    servers of the policy.
    """

    kind: Literal["regular", "prefill", "decode", "encoder"] = "regular"
    """Task of the group's servers: whole requests, prefill alone, decode alone, or the encoding of images and
    audio alone."""
    servers: Positive = 1
    """Number of servers; all groups together have ``placement.rollout_workers``."""
    model: Name = POLICY
    """Name of the served model. Only ``policy`` gets synced weights; rollout functions call another model as
    ``rollout.engines[NAME]``."""
    path: Path | None = None
    """Hugging Face directory of that model; ``None`` takes ``model.path``, which only ``policy`` may."""
    sglang: dict[str, Any] = {}
    """Arguments of these servers, which override those in ``[rollout.sglang]``."""


class RolloutGateway(Section):
    """Gateway for agents: OpenAI's and Anthropic's APIs, for ``rollout.function = "agent"``."""

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
    """Format of the model's tool calls: ``hermes``, ``xml``, ``glm``, ``deepseek``, ``none``, or a
    ``ToolFormat`` as ``package.module:attribute``; ``auto`` detects it from the chat template."""
    reasoning: Literal["auto", "split", "keep"] = "auto"
    """``split`` separates reasoning from the answer, ``keep`` leaves it in the text; ``auto`` splits if the
    template has reasoning."""
    max_requests: Positive | None = None
    """Most concurrent generations; further requests are answered with 429. ``None`` refuses none: requests
    wait until an engine has room."""
    max_context_tokens: Positive | None = None
    """Most tokens of prompt and response together; ``None`` takes the model's limit. A request with more than
    16 characters for each of these tokens is refused before its chat is rendered."""
    max_body_bytes: Positive = 8 * 2**20
    """Largest body of a request, images that are sent as ``data:`` included; a larger one is answered with
    413."""
    timeout_s: Seconds = 1800.0
    """Longest time for one generation, waiting included."""


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
    """Nucleus sampling; 1 is off, the only value that training takes: log-probs are over the whole
    vocabulary."""
    top_k: NonNegative = 0
    """Sample from the ``top_k`` most probable tokens; 0 keeps all, the only value that training takes, as for
    ``top_p``."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end a response."""
    stop_token_ids: tuple[NonNegative, ...] = ()
    """Tokens that end a response, in addition to the model's own."""
    max_batch_tokens: Positive = 262_144
    """Prompt and response tokens that fit into one engine's KV cache at once."""
    dtype: DType | None = None
    """Precision of the engine; ``None`` takes ``train.dtype``."""
    enforce_eager: bool = False
    """For ``transformers``: decode without device graphs. By default the decode pass of a token is recorded
    as a graph and replayed, where device and model allow it. Servers have arguments of their own, such as
    SGLang's ``disable_cuda_graph``."""
    schedule: Literal["sync", "one_step_off", "async"] = "sync"
    """Schedule of generation: ``sync`` before each step with its weights; ``one_step_off`` while the previous
    step trains; ``async`` all the time, through weight updates. All but ``sync`` need served engines."""
    max_staleness: Positive = 1
    """For ``async``: most weight versions between a sample's first token and the step that trains on it."""
    client: RolloutClient = RolloutClient()
    """HTTP client of served engines."""
    function: str = "single_turn"
    """Function that turns a prompt into a sample: a registered name (``single_turn``, ``multi_turn``,
    ``agent``), or ``package.module:function``."""
    function_options: dict[str, Any] = {}
    """Keyword arguments of the function."""
    function_timeout_s: Seconds = 600.0
    """Longest time, in seconds, that the function may take between two generations."""
    gateway: RolloutGateway = RolloutGateway()
    """Gateway that serves agents."""
    max_failed_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of a step's rollouts whose function may fail; they are left out. More end the run."""
    after_sample: tuple[str, ...] = ()
    """Functions ``package.module:function`` that see each finished sample before it is scored, in order; what
    they return instead of ``None`` takes its place."""
    filters: tuple[str, ...] = ()
    """Filters of groups: registered names (``zero_variance``), or ``package.module:function``. A group must
    pass all of them; rejected groups are replaced by others."""
    filter_options: dict[str, dict[str, Any]] = {}
    """Keyword arguments of the filters, by name."""
    max_num_gen_batches: Positive = 10
    """Limit on rejected groups, in multiples of the groups that a step needs."""
    on_incomplete_batch: Literal["error", "smaller_step"] = "error"
    """Action when ``max_num_gen_batches`` is reached: end the run with an error, or train the step on the
    groups that passed."""
    over_sampling: NonNegative = 0
    """Extra prompts started for a step, which ends with the first groups that are done."""
    partial_rollout: bool = False
    """Continue unfinished samples in the next step, from the tokens that they have, instead of discarding
    them."""
    requeue_discarded: bool = True
    """Restart the prompts of discarded groups at the start of the next step; ``false`` drops them."""
    sglang: dict[str, Any] = {}
    """Any argument of SGLang's server by its name, such as ``tp_size = 2``; checked against the installed
    one."""
    sglang_version: str | None = None
    """Tested version of SGLang to treat an untested one as."""
    external: tuple[str, ...] = ()
    """Addresses ``http://HOST:PORT`` of running engines to use instead of servers of the run. Their model and
    tokenizer are compared with the run's; they get its weights and are never ended."""
    api_key: str | None = None
    """Environment variable, as ``$NAME``, with the key that servers ask for: files and logs of the run hold
    its name alone. ``None`` gives each server of the run a random key, and shows ``external`` ones none."""
    admin_api_key: str | None = None
    """The same, for the key of requests that change a server: weights, cache, memory, pauses."""
    groups: tuple[RolloutGroup, ...] = ()
    """Groups of servers with different settings."""


class WeightSync(Section):
    """How rollout engines get the trained weights. Engines in training workers need none of this."""

    transport: str = "tensor"
    """Weight transport to servers, by registered name: ``tensor`` (memory that processes of one host
    share, or one accelerator), ``distributed`` (broadcast), ``disk`` (a shared directory), ``delta`` (only
    changed bytes), ``adapter`` (the adapter of ``[train.lora]`` by itself, which servers compute beside
    ``model.path``, over a shared directory). By default, servers with devices of their own or on other hosts
    use ``distributed``."""
    bucket_bytes: Annotated[int, Field(ge=4096)] = 2**30
    """Size of a bucket's buffer. There are two buffers; a larger tensor has a bucket for itself. Each bucket
    costs a request, so larger ones are faster."""
    verify: Literal["none", "first", "always"] = "first"
    """Compare the checksums of the engines' weights with those sent, tensor by tensor: never, after the first
    update of each engine, or after every one."""
    senders: Literal["one", "stages"] = "one"
    """Training ranks that send weights with ``distributed``: ``one`` gathers each tensor on rank 0, and
    ``stages`` has the first rank of each pipeline stage and expert group send its own, each in its own
    process group with all servers."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """Treatment of in-flight requests: ``retract`` restarts them with the tokens sampled so far, ``in_place``
    continues them with the KV cache of the old weights, ``abort`` ends them with what they have. With
    ``transport = "adapter"``, ``retract`` acts as ``abort``: a request keeps the adapter it began with."""
    drain_s: Annotated[float, Field(ge=0, le=1_000_000)] = 2.0
    """Longest wait for the requests in flight before an update of engines that cannot keep them, such as
    SGLang 0.5.17, in seconds. Those that have not ended then are aborted, and go on after the update."""
    deadline_s: Seconds = 300.0
    """Longest wait for an engine to take one bucket, or to answer anything else, in seconds."""
    directory: Path | None = None
    """Directory of the weight versions, for ``disk`` and ``adapter``; ``None`` takes ``weights/`` in the run
    directory."""
