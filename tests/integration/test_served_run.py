"""A whole run whose rollout engines are servers: fake ones, which speak as the real ones do."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from anygauge import Run
from anygauge.observability.timeline import read_events
from anygauge.serving.engine_pool import EnginePool
from anygauge.serving.load_balancer import LoadBalancer
from anygauge.serving.sglang.client.channel import Channel
from anygauge.testing.tiny import tiny_tokenizer
from anygauge.testing.tiny_vision import add_vision_tokens, tiny_qwen3_vl
from anygauge.trainer import run as run_module
from anygauge.trainer import start as start_module
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import ConfigError, WorkerDiedError
from anygauge_hooks.rl import Group
from anygauge_hooks.types import NamedFunction, RunInfo
from anygauge_tests.fake_engine.installed import install_fake_engine
from anygauge_tests.observer import Observer, run_with_observer, versions_by_step
from anygauge_tests.recipe import tiny_recipe

pytestmark = pytest.mark.usefixtures("forked_actors")
BUCKET_BYTES = 1 << 20
WITHIN_S = 60.0
"""Holds the whole model: the default, 1 GiB for each of two buffers, is zeroed by the host in each run."""


def install(directory: Path, faults: Sequence[str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Install the fake engine for this process and its workers.

    :param faults: Of each engine.
    :param options: Of all.
    """
    options = {"vocab_size": 18, "lengths": "uniform:2:4", **options}
    monkeypatch.syspath_prepend(str(install_fake_engine(directory, faults, options)))


def run(directory: Path, observer: Observer, **keys: Any) -> RunInfo:
    path = tiny_recipe(
        directory,
        **{
            "run__steps": 3,
            "rollout__engine": "fake",
            "placement__rollout_workers": 2,
            "weight_sync__transport": "tensor",
            "weight_sync__bucket_bytes": BUCKET_BYTES,
            "run__timeout_s": 60,
            "health__logprob_abs_diff_error": "none",  # fake engines make their log-probs up
            **keys,
        },
    )
    return run_with_observer(path, observer)


def test_processes_come_up_while_the_data_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Preparing:
        cluster = ""

        def __enter__(self) -> Preparing:
            return self

        def __exit__(self, *_: object) -> None:
            events.append("trainers end")

        def begin(self) -> None:
            events.append("trainers prepare")

        def watched(self, watch: object) -> AbstractContextManager[None]:
            return nullcontext()

        def ready(self) -> None:
            events.append("trainers are waited for")
            raise WorkerDiedError("they died")

    class Engines(Preparing):
        def begin(self) -> None:
            events.append("engines prepare")

        def connect(self) -> None:
            events.append("servers begin")

        def __exit__(self, *_: object) -> None:
            events.append("engines end")

    def launch(*_: object, wait: bool, **__: object) -> Preparing:
        assert not wait
        return Preparing()

    def launch_engines(*_: object) -> Engines:
        events.append("engines start")
        return Engines()

    def read_inputs(*arguments: Any) -> Any:
        events.append("data are read")
        return read(*arguments)

    read = run_module.read_inputs
    install(tmp_path / "plugin", ["", ""], monkeypatch)
    monkeypatch.setattr(run_module, "read_inputs", read_inputs)
    monkeypatch.setattr(start_module, "launch_workers", launch)
    monkeypatch.setattr(start_module, "launch_engines", launch_engines)
    with pytest.raises(WorkerDiedError, match="they died"):
        run(tmp_path, Observer())
    assert events == [
        *("engines start", "engines prepare", "trainers prepare", "servers begin"),
        *("data are read", "trainers are waited for", "engines end", "trainers end"),
    ]


def test_the_samples_of_a_prompt_are_one_http_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    posts: list[int] = []
    send = Channel.request

    async def count(channel: Channel, path: str, body: bytes | None, **limits: Any) -> bytes:
        if path == "/generate":
            ids = json.loads(body or b"")["input_ids"]
            posts.append(len(ids) if isinstance(ids[0], list) else 1)
        return await send(channel, path, body, **limits)

    monkeypatch.setattr(Channel, "request", count)
    install(tmp_path / "plugin", ["", ""], monkeypatch)
    observer = Observer()
    run(tmp_path, observer, placement__rollout_workers=1)
    assert posts == [len(group.samples) for group in observer.groups] == [4] * 12
    log = (tmp_path / "run" / "logs" / "rollout-0.log").read_text()
    assert "looks after a process on cpu" in log, "the device was made after the server had begun"


def test_servers_that_end_are_started_again_with_the_current_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "plugin", ["die@generate:12", "die@update:2"], monkeypatch)
    observer = Observer()
    info = run(tmp_path, observer, run__steps=4)
    assert info.step == 4
    assert versions_by_step(observer.groups, 4) == [{0}, {1}, {2}, {3}]
    assert all(metrics["perf/update_weights_time"] > 0 for metrics in observer.metrics)
    seeds = [sample.seed for group in observer.groups for sample in group.samples]
    assert len(seeds) == len(set(seeds)) == 64
    log = json.dumps([path.name for path in (tmp_path / "run" / "logs").iterdir()])
    assert "rollout-0" in log


def test_servers_get_the_adapter_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From before the first rollout on; one that dies gets it again. Their requests ask for it."""
    install(tmp_path / "plugin", ["die@generate:12", ""], monkeypatch, adapter="policy")
    observer = Observer()
    keys = {"weight_sync__transport": "adapter", "train__lora__rank": 2, "train__lr": 0.02}
    run(tmp_path, observer, train__engine="fsdp", **keys)
    assert versions_by_step(observer.groups, 4) == [{0}, {1}, {2}]
    (last,) = (tmp_path / "run" / "weights").iterdir()
    assert last.name == "version-3"
    sent = load_file(last / "adapter_model.safetensors")
    exported = load_file(tmp_path / "run" / "hf" / "adapter" / "adapter_model.safetensors")
    assert sent.keys() == exported.keys()
    assert all(tensor.equal(exported[name]) for name, tensor in sent.items())


def ages(groups: Sequence[Group]) -> list[list[int]]:
    """Return, for each step of 4 groups, how many versions behind it was each token."""
    steps = [groups[start : start + 4] for start in range(0, len(groups), 4)]
    return [
        sorted(
            number - version
            for group in step
            for sample in group.samples
            for version in sample.weight_versions
        )
        for number, step in enumerate(steps)
    ]


def test_one_step_off_trains_on_what_was_generated_while_the_step_before_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "plugin", [""], monkeypatch)
    observer = Observer()
    keys = {"rollout__schedule": "one_step_off", "placement__rollout_workers": 1}
    run(tmp_path, observer, run__steps=4, **keys)
    assert [set(step) for step in ages(observer.groups)] == [{0}, {1}, {1}, {1}]
    health = Run.load(tmp_path / "run").health
    assert health is not None
    assert {rule.rule: rule.state for rule in health.rules}["stale_weights"] == "ok"
    assert len({group.prompt.index for group in observer.groups[:12]}) == 12  # an epoch, each prompt once


def test_samples_go_on_through_updates_and_are_never_older_than_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens take so long that samples are under way at an update, unless the host is slower still."""
    install(tmp_path / "plugin", [""], monkeypatch, token_s=0.05, lengths="uniform:2:24")
    observer = Observer()
    keys = {"rollout__schedule": "async", "rollout__max_staleness": 2, "rollout__max_new_tokens": 24}
    evaluated = {"eval__data": [tmp_path / "data.jsonl"], "eval__interval": 1, "eval__max_new_tokens": 4}
    run(tmp_path, observer, run__steps=5, placement__rollout_workers=1, **keys, **evaluated)
    found = ages(observer.groups)
    assert len(found) == 5
    assert min(map(min, found)) >= 0
    assert 1 <= max(map(max, found)) <= 2
    assert [metrics["rollout/lag/max"] for metrics in observer.metrics] == [max(step) for step in found]
    samples = [sample for group in observer.groups for sample in group.samples]
    assert all(list(sample.weight_versions) == sorted(sample.weight_versions) for sample in samples)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluations = [row for row in rows if "eval/data" in row]
    assert {0, 5} < {row["eval/step"] for row in evaluations}, "a step may have none, the last one has"
    beside = [row["eval/data/versions"] for row in evaluations if "eval/data/versions" in row]
    assert len(beside) == len(evaluations) - 2, "training waited for the first and the last"
    assert min(beside) >= 1


def test_a_server_without_requests_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_open = LoadBalancer.set_open

    def set_first_open(self: LoadBalancer, engine: str, is_open: bool) -> None:
        set_open(self, engine, is_open and engine == "engine 0")

    install(tmp_path / "plugin", ["", ""], monkeypatch)
    monkeypatch.setattr(LoadBalancer, "set_open", set_first_open)
    run(tmp_path, Observer(), run__steps=5)
    health = Run.load(tmp_path / "run").health
    assert health is not None
    assert [(rule.value, rule.since) for rule in health.firing if rule.rule == "idle_servers"] == [(1, 5)]


def test_an_update_does_not_wait_for_the_poll_of_servers_that_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang 0.5.17 cannot keep requests over an update: it aborts them and polls until it has none."""
    options = {"sglang": "0.5.17", "token_s": 0.05, "lengths": "fixed:24", "abort_poll_s": 1e6}
    install(tmp_path / "plugin", [""], monkeypatch, **options)
    observer = Observer()
    keys = {"rollout__schedule": "async", "rollout__max_staleness": 2, "rollout__max_new_tokens": 24}
    run(tmp_path, observer, placement__rollout_workers=1, weight_sync__deadline_s=10, **keys)
    assert "did not take weight version" not in caplog.text, "the pause waited for the poll"
    assert 1 <= max(map(max, ages(observer.groups))) <= 2


def test_requests_end_before_an_update_beside_trainers_that_never_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait for the server's room are sent again after it: an update would wait for them."""
    options = {"sglang": "0.5.17", "token_s": 0.02, "lengths": "fixed:24", "abort_poll_s": 1e6}
    install(tmp_path / "plugin", [""], monkeypatch, **options)
    aborts: list[EnginePool] = []
    abort = EnginePool.abort

    async def noted(pool: EnginePool) -> None:
        aborts.append(pool)
        await abort(pool)

    monkeypatch.setattr(EnginePool, "abort", noted)
    observer = Observer()
    beside = {"placement__colocated": True, "placement__offload": "never", "placement__rollout_workers": 1}
    keys = {"rollout__schedule": "async", "rollout__max_staleness": 2, "rollout__max_new_tokens": 24}
    few = {"rollout__client.concurrency": 4}
    run(tmp_path, observer, run__steps=4, weight_sync__drain_s=50, **beside, **keys, **few)
    assert not aborts
    samples = [sample for group in observer.groups for sample in group.samples]
    assert all(len(set(sample.weight_versions)) == 1 for sample in samples)
    assert 1 <= max(map(max, ages(observer.groups))) <= 2
    assert all("perf/sleep_time" not in metrics for metrics in observer.metrics)


def test_asynchronous_training_needs_engines_of_its_own(tmp_path: Path) -> None:
    embedded = {"rollout__schedule": "async", "rollout__engine": "transformers"}
    with pytest.raises(ConfigError, match=r"rollout\.schedule: .* set placement.rollout_workers"):
        run(tmp_path, Observer(), placement__rollout_workers=0, **embedded)
    with pytest.raises(ConfigError, match=r"rollout\.schedule: .*'transformers' is not a server"):
        run(tmp_path, Observer(), **embedded)


@pytest.mark.soak
def test_only_what_changed_travels_to_receivers_beside_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "plugin", ["", "die@update:2"], monkeypatch)
    observer = Observer()
    info = run(tmp_path, observer, run__steps=4, weight_sync__transport="delta", weight_sync__verify="always")
    assert info.step == 4
    assert versions_by_step(observer.groups, 4) == [{0}, {1}, {2}, {3}]


def test_trainers_and_servers_on_one_device_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines refuse to generate without their memory, and with weights that were released and not sent.

    Two trainers: each sends its server the weights, and they talk through groups that are made again.
    """
    install(tmp_path / "plugin", ["die@generate:20,error@profile:1:400", "die@generate:20"], monkeypatch)
    observer = Observer()
    keys = {"placement__colocated": True, "placement__train_workers": 2, "save__every": 2}
    run(tmp_path, observer, **keys, profile__kind="fake", profile__steps=[1])
    assert versions_by_step(observer.groups, 4) == [{0}, {1}, {2}]
    assert all(metrics["perf/wake_up_time"] > 0 for metrics in observer.metrics)
    steps = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in steps.glob("step-*")) == ["step-00000002", "step-00000003"]
    # A warning names the server that refused, and the other one wrote its profile.
    assert "engine 0 records no profile: " in (tmp_path / "run" / "logs" / "driver.log").read_text()
    profiles = [path.name for path in (tmp_path / "run" / "profiles").rglob("*.gz")]
    assert profiles == ["1-TP-0.trace.json.gz"]
    assert (tmp_path / "run" / "profiles/step-00000001/engine-1" / profiles[0]).is_file()
    timeline = read_events(tmp_path / "run" / "timeline.json", most_bytes=2**20)
    slept = {phase.name for row, phase in timeline if row.kind in ("driver", "actor")}
    assert slept >= {"sleep", "wake_up", "train", "weight_sync", "save"}
    for rank in range(2):
        assert {phase.name for row, phase in timeline if row == ("engine", rank)} >= {"generate", "asleep"}


class Interrupter(Observer):
    """Interrupts the run as samples of its second step are scored."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    @hookimpl
    def on_wait(self, message: str) -> None:
        if message.startswith("saving"):
            self.told.set()

    @hookimpl
    def register_reward_functions(self) -> list[NamedFunction]:
        return [NamedFunction(name="length", fn=self.length, inline=True)]

    def length(self, response: str) -> float:
        if len(self.metrics) == 1:
            self.metrics.clear()
            os.kill(os.getpid(), signal.SIGINT)
            self.told.wait(WITHIN_S)  # else the step may be trained before the main thread sees the signal
        return float(len(response) % 3)


def test_an_interrupted_rollout_ends_and_the_trainers_wake_up_to_save_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "plugin", ["", ""], monkeypatch)
    keys: dict[str, Any] = {"placement__colocated": True, "placement__train_workers": 2, "save__every": 100}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Interrupter(), **keys, reward__function="length")
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000001"]
    observer = Observer()
    assert run(tmp_path, observer, **keys, run__resume=True, run__accept_changes=["reward"]).step == 3
    assert versions_by_step(observer.groups, 4) == [{1}, {2}]


def test_servers_are_shown_the_images_that_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = add_vision_tokens(tiny_tokenizer(tmp_path / "seeing", alphabet="0123456789+="))
    tiny_qwen3_vl(tmp_path / "seeing", tokenizer, init_std=0.2)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    rows = []
    for number in range(12):
        Image.new("RGB", (16 * (1 + number % 2), 16), (20 * number, 0, 0)).save(tmp_path / f"{number}.png")
        rows.append({"prompt": "<image>1+2=", "label": "3", "images": [f"{number}.png"]})
    (tmp_path / "seen.jsonl").write_text("\n".join(map(json.dumps, rows)))
    install(tmp_path / "plugin", [""], monkeypatch, vocab_size=32, image_token=pad, image_factor=16)
    observer = Observer()
    run(
        tmp_path,
        observer,
        run__steps=1,
        model__path=tmp_path / "seeing",
        data__train=[tmp_path / "seen.jsonl"],
        data__multimodal_keys__image="images",
        placement__rollout_workers=1,
    )
    for group in observer.groups:
        [shown] = group.prompt.media
        assert shown.num_tokens == 1 + group.prompt.index % 2
        for sample in group.samples:
            assert sample.media == (shown,)
            assert pad not in sample.response_tokens
    first = {group.samples[0].response_tokens for group in observer.groups}
    assert len(first) > 1, "each image has answers of its own"
    tokens = [group.prompt.media[0].num_tokens for group in observer.groups]
    assert observer.metrics[0]["rollout/media_tokens"] == sum(tokens) / len(tokens)
