"""The plugin: registers ``rollout.engine = "vllm"``, and speaks vLLM's API to its servers."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from anygauge_hooks import hookimpl
from anygauge_hooks.engines import RolloutEngineSpec
from anygauge_hooks.errors import DeadlineError, RolloutError
from anygauge_hooks.rollout import Generation
from anygauge_hooks.serving import EngineAwayError, ServerPeer
from anygauge_hooks.weights import WeightTarget

if TYPE_CHECKING:
    from anygauge_hooks.engines import WorkerContext
    from anygauge_hooks.rollout import GenerateRequest
    from anygauge_hooks.serving import ClientLimits, EngineServer, ImageEncoder, MemoryState
    from anygauge_hooks.weights import PauseMode, WeightUpdate

__all__ = ["VllmClient", "VllmPeer", "VllmTarget", "register_rollout_engines"]

PAUSES: Mapping[PauseMode, str] = {"abort": "abort", "retract": "abort", "in_place": "keep"}


@hookimpl
def register_rollout_engines() -> list[RolloutEngineSpec]:
    """Register the engine."""
    return [RolloutEngineSpec(name="vllm", serve=_serve)]


def _serve(config: Any, context: WorkerContext) -> EngineServer:
    from anygauge_tests.vllm_engine.server import VllmServer

    return VllmServer(config.model.path, VllmPeer)


@dataclass(frozen=True, kw_only=True)
class VllmPeer(ServerPeer):
    """A server, as other processes know it."""

    def client(self, limits: ClientLimits, *, name: str, images: ImageEncoder | None) -> VllmClient:
        """Return a client for requests."""
        return VllmClient(self.address, limits, name)

    def target(self, *, deadline_s: float) -> VllmTarget:
        """Return how it takes weights."""
        return VllmTarget(self.address, deadline_s)


class VllmClient:
    """An :class:`~anygauge_hooks.serving.EngineClient`."""

    def __init__(self, address: str, limits: ClientLimits, name: str) -> None:
        self.address, self.name, self.silence = address, name, ""
        self.weight_version = 0
        self._limits = limits
        self._ids: set[str] = set()
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self,
        request: GenerateRequest,
        *,
        rank: int | None = None,
        ends: float | None = None,
    ) -> Generation:
        """Return what follows; the core tries again where this raises :class:`EngineAwayError`."""
        timeout_s = self._limits.request_timeout_s
        if ends is not None:
            timeout_s = ends - asyncio.get_running_loop().time()
        version = self.weight_version
        self._ids.add(request.id)
        try:
            answer = await self._ask("/v1/completions", _completion_request(request), timeout_s)
        finally:
            self._ids.discard(request.id)
        (choice,) = answer["choices"]
        tokens = tuple(choice["token_ids"])
        return Generation(
            tokens=tokens,
            log_probs=tuple(choice["logprobs"]["token_logprobs"]),
            weight_versions=(version,) * len(tokens),
            finish_reason=choice["finish_reason"],
        )

    async def abort(self) -> None:
        """End all generations."""
        await self._control("/abort_requests", {"request_ids": list(self._ids)})

    async def set_memory_state(self, state: MemoryState) -> None:
        """Refuse: the engine does not declare that it releases memory."""
        raise RolloutError(f"{self.name} releases no memory.")

    async def is_healthy(self) -> bool:
        """Return whether it answers its health check."""
        try:
            await self._ask("/health", None, self._limits.probe_timeout_s)
        except (RolloutError, DeadlineError) as error:
            self.silence = str(error)
            return False
        return True

    is_answering = is_healthy

    async def close(self, *, farewell_s: float = 0.0) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _control(self, path: str, body: Mapping[str, Any]) -> None:
        await self._ask(path, body, self._limits.control_timeout_s)

    async def _ask(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        verb = "GET" if body is None else "POST"
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(verb, self.address + path, json=body) as answer,
            ):
                if answer.status >= 500:
                    raise EngineAwayError(f"{self.name} answered {path} with {answer.status}.")
                if answer.status >= 400:
                    raise RolloutError(f"{self.name} refused {path}: {await answer.text()}")
                return await answer.json()
        except TimeoutError as error:
            raise DeadlineError(f"{self.name} did not answer {path} in {timeout_s:g} s.") from error
        except aiohttp.ClientError as error:
            raise EngineAwayError(f"{self.name} is away: {error}") from error


def _completion_request(request: GenerateRequest) -> dict[str, Any]:
    params = request.params
    return {
        "model": "policy",
        "request_id": request.id,
        "prompt": list(request.tokens),
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": request.seed % 2**63,
        "stop": list(params.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "logprobs": 0,
        "return_token_ids": True,
    }


class VllmTarget(WeightTarget):
    """Reads whole checkpoints."""

    def __init__(self, address: str, deadline_s: float) -> None:
        self._address, self._deadline_s = address, deadline_s

    def pause(self, mode: PauseMode) -> None:
        """Make no tokens."""
        self._post(f"/pause?mode={PAUSES[mode]}", {})

    def resume(self) -> None:
        """Go on."""
        self._post("/resume", {})

    def load_directory(self, path: str, update: WeightUpdate) -> None:
        """Have every worker of the server read a checkpoint."""
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._address + path, json.dumps(body).encode(), headers)
        try:
            urllib.request.urlopen(request, timeout=self._deadline_s).close()
        except urllib.error.URLError as error:
            raise RolloutError(f"{self._address}{path} failed: {error}.") from error
