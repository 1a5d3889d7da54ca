"""Each transport to a real server: its log-probs are those of the weights that were sent, token by token."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from anygauge.config.schema import WeightSync
from anygauge.serving.sglang.server import SGLangServer
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.pusher import WeightPusher
from anygauge.weight_sync.receiver import Receiver
from anygauge.weight_sync.sharing import shared_memory
from anygauge.weight_sync.transports.delta import DeltaTransport
from anygauge.weight_sync.transports.disk import DiskTransport
from anygauge.weight_sync.transports.distributed import DistributedTransport
from anygauge.weight_sync.transports.tensor import TensorTransport
from anygauge_hooks.sglang import WeightApi
from anygauge_hooks.weights import WeightTransport

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

PROMPT = [3, 10, 4, 15]
TOLERANCE = 1e-4
LONG = 900
API = WeightApi(checksums="sha256")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def ask(server: SGLangPeer, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **server.keys.headers(path)}
    request = urllib.request.Request(server.address + path, data, headers)
    with urllib.request.urlopen(request, timeout=240) as answer:
        return json.load(answer)


def body(count: int) -> dict[str, Any]:
    params = {"max_new_tokens": count, "ignore_eos": True, "temperature": 1.0}
    return {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}


def streamed(server: SGLangPeer, body: dict[str, Any]) -> Iterator[Any]:
    """Yield a response as it grows; the last one is whole."""
    data = json.dumps({**body, "stream": True}).encode()
    headers = {"Content-Type": "application/json", **server.keys.headers("/generate")}
    request = urllib.request.Request(f"{server.address}/generate", data, headers)
    with urllib.request.urlopen(request, timeout=240) as answer:
        for line in answer:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                yield json.loads(text)


def furthest(model: Any, answer: Any, tokens: slice = slice(None)) -> float:
    """Return how far log-probs of an answer are from the model's, at most."""
    ids: Sequence[int] = answer["output_ids"]
    told = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *ids]])).logits[0, len(PROMPT) - 1 : -1].float()
    rows = torch.log_softmax(logits, dim=-1)
    right = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
    return float((told - right)[tokens].abs().max())


@pytest.fixture(scope="module")
def models(tiny_model: Path, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Return the model that the server starts with, and another of its shapes."""
    from transformers import AutoModelForCausalLM

    from anygauge.testing.tiny import tiny_qwen3  # once torchvision can be imported

    directory = tmp_path_factory.mktemp("other")
    other = tiny_qwen3(directory, init_std=0.2, dtype="float32", seed=1, tokenizer=tokenizer)
    return [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (tiny_model, other)]


@pytest.fixture(scope="module")
def served(servers: Callable[..., SGLangServer], tmp_path_factory: pytest.TempPathFactory) -> SGLangPeer:
    server = servers(tmp_path_factory.mktemp("runs"))
    server.start()
    return replace(server.peer(), api=API)


@pytest.fixture
def peer(served: SGLangPeer) -> Iterator[SGLangPeer]:
    beside = Receiver(served, host="127.0.0.1", bucket_bytes=1 << 16, deadline_s=120)
    yield replace(served, receiver=beside.address, secret=beside.secret)
    beside.close()


@pytest.fixture
def pusher(request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path) -> Iterator[WeightPusher]:
    makers: dict[str, Callable[[], WeightTransport]] = {
        "tensor": TensorTransport,
        "disk": lambda: DiskTransport(tmp_path, tiny_model),
        "distributed": lambda: DistributedTransport("cpu", {"cpu": "gloo"}, deadline_s=120),
        "delta": lambda: DeltaTransport(deadline_s=120),
    }
    name: str = request.param
    allocate = shared_memory if name == "tensor" else partial(torch.empty, dtype=torch.uint8)
    options = WeightSync(transport=name, bucket_bytes=1 << 16, verify="always", deadline_s=120)
    made = WeightPusher(options, makers[name](), Buffers(allocate))
    yield made
    made.close()


def weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a train engine would: a tied output layer comes once."""
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            yield name, tensor.detach()


@pytest.mark.parametrize("pusher", ["tensor", "disk", "distributed", "delta"], indirect=True)
def test_log_probs_are_of_the_weights_that_were_sent_also_in_the_middle_of_a_response(
    pusher: WeightPusher, peer: SGLangPeer, models: list[Any]
) -> None:
    for version, number in ((1, 1), (2, 0), (3, 1)):
        report = pusher.push(weights(models[number]), version, [peer])
        assert not report.failed, report
        assert report.unverified == (), "every parameter of the server was compared"
        answer = ask(peer, "/generate", body(24))
        assert answer["meta_info"]["weight_version"] == str(version)
        assert furthest(models[number], answer) < TOLERANCE
        assert furthest(models[1 - number], answer) > 0.1, "the two models can be told apart"

    chunks = streamed(peer, body(LONG))
    begun = next(chunks)
    assert len(begun["output_ids"]) < LONG, "the response ended before its weights could change"
    assert not pusher.push(weights(models[0]), 4, [peer]).failed
    *_, answer = chunks
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["3", "4"]
    cut = int(spans[0]["end"])
    assert 0 < cut < LONG
    assert furthest(models[1], answer, slice(0, cut)) < TOLERANCE
    assert furthest(models[0], answer, slice(cut, None)) < TOLERANCE


@pytest.mark.parametrize("pusher", ["tensor"], indirect=True)
def test_a_parameter_that_is_not_what_was_sent_is_named(
    pusher: WeightPusher, peer: SGLangPeer, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    other = TensorTransport()
    honest = other.send

    def damaging(bucket: Any, update: Any) -> None:
        places = {each.name: each for each in bucket.tensors}
        if name in places:
            bucket.data[places[name].start] ^= 1
        honest(bucket, update)
        if name in places:
            bucket.data[places[name].start] ^= 1  # so that only the server has it

    monkeypatch.setattr(pusher._transport, "send", damaging)
    (failed,) = pusher.push(weights(models[0]), 5, [peer]).failed
    assert failed.state == "unusable"
    assert "model.layers.1.self_attn.qkv_proj.weight" in (failed.error or "")
    assert name in (failed.error or "")
    monkeypatch.undo()
    assert not pusher.push(weights(models[0]), 6, [peer]).failed
    assert furthest(models[0], ask(peer, "/generate", body(24))) < TOLERANCE


@pytest.fixture(scope="module")
def two_processes(
    servers: Callable[..., SGLangServer], tmp_path_factory: pytest.TempPathFactory
) -> SGLangPeer:
    """Return a server whose matrices are split between two processes."""
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as patch:  # SGLang wants to know the cores of each
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        server = servers(tmp_path_factory.mktemp("runs"), sglang={"tp_size": 2})
        server.start()
    return server.peer()


@pytest.mark.soak
@pytest.mark.parametrize("pusher", ["tensor", "distributed", "disk"], indirect=True)
def test_weights_reach_a_server_that_splits_its_matrices(
    pusher: WeightPusher, two_processes: SGLangPeer, models: list[Any]
) -> None:
    assert two_processes.tensor_parallel == 2
    for version, number in ((1, 1), (2, 0)):
        assert not pusher.push(weights(models[number]), version, [two_processes]).failed
        answer = ask(two_processes, "/generate", body(24))
        assert furthest(models[number], answer) < TOLERANCE
        assert furthest(models[1 - number], answer) > 0.1
