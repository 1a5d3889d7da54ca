"""The agent of ``examples/arithmetic_agent.toml``: asks for a sum, checks the answer, and asks once more.

It knows nothing of training: with another ``base_url`` it would talk to any server of OpenAI's API. It needs
``pip install openai``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

MOST_TOKENS = 4
"""Most tokens of an answer: three digits and the end."""


@cache
def connections() -> DefaultAsyncHttpxClient:
    """Return one pool for all rollouts: to make a pool takes longer than to ask."""
    return DefaultAsyncHttpxClient(verify=False)  # the address is plain HTTP, so no certificates are read


async def solve(base_url: str, api_key: str, row: Mapping[str, Any]) -> float:
    """Return 1 if the first answer is right, 0.5 if the second is, else 0."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=connections())
    question = {"role": "user", "content": row["prompt"]}
    messages = [question]
    for reward in (1.0, 0.5):
        reply = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=MOST_TOKENS
        )
        answer = reply.choices[0].message.content
        if answer == row["label"]:
            return reward
        messages += [{"role": "assistant", "content": answer}, question]
    return 0.0
