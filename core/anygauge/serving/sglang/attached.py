"""A server that somebody else has started."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anygauge.hub import localized
from anygauge.serving.sglang.client import EngineClient, Expected, check_engine, running_limit
from anygauge.serving.sglang.keys import named_keys
from anygauge.serving.sglang.versions import ServerApi, find_api
from anygauge.serving.sglang.weights import SGLangPeer

if TYPE_CHECKING:
    from anygauge.config import Config

__all__ = ["AttachedServer"]

TEXTS, LENGTH = 4, 32
"""How many texts tell tokenizers apart, and of how many tokens."""


class AttachedServer:
    """An external server as ``EngineServer``: checked when it is started, left running when closed.

    :param address: ``http://host:port``.
    """

    def __init__(self, config: Config, address: str) -> None:
        self._config = config
        self._options = config.rollout.client.model_copy(update={"attempts": 1})
        self._address = address.rstrip("/")
        self._keys = named_keys(config)
        self._facts: dict[str, str] = {}
        self._api: ServerApi | None = None
        self._device_type = ""
        self._running_limit: int | None = None

    def start(self, encoders: Sequence[str] = ()) -> str:
        """Return its address after checking that it serves the run's model.

        :raises RolloutError: It is something else, of a version that was not tested, or away
            (:class:`~anygauge_hooks.serving.EngineAwayError`).
        """
        asyncio.run(self._look())
        return self._address

    async def _look(self) -> None:
        client = EngineClient(self._address, self._options, keys=self._keys)
        try:
            self._facts = dict(await check_engine(client, _expected(self._config)))
            info = await client.server_info()
        finally:
            await client.close()
        self._api = find_api(self._facts["version"], treat_as=self._config.rollout.sglang_version)
        self._device_type = str(info.get("device") or "")
        self._running_limit = running_limit(info)
        self._facts |= {
            "installed": self._facts["version"],
            "version": self._api.version,
            "ranks": str(info.get("dp_size") or 1),
            "tensor_parallel": str(info.get("tp_size") or 1),
        }

    def is_alive(self) -> bool:
        """Return whether it answers."""
        return asyncio.run(self._answers())

    async def _answers(self) -> bool:
        client = EngineClient(self._address, self._options, keys=self._keys)
        try:
            return await client.is_answering()
        finally:
            await client.close()

    def facts(self) -> Mapping[str, str]:
        """Return the server's facts about itself."""
        return self._facts

    def peer(self) -> SGLangPeer:
        """Return how its version takes weights."""
        assert self._api is not None, "it was looked at"
        return SGLangPeer(
            address=self._address,
            tensor_parallel=int(self._facts["tensor_parallel"]),
            data_parallel=int(self._facts["ranks"]),
            max_running_requests=self._running_limit,
            device=self._device_type or None,
            api=self._api.weights(self._device_type),
            keys=self._keys,
        )

    def close(self) -> None:
        """Do nothing: the run did not start it."""


def _expected(config: Config) -> Expected:
    """Return what the run's requests need of an engine."""
    from transformers import AutoTokenizer

    path: Path = localized(config, data=False).model.path
    hf = json.loads((path / "config.json").read_text(encoding="utf-8"))
    tokenizer: Any = AutoTokenizer.from_pretrained(
        path, local_files_only=True, trust_remote_code=config.model.trust_remote_code
    )
    return Expected(
        architectures=tuple(hf.get("architectures") or ()),
        tokens=dict(_tokenized(tokenizer)),
        context_length=(config.data.max_prompt_tokens or 1) + config.rollout.max_new_tokens,
    )


def _tokenized(tokenizer: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield texts from all over a vocabulary, and what its tokenizer makes of them."""
    size = len(tokenizer)
    step = max(1, size // (TEXTS * LENGTH))
    for first in range(TEXTS):
        ids = range(first * step, size, TEXTS * step)
        text = tokenizer.decode(list(ids), skip_special_tokens=True)
        if text:
            yield text, tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
