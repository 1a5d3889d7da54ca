"""Images at a real server: its log-probs are those of the trainer's model, tower included, turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from anygauge.config.schema import WeightSync
from anygauge.plugins import Plugins
from anygauge.serving.image_encoder import ImageEncoder
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
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.sglang import WeightApi
from anygauge_hooks.weights import WeightTransport
from anygauge_tests.served_vision import PATCH, VisionReference

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
TOLERANCE = 1e-4
API = WeightApi(checksums="sha256")
MakeServer = Callable[..., SGLangServer]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, plugins: Plugins) -> VisionReference:
    from anygauge.testing.tiny import tiny_tokenizer
    from anygauge.testing.tiny_vision import add_vision_tokens, tiny_qwen3_vl

    path = tmp_path_factory.mktemp("seeing")
    tokenizer = add_vision_tokens(tiny_tokenizer(path, texts=["what is in the picture "] * 4))
    tiny_qwen3_vl(path, tokenizer, patch=PATCH, pixels=(32 * 32, 256 * 256), init_std=0.2)
    return VisionReference(plugins.model([ARCHITECTURE]), path)


def started(server: SGLangServer, encoders: Sequence[str] = ()) -> SGLangPeer:
    server.start(encoders)
    return replace(server.peer(), api=API)


class Starting(NamedTuple):
    """Servers that start at the same time."""

    whole: Future[SGLangPeer]
    divided: Future[SGLangPeer]
    """Server with the decoder alone; an encoder computes its image features."""


@pytest.fixture(scope="module")
def starting(make_vision_model: MakeServer, reference: VisionReference) -> Iterator[Starting]:
    make = partial(make_vision_model, reference.path)
    groups = [{"kind": "encoder"}, {"kind": "regular"}]
    whole, encoder, decoder = make(), make(groups=groups), make(rank=1, groups=groups)
    with ThreadPoolExecutor(2) as pool:
        yield Starting(pool.submit(started, whole), pool.submit(lambda: started(decoder, [encoder.start()])))


@pytest.fixture(scope="module")
def peer(starting: Starting) -> SGLangPeer:
    return starting.whole.result()


def test_log_probs_are_those_of_the_model_for_one_image_and_several(
    reference: VisionReference, peer: SGLangPeer
) -> None:
    requests = [
        reference.request("one", 5, "square", 7, 8),
        reference.request("two", 5, 6, "wide", 9, 10, "square", 7),
        reference.request("same", "square", "square", 3),
        reference.request("none", 5, 6, 7),
    ]
    answers = reference.generate(peer, *requests)
    for request, said in zip(requests, answers, strict=True):
        assert len(said.tokens) == 16
        assert not set(said.tokens) & set(reference.forbidden)
        if request.media:
            assert reference.difference(request, said) < TOLERANCE
    swapped = {"square": "other"}
    assert reference.difference(requests[0], answers[0], swapped) > 0.5, "another image has other log-probs"
    assert reference.difference(requests[1], answers[1], swapped) > 0.5


def test_a_conversation_goes_on_with_an_image_of_a_tool(reference: VisionReference, peer: SGLangPeer) -> None:
    first = reference.request("turn-1", 5, "wide", 7)
    [said] = reference.generate(peer, first)
    shown = reference.request("", 4, "square", 6)
    before = len(first.tokens) + len(said.tokens)
    second = first._replace(
        id="turn-2",
        tokens=(*first.tokens, *said.tokens, *shown.tokens),
        media=(*first.media, *(medium.moved(before) for medium in shown.media)),
    )
    [answer] = reference.generate(peer, second)
    assert reference.difference(second, answer) < TOLERANCE
    assert reference.difference(second, answer, {"square": "other"}) > 0.5


def test_a_broken_picture_is_refused_and_the_server_lives(
    reference: VisionReference, peer: SGLangPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = reference.request("broken", 5, "square", 7)
    with monkeypatch.context() as patch:
        patch.setattr(ImageEncoder, "_encode", lambda self, medium, contents: b'"iVBORw0KGgpicm9rZW4="')
        with pytest.raises(RolloutError) as caught:
            reference.generate(peer, request)
    assert caught.value.code == "AG401"
    [said] = reference.generate(peer, request)
    assert reference.difference(request, said) < TOLERANCE


@pytest.fixture
def pusher(
    request: pytest.FixtureRequest, tmp_path: Path, reference: VisionReference
) -> Iterator[WeightPusher]:
    makers: dict[str, Callable[[], WeightTransport]] = {
        "tensor": TensorTransport,
        "disk": lambda: DiskTransport(tmp_path, reference.path),
        "distributed": lambda: DistributedTransport("cpu", {"cpu": "gloo"}, deadline_s=120),
        "delta": lambda: DeltaTransport(deadline_s=120),
    }
    name: str = request.param
    options = WeightSync(transport=name, bucket_bytes=1 << 16, verify="always", deadline_s=120)
    allocate = shared_memory if name == "tensor" else partial(torch.empty, dtype=torch.uint8)
    made = WeightPusher(options, makers[name](), Buffers(allocate))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("pusher", "version"), [("distributed", 1), ("disk", 2), ("delta", 3), ("tensor", 4)], indirect=["pusher"]
)
def test_new_weights_reach_the_servers_tower(
    pusher: WeightPusher, version: int, reference: VisionReference, peer: SGLangPeer
) -> None:
    request = reference.request(f"sync-{version}", 5, "square", 7)
    [before] = reference.generate(peer, request)
    retrain(reference.model, version)
    weights = [
        (name, tensor.detach())
        for name, tensor in reference.model.state_dict().items()
        if name != "lm_head.weight"
    ]
    beside = Receiver(peer, host="127.0.0.1", bucket_bytes=1 << 16, deadline_s=120)
    try:
        delta = replace(peer, receiver=beside.address, secret=beside.secret)
        report = pusher.push(iter(weights), version, [delta])
    finally:
        beside.close()
    assert not report.failed, report
    assert report.unverified == (), "every parameter of the server was compared"
    [after] = reference.generate(peer, request)
    assert reference.difference(request, after) < TOLERANCE
    assert reference.difference(request, before) > 0.05, "the weights before can be told apart"


def retrain(model: Any, seed: int) -> None:
    """Move every weight, those of the tower too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def test_an_encoder_beside_a_server_of_the_decoder_alone(
    reference: VisionReference, starting: Starting
) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    reference.model = Qwen3VLForConditionalGeneration.from_pretrained(
        reference.path, dtype=torch.float32
    ).eval()
    request = reference.request("split", 5, "square", 7)
    [said] = reference.generate(starting.divided.result(), request)
    assert reference.difference(request, said) < TOLERANCE
    assert reference.difference(request, said, {"square": "other"}) > 0.5
