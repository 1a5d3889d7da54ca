"""Families that see at real servers: log-probs for images are those of transformers, also of new weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from anygauge.config.schema import WeightSync
from anygauge.engines.hf_directory import write_directory
from anygauge.plugins import Plugins
from anygauge.serving.embedded.weights import copy_weights
from anygauge.serving.sglang.server import SGLangServer
from anygauge.serving.sglang.weights import SGLangPeer
from anygauge.weight_sync.buckets import Buffers
from anygauge.weight_sync.pusher import WeightPusher
from anygauge.weight_sync.transports.distributed import DistributedTransport
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import RolloutError
from anygauge_hooks.models import ModelSpec
from anygauge_hooks.sglang import WeightApi
from anygauge_tests.served_vision import VisionReference, published, write_served
from anygauge_tests.transformers_parity import build

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {},
    "qwen3_omni_moe": {},
    "glm4v": {},
    "glm4v_moe": {},
    # SGLang has the model under this name alone
    "glm46v": {"json_model_override_args": {"architectures": ["Glm4vForConditionalGeneration"]}},
}
"""Options that the servers of each family start with."""
TOLERANCE = 1e-4
OTHER = 100 * TOLERANCE
OTHERS = {"square": "other", "clip": "other clip", "sound": "other sound"}


class Served(NamedTuple):
    """A family in transformers, in the trainer, and in a server."""

    reference: VisionReference
    policy: Any
    server: SGLangServer
    peer: Future[SGLangPeer]


@pytest.fixture(scope="module")
def all_served(
    plugins: Plugins,
    context: WorkerContext,
    make_vision_model: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Served]]:
    """Start a server for each family, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        found = {}
        for family, arguments in FAMILIES.items():
            spec = plugins.get("register_models", family)
            reference, policy, path = written(spec, tmp_path_factory.mktemp(family), context)
            server = make_vision_model(path, kinds=reference.kinds, sglang=arguments)
            found[family] = Served(reference, policy, server, pool.submit(started, server))
        yield found


def started(server: SGLangServer) -> SGLangPeer:
    server.start()
    return replace(server.peer(), api=WeightApi(checksums="sha256"))


def written(spec: ModelSpec, path: Path, context: WorkerContext) -> tuple[VisionReference, Any, Path]:
    """Return the model, the same in the trainer, and a directory that the trainer has written of it."""
    reference = VisionReference(spec, write_served(spec, path))
    source = published(path)
    policy = build(source, context, reference.kinds)
    write_directory(path / "served", source, policy.weights(), torch.float32)
    return reference, policy, path / "served"


@pytest.fixture(params=FAMILIES)
def served(request: pytest.FixtureRequest, all_served: dict[str, Served]) -> Iterator[Served]:
    yield (found := all_served[request.param])
    found.server.close()


def test_log_probs_are_those_of_the_model_before_and_after_an_update(served: Served) -> None:
    reference, policy, peer = served.reference, served.policy, served.peer.result()
    requests = [
        reference.request("one", 5, "square", 7, 8),
        reference.request("two", 5, "wide", 9, "square", 7),
        *others(reference),
    ]
    before = compare(reference, peer, requests)
    retrain(policy)
    copy_weights(reference.model, policy.weights())
    assert reference.difference(requests[0], before) > OTHER, "the weights before can be told apart"
    push(policy, peer)
    compare(reference, peer, requests)
    if "audio" in reference.kinds:
        with pytest.raises(RolloutError, match=r"has 0.37 s; servers of SGLang take 1 to 30 s"):
            reference.generate(peer, reference.request("short", 5, "short", 9))


def others(reference: VisionReference) -> list[Any]:
    """Return requests with video, between images where transformers takes both, and with sound."""
    beside = () if "image_start_token_id" in reference.hf else ("wide", 3, "square")
    requests = [reference.request("video", 5, *beside, "clip", 9)]
    if "audio" in reference.kinds:
        requests += [
            reference.request("sound", 5, "sound", 9),
            reference.request("all", 4, "longer", "square", 7, "clip", 8, "sound", 9),
        ]
    return requests


def compare(reference: VisionReference, peer: SGLangPeer, requests: list[Any]) -> Any:
    """Compare what is said of images, and of another image; return the answer to the first request."""
    answers = reference.generate(peer, *requests)
    for request, said in zip(requests, answers, strict=True):
        assert len(said.tokens) == 16
        assert not set(said.tokens) & set(reference.forbidden)
        assert reference.difference(request, said) < TOLERANCE
        for medium in request.media:
            if (other := OTHERS.get(medium.key)) is not None:
                assert reference.difference(request, said, {medium.key: other}) > OTHER, medium.key
    return answers[0]


def retrain(policy: Any) -> None:
    """Move every weight, those of towers and experts too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (each for chunk in policy.chunks for each in chunk.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def push(policy: Any, peer: SGLangPeer) -> None:
    options = WeightSync(transport="distributed", bucket_bytes=1 << 16, verify="always", deadline_s=120)
    transport = DistributedTransport("cpu", {"cpu": "gloo"}, deadline_s=120)
    pusher = WeightPusher(options, transport, Buffers(partial(torch.empty, dtype=torch.uint8)))
    try:
        report = pusher.push(policy.weights(), 1, [peer])
    finally:
        pusher.close()
    assert not report.failed, report
    assert [name for name in report.unverified if ".experts." not in name] == [], "all others were compared"
