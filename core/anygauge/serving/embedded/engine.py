"""The embedded rollout engine: a transformers model in the worker's own process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from anygauge.config.modalities import modalities
from anygauge.serving.embedded.batches import PendingSample, Response, generate_batch, plan_batches
from anygauge.serving.embedded.decoding import Recorder
from anygauge.serving.embedded.multimodal import MultimodalContext, MultimodalTowers
from anygauge.serving.embedded.stopping import StopRules
from anygauge.serving.embedded.weights import copy_weights, read_weights
from anygauge_hooks.errors import CheckpointError, RolloutError, UnknownNameError
from anygauge_hooks.models import text_config, transformers_model
from anygauge_hooks.rollout import Generation

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.engines import WeightStream, WorkerContext
    from anygauge_hooks.rl import SamplingParams
    from anygauge_hooks.rollout import GenerateRequest
    from anygauge_hooks.types import CaptureGraph

__all__ = ["TransformersEngine", "make_engine"]


def make_engine(config: Config, context: WorkerContext) -> TransformersEngine:
    """Return an engine that serves the weights of ``model.path`` as version 0.

    :raises CheckpointError: The directory is not complete.
    """
    return TransformersEngine(
        config.model.path,
        dtype=getattr(torch, config.rollout.dtype or config.train.dtype or "float32"),
        device=context.device.torch_device,
        max_batch_tokens=config.rollout.max_batch_tokens,
        trust_remote_code=config.model.trust_remote_code,
        capture=None if config.rollout.enforce_eager else context.device.capture_graph,
        build=_builder(config, context),
        multimodal=_multimodal_context(config, context),
    )


def _read_config(config: Config) -> Mapping[str, Any] | None:
    """Return the Hugging Face config, or ``None`` if the directory has none."""
    path = config.model.path / "config.json"
    return text_config(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _builder(config: Config, context: WorkerContext) -> Callable[[torch.dtype], Any] | None:
    """Return the builder of a family that transformers has no class for, if the model is of one."""
    if (hf := _read_config(config)) is None:
        return None
    try:
        own = transformers_model(context.plugins.model(hf.get("architectures") or ()))
    except UnknownNameError:
        return None
    return None if own is None else partial(own.build, hf)


def _multimodal_context(config: Config, context: WorkerContext) -> MultimodalContext | None:
    """Return what the model of a run is shown: nothing, if transformers has it only with its towers."""
    hf, kinds = _read_config(config), modalities(config)
    if hf is None or (kinds and context.media is None):
        return None
    if not kinds and ("auto_map" in hf or hf.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        return None
    spec = context.plugins.model(hf.get("architectures") or ())
    if spec.media is None:
        return None
    return MultimodalContext.of(spec, hf, kinds, context.media)


class TransformersEngine:
    """Generates with a transformers model in this process; see :class:`anygauge_hooks.engines.RolloutEngine`.

    A sample depends on the weights, its prompt, the sampling parameters and its seed. What else is in its
    batch can only change the rounding of matrix products, and with it a token whose draw falls within that
    rounding of the border between two tokens. The same call gives the same samples.

    :param path: Hugging Face directory: config, tokenizer, safetensors.
    :param dtype: Precision of the weights and of the cache.
    :param device: Where the model lives.
    :param max_batch_tokens: Prompt and response tokens held in the cache at once.
    :param trust_remote_code: Let Python files of the directory run.
    :param capture: Records the device's work, for decoding; ``None`` where every pass is queued again.
    :param build: Builds the model, given a dtype, where transformers has no class for it.
    :param multimodal: Media that the model is shown; ``None`` takes the class that reads text alone.
    :raises CheckpointError: The directory is not complete, or needs Python files that may not run.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_batch_tokens: int,
        trust_remote_code: bool = False,
        capture: CaptureGraph | None = None,
        build: Callable[[torch.dtype], Any] | None = None,
        multimodal: MultimodalContext | None = None,
    ) -> None:
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"No model in {path}: config.json not found.",
                hint="Set model.path to a Hugging Face directory.",
            )
        self.version = 0
        self._max_batch_tokens = max_batch_tokens
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        self._refusal: str | None = None
        self._recorder = Recorder(capture)
        build = build or partial(_from_transformers, path, trust_remote_code, multimodal)
        self._tokenizer, self._model = _load(path, dtype, device, trust_remote_code, build)
        self._towers = None if multimodal is None else MultimodalTowers(self._model, multimodal)
        text = self._model.config.get_text_config()
        self._vocab_size: int = text.vocab_size
        self._context_length: int | None = getattr(text, "max_position_embeddings", None)
        self._stop_rules = StopRules(
            self._tokenizer, _eos_ids(path, self._model.config, self._tokenizer), self._vocab_size, device
        )
        left_out = (
            [prefix for spec in multimodal.left_out() for prefix in spec.hf_prefixes] if multimodal else []
        )
        unused = multimodal.unused if multimodal else ()
        copy_weights(self._model, read_weights(path, without=(*left_out, *unused)))

    def answer(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Answer the requests of one batch, in order.

        A response ends early, as ``length``, where prompt and response fill the model's context.

        :raises RolloutError: A request cannot be served, or the last weight update failed.
        """
        with self._lock:
            self._aborted.clear()
            self._check_open()
            if self._refusal is not None:
                raise RolloutError(self._refusal, hint="Send a complete set of weights.")
            if not requests:
                return []
            longest = max(request.params.max_new_tokens for request in requests)
            params = replace(requests[0].params, max_new_tokens=longest)
            self._check(requests, params)
            responses = self._run(requests, params)
            return [
                self._generation(response, request.params.max_new_tokens)
                for response, request in zip(responses, requests, strict=True)
            ]

    def update_weights(self, weights: WeightStream, version: int) -> None:
        """Replace all weights, in place, between two calls of :meth:`answer`.

        :raises WeightMappingError: A tensor is missing, unknown or of the wrong shape; all are listed. Until
            an update succeeds, the engine refuses to generate.
        """
        with self._lock:
            self._check_open()
            self._refusal = f"The update to weight version {version} failed, so the weights are incomplete."
            copy_weights(self._model, weights)
            self.version = version
            self._refusal = None

    def abort(self) -> None:
        """End the :meth:`answer` that is running, if any, after its current token."""
        self._aborted.set()

    def close(self) -> None:
        """Release the model; the engine serves nothing after it."""
        self.abort()
        with self._lock:
            self._model = self._towers = None

    def _check_open(self) -> None:
        if self._model is None:
            raise RolloutError("The rollout engine is closed.", hint="Make another one.")

    def _check(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> None:
        """Refuse what would fail later, on the device, without a name."""
        _check_params(params, self._vocab_size)
        checked: set[int] = set()  # the samples of a prompt share its tokens
        for request in requests:
            if id(request.tokens) not in checked or request.media:
                checked.add(id(request.tokens))
                self._check_prompt(request, params)

    def _check_prompt(self, request: GenerateRequest, params: SamplingParams) -> None:
        tokens, name = request.tokens, f"Request {request.label}"
        if not tokens:
            raise RolloutError(f"{name} has no tokens.", hint="Generation needs at least one.")
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self._vocab_size:
                raise RolloutError(
                    f"{name} has token {token}, outside the vocabulary of {self._vocab_size}.",
                    hint="Tokenize it with the tokenizer that the model in model.path was trained with.",
                )
        if self._towers is not None:
            self._towers.check(request.media, name)
        elif request.media:
            raise RolloutError(
                f"{name} has {request.media[0].kind}, and the engine's model is text-only.",
                hint="Say what the model takes: model.modalities, or data.multimodal_keys.",
            )
        if self._room(tokens, params) < 1:
            raise RolloutError(
                f"{name} has {len(tokens)} tokens; the model's context is {self._context_length}.",
                hint="Set data.max_prompt_tokens below it.",
            )

    def _room(self, tokens: Sequence[int], params: SamplingParams) -> int:
        if self._context_length is None:
            return params.max_new_tokens
        return min(params.max_new_tokens, self._context_length - len(tokens))

    def _run(self, requests: Sequence[GenerateRequest], params: SamplingParams) -> list[Response]:
        """Return a response for each request."""
        stopper = self._stop_rules.stopper(params)
        rows = [
            PendingSample(
                index=index,
                tokens=request.tokens,
                seed=request.seed,
                max_new_tokens=self._room(request.tokens, params),
                media=request.media,
            )
            for index, request in enumerate(requests)
        ]
        responses = [Response()] * len(rows)
        for batch in plan_batches(rows, params.max_new_tokens, self._max_batch_tokens):
            if self._aborted.is_set():
                break
            results = generate_batch(
                self._model, batch, params, stopper, self._aborted.is_set, self._recorder, self._towers
            )
            for row, response in zip(batch, results, strict=True):
                responses[row.index] = response
        return responses

    def _generation(self, response: Response, limit: int) -> Generation:
        tokens = response.tokens[:limit]
        return Generation(
            tokens=tokens,
            log_probs=response.log_probs[:limit],
            weight_versions=(self.version,) * len(tokens),
            finish_reason="length" if len(tokens) < len(response.tokens) else response.finish_reason,
        )


def _load(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    build: Callable[[torch.dtype], Any],
) -> tuple[Any, Any]:
    """Return the tokenizer, and the model with weights yet to be copied in."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
        # Weights are copied in later. Drawing them first would take time and advance the random state.
        with no_init_weights(), device:
            model = build(dtype)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"transformers cannot load {path}: {error}",
            hint="Complete the directory; one that needs Python files of its own also needs "
            "model.trust_remote_code = true.",
        ) from error
    model.tie_weights()
    return tokenizer, model.eval().requires_grad_(False)


def _from_transformers(
    path: Path, trust_remote_code: bool, multimodal: MultimodalContext | None, dtype: torch.dtype
) -> Any:
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    config = getattr(config, "thinker_config", config)  # of a model that speaks, what it thinks with
    auto = AutoModelForCausalLM if multimodal is None else AutoModelForMultimodalLM
    # Without a name transformers takes sdpa where a model has it, and eager attention for sinks.
    return auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)


def _eos_ids(path: Path, config: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end a response: those of the generation config, and the tokenizer's own."""
    source = config.get_text_config()
    if (path / "generation_config.json").is_file():
        source = GenerationConfig.from_pretrained(path, local_files_only=True)
    value = getattr(source, "eos_token_id", None)
    ids = set(value) if isinstance(value, list) else {value}
    return {token for token in ids | {tokenizer.eos_token_id} if token is not None}


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    outside = [token for token in params.forbidden if not 0 <= token < vocab_size]
    wrong = [
        text
        for text, ok in (
            (
                f"max_new_tokens = {params.max_new_tokens}, which must be at least 1",
                params.max_new_tokens >= 1,
            ),
            (f"temperature = {params.temperature}, which must be at least 0", params.temperature >= 0),
            (f"top_p = {params.top_p}, which must be above 0 and at most 1", 0 < params.top_p <= 1),
            (f"top_k = {params.top_k}, which must be at least 0", params.top_k >= 0),
            (f"forbidden tokens {outside} outside the vocabulary of {vocab_size}", not outside),
        )
        if not ok
    ]
    if wrong:
        raise RolloutError(
            f"Cannot sample with {'; '.join(wrong)}.", hint="Correct SamplingParams; a run takes [rollout]."
        )
