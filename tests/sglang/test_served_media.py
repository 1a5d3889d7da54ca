"""Images at a real server: its log-probs are those of the trainer's model, tower included, turn by turn."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anygauge.config.schema import RolloutClient, WeightSync
from anygauge.config.validate import validate
from anygauge.plugins import Plugins
from anygauge.rollout.client import EngineClient, Pictures
from anygauge.rollout.sglang.server import SGLangServer, make_server
from anygauge.testing.media import DictStore
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.pusher import WeightPusher
from anygauge.weight_sync.receiver import Receiver
from anygauge.weight_sync.sharing import shared_memory
from anygauge.weight_sync.transports.delta import DeltaTransport
from anygauge.weight_sync.transports.disk import DiskTransport
from anygauge.weight_sync.transports.distributed import DistributedTransport
from anygauge.weight_sync.transports.tensor import TensorTransport
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.media import Content, Media
from anygauge_hooks.models import text_config
from anygauge_hooks.rl import SamplingParams
from anygauge_hooks.rollout import GenerateRequest, Generation
from anygauge_hooks.weights import WeightApi, WeightPeer, WeightTransport

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
PATCH, TOLERANCE = 16, 1e-4
SIZES = {"wide": (32, 96), "square": (64, 64), "other": (64, 64)}
API = WeightApi(checksums="sha256")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


class Seeing:
    """A tiny model with images, and what it should say of them."""

    def __init__(self, path: Path, plugins: Plugins) -> None:
        from transformers import Qwen3VLForConditionalGeneration

        from anygauge.testing.tiny import tiny_tokenizer
        from anygauge.testing.tiny_vision import add_vision_tokens, tiny_qwen3_vl

        self.tokenizer = add_vision_tokens(tiny_tokenizer(path, texts=["what is in the picture "] * 4))
        tiny_qwen3_vl(path, self.tokenizer, patch=PATCH, pixels=(32 * 32, 256 * 256), init_std=0.2)
        self.path = path
        self.model: Any = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        self.hf = text_config(self.model.config.to_dict())
        self.media = plugins.model([ARCHITECTURE]).media
        self.forbidden = tuple(self.media.forbidden(self.hf))
        rng = np.random.default_rng(0)
        self.store = DictStore(
            {key: Content("image", rng.integers(0, 255, (*size, 3), np.uint8)) for key, size in SIZES.items()}
        )

    def request(self, name: str, *parts: int | str, count: int = 16) -> GenerateRequest:
        """Return a request of tokens, and of images by their keys."""
        start, end, pad = (self.hf[f"{each}_token_id"] for each in ("vision_start", "vision_end", "image"))
        tokens: list[int] = []
        media: list[Media] = []
        for part in parts:
            if isinstance(part, int):
                tokens.append(part)
                continue
            height, width = (side // PATCH for side in SIZES[part])
            media.append(Media("image", part, ((len(tokens) + 1, height * width // 4),), (1, height, width)))
            tokens += [start, *[pad] * (height * width // 4), end]
        params = SamplingParams(max_new_tokens=count, ignore_eos=True, forbidden=self.forbidden)
        return GenerateRequest(name, tuple(tokens), params, seed=1, media=tuple(media))

    def difference(
        self, request: GenerateRequest, said: Generation, swapped: Mapping[str, str] | None = None
    ) -> float:
        """Return how far log-probs are from those of the model, at most.

        :param swapped: Images that the model is shown in the place of others.
        """
        keys = [(swapped or {}).get(medium.key, medium.key) for medium in request.media]
        [tower] = self.media.towers(self.hf)
        inputs = tower.inputs(self.hf, [self.store.get(key) for key in keys], torch.device("cpu"))
        whole = (*request.tokens, *said.tokens)
        positions = torch.from_numpy(self.media.positions(self.hf, len(whole), request.media))
        with torch.no_grad():
            logits = self.model(
                input_ids=torch.tensor([whole]),
                pixel_values=inputs["hidden_states"],
                image_grid_thw=inputs["grid_thw"],
                position_ids=positions[:, None],
            ).logits[0]
        left = logits.index_fill(1, torch.tensor(self.forbidden), -torch.inf).log_softmax(-1)
        right = left[len(request.tokens) - 1 : -1].gather(1, torch.tensor(said.tokens)[:, None])[:, 0]
        return float((torch.tensor(said.log_probs) - right).abs().max())

    def ask(self, address: str, *requests: GenerateRequest) -> list[Generation]:
        async def run() -> list[Generation]:
            limits = RolloutClient(request_timeout_s=120)
            client = EngineClient(address, limits, pictures=Pictures(self.store))
            try:
                return await asyncio.gather(*map(client.generate, requests))
            finally:
                await client.close()

        return asyncio.run(run())

    def retrain(self, seed: int) -> None:
        """Move every weight, those of the tower too."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, plugins: Plugins) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("seeing"), plugins)


MakeServer = Callable[..., SGLangServer]


@pytest.fixture(scope="module")
def make(seeing: Seeing, plugins: Plugins, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeServer]:
    """Return a maker of servers that are ended with the file."""
    backend = plugins.get("register_backends", "cpu")
    made: list[SGLangServer] = []

    def make(rank: int, **rollout: Any) -> SGLangServer:
        tree = {
            "run": {"name": "seeing", "directory": str(tmp_path_factory.mktemp("run"))},
            "model": {"path": str(seeing.path), "modalities": ["image"]},
            "data": {"train": ["none.jsonl"]},
            "train": {"dtype": "float32", "freeze": ["vision"] if rollout else []},
            "rollout": {
                "engine": "sglang",
                "max_batch_tokens": 8192,
                "sglang": {"context_length": 1024, "max_running_requests": 16},
                **rollout,
            },
            "placement": {"rollout_workers": 2 if rollout else 1, "start_timeout_s": 600.0},
        }
        checked = validate(tree)
        assert not checked.problems, checked.problems
        device = plugins.make_device(backend, 0)
        context = WorkerContext(rank=rank, world_size=2, backend=backend, device=device, plugins=plugins)
        made.append(make_server(checked.config, context))
        return made[-1]

    yield make
    for server in made:
        server.close()


class Starting(NamedTuple):
    """Addresses of servers that start at the same time."""

    whole: Future[str]
    divided: Future[str]
    """Of one that has the decoder alone; an encoder sees for it."""


@pytest.fixture(scope="module")
def starting(make: MakeServer) -> Iterator[Starting]:
    groups = [{"kind": "encoder"}, {"kind": "regular"}]
    whole, encoder, decoder = make(0), make(0, groups=groups), make(1, groups=groups)
    with ThreadPoolExecutor(2) as pool:
        yield Starting(pool.submit(whole.start), pool.submit(lambda: decoder.start([encoder.start()])))


@pytest.fixture(scope="module")
def address(starting: Starting) -> str:
    return starting.whole.result()


def test_log_probs_are_those_of_the_model_for_one_image_and_several(seeing: Seeing, address: str) -> None:
    requests = [
        seeing.request("one", 5, "square", 7, 8),
        seeing.request("two", 5, 6, "wide", 9, 10, "square", 7),
        seeing.request("same", "square", "square", 3),
        seeing.request("none", 5, 6, 7),
    ]
    answers = seeing.ask(address, *requests)
    for request, said in zip(requests, answers, strict=True):
        assert len(said.tokens) == 16
        assert not set(said.tokens) & set(seeing.forbidden)
        if request.media:
            assert seeing.difference(request, said) < TOLERANCE
    swapped = {"square": "other"}
    assert seeing.difference(requests[0], answers[0], swapped) > 0.5, "another image has other log-probs"
    assert seeing.difference(requests[1], answers[1], swapped) > 0.5


def test_a_conversation_goes_on_with_an_image_of_a_tool(seeing: Seeing, address: str) -> None:
    first = seeing.request("turn-1", 5, "wide", 7)
    [said] = seeing.ask(address, first)
    shown = seeing.request("", 4, "square", 6)
    before = len(first.tokens) + len(said.tokens)
    second = first._replace(
        id="turn-2",
        tokens=(*first.tokens, *said.tokens, *shown.tokens),
        media=(*first.media, *(medium.moved(before) for medium in shown.media)),
    )
    [answer] = seeing.ask(address, second)
    assert seeing.difference(second, answer) < TOLERANCE
    assert seeing.difference(second, answer, {"square": "other"}) > 0.5


def test_a_broken_picture_is_refused_and_the_server_lives(
    seeing: Seeing, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = seeing.request("broken", 5, "square", 7)
    with monkeypatch.context() as patch:
        patch.setattr(Pictures, "_encode", lambda self, medium: b'"iVBORw0KGgpicm9rZW4="')
        with pytest.raises(RolloutError) as caught:
            seeing.ask(address, request)
    assert caught.value.code == "AG401"
    [said] = seeing.ask(address, request)
    assert seeing.difference(request, said) < TOLERANCE


@pytest.fixture
def pusher(request: pytest.FixtureRequest, tmp_path: Path, seeing: Seeing) -> Iterator[WeightPusher]:
    makers: dict[str, Callable[[], WeightTransport]] = {
        "tensor": TensorTransport,
        "disk": lambda: DiskTransport(tmp_path, seeing.path),
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
    pusher: WeightPusher, version: int, seeing: Seeing, address: str
) -> None:
    request = seeing.request(f"sync-{version}", 5, "square", 7)
    [before] = seeing.ask(address, request)
    seeing.retrain(version)
    weights = [
        (name, tensor.detach())
        for name, tensor in seeing.model.state_dict().items()
        if name != "lm_head.weight"
    ]
    beside = Receiver(
        WeightPeer(address=address, api=API), host="127.0.0.1", bucket_bytes=1 << 16, deadline_s=120
    )
    try:
        peer = WeightPeer(address=address, api=API, receiver=beside.address, secret=beside.secret)
        report = pusher.push(iter(weights), version, [peer])
    finally:
        beside.close()
    assert not report.failed, report
    assert report.unverified == (), "every parameter of the server was compared"
    [after] = seeing.ask(address, request)
    assert seeing.difference(request, after) < TOLERANCE
    assert seeing.difference(request, before) > 0.05, "the weights before can be told apart"


def test_an_encoder_beside_a_server_of_the_decoder_alone(seeing: Seeing, starting: Starting) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    seeing.model = Qwen3VLForConditionalGeneration.from_pretrained(seeing.path, dtype=torch.float32).eval()
    request = seeing.request("split", 5, "square", 7)
    [said] = seeing.ask(starting.divided.result(), request)
    assert seeing.difference(request, said) < TOLERANCE
    assert seeing.difference(request, said, {"square": "other"}) > 0.5
