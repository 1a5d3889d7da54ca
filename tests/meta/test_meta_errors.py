"""Every error has a code of its own, survives pickling, and reads in docs/errors.md as it is printed."""

from __future__ import annotations

import ast
import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import Any

import pytest
import torch

from anygauge import device
from anygauge.cli.torch_extensions import extension_failure
from anygauge.config.load import load_config
from anygauge.config.schema import Config, Data, DataFile, Reward
from anygauge.data.media.decode import decode_image
from anygauge.data.media.problems import naming
from anygauge.data.source import FileSource
from anygauge.engines.megatron import scope
from anygauge.hub import localized
from anygauge.observability.metric_functions import custom_metrics
from anygauge.planning.fit import check_fit
from anygauge.planning.plan import Assumptions, make_plan
from anygauge.planning.shape import read_shape
from anygauge.plugins import Plugins, load_plugins, select_backend
from anygauge.rollout.rewards import Scorer
from anygauge.run_directory.directory import reserve_run_directory
from anygauge.runtime.memory_advice import advise, advise_death
from anygauge.runtime.placement import check_capacity
from anygauge.runtime.rpc import Died, Raised, WorkerId, deadline_error, error_of
from anygauge.serving.embedded.engine import TransformersEngine
from anygauge.testing.tiny import tiny_qwen3, tiny_tokenizer
from anygauge.trainer.health import HealthMonitor
from anygauge_cpu.device import CpuDevice
from anygauge_cpu.plugin import CPU
from anygauge_hooks import errors, hookimpl
from anygauge_hooks.errors import AnygaugeError
from anygauge_hooks.rl import Group, Prompt, SamplingParams
from anygauge_hooks.types import Availability, BackendSpec, ConfigChange, NamedFunction
from anygauge_npu import guards, mindspeed
from anygauge_tests.embedded import sample_all
from anygauge_tests.published_sizes import QWEN3_4B
from anygauge_tests.scoring import sample

CLASSES: list[type[AnygaugeError]] = [getattr(errors, name) for name in errors.__all__]
BY_CODE = {cls.code: cls for cls in CLASSES}
CONFIG = """\
[run]
name = "first"
[model]
path = "model"
[data]
train = ["train.jsonl"]
[reward]
function = "exact_match"
"""


# -------------------------------------------------------------------------
# The classes
# -------------------------------------------------------------------------


def test_every_error_class_is_exported() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(errors.__all__) == defined


def test_codes_are_unique() -> None:
    codes = [cls.__dict__["code"] for cls in CLASSES]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"AG\d{3}", code) for code in codes)


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_survives_pickling(cls: type[AnygaugeError]) -> None:
    error = pickle.loads(pickle.dumps(cls("What was found.", hint="What to do.")))
    assert type(error) is cls
    assert str(error) == f"What was found.\n  What to do.\n  [{cls.code}]"
    assert error.hint == "What to do."


# -------------------------------------------------------------------------
# How they are provoked
# -------------------------------------------------------------------------


def plugins_of(**functions: Callable[..., Any]) -> Plugins:
    """Return plugins of one hook implementation each, named after the keyword: ``my_plugin__hook``."""
    plugins = Plugins()
    for key, function in functions.items():
        name, _, hook = key.partition("__")
        module = ModuleType(name)
        setattr(module, hook, hookimpl(function))
        plugins.register(module, name.replace("_", "-"))
    return plugins


def unknown_backend() -> None:
    select_backend(load_plugins(only=["cpu"]), "npu")


def unavailable_backend() -> None:
    def probe() -> Availability:
        return Availability(ok=False, reason="no /dev/abacus0", hint="Load the driver: modprobe abacus")

    def register_backends() -> list[BackendSpec]:
        return [replace(CPU, name="abacus", probe=probe)]

    select_backend(plugins_of(abacus__register_backends=register_backends), "abacus")


def duplicate_name() -> None:
    def register() -> list[NamedFunction]:
        return [NamedFunction(name="brief", fn=len)]

    hook = "register_reward_functions"
    plugins_of(**{f"my_plugin__{hook}": register, f"other_plugin__{hook}": register}).named(hook)


def broken_plugin() -> None:
    plugins_of(my_plugin__register_reward_function=lambda: [])


def unknown_name() -> None:
    load_plugins(only=["cpu"]).get("register_rollout_engines", "transformer")


def broken_extension() -> None:
    cause = ImportError("libabacus.so: cannot open shared object file: No such file or directory")
    error = RuntimeError("Failed to load the backend extension: torch_abacus. You can disable extension ...")
    error.__cause__ = cause
    failure = extension_failure(error)
    assert failure is not None
    raise failure


def missing_provider() -> None:
    mindspeed.load(load(load_plugins(only=["cpu"])), None)


def load(plugins: Plugins, *overrides: str, extra: str = "") -> Config:
    Path("run.toml").write_text(CONFIG + extra)
    return load_config("run.toml", overrides, backend="cpu", plugins=plugins, check_files=False).config


def wrong_config() -> None:
    load(load_plugins(only=["cpu"]), "train.optimizer_steps=3", extra="[train]\nlrr = 0.001\n")


def conflicting_plugins() -> None:
    def adjust_quick() -> list[ConfigChange]:
        return [ConfigChange(path="train.dtype", value="bfloat16", reason="it is faster")]

    def adjust_exact() -> list[ConfigChange]:
        return [ConfigChange(path="train.dtype", value="float32", reason="it is exact")]

    load(
        plugins_of(
            cpu__register_backends=lambda: [CPU],
            quick__adjust_config=adjust_quick,
            exact__adjust_config=adjust_exact,
        )
    )


def too_large_a_run() -> None:
    config = Config.model_validate(
        {
            "run": {"name": "first"},
            "model": "Qwen/Qwen3-4B",
            "data": {"train": []},
            "reward": {"function": "none"},
            "train": {"dtype": "bfloat16"},
        }
    )
    given = Assumptions(backend="cuda", master_bytes=2, device_bytes=60 * 2**30)
    check_fit(config, make_plan(config, read_shape(QWEN3_4B), given))


def wrong_row() -> None:
    Path("train.jsonl").write_text('{"question": "1+1=", "solution": "2"}\n')
    FileSource(Data(train=(DataFile(path="train.jsonl"),), input_key="question", label_key="answer"), None)


def reward_without_a_number() -> None:
    def brief(response: str) -> None:
        del response

    def register() -> list[NamedFunction]:
        return [NamedFunction(name="brief", fn=brief, inline=True)]

    prompt = Prompt(index=3, tokens=(1,), text="1+1=", label="2", source="train.jsonl:4")
    plugins = plugins_of(my_plugin__register_reward_functions=register)
    scorer = Scorer(Reward(function="brief"), plugins, max_new_tokens=8, log=None)
    scorer.score([Group(prompt=prompt, samples=(sample(prompt_index=3, text="two"),))])


def broken_image() -> None:
    raw = bytes.fromhex("89504e470d0a1a0a") + bytes(100)
    with naming("train.jsonl:4", "image", 2, "11.png"):
        decode_image(io.BytesIO(raw), 1)


def metric_that_fails() -> None:
    path = Path("my_metrics.py")
    path.write_text('def distinct(metrics):\n    return {"answers": metrics["answer"]}\n')
    custom_metrics({"my_metrics:distinct": run_path(str(path))["distinct"]}, (), {}, step=1)


def long_prompt() -> None:
    tiny_tokenizer("model", alphabet="0123456789+=")
    path = tiny_qwen3("model", hidden=16, layers=1, head_dim=8, mlp=16, max_positions=32)
    engine = TransformersEngine(path, dtype=torch.float32, device=torch.device("cpu"), max_batch_tokens=100)
    prompt = Prompt(index=3, tokens=(1,) * 40, text="", source="train.jsonl:4")
    sample_all(engine, [prompt], SamplingParams(max_new_tokens=4), [[0]])


def occupied_directory() -> None:
    config = load(load_plugins(only=["cpu"]))
    for _ in range(2):
        with reserve_run_directory(config) as reserved:
            directory = reserved.open({})
            (directory.path / "metrics.jsonl").write_text('{"train/step": 1}')


def name_not_in_the_cache() -> None:
    overrides = ["model.path=Qwen/Qwen3-0.6B", "hub.offline=true", "hub.cache=cache"]
    localized(load(load_plugins(only=["cpu"]), *overrides))


def device_in_use() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        scope.make_scope(CpuDevice()).__enter__()


def missed_redirection() -> None:
    scope._fence("torch.cuda.memory_stats", "npu")()


class FullDevice(CpuDevice):
    """Some device with too little memory."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._peaks = iter([0, 3 * 2**30, 0, 5.5 * 2**30, 5.5 * 2**30])

    def peak_memory(self, *, reset: bool = False) -> int:
        return int(next(self._peaks))

    def memory(self) -> Mapping[str, int]:
        return {"allocated": int(5.25 * 2**30), "free": 2**29, "total": 2**33}


def full_memory() -> None:
    full, config = FullDevice(), load(load_plugins(only=["cpu"]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "_peaks", {})
        try:
            with device.memory_phase(full, "load"):
                pass
            with device.memory_phase(full, "forward_backward"):
                reason = (
                    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 68719476736 bytes."
                )
                raise RuntimeError(f"[enforce fail] {reason}")
        except errors.OutOfMemoryError as error:
            advise(error, config)
            raise


def lengths_of_other_tokens() -> None:
    guards.check_lengths("varlen_attention", "lengths", (40, 7), 48, "q")


WORKERS = {rank: WorkerId(role="actor", rank=rank, pid=4711 + rank, host="node-1") for rank in range(2)}
TRACEBACK = """\
Traceback (most recent call last):
  File "my_losses.py", line 12, in reinforce
    return loss / scale
ZeroDivisionError: division by zero"""
LOST_PEER = """\
Traceback (most recent call last):
RuntimeError: Connection closed by peer"""


def dead_worker() -> None:
    log = "step 12: 2048 samples"
    died = Died(how="was killed by SIGKILL", log=log)
    config = load(load_plugins(only=["cpu"]))
    raise error_of(
        {0: Raised(traceback=LOST_PEER, lost_peer=True), 1: died},
        WORKERS,
        lambda death: advise_death(death, "generate", config, oom_kills=0),
    )


def failed_worker() -> None:
    raise error_of({0: Raised(traceback=TRACEBACK)}, WORKERS)


def slow_worker() -> None:
    stack = '  File "my_engine.py", line 40 in generate'
    log = Path("runs/first/logs/actor-1.log").resolve()
    raise deadline_error("generate", 1800.0, [WORKERS[1]], {1: stack}, "run.timeout_s", {1: log})


def small_cluster() -> None:
    check_capacity({"GPU": 1.0}, 8, {"node-1": {"GPU": 4.0}})


def other_model_in_the_engine() -> None:
    config = load(load_plugins(only=["cpu"]))
    HealthMonitor(config, Path()).check({"health/logprob_abs_diff": 0.365}, 1)


PROVOKED: Mapping[str, Callable[[], None]] = {
    "AG101": unknown_backend,
    "AG102": unavailable_backend,
    "AG103": duplicate_name,
    "AG104": broken_plugin,
    "AG105": unknown_name,
    "AG106": broken_extension,
    "AG107": missing_provider,
    "AG201": wrong_config,
    "AG202": conflicting_plugins,
    "AG203": too_large_a_run,
    "AG301": wrong_row,
    "AG302": reward_without_a_number,
    "AG303": broken_image,
    "AG304": metric_that_fails,
    "AG401": long_prompt,
    "AG501": occupied_directory,
    "AG503": name_not_in_the_cache,
    "AG601": device_in_use,
    "AG602": missed_redirection,
    "AG605": full_memory,
    "AG608": lengths_of_other_tokens,
    "AG701": dead_worker,
    "AG702": failed_worker,
    "AG703": slow_worker,
    "AG704": small_cluster,
    "AG801": other_model_in_the_engine,
}
FROM_SOURCE = ("AG502", "AG603", "AG604", "AG606", "AG607", "AG609", "AG610", "AG611")
"""Codes whose errors need Megatron: their text is compared with the source."""


# -------------------------------------------------------------------------
# The document
# -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sections(root: Path) -> dict[str, str]:
    """Return the text under each heading of docs/errors.md."""
    parts = re.split(r"^## (.+)$", (root / "docs/errors.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def shown(section: str) -> str:
    """Return the typical text of a section."""
    return section.split("```text\n")[1].split("\n```")[0]


def test_the_document_has_one_section_per_code_in_order(sections: dict[str, str]) -> None:
    assert list(sections) == sorted(BY_CODE)
    for code, cls in BY_CODE.items():
        assert sections[code].lstrip().startswith(f"`{cls.__name__}`: ")


def test_every_text_of_the_document_is_held_by_a_test() -> None:
    assert {*PROVOKED, *FROM_SOURCE, AnygaugeError.code} == set(BY_CODE)


@pytest.mark.parametrize("code", PROVOKED)
def test_the_document_shows_what_is_printed(
    code: str, sections: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BY_CODE[code]) as caught:
        PROVOKED[code]()
    found = str(caught.value).replace(f"{tmp_path.resolve()}/", "/home/me/")
    assert found == shown(sections[code])


@pytest.mark.parametrize("code", FROM_SOURCE)
def test_the_document_shows_what_the_source_formats(code: str, sections: dict[str, str], root: Path) -> None:
    name = BY_CODE[code].__name__
    folders = [root / "core/anygauge" / name for name in ("distributed", "engines")]
    sources = [path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))]
    patterns = [pattern for source in sources for pattern in printed(ast.parse(source), name)]
    assert patterns
    assert any(re.fullmatch(pattern, shown(sections[code]), re.DOTALL) for pattern in patterns), patterns


def printed(tree: ast.AST, name: str) -> Iterator[str]:
    """Yield a pattern of the text of each error of a class: its literal parts, anything between them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            message, hint = (literal(part) for part in (node.args[0], node.keywords[0].value))
            yield rf"{message}\n  {hint}\n  \[{getattr(errors, name).code}\]"


def literal(node: ast.expr) -> str:
    """Return a pattern of a string or an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) for part in node.values)
    return re.escape(str(node.value)) if isinstance(node, ast.Constant) else ".*?"
