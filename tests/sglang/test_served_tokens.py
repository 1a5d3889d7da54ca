"""Tokens and log-probs of a real server, compared with transformers; and its life."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from anygauge.config import Config
from anygauge.config.schema import RolloutClient
from anygauge.rollout.gateway.server import Gateway
from anygauge.serving.engine_pool import EnginePool
from anygauge.serving.sglang.server import SGLangServer
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.rl import Prompt, Sample, SamplingParams
from anygauge_hooks.sglang import NO_KEYS, ServerKeys
from anygauge_tests import http_requests

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

ASKED = (
    *("/generate", "/model_info", "/server_info", "/v1/tokenize", "/abort_request", "/flush_cache"),
    *("/update_weights_from_tensor", "/update_weights_from_disk", "/update_weights_from_distributed"),
    *("/init_weights_update_group", "/destroy_weights_update_group", "/weights_checker"),
)
"""Paths that need a key, for requests that leave the server as it is."""
PROMPT = [3, 10, 4, 15]
TOLERANCE = 1e-4


def ask(server: SGLangPeer, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **server.keys.headers(path)}
    request = urllib.request.Request(server.address + path, data, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def generate(server: SGLangPeer, **params: Any) -> tuple[list[int], list[float]]:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 24, "ignore_eos": True, **params},
        "return_logprob": True,
    }
    answer = ask(server, "/generate", body)
    log_probs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return answer["output_ids"], log_probs


def expected(
    model: Any, tokens: Sequence[int], temperature: float = 1.0, *, prompt: Sequence[int] = PROMPT
) -> list[float]:
    """Return the log-probs of the tokens after a prompt, of all of the vocabulary."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    rows = torch.log_softmax(logits / temperature, dim=-1)
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def family(server: SGLangServer) -> list[psutil.Process]:
    """Return the server's processes and its supervisor."""
    supervisor = psutil.Process(int(server.facts()["pid"])).parent()
    assert supervisor is not None
    return [supervisor, *supervisor.children(recursive=True)]


def shared_memory(processes: Sequence[psutil.Process]) -> set[Path]:
    links = [link for each in processes for link in Path(f"/proc/{each.pid}/fd").iterdir()]
    found = {Path(os.readlink(link)) for link in links if link.exists()}
    return {path for path in found if path.parent == Path("/dev/shm") and path.name.startswith("sglang_")}


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def both(
    servers: Callable[..., SGLangServer], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SGLangServer, SGLangServer]:
    """Return two servers that were started at once."""
    directory = tmp_path_factory.mktemp("runs")
    pair = (servers(directory, rank=0), servers(directory, rank=1))
    threads = [threading.Thread(target=server.start) for server in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return pair


def test_two_servers_that_start_at_once_have_ports_logs_and_processes_of_their_own(
    both: tuple[SGLangServer, SGLangServer],
) -> None:
    facts = [server.facts() for server in both]
    assert all(server.is_alive() for server in both)
    for name in ("address", "log", "pid"):
        assert len({each[name] for each in facts}) == 2, name
    assert [Path(each["log"]).name for each in facts] == ["rollout-0-engine.log", "rollout-1-engine.log"]
    assert {ask(server.peer(), "/server_info")["version"] for server in both} == {facts[0]["installed"]}


def test_a_server_answers_no_stranger_and_shows_its_keys_nowhere(
    both: tuple[SGLangServer, SGLangServer],
) -> None:
    server, other = both
    keys, others = server.peer().keys, other.peer().keys
    assert len({keys.api, keys.admin, others.api, others.admin}) == 4
    for shown in (NO_KEYS, others, ServerKeys(api=keys.admin, admin=keys.api)):
        refused = {path: status(replace(server.peer(), keys=shown), path) for path in ASKED}
        assert set(refused.values()) == {401}, refused
    accepted = {path: status(server.peer(), path) for path in ASKED}
    assert 401 not in accepted.values(), accepted
    assert status(replace(server.peer(), keys=NO_KEYS), "/health") == 200
    log = server.log.read_text()
    assert "'api_key': '***'" in log, "SGLang has written its arguments"
    start, _, served = log.partition("fired up")
    assert "401 Unauthorized" in served, "the log has a line for each request"
    assert "401 Unauthorized" not in start, "the server sends its key to itself"
    texts = [log, repr(server.facts()), *(" ".join(each.cmdline()) for each in family(server))]
    assert not any(key in text for key in (keys.api, keys.admin) for text in texts)


def test_a_server_listens_on_loopback_alone(both: tuple[SGLangServer, SGLangServer]) -> None:
    found = [each for process in family(both[0]) for each in process.net_connections(kind="inet")]
    listens = [each.laddr for each in found if each.status == psutil.CONN_LISTEN]
    assert {each.ip for each in listens} == {"127.0.0.1"}, listens


def status(server: SGLangPeer, path: str) -> int:
    """Return the status of a request without any meaning."""
    headers = server.keys.headers(path)
    url = server.address + path
    if path in ("/model_info", "/server_info", "/health"):
        return http_requests.ask(url, headers=headers).status
    headers = {"Content-Type": "application/json", **headers}
    return http_requests.ask(url, b'{"rid": "none"}', headers).status


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_log_probs_are_those_of_transformers_at_the_temperature(
    temperature: float, both: tuple[SGLangServer, SGLangServer], model: Any
) -> None:
    tokens, found = generate(both[0].peer(), temperature=temperature)
    assert len(tokens) == 24
    assert found == pytest.approx(expected(model, tokens, temperature), abs=TOLERANCE)
    if temperature != 1.0:
        assert found != pytest.approx(expected(model, tokens, 1.0), abs=0.01)


def test_a_nucleus_leaves_the_log_probs_those_of_all_tokens(
    both: tuple[SGLangServer, SGLangServer], model: Any
) -> None:
    tokens, found = generate(both[0].peer(), temperature=1.0, top_p=0.5)
    assert found == pytest.approx(expected(model, tokens, 1.0), abs=TOLERANCE)


def test_both_servers_serve_the_same_weights(both: tuple[SGLangServer, SGLangServer]) -> None:
    greedy = [generate(server.peer(), temperature=0.0) for server in both]
    assert greedy[0][0] == greedy[1][0]
    assert greedy[0][1] == pytest.approx(greedy[1][1], abs=TOLERANCE)


WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object"}},
}


async def conversation(client: Any) -> None:
    """Ask with tools, answer as a tool, let the next turn be streamed, and begin another way."""
    create = partial(client.chat.completions.create, model="policy", tools=[WEATHER])
    messages: list[Any] = [{"role": "user", "content": "what is the weather"}]
    first = (await create(messages=messages, max_tokens=12, logprobs=True)).choices[0]
    assert first.logprobs.content
    messages.append({"role": "assistant", "content": first.message.content})
    messages.append({"role": "tool", "tool_call_id": "1", "content": "sunny in Paris"})
    parts = [chunk.choices[0] async for chunk in await create(messages=messages, max_tokens=16, stream=True)]
    assert "".join(part.delta.content or "" for part in parts)
    assert parts[-1].finish_reason in ("length", "stop")
    messages[0] = {"role": "user", "content": "what is the weather in Paris"}
    assert len((await create(messages=messages, max_tokens=8, n=2)).choices) == 2


def scored(server: SGLangPeer, tokens: Sequence[int]) -> list[float]:
    """Return the engine's own log-probs of some tokens but the first, each given those before it."""
    params = {"max_new_tokens": 1, "temperature": 1.0}
    body = {
        "input_ids": list(tokens),
        "sampling_params": params,
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    rows = ask(server, "/generate", body)["meta_info"]["input_token_logprobs"]
    assert len(rows) == len(tokens)  # their ids are those that were sent, but for the vocabulary's last
    return [row[0] for row in rows[1:]]


def test_what_an_agent_is_trained_on_has_the_engines_log_probs(
    both: tuple[SGLangServer, SGLangServer], model: Any, tokenizer: Any
) -> None:
    openai = pytest.importorskip("openai")
    server = both[0].peer()

    async def main() -> list[Sample]:
        fleet = EnginePool(RolloutClient())
        fleet.add("engine-0", server)
        async with Gateway(tokenizer, SamplingParams(max_new_tokens=64)) as gateway:
            session = gateway.open(fleet, seed=1)
            url, key = gateway.openai_url(session), gateway.key(session)
            async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
                await conversation(client)
        await fleet.close()
        return session.trajectories(Prompt(index=0, tokens=(1,), text=""))

    samples = asyncio.run(main())
    assert [sum(sample.loss_mask) > 0 for sample in samples[1:]] == [1, 1]
    assert 0 in samples[0].loss_mask  # what the tool answered
    for sample in samples:
        whole = sample.prompt_tokens + sample.response_tokens
        begin = len(sample.prompt_tokens) - 1
        own, ours = scored(server, whole)[begin:], expected(model, whole[1:], prompt=whole[:1])[begin:]
        made = [place for place, mask in enumerate(sample.loss_mask) if mask]
        found = [sample.log_probs[place] for place in made]
        assert found == pytest.approx([own[place] for place in made], abs=TOLERANCE)
        assert found == pytest.approx([ours[place] for place in made], abs=TOLERANCE)


def test_a_killed_server_is_noticed_and_starts_again(
    both: tuple[SGLangServer, SGLangServer], model: Any
) -> None:
    server, other = both
    processes, files = family(server), shared_memory(family(server))
    assert files
    os.kill(int(server.facts()["pid"]), signal.SIGKILL)
    psutil.wait_procs(processes, timeout=60)
    assert not server.is_alive()
    assert not any(each.is_running() for each in processes if each.pid != processes[0].pid)
    assert not any(path.exists() for path in files)
    assert other.is_alive()
    server.start()
    tokens, found = generate(server.peer(), temperature=1.0)
    assert found == pytest.approx(expected(model, tokens, 1.0), abs=TOLERANCE)


def test_a_clean_stop_leaves_no_process_and_no_file_and_spares_the_other(
    both: tuple[SGLangServer, SGLangServer],
) -> None:
    server, other = both
    processes, files = family(server), shared_memory(family(server))
    spared = shared_memory(family(other))
    assert files
    assert spared
    server.close()
    assert not any(each.is_running() for each in processes)
    assert not any(path.exists() for path in files)
    assert all(path.exists() for path in spared)
    assert other.is_alive()
    assert generate(other.peer(), temperature=1.0)[0]
    server.close()
    assert not server.is_alive()


def test_a_server_whose_worker_is_gone_ends_itself_and_leaves_nothing(
    both: tuple[SGLangServer, SGLangServer],
) -> None:
    processes, files = family(both[1]), shared_memory(family(both[1]))
    supervisor = both[1]._supervisor
    assert files
    assert supervisor is not None
    assert supervisor.stdin is not None
    supervisor.stdin.close()  # as the kernel does when a worker is killed
    supervisor.wait(timeout=60)
    assert not any(each.is_running() for each in processes)
    assert not any(path.exists() for path in files)


def test_a_value_that_sglang_refuses_is_an_error_with_the_end_of_the_log(
    servers: Callable[..., SGLangServer], tmp_path: Path
) -> None:
    server = servers(tmp_path, sglang={"attention_backend": "abacus"})
    with pytest.raises(RolloutError, match="ended with status 2 before it answered") as caught:
        server.start()
    assert "argument --attention-backend: invalid choice: 'abacus'" in str(caught.value)
    assert not server.is_alive()


def test_an_argument_that_sglang_does_not_know_is_named(
    make_config: Callable[..., Config], tmp_path: Path, plugins: Any
) -> None:
    config = make_config(tmp_path, sglang={"tensor_paralel_size": 2, "nccl-port": 1})
    problems = plugins.collect("check_config", config=config, backend=plugins.get("register_backends", "cpu"))
    hints = {each.path: each.hint for each in problems if each.path.startswith("rollout.sglang")}
    assert "close names: tensor_parallel_size" in hints["rollout.sglang.tensor_paralel_size"]
    assert hints["rollout.sglang.nccl-port"] == "The launcher takes a free port."
