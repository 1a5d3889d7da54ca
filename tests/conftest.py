"""Fixtures of the whole suite: one Ray cluster, and groups of workers that never outlive their test."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from anygauge.cli import doctor
from anygauge.config.schema import Config
from anygauge.distributed import child_process
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import Plugins, find_backend, load_plugins
from anygauge.runtime.launch import launch_workers
from anygauge.runtime.placement import Seat
from anygauge.runtime.worker_group import WorkerGroup
from anygauge_hooks.engines import WorkerContext
from anygauge_tests import datasets, fork_server, fork_server_probes
from anygauge_tests.fork_server import ForkedProcess, ForkServers

Launch = Callable[..., WorkerGroup]
StartScript = Callable[..., tuple[ForkedProcess, Path]]
RunScript = Callable[..., str]

PROBE = "anygauge_tests.workers:ProbeWorker"
# No test leaves loopback: read when huggingface_hub is imported, here and in every child process.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
# As many processes as cores run tests: threads of theirs would wait for each other. Read with torch's import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Until everything is collected: nothing that is imported is garbage.
gc.disable()
# A shell without job control lets what it starts in the background ignore interrupts, and so its children.
signal.signal(signal.SIGINT, signal.default_int_handler)


TOGETHER = {
    "ray": r"integration/test_(cluster_two_nodes|launch|launch_endings|launch_ray|train_run)",
    "artifacts": r"integration/test_(install|third_party)",
    "clients": r"unit/rollout/gateway/test_gateway_(anthropic|http|images)",
    "run_with_torch": r"meta/test_meta_imports|backends/(npu/test_mindspeed|cuda/test_transformer_engine)",
}
"""Files that one process has, by what they share that costs as much as many tests."""
RAY = pytest.StashKey[tuple[str, ExitStack]]()
"""Address of the Ray cluster, and the stack that ends it."""


def shared_by(nodeid: str) -> str | None:
    """Return what the file of a test shares with others."""
    file = nodeid.partition("::")[0]
    return next(
        (name for name, files in TOGETHER.items() if re.fullmatch(rf"tests/({files})\.py", file)), None
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let one of the processes have all files that share something costly."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return shared_by(nodeid) or super()._split_scope(nodeid)

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_finish() -> None:
    """Leave the million objects of modules and collected tests out of garbage collections, and have fewer."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    """Return the plugins that are installed."""
    return load_plugins()


@pytest.fixture(scope="module")
def context(plugins: Plugins) -> Iterator[WorkerContext]:
    """Let this process be the only worker, with a train engine that can be built in it."""
    from torch.distributed import HashStore

    from anygauge.distributed.process_groups import destroy_process_group, init_process_group

    backend = plugins.get("register_backends", "cpu")
    prepare_megatron(plugins, backend)
    init_process_group(plugins, backend, HashStore(), rank=0, world_size=1, timeout_s=60.0, single_host=True)
    yield WorkerContext(
        rank=0, world_size=1, backend=backend, device=plugins.make_device(backend, 0), plugins=plugins
    )
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel

    parallel_state.destroy_model_parallel()
    destroy_process_group()
    # Hooks of its gradients hold a model through torch's own memory, where no garbage collection looks: empty
    # it, or the open files of its process groups stay until the tests end, some 70 for each file of tests.
    for model in gc.get_objects():
        if issubclass(type(model), DistributedDataParallel):  # isinstance would follow dead weak references
            vars(model).clear()


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Take back what a test changes in the environment: libraries, benches and ours set variables as well.

    Only what differs: threads of the session read it at any time.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        os.environ.pop(name, None)
    changed = {name: value for name, value in before.items() if os.environ.get(name) != value}
    os.environ.update(changed)


@pytest.fixture(scope="session", autouse=True)
def index_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the indexes of data files away from the home directory."""
    os.environ["ANYGAUGE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "data"
"""Rows of the published data sets, where a developer keeps some: no test needs them."""
MADE_AND_PUBLISHED = ["made", pytest.param("published", marks=pytest.mark.published_data)]


@pytest.fixture(scope="session", params=MADE_AND_PUBLISHED)
def gsm8k(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with ``train.jsonl`` and ``test.jsonl`` in the format of GSM8K."""
    if request.param == "published":
        return published("gsm8k")
    return datasets.write_gsm8k(tmp_path_factory.mktemp("gsm8k"))


@pytest.fixture(scope="session", params=MADE_AND_PUBLISHED)
def geo3k(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with ten problems and their diagrams in the format of Geometry3K."""
    if request.param == "published":
        return published("geo3k")
    return datasets.write_geo3k(tmp_path_factory.mktemp("geo3k"))


def published(name: str) -> Path:
    """Return the directory of a published data set; without it, skip the test."""
    if not (PUBLISHED / name).is_dir():
        pytest.skip(f"reads rows of {name} in {PUBLISHED}")
    return PUBLISHED / name


@pytest.fixture(scope="module")
def ray_cluster(
    request: pytest.FixtureRequest, fork_servers: ForkServers, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Return the address of a Ray cluster of this host, which the files that share it start once."""
    stash = request.config.stash
    if RAY not in stash:
        stack = ExitStack()
        stash[RAY] = stack.enter_context(run_ray(fork_servers, tmp_path_factory)), stack
    return stash[RAY][0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the Ray cluster after the last file that shares it: idle, it takes 2 % of a core."""
    if RAY in item.config.stash and (nextitem is None or shared_by(nextitem.nodeid) != "ray"):
        item.config.stash[RAY][1].close()
        del item.config.stash[RAY]


@contextmanager
def run_ray(processes: ForkServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Ray cluster of this host."""
    import ray

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray warns that it hides the devices of a host with some from workers without any.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    with forked_ray_workers(processes, tmp_path_factory):
        context = ray.init(
            address="local",
            num_cpus=2,
            resources={"anygauge_cpu": 8},
            object_store_memory=128 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="anygauge",
            # Those that wait for work have another environment than ours, and wait in vain.
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
        )
        yield context.address_info["address"]
        ray.shutdown()


def forked_ray_workers(
    processes: ForkServers, tmp_path_factory: pytest.TempPathFactory
) -> AbstractContextManager[None]:
    if sys.platform != "linux":
        return nullcontext()
    from ray._private import ray_constants

    from anygauge_tests.fork_server_ray import forked_ray_workers

    return forked_ray_workers(processes, tmp_path_factory.mktemp("ray"), ray_constants)


@pytest.fixture(scope="session")
def fork_servers() -> Iterator[ForkServers]:
    """Return what forks processes that have imported everything already."""
    processes = ForkServers("cpu")
    yield processes
    processes.close()


@pytest.fixture(scope="session", autouse=True)
def forked_workers(fork_servers: ForkServers) -> Iterator[None]:
    """Let workers and scorers be forked: importing takes longer than most of what they are started for."""
    fork_server.use(fork_servers)
    scorers = ForkServers(None, [fork_server.SCORER])
    with fork_server.forked_workers(fork_servers, scorers) if sys.platform == "linux" else nullcontext():
        yield
    scorers.close()
    fork_server.use()


@pytest.fixture
def cold_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the workers and scorers of a test be started as a user's are."""
    monkeypatch.setattr(child_process, "Popen", subprocess.Popen)


@pytest.fixture
def start_script(fork_servers: ForkServers, tmp_path: Path) -> Iterator[StartScript]:
    """Return a function that runs a script or a module in a process that has imported everything.

    It takes the path or the name, the arguments and what ``ForkServers.start`` does, and returns the
    process and the file of its output.
    """
    started: list[ForkedProcess] = []

    def start(script: Path | str, *arguments: str, **options: Any) -> tuple[ForkedProcess, Path]:
        output = tmp_path / f"output-{len(started)}"
        with output.open("wb") as file:
            started.append(fork_servers.start(str(script), arguments, output=file.fileno(), **options))
        return started[-1], output

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def run_with_torch() -> Iterator[RunScript]:
    """Return a function that runs a script in a process that has imported torch, and nothing of Megatron.

    It takes the path, the arguments and what ``ForkServers.start`` does, and returns what was printed.
    """
    processes = ForkServers(None, ["torch"])

    def run(script: Path, *arguments: str, **options: Any) -> str:
        with TemporaryFile() as output, TemporaryFile() as errors:
            outputs = {"output": output.fileno(), "errors": errors.fileno()}
            process = processes.start(str(script), arguments, **outputs, **options)
            try:
                code = process.wait(200)
            finally:
                process.kill()
            output.seek(0)
            errors.seek(0)
            assert code == 0, errors.read().decode()
            return output.read().decode()

    yield run
    processes.close()


@pytest.fixture
def forked_probes(fork_servers: ForkServers) -> Iterator[None]:
    """Let ``anygauge doctor`` ask processes that have imported torch. Those of a user: test_cli_doctor."""
    with fork_server_probes.forked_probes(fork_servers, doctor):
        yield


def probe_config(**placement: Any) -> Config:
    """Return a config that only its ``placement`` matters of."""
    return Config.model_validate(
        {
            "run": {"name": "launch", "timeout_s": 60},
            "model": {"path": "model"},
            "data": {"train": ["train.jsonl"]},
            "reward": {"function": "exact_match"},
            "placement": {"start_timeout_s": 120, **placement},
        }
    )


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Return a function that starts probe workers on the CPU backend; they are ended after the module.

    Its arguments are the launcher, the number of workers, and what :func:`launch_workers` takes or
    ``placement`` has.
    """
    plugins = load_plugins(only=["cpu"])
    backend = find_backend(plugins, plugins.named("register_backends"), "cpu")

    def start(
        launcher: str,
        num_workers: int = 2,
        *,
        worker_class: str = PROBE,
        seats: Sequence[Seat] = (),
        **placement: Any,
    ) -> WorkerGroup:
        if launcher == "ray":
            request.getfixturevalue("ray_cluster")
        group = launch_workers(
            probe_config(launcher=launcher, **placement),
            backend,
            plugins,
            worker_class=worker_class,
            role="actor",
            num_workers=num_workers,
            run_directory=tmp_path_factory.mktemp("run"),
            seats=seats,
        )
        stack.callback(group.end)
        return group

    with ExitStack() as stack:
        yield start


@pytest.fixture
def worker_log() -> Callable[[WorkerGroup, int], Path]:
    """Return a function that finds the log of a rank."""
    return lambda group, rank: group._spec.log(rank)
