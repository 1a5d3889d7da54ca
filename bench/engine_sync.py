"""Weights from the real train engine into a real server: how fast, in how much memory, and are they right.

    python bench/engine_sync.py --backend cuda --size 4b --place apart     # two GPUs, a broadcast
    python bench/engine_sync.py --backend cuda --size 4b --place shared    # one GPU, handles of its memory
    .venv-sglang/bin/python bench/engine_sync.py --backend cpu --size tiny --place shared

A worker holds Megatron's model with random weights; the server begins with others. After the first push it
prints, for each size of bucket, the median seconds of some more; `apart`, beside a bare broadcast of the same
bytes, in pieces of the first size and in a group of the same kind. Memory is the most that torch's allocator
had beyond what it had before.

Then the log-probs of what the server says are compared with the trainer's; the trainer's with its own in
float32, which tells what such numbers are worth; and those of wrong prompts. Last, weights change in the
middle of long responses: `abort` gives back what there is, which is gone on from, and `retract` has the
server compute the beginning anew. `shared` also puts the server to sleep and wakes it, and `--broken` ends it
in the middle of an update.

With `--size 4b` and three sizes of bucket `shared` took two minutes on an H200, one of them the server's
start; `apart` should not take longer, also with `--by-tensor --broken`. A server starts sooner with
`--server cuda_graph_max_bs_decode=16 --server disable_prefill_cuda_graph=true`.
Ends with status 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

MIB, GIB = 2**20, 2**30
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "kv": 2, "head": 16, "mlp": 128, "vocab": 2048},
    "0.6b": {"hidden": 1024, "layers": 28, "heads": 16, "kv": 8, "head": 128, "mlp": 3072},
    "1.7b": {"hidden": 2048, "layers": 28, "heads": 16, "kv": 8, "head": 128, "mlp": 6144},
    "4b": {"hidden": 2560, "layers": 36, "heads": 32, "kv": 8, "head": 128, "mlp": 9728},
}
VOCABULARY = 151_936
DEADLINE_S = 60.0
BARE_ROUNDS, BARE_S = 7, 300.0
GOAL = {"own": 0.9, "rate": 80.0, "shared_s": 0.25, "buckets": 2.0, "noise": 1.5, "control": 10.0}
PARTS = ("kv_cache", "cuda_graph", "weights")
EDGE = 16
"""Tokens on either side of a change that may be of either version: they were on their way."""


class Row(NamedTuple):
    """A line of the table, and whether it is as it must be."""

    what: str
    figures: str
    is_right: bool = True


def model_directory(path: Path, size: str, dtype: str) -> Path:
    """Write what a server and a train engine read of a model, but for its weights."""
    from transformers import Qwen3Config

    from anygauge.testing.tiny import tiny_tokenizer

    shape = SIZES[size]
    vocabulary = shape.get("vocab", VOCABULARY)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv"],
        head_dim=shape["head"],
        intermediate_size=shape["mlp"],
        tie_word_embeddings=False,
        max_position_embeddings=40_960,
        eos_token_id=vocabulary - 1,
        bos_token_id=None,
        dtype=dtype,
    )
    config.save_pretrained(path)
    tiny_tokenizer(path, alphabet="0123456789+-*/=.")
    return path


def listen(host: str, port: int, backend: str, pieces: Sequence[int], rounds: int) -> None:
    """Take bare broadcasts; the other process of the comparison, on the server's device."""
    import torch

    from anygauge.weight_sync.broadcast import finish, join_group

    own = None if backend == "gloo" else torch.accelerator.current_accelerator()
    device = torch.device("cpu") if own is None else torch.device(own.type, 0)
    group = join_group(host, port, rank=1, world_size=2, name="bare", backend=backend, timeout_s=BARE_S)
    data = torch.empty(max(pieces), dtype=torch.uint8, device=device)
    for _ in range(rounds):
        for piece in pieces:
            group.start(data[:piece])
        finish(device)
    group.close()


class Bare:
    """Two processes and nothing between them but broadcasts, in pieces of a bucket."""

    def __init__(self, context: Any, size: int, piece: int) -> None:
        from anygauge.weight_sync.broadcast import Rendezvous

        self._device, self._backend = context.device, context.backend
        self._pieces = [piece] * (size // piece) + ([size % piece] if size % piece else [])
        self._rendezvous = Rendezvous("127.0.0.1", timeout_s=BARE_S)
        backend = context.backend
        visible = {backend.visible_devices_env: "1"} if backend.visible_devices_env else {}
        self._address = ("127.0.0.1", self._rendezvous.port)
        arguments = (*self._address, backend.dist_backend, self._pieces, BARE_ROUNDS)
        self._process = multiprocessing.get_context("spawn").Process(
            target=listen, args=arguments, daemon=True
        )
        with patch.dict(os.environ, visible):
            self._process.start()

    def seconds(self) -> float:
        """Return the median."""
        import torch

        from anygauge.weight_sync.broadcast import finish, join_group

        if not self._process.is_alive():
            raise SystemExit(f"The other side of the bare broadcast ended with {self._process.exitcode}.")
        device = self._device.torch_device
        group = join_group(
            *self._address,
            rank=0,
            world_size=2,
            name="bare",
            backend=self._backend.dist_backend,
            timeout_s=BARE_S,
            store=self._rendezvous.store,
        )
        data = torch.zeros(max(self._pieces), dtype=torch.uint8, device=device)
        found = []
        for _ in range(BARE_ROUNDS):
            self._device.synchronize()
            started = time.perf_counter()
            for each in self._pieces:
                group.start(data[:each])
            finish(device)
            found.append(time.perf_counter() - started)
        self._process.join(BARE_S)
        group.close()
        return statistics.median(found[2:])


class Sender:
    """The trainer's side, in a worker of its own."""

    def __init__(self, config: Any, context: Any, *, place: str, bucket_mib: int) -> None:
        from anygauge.engines.megatron.engine import MegatronEngine
        from anygauge.runtime.event_loop import EventLoop
        from anygauge.serving.sglang.server import make_server

        self._config, self._context, self._place = config, context, place
        self._device = context.device.torch_device
        self._version = 0
        self._pushers: list[Any] = []
        self._open = threading.Event()
        """Whether the server may be asked: while it ends what it has, it would end that too."""
        self._open.set()
        beside = (*context.accelerators[:1],) if place == "shared" else ("1",)
        self._server = make_server(config, replace(context, accelerators=beside))
        self._started = time.perf_counter()
        self._up_s = 0.0
        self._failed: BaseException | None = None
        self._starting = threading.Thread(target=self._start, daemon=True)
        self._starting.start()
        self._make = partial(MegatronEngine, context=context, build=self._random_policy)
        self._engine = self._make(config)
        self._bytes = sum(tensor.nbytes for tensor in self._engine.policy.tensors.values())
        self._bare_s: float | None = None
        self._later_s: dict[int, float] = {}
        self._bare = Bare(context, self._bytes, bucket_mib * MIB) if place == "apart" else None
        self._loop = EventLoop()
        self._loop.__enter__()

    def _start(self) -> None:
        try:
            self._server.start()
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._failed = error
        self._up_s = time.perf_counter() - self._started

    def _random_policy(self, *args: Any) -> Any:
        """Build the model with random weights, with logits that differ."""
        import torch

        from anygauge.engines.megatron.model import build_policy

        policy = build_policy(*args, load=False)
        generator = torch.Generator(self._device).manual_seed(0)
        for name, tensor in policy.tensors.items():
            data = tensor.detach()
            if data.dim() < 2:
                data.fill_(1.0)
            else:
                data.normal_(0, 0.05 if "output_layer" in name else 0.02, generator=generator)
        return policy

    def ready(self) -> list[Row]:
        """Wait for the server."""
        self._starting.join()
        if self._failed is not None:
            raise self._failed
        facts = self._server.facts()
        self._peer = self._server.peer()
        from anygauge.serving.sglang.client import EngineClient

        self._client = EngineClient(facts["address"], self._config.rollout.client, keys=self._peer.keys)
        rows = [Row(f"server, SGLang {facts['installed']}", f"{self._up_s:.1f} s until it answered")]
        if self._bare is not None:
            self._bare_s = seconds = self._bare.seconds()
            rows.append(Row("bare broadcast", f"{seconds:7.4f} s  {self._bytes / seconds / 1e9:6.1f} GB/s"))
        return rows

    # ---- pushes ----

    def _pusher(self, bucket_mib: int, transport: Any = None) -> Any:
        from anygauge.weight_sync.pusher import make_pusher

        sync = self._config.weight_sync.model_copy(update={"bucket_bytes": bucket_mib * MIB})
        pusher = make_pusher(self._config.model_copy(update={"weight_sync": sync}), self._context)
        if transport is not None:
            pusher._transport = transport  # its group is made once
        self._pushers.append(pusher)
        return pusher

    def _push(self, pusher: Any, peer: Any = None, **options: Any) -> Any:
        self._version += 1
        self._synchronize()
        report = pusher.push(self._engine.weights(), self._version, [peer or self._peer], **options)
        if report.failed:
            raise SystemExit(f"{report.transport}: {report.failed[0].error}")
        return report

    def _synchronize(self) -> None:
        self._context.device.synchronize()

    def first(self, bucket_mib: int) -> list[Row]:
        """Push for the first time, which makes the group and the buffers and verifies."""
        device = self._context.device
        device.empty_cache()
        before = device.memory()["allocated"]
        device.peak_memory(reset=True)
        self._main = self._pusher(bucket_mib)
        report = self._push(self._main)
        extra = ((device.peak_memory() or 0) - before) / (bucket_mib * MIB)
        assert report.bytes == self._bytes, (report.bytes, self._bytes)
        figures = f"{report.seconds['total']:7.3f} s  {phases(report)}  peak {extra:.2f} buckets"
        return [
            Row(f"first push, {bucket_mib} MiB, verified", figures),
            Row("weights", f"{report.bytes / 1e9:.2f} GB in {report.tensors} tensors"),
        ]

    def later(self, bucket_mib: int, rounds: int, *, by_tensor: bool = False) -> list[Row]:
        """Push some more, and return the median."""
        device = self._context.device
        peer = self._peer
        if by_tensor:
            peer = replace(peer, api=replace(peer.api, has_flattened_broadcast=False))
        for pusher in self._pushers:
            pusher.release_buffers()
        device.empty_cache()
        before = device.memory()["allocated"]
        pusher = self._pusher(bucket_mib, self._main._transport)
        device.peak_memory(reset=True)
        reports = [self._push(pusher, peer) for _ in range(rounds + 2)][2:]
        extra = ((device.peak_memory() or 0) - before) / (bucket_mib * MIB)
        middle = sorted(reports, key=lambda each: each.seconds["total"])[len(reports) // 2]
        seconds = self._later_s[bucket_mib] = middle.seconds["total"]
        bare = self._bare_s
        share = f"  {bare / seconds:.2f} of bare" if bare else ""
        figures = (
            f"{seconds:7.4f} s  {self._bytes / seconds / 1e9:6.1f} GB/s{share}  peak {extra:.3f} buckets  "
            f"{middle.buckets} buckets  {phases(middle)}"
        )
        is_right = extra < GOAL["buckets"]
        if self._place == "apart":
            is_right &= self._bytes / seconds / 1e9 >= GOAL["rate"]
        else:
            is_right &= seconds < GOAL["shared_s"]
        how = ", by tensor" if by_tensor else ""
        return [Row(f"push, {bucket_mib} MiB{how}", figures, is_right)]

    def filled(self, bucket_mib: int) -> list[Row]:
        """Return how long it takes to make the buckets alone."""
        from anygauge.weight_sync.buckets import cut

        pusher, found = self._pusher(bucket_mib), []
        for _ in range(4):
            self._synchronize()
            started = time.perf_counter()
            for _ in cut(self._engine.weights(), bucket_mib * MIB, pusher._buffers):
                pass
            issued = time.perf_counter() - started
            self._synchronize()
            found.append((time.perf_counter() - started, issued))
        pusher.release_buffers()
        total, issued = min(found)
        return [Row("buckets made, none sent", f"{total * 1e3:.1f} ms, {issued * 1e3:.1f} of the host's")]

    def own(self, bucket_mib: int, rounds: int) -> list[Row]:
        """Time SGLang's own way, one bucket after the other, with tensors that were converted before.

        There are no pauses, no names and no version of anygauge's in it.
        """
        items = [(name, tensor.detach().clone()) for name, tensor in self._engine.weights()]
        buckets = list(split(items, bucket_mib * MIB))
        target, found = self._peer.target(deadline_s=DEADLINE_S), []
        for _ in range(rounds + 2):
            self._synchronize()
            started = time.perf_counter()
            target.begin()
            for bucket in buckets:
                self._send_alone(bucket, target)
            target.end()
            self._synchronize()
            found.append(time.perf_counter() - started)
        target.close()
        seconds = statistics.median(found[2:])
        ours = self._later_s[bucket_mib]
        figures = (
            f"{seconds:7.4f} s  {self._bytes / seconds / 1e9:6.1f} GB/s  {len(buckets)} buckets  "
            f"ours has {seconds / ours:.2f} of its rate"
        )
        return [Row(f"SGLang's own update, {bucket_mib} MiB", figures, seconds / ours >= GOAL["own"])]

    def _send_alone(self, bucket: Sequence[tuple[str, Any]], target: Any) -> None:
        import torch

        from anygauge.failures import in_background

        transport = self._main._transport
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": transport._name,
            "flush_cache": False,
            "load_format": "flattened_bucket",
        }
        ask = partial(target.post, "/update_weights_from_distributed", body, what="a bucket")
        asking = in_background(ask, "own-request")
        transport._group.start(torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket]))
        asking.result()

    # ---- log-probs ----

    def agreement(self, prompts: int, length: int, tokens: int) -> list[Row]:
        """Compare the server with the trainer, the trainer with itself in float32, and with wrong prompts."""
        import torch

        self._push(self._main)
        asked = [self._request(number, length, tokens) for number in range(prompts)]
        answers = self._loop.run(self._all(asked), timeout_s=DEADLINE_S)
        versions = {version for each in answers for version in each.weight_versions}
        assert versions == {self._version}, versions
        said = [(each.tokens, answer) for each, answer in zip(asked, answers, strict=True)]
        theirs = torch.cat([torch.tensor(answer.log_probs) for _, answer in said])
        ours = self._log_probs(self._engine, said)
        turned = [(said[number - 1][0], answer) for number, (_, answer) in enumerate(said)]
        wrong = self._log_probs(self._engine, turned)
        whole = self._config.model_copy(
            update={"train": self._config.train.model_copy(update={"dtype": "float32"})}
        )
        precise = self._make(whole)
        for name, tensor in precise.policy.tensors.items():
            tensor.detach().copy_(self._engine.policy.tensors[name].detach())
        exact = self._log_probs(precise, said)
        del precise
        self._context.device.empty_cache()
        served, noise = (theirs - ours).abs(), (ours - exact).abs()
        control = (theirs - wrong).abs().mean().item()
        ratio = served.mean().item() / max(noise.mean().item(), 1e-12)
        distance = control / served.mean().item()
        is_float32 = self._config.train.dtype == "float32"
        return [
            Row(
                "server against trainer",
                f"{spread(served)}  {ratio:.2f} of noise  mean log-prob {theirs.mean():.3f}",
                ratio <= GOAL["noise"] or is_float32,
            ),
            Row("trainer against itself in float32", spread(noise)),
            Row("server against trainer in float32", spread((theirs - exact).abs())),
            Row(
                "control: wrong prompt",
                f"mean {control:.4f}  {distance:.0f} times",
                distance >= GOAL["control"],
            ),
        ]

    def _log_probs(self, engine: Any, said: Sequence[tuple[tuple[int, ...], Any]]) -> Any:
        import torch

        from anygauge_tests import batches

        samples = [
            batches.sample_of([*prompt, *answer.tokens], len(answer.tokens)) for prompt, answer in said
        ]
        return torch.cat([each.float().cpu() for each in batches.log_probs(engine, samples, temperature=1.0)])

    def _request(self, number: int, length: int, tokens: int) -> Any:
        from anygauge_hooks.rl import SamplingParams
        from anygauge_hooks.rollout import GenerateRequest

        most = self._engine.policy.hf["vocab_size"] - 8
        prompt = tuple(Random(f"{self._version}-{number}").choices(range(most), k=length))
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        return GenerateRequest(f"{self._version}-{number}", prompt, params, number)

    async def _all(self, asked: Sequence[Any]) -> list[Any]:
        return await asyncio.gather(*map(self._client.generate, asked))

    def across(self, how: str, prompts: int, length: int, tokens: int) -> list[Row]:
        """Change the weights in the middle of responses: those before are of A, those after of B."""
        self._push(self._main)
        asked = [self._request(1000 + number, length, tokens) for number in range(prompts)]
        begun = [0] * prompts
        running = [self._loop.start(self._long(each, begun, number)) for number, each in enumerate(asked)]
        limit = time.monotonic() + DEADLINE_S
        while min(begun) < tokens // 3 and time.monotonic() < limit:
            time.sleep(0.005)
        kept = self._changed()
        try:
            started = time.perf_counter()
            at = self._retracted(begun) if how == "retract" else self._aborted()
            seconds = time.perf_counter() - started
            answers = [each.result(DEADLINE_S) for each in running]
            said = [(each.tokens, answer) for each, answer in zip(asked, answers, strict=True)]
            after = self._log_probs(self._engine, said)
        finally:
            self._restore(kept)
        before = self._log_probs(self._engine, said)
        return self._compared(how, said, at, before, after, seconds)

    def _retracted(self, begun: list[int]) -> list[int]:
        """Have the server compute beginnings anew; return how much of each response there was."""
        control = self._peer.target(deadline_s=DEADLINE_S)
        control.pause("retract")
        at = list(begun)
        spare = self._config.weight_sync.model_copy(update={"pause": "in_place"})  # drops no cache
        self._main._options, options = spare, self._main._options
        self._push(self._main, pauses=False)
        self._main._options = options
        control.resume()
        control.close()
        return at

    def _aborted(self) -> None:
        self._open.clear()
        self._push(self._main)
        self._open.set()

    def _compared(
        self, how: str, said: Sequence[Any], at: Sequence[int] | None, before: Any, after: Any, seconds: float
    ) -> list[Row]:
        import torch

        late, early = [], []
        for number, (_, answer) in enumerate(said):
            count = len(answer.tokens)
            cut = at[number] if at else sum(each != self._version for each in answer.weight_versions)
            edge = EDGE if at else 0
            places = torch.arange(count)
            early.append(places < cut - edge)
            late.append(places >= cut + edge)
        theirs = torch.cat([torch.tensor(answer.log_probs) for _, answer in said])
        is_early, is_late = torch.cat(early), torch.cat(late)
        right = torch.cat([(theirs - before)[is_early], (theirs - after)[is_late]]).abs().mean().item()
        rows = []
        for name, chosen, good, bad in (
            ("before", is_early, before, after),
            ("after", is_late, after, before),
        ):
            own = (theirs - good)[chosen].abs().mean().item()
            other = (theirs - bad)[chosen].abs().mean().item()
            figures = f"{int(chosen.sum())} tokens, own weights {own:.4f}, the other {other:.3f}"
            rows.append(Row(f"{how}: {name} the change", figures, other >= GOAL["control"] * own))
        return [*rows, Row(f"{how}: pause, push, go on", f"{seconds:.3f} s, mean {right:.4f}")]

    async def _long(self, request: Any, begun: list[int], number: int) -> Any:
        """Ask for a response, and go on from what came back of it."""
        from anygauge_tests.progress import watched

        parts: list[Any] = []
        while sum(len(part.tokens) for part in parts) < request.params.max_new_tokens:
            had = tuple(token for part in parts for token in part.tokens)
            left = request.params.max_new_tokens - len(had)
            while not self._open.is_set():
                await asyncio.sleep(0.005)
            asked = request._replace(
                id=f"{request.id}-{len(parts)}",
                tokens=request.tokens + had,
                params=replace(request.params, max_new_tokens=left),
            )

            def count(tokens: int, before: int = len(had)) -> None:
                begun[number] = before + tokens

            parts.append(await watched(self._peer.address, asked, count, self._peer.keys))
        return parts[0]._replace(
            tokens=tuple(token for part in parts for token in part.tokens),
            log_probs=tuple(each for part in parts for each in part.log_probs),
            weight_versions=tuple(each for part in parts for each in part.weight_versions),
        )

    def _changed(self) -> list[tuple[Any, Any]]:
        """Turn the rows of embedding and output; return what brings the weights back."""
        kept = []
        for name, tensor in self._engine.policy.tensors.items():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                kept.append((tensor.detach(), tensor.detach().clone()))
                tensor.detach().copy_(kept[-1][1].roll(7 if "embedding" in name else 13, 0))
        assert len(kept) == 2, "embedding and output are tensors of their own"
        return kept

    def _restore(self, kept: Sequence[tuple[Any, Any]]) -> None:
        for tensor, before in kept:
            tensor.copy_(before)

    # ---- memory, and the end ----

    def sleep(self) -> list[Row]:
        """Have the server give its memory up and take it back, part by part."""
        rows = []
        for verb, parts in (("release", PARTS), ("resume", PARTS[::-1])):
            for part in parts:
                before = self._used()
                started = time.perf_counter()
                self._loop.run(self._client.move_memory(verb, [part]), timeout_s=DEADLINE_S)
                seconds = time.perf_counter() - started
                rows.append(
                    Row(f"{verb} {part}", f"{seconds * 1e3:6.1f} ms  {self._used() - before:+8.2f} GiB")
                )
        return rows

    def _used(self) -> float:
        memory = self._context.device.memory()
        return (memory["total"] - memory["free"]) / GIB

    def broken(self) -> list[Row]:
        """End the server in the middle of an update: the sender comes back."""
        pusher, pid = self._main, int(self._server.facts()["pid"])
        sends, send = [0], pusher._transport.send

        def fatal(bucket: Any, update: Any) -> None:
            sends[0] += 1
            if sends[0] == 2:
                for child in [*_children(pid), pid]:
                    with suppress(ProcessLookupError):
                        os.kill(child, 9)
            send(bucket, update)

        pusher._transport.send = fatal
        pusher._options = pusher._options.model_copy(update={"deadline_s": 20.0})
        self._version += 1
        started = time.perf_counter()
        report = pusher.push(self._engine.weights(), self._version, [self._peer])
        seconds = time.perf_counter() - started
        self._synchronize()
        (failed,) = report.failed
        text = (failed.error or "").splitlines()[0][:110]
        return [
            Row("server killed in an update", f"{failed.state} after {seconds:.1f} s: {text}", seconds < 60)
        ]

    def close(self) -> None:
        """End the server."""
        with suppress(Exception):
            self._loop.run(self._client.close(), timeout_s=5)
        for pusher in self._pushers[:1]:
            with suppress(Exception):
                pusher.close()
        self._server.close()


def split(items: Sequence[tuple[str, Any]], size: int) -> Iterator[list[tuple[str, Any]]]:
    """Yield tensors with their names in buckets of at most so many bytes, or of a single tensor."""
    bucket: list[tuple[str, Any]] = []
    for name, tensor in items:
        if bucket and sum(each.nbytes for _, each in bucket) + tensor.nbytes > size:
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    yield bucket


def _children(pid: int) -> list[int]:
    import psutil

    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def phases(report: Any) -> str:
    """Return the milliseconds of the phases of a push."""
    return " ".join(f"{name} {value * 1e3:.1f}" for name, value in report.seconds.items() if name != "total")


def spread(values: Any) -> str:
    """Return what is to be known of absolute differences."""
    high = values.kthvalue(max(1, int(values.numel() * 0.99))).values.item()
    return f"mean {values.mean():.4f}  p99 {high:.3f}  max {values.max():.3f}  ({values.numel()} tokens)"


def load(arguments: argparse.Namespace, directory: Path) -> tuple[Any, Any]:
    """Write a recipe, and read it for the backend."""
    from anygauge.config.load import load_config
    from anygauge.plugins import load_plugins

    plugins = load_plugins()
    backend = plugins.named("register_backends")[arguments.backend]
    plugins.prepare_worker(backend, "driver", "before_vendor_import")
    from anygauge_tests.recipe import tiny_recipe  # transformers, once it can be imported

    dtype = arguments.dtype or ("float32" if arguments.backend == "cpu" else "bfloat16")
    server = {
        "context_length": 2048,
        "max_running_requests": 64,
        "skip_server_warmup": True,
        "load_format": "dummy",
        "disable_radix_cache": True,
    }
    keys: dict[str, Any] = {
        "placement__colocated": arguments.place == "shared",
        "placement__rollout_workers": 1,
        "placement__start_timeout_s": 300,
        "rollout__engine": "sglang",
        "rollout__max_batch_tokens": 65_536,
        "train__dtype": dtype,
        "train__micro_batch_tokens": 8192,
        "weight_sync__deadline_s": DEADLINE_S,
        **({"weight_sync__transport": "distributed"} if arguments.place == "apart" else {}),
        "run__timeout_s": 300,
        **{f"rollout__sglang.{name}": value for name, value in server.items()},
    }
    path = tiny_recipe(directory, **keys)
    model_directory(directory / "model", arguments.size, dtype)
    given = [f"rollout.sglang.{each}" for each in arguments.server]
    return load_config(path, given, backend=arguments.backend, plugins=plugins), plugins


@contextmanager
def opened(arguments: argparse.Namespace, directory: Path) -> Iterator[Callable[..., list[Row]]]:
    """Start the worker; yield what calls it."""
    from anygauge.runtime.launch import launch_workers

    loaded, plugins = load(arguments, directory)
    with launch_workers(
        loaded.config,
        loaded.backend,
        plugins,
        worker_class="engine_sync:Sender",
        role="actor",
        run_directory=arguments.logs or directory,
        options={"place": arguments.place, "bucket_mib": arguments.buckets[0]},
    ) as workers:
        yield lambda method, **options: workers.call(method, **options)[0]


def steps(arguments: argparse.Namespace) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what is done, in order."""
    first, *others = arguments.buckets
    answers = {"prompts": arguments.prompts, "length": arguments.length}
    yield "ready", {}
    yield "first", {"bucket_mib": first}
    yield "filled", {"bucket_mib": first}
    for bucket in (first, *others):
        yield "later", {"bucket_mib": bucket, "rounds": arguments.rounds}
        if arguments.own:
            yield "own", {"bucket_mib": bucket, "rounds": arguments.rounds}
    if arguments.by_tensor:
        yield "later", {"bucket_mib": first, "rounds": arguments.rounds, "by_tensor": True}
    if not arguments.pushes:
        yield "agreement", {**answers, "tokens": arguments.tokens}
        if arguments.place == "shared" and arguments.backend != "cpu":
            yield "sleep", {}
            yield "later", {"bucket_mib": first, "rounds": 1}
        for how in ("abort", "retract"):
            yield "across", {"how": how, **answers, "tokens": arguments.long}
    if arguments.broken:
        yield "broken", {}


def main() -> int:
    """Measure, print as it goes, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", required=True)
    parser.add_argument("--size", default="4b", choices=SIZES)
    parser.add_argument("--place", default="shared", choices=["shared", "apart"])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--buckets", type=int, nargs="+", default=[1024], help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of a response")
    parser.add_argument("--long", type=int, default=400, help="of a response whose weights change")
    parser.add_argument("--by-tensor", action="store_true", help="also broadcast tensors one by one")
    parser.add_argument("--own", action="store_true", help="also SGLang's own way, apart, for each size")
    parser.add_argument("--pushes", action="store_true", help="nothing but pushes")
    parser.add_argument("--broken", action="store_true", help="end the server in the middle of an update")
    parser.add_argument("--logs", type=Path, help="directory for the logs; else they are removed")
    parser.add_argument("--server", action="append", default=[], help="an argument of SGLang's: NAME=VALUE")
    arguments = parser.parse_args()
    if arguments.own and arguments.place == "shared":
        parser.error("--own is for --place apart: it broadcasts")
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="anygauge-bench-") as directory,
        opened(arguments, Path(directory)) as call,
    ):
        for method, options in steps(arguments):
            found = call(method, **options)
            rows += found
            for row in found:
                print(f"{row.what:<36} {row.figures}{'' if row.is_right else '   MISSED'}", flush=True)
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
