"""The engine behind the endpoints: gates, ranks and requests, as SGLang's tokenizer manager has them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from anygauge_tests.fake_engine.active_request import ActiveRequest
from anygauge_tests.fake_engine.bootstrap_rooms import BootstrapRooms
from anygauge_tests.fake_engine.faults import Faults, parse_faults
from anygauge_tests.fake_engine.images import expanded
from anygauge_tests.fake_engine.lengths import parse_lengths
from anygauge_tests.fake_engine.options import Options
from anygauge_tests.fake_engine.scheduler import Scheduler
from anygauge_tests.fake_engine.tokens import source_of
from anygauge_tests.fake_engine.weights import Weights

__all__ = ["Engine"]


class Engine:
    """All that a fake engine knows. Made on its event loop."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.faults = Faults(parse_faults(options.faults))
        self.weights = Weights(options, self._change_version)
        self.ranks = [Scheduler(options, options.weight_version) for _ in range(options.dp_size)]
        self.rooms = BootstrapRooms(options)
        self.requests: dict[str, ActiveRequest] = {}
        self.paused = False
        self.asleep: set[str] = set()
        """Memory that was released, by tag."""
        self.is_hollow = False
        """Whether the weights came back from sleep empty, and no update has filled them since."""
        self.finished = 0
        self.profile: Mapping[str, Any] | None = None
        self.writes_profile = False
        self._lengths = parse_lengths(options.lengths)
        self._numbers, self._next_rank = itertools.count(), itertools.count()
        self._gate = asyncio.Condition()
        """Guard of ``paused``, ``_readers`` and ``_writing``."""
        self._readers, self._writing = 0, False
        self._tokenizer: Any = None

    # ---- generation ----

    def new_request(self, body: Mapping[str, Any]) -> ActiveRequest:
        """Return the request of a body.

        :raises ValueError: SGLang would refuse it.
        :raises ImageCountError: SGLang would fail.
        """
        self._check_awake()
        params = body.get("sampling_params") or {}
        prompt = self._prompt(body)
        self._check(prompt, params)
        self._check_adapter(body.get("lora_path"))
        self.rooms.check(body)
        if self.options.disaggregation == "prefill":
            params = {**params, "max_new_tokens": 1}
        rid = body.get("rid") or f"fake-{next(self._numbers)}"
        if rid in self.requests:
            raise ValueError(f"Duplicate request ID detected: {rid}")
        seed = params.get("sampling_seed")
        source = source_of(prompt, next(self._numbers) if seed is None else seed, self.options.vocab_size)
        request = ActiveRequest(
            rid,
            len(prompt),
            source,
            params,
            self._lengths,
            self._rank(body),
            log_probs=bool(body.get("return_logprob")),
        )
        self.requests[rid] = request
        return request

    def _prompt(self, body: Mapping[str, Any]) -> Sequence[int]:
        if (ids := body.get("input_ids")) is not None:
            if not ids:
                raise ValueError("The input_ids should not be empty.")
            return expanded(ids, body, self.options)
        if isinstance(text := body.get("text"), str):
            return [byte % (self.options.vocab_size // 2) for byte in text.encode()]
        raise ValueError("Either text, input_ids or input_embeds should be provided.")

    def _check_adapter(self, name: str | None) -> None:
        """Refuse an adapter that is not there, and a request of a run with adapters that asks for none."""
        if name != (self.options.adapter or None):
            raise ValueError(f"The request asks for the adapter {name!r}.")
        if name is not None and name not in self.weights.adapters:
            raise ValueError(f"The following requested LoRA adapters are not loaded: {name}")

    def _check_awake(self) -> None:
        """Refuse what the real engine would take, to read memory that is not there."""
        if self.asleep:
            raise ValueError(f"The engine is asleep: it has released {', '.join(sorted(self.asleep))}.")
        if self.is_hollow:
            raise ValueError("The engine's weights were released, and none were sent since.")

    def release(self, parts: Collection[str]) -> None:
        """Give memory back."""
        self.asleep.update(parts)

    def regain(self, parts: Collection[str]) -> None:
        """Take memory again; what it held is lost."""
        self.asleep.difference_update(parts)
        self.is_hollow |= "weights" in parts

    def _check(self, prompt: Sequence[int], params: Mapping[str, Any]) -> None:
        context, size = self.options.context_length, len(prompt)
        if size >= context:
            raise ValueError(
                f"The input ({size} tokens) is longer than the model's context length ({context} tokens)."
            )
        wanted = params.get("max_new_tokens")
        if wanted is not None and wanted + size > context:
            raise ValueError(
                f"Requested token count exceeds the model's maximum context length of {context} tokens. You "
                f"requested a total of {wanted + size} tokens: {size} tokens from the input messages and "
                f"{wanted} tokens for the completion."
            )
        if max(prompt) >= self.options.vocab_size or min(prompt) < 0:
            raise ValueError(
                f"The input_ids contain values out of the vocabulary of {self.options.vocab_size}."
            )
        temperature, top_k = params.get("temperature", 1.0), params.get("top_k", -1)
        if temperature is not None and temperature < 0:
            raise ValueError(f"temperature must be a non-negative finite number, got {temperature}.")
        if top_k is not None and (top_k < -1 or top_k == 0):
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")

    def _rank(self, body: Mapping[str, Any]) -> int:
        given = body.get("routed_dp_rank", body.get("data_parallel_rank"))
        size = len(self.ranks)
        if given is None:
            return next(self._next_rank) % size
        if not 0 <= given < size:
            raise ValueError(f"routed_dp_rank={given} out of range [0, {size})")
        return int(given)

    @asynccontextmanager
    async def generating(self, request: ActiveRequest) -> AsyncIterator[None]:
        """Let a request run while the block is entered, and forget it afterwards."""
        try:
            async with self._reader():
                self.ranks[request.rank].submit(request)
                yield
        finally:
            self.requests.pop(request.rid, None)
            self.finished += 1

    def current(self, request: ActiveRequest) -> ActiveRequest:
        """Return a request with its count of tokens up to date."""
        self.ranks[request.rank].update(request)
        return request

    def answer(self, request: ActiveRequest) -> dict[str, Any]:
        """Return what a client is sent about a request."""
        facts = {"spans": self.options.sglang != "0.5.17", "text": not self.options.skip_tokenizer}
        return request.answer(self.weights.version, facts)

    def abort(self, rid: str, *, everything: bool) -> None:
        """End requests. Without an id nothing happens, nor with one that is not known here."""
        if not everything and rid not in self.requests:
            return
        for rank in self.ranks:
            rank.abort(None if everything else rid)

    # ---- gates ----

    async def pause(self, mode: str) -> None:
        """Stop generation; ``abort`` also waits until nothing runs."""
        async with self._gate:
            self.paused = True
        if mode != "abort":
            for rank in self.ranks:
                rank.pause(retract=mode == "retract")
            return
        while True:
            self.abort("", everything=True)
            if not self._readers:
                return
            await asyncio.sleep(self.options.abort_poll_s)

    async def resume(self) -> None:
        """Go on."""
        for rank in self.ranks:
            rank.resume()
        async with self._gate:
            self.paused = False
            self._gate.notify_all()

    @asynccontextmanager
    async def _reader(self) -> AsyncIterator[None]:
        async with self._gate:
            await self._gate.wait_for(lambda: not self.paused and not self._writing)
            self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            await asyncio.shield(asyncio.ensure_future(self._notify()))

    async def _notify(self) -> None:
        async with self._gate:
            self._gate.notify_all()

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        """Enter once no request generates, or at once where the engine is paused."""
        async with self._gate:
            alone = not self.paused
            if alone:
                await self._gate.wait_for(lambda: not self._writing)
                self._writing = True
                await self._gate.wait_for(lambda: not self._readers)
        try:
            yield
        finally:
            if alone:
                self._writing = False
                await self._notify()

    # ---- tokenizer, weights and cache ----

    def tokenizer(self) -> Any:
        """Return the tokenizer of ``tokenizer_path``, read when first asked for; ``None`` without one."""
        path = Path(self.options.tokenizer_path or self.options.model_path) / "tokenizer.json"
        if self._tokenizer is None and path.is_file():
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_file(str(path))
        return self._tokenizer

    def _change_version(self, version: str) -> None:
        for rank in self.ranks:
            rank.change_version(version)

    def flush(self) -> bool:
        """Return whether the cache was flushed: nothing may run, nor wait unless the engine is paused."""
        waiting = 0 if self.paused else sum(rank.waiting for rank in self.ranks)
        return not waiting and not any(rank.running for rank in self.ranks)

    @property
    def retracted(self) -> int:
        """Return how many requests wait that have tokens already."""
        return sum(request.done > 0 for rank in self.ranks for request in rank.requests())

    def freeze(self) -> None:
        """Let no token be made any more, for ever."""
        for rank in self.ranks:
            rank.pause(retract=False)

    def state(self) -> dict[str, Any]:
        """Return what a test may want to know."""
        return {
            "requests": {rid: self.current(request).done for rid, request in self.requests.items()},
            "running": [rank.running for rank in self.ranks],
            "waiting": [rank.waiting for rank in self.ranks],
            "paused": self.paused,
            "asleep": sorted(self.asleep),
            "hollow": self.is_hollow,
            "weight_version": self.weights.version,
            "events": dict(self.faults.seen),
            "finished": self.finished,
            "rooms": self.rooms.used,
            "adapters": self.weights.adapters,
        }
