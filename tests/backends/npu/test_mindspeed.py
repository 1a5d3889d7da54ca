"""MindSpeed as a provider, on a stand-in with its names; test_mindspeed_simulated.py has the real one."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anygauge.config.load import load_config
from anygauge.plugins import Plugins, load_plugins
from anygauge.runtime.worker import Worker, WorkerSetup
from anygauge_cpu.plugin import CPU
from anygauge_hooks import hookimpl
from anygauge_hooks.errors import ConfigError, PluginError, ProviderError
from anygauge_hooks.types import Availability
from anygauge_npu import mindspeed
from anygauge_npu.audit import Audit, Change, unknown_changes
from anygauge_npu.plugin import NPU

HERE = Path(__file__).parent
STAND_IN = HERE / "provider"
PUBLISHED = json.loads((HERE / "data/mindspeed_core_r0_16_0.json").read_text())
Chosen = Callable[..., dict[str, Any]]
CONFIG = """\
[run]
name = "first"
[model]
path = "model"
[data]
train = ["train.jsonl"]
[reward]
function = "exact_match"
[on.npu.train]
provider = "mindspeed"
"""


@pytest.fixture(scope="module")
def chosen(run_with_torch: Callable[..., str]) -> Chosen:
    """Return a function that runs the phases of a worker in a process of its own, where replacements stay."""

    def run(tmp_path: Path, *step: str, extra: Sequence[str] = (), **options: Any) -> dict[str, Any]:
        env = os.environ | {"FAKE_MINDSPEED_EXTRA": json.dumps(extra)}
        arguments = (str(tmp_path / "actor-0.log"), json.dumps(options), *step)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(STAND_IN)
            printed = run_with_torch(HERE / "chosen_provider.py", *arguments, env=env)
        report: dict[str, Any] = json.loads(printed.splitlines()[-1])
        return report

    return run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, chosen: Chosen) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("provider")
    found = chosen(directory, "step", strict=True, arguments={"optimization_level": 1})
    found["after config"] = json.loads((directory / "actor-0.mindspeed.json").read_text())
    return found


# -------------------------------------------------------------------------
# Order
# -------------------------------------------------------------------------


def test_it_is_imported_before_megatron_and_does_not_see_the_workers_arguments(
    report: dict[str, Any],
) -> None:
    assert report["first"] == {"argv": [], "megatron_before": False}
    assert report["argv"][-1] == "step"


def test_the_fuser_of_the_backend_is_there_before_it(report: dict[str, Any]) -> None:
    assert report["fuser"] == "cpu"


def test_it_is_applied_again_with_the_arguments_of_the_run(report: dict[str, Any]) -> None:
    (arguments,) = report["arguments"]
    assert arguments["tensor_model_parallel_size"] == 1
    assert arguments["optimization_level"] == 1
    assert set(PUBLISHED["arguments_of_megatron"]) <= set(arguments)


def test_a_worker_prepares_the_engine_first_and_hands_on_config_and_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    order: list[Any] = []

    def prepare_worker(phase: str, config: Any, log: str) -> None:
        order.append((phase, config.train.provider, log))

    setup = WorkerSetup(
        config=npu_config(tmp_path),
        backend="npu",
        worker_class="",
        role="actor",
        rank=0,
        world_size=1,
        log="actor-0.log",
        timeout_s=1,
    )
    worker = Worker(setup)
    worker._plugins, worker._backend = load_plugins(only=["cpu"]), NPU
    engine = SimpleNamespace(prepare=lambda plugins, backend: order.append(backend.name))
    monkeypatch.setattr(Plugins, "get", lambda *_: engine)
    worker._plugins.register(SimpleNamespace(prepare_worker=hookimpl(prepare_worker)), "watcher")
    worker._prepare("before_vendor_import")
    worker._prepare("after_config")
    assert order == [
        "npu",
        ("before_vendor_import", "mindspeed", "actor-0.log"),
        ("after_config", "mindspeed", "actor-0.log"),
    ]


def test_it_is_never_imported_where_it_is_not_chosen(tmp_path: Path) -> None:
    config = npu_config(tmp_path)
    assert mindspeed.is_chosen(config, "actor")
    assert not mindspeed.is_chosen(config, "rollout")
    assert not mindspeed.is_chosen(None, "actor")
    plain = config.model_copy(update={"train": config.train.model_copy(update={"provider": None})})
    assert not mindspeed.is_chosen(plain, "actor")


# -------------------------------------------------------------------------
# The config
# -------------------------------------------------------------------------


def npu_config(tmp_path: Path, *overrides: str, backend: Any = NPU) -> Any:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    plugins = load_plugins(only=["cpu", "npu"])
    return load_config(path, overrides, backend=backend, plugins=plugins, check_files=False).config


def test_another_backend_does_not_know_it(tmp_path: Path) -> None:
    assert npu_config(tmp_path, backend=CPU).train.provider is None
    with pytest.raises(ConfigError, match=r"train.provider: found 'mindspeed'.*backend cpu: it knows none"):
        npu_config(tmp_path, "train.provider=mindspeed", backend=CPU)


def test_an_unknown_name_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"found 'mindsped'.*it knows mindspeed"):
        npu_config(tmp_path, "train.provider=mindsped")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.provider_options={strikt = true}", "unknown to mindspeed; known: strict, allow"),
        ("train.provider_options={strict = 1}", "must be true or false"),
        ("train.provider_options={allow = 'torch.*'}", "must be a list of names"),
        ("train.provider_options={allow = [3]}", "must be a list of names"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        npu_config(tmp_path, override)


def test_options_without_a_provider_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no effect without train.provider"):
        npu_config(tmp_path, "train.provider_options={strict = true}", backend=CPU)


def test_where_it_is_not_installed_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    assert importlib.util.find_spec("mindspeed") is None
    with pytest.raises(ProviderError, match="not installed") as caught:
        mindspeed.load(npu_config(tmp_path), None)
    assert "core_r0.16.0" in str(caught.value)
    assert "placeholder" in str(caught.value)


def test_a_host_with_an_npu_says_at_once_that_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = replace(NPU, probe=lambda: Availability(ok=True))
    with pytest.raises(ConfigError, match=r"train.provider: found 'mindspeed'.*not installed: git clone"):
        npu_config(tmp_path, backend=here)
    package = tmp_path / "placeholder" / "mindspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported by a check')\n")
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(ConfigError, match="placeholder"):
        npu_config(tmp_path, backend=here)
    (package / "megatron_adaptor.py").touch()
    assert npu_config(tmp_path, backend=here).train.provider == "mindspeed"


def test_one_that_does_not_load_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken" / "mindspeed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "megatron_adaptor.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(mindspeed, "REQUIREMENTS", ("pytest", "a-library-that-is-not-there"))
    with pytest.raises(ProviderError, match="does not load: ModuleNotFoundError") as caught:
        mindspeed.load(npu_config(tmp_path), None)
    assert "It needs a-library-that-is-not-there, which" in str(caught.value)
    sys.modules.pop("mindspeed", None)


@pytest.mark.parametrize("contents", [{}, {"repatch": lambda args: args["unheard_of"]}])
def test_one_that_is_not_applied_again_is_named_with_its_error(
    contents: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mindspeed._State, "audit", Audit([]))
    monkeypatch.setitem(sys.modules, mindspeed.ADAPTOR, SimpleNamespace(**contents))
    with pytest.raises(ProviderError, match=r"does not take the arguments of the run: (Attribute|Key)Error"):
        mindspeed.reapply(npu_config(tmp_path), None)


# -------------------------------------------------------------------------
# The audit
# -------------------------------------------------------------------------


def names(listed: dict[str, Any], **wanted: Any) -> set[str]:
    return {each["name"] for each in listed["replaced"] if wanted.items() <= each.items()}


def test_what_it_replaced_is_listed_also_in_modules_that_it_imported_itself(report: dict[str, Any]) -> None:
    listed = report["after import"]
    config = "megatron.core.transformer.transformer_config.TransformerConfig.__post_init__"
    assert listed["after"] == "import"
    assert {"torch.jit.script", config} <= names(listed, by="mindspeed.megatron_adaptor", kind="replaced")
    assert "fused_weight_gradient_mlp_cuda" in names(listed, kind="made up")


def test_the_list_grows_once_the_config_is_known(report: dict[str, Any]) -> None:
    permute = "megatron.core.transformer.moe.moe_utils.permute"
    assert permute not in names(report["after import"])
    now = names(report["after config"], by="mindspeed.megatron_adaptor")
    assert permute in now
    assert "megatron.core.transformer.moe.token_dispatcher.permute" in now  # the same under another name
    assert "torch.jit.script" in now


def test_what_torch_does_to_itself_is_no_surprise(report: dict[str, Any]) -> None:
    assert names(report["after config"], expected=False) == set()
    assert names(report["after config"]) > names(report["after config"], by="mindspeed.megatron_adaptor")


def test_something_unexpected_is_an_error_in_a_strict_run(chosen: Chosen, tmp_path: Path) -> None:
    extra = ["megatron.core.utils.get_attr_wrapped_model"]
    error = chosen(tmp_path, strict=True, extra=extra)["error"]
    assert "replaced what its list does not have: megatron.core" in error
    assert "[AG107]" in error
    listed = json.loads((tmp_path / "actor-0.mindspeed.json").read_text())
    assert extra[0] in names(listed, expected=False)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"strict": True, "allow": ["megatron.core.utils.get_attr_*"]}, id="allowed"),
        pytest.param({}, id="listed", marks=pytest.mark.soak),
    ],
)
def test_something_unexpected_can_be_allowed_or_only_listed(
    chosen: Chosen, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert "error" not in chosen(tmp_path, extra=["megatron.core.utils.get_attr_wrapped_model"], **options)


@pytest.fixture
def scratch() -> Iterator[ModuleType]:
    module = ModuleType("scratch_of_audit")
    exec("class Thing:\n    def work(self): pass\ndef fn(): pass\nstate = 1\n", vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_an_audit_sees_functions_methods_and_new_ones_but_not_state(scratch: Any) -> None:
    audit = Audit([scratch.__name__])
    assert audit.changes() == []
    scratch.state = 2
    scratch.fn = scratch.new = print
    scratch.Thing.work = len
    found = {change.name.removeprefix("scratch_of_audit."): change.kind for change in audit.changes()}
    assert found == {"fn": "replaced", "new": "added", "Thing.work": "replaced"}
    del scratch.fn
    assert {change.kind for change in audit.changes() if change.name.endswith(".fn")} == {"removed"}


def test_an_audit_asks_a_lazy_module_for_nothing() -> None:
    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(name)

    audit, lazy = Audit(["scratch_of_audit"]), Lazy("lazy_of_audit")
    del lazy.__spec__
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, lazy.__name__, lazy)
        assert audit.changes() == []


def test_an_audit_asks_no_value_whether_it_is_true(scratch: Any) -> None:
    class Array:
        def __bool__(self) -> bool:
            raise ValueError("of which element?")

    class Wrapper:
        func = Array()

        def __call__(self) -> None: ...

    audit = Audit([scratch.__name__])
    scratch.fn = Wrapper()
    assert [change.by for change in audit.changes()] == [Array.__module__]


def test_a_class_that_was_replaced_is_one_change(scratch: Any) -> None:
    audit = Audit([scratch.__name__])
    scratch.Thing = type("Thing", (), {"work": len, "more": len})
    assert [change.name for change in audit.changes()] == ["scratch_of_audit.Thing"]


def test_what_is_explained() -> None:
    value = object()
    listed = Change("torch.a", "replaced", "lib", value)
    alias = Change("megatron.b", "replaced", "lib", value)
    itself = Change("torch.c", "replaced", "torch._dynamo", object())
    author = Change("torch.d", "replaced", "vendor.x", object())
    other = Change("torch.e", "replaced", "lib", object())
    found = unknown_changes([listed, alias, itself, author, other], ["torch.a"], ["vendor"])
    assert found == [other]


# -------------------------------------------------------------------------
# Its names and signatures
# -------------------------------------------------------------------------


def test_the_stand_in_has_the_published_signatures(monkeypatch: pytest.MonkeyPatch, context: Any) -> None:
    monkeypatch.syspath_prepend(STAND_IN)
    from importlib import import_module

    linear = import_module(mindspeed.LINEARS)
    for name in ("TEColumnParallelLinear", "TERowParallelLinear"):
        published = PUBLISHED["signatures"][f"{mindspeed.LINEARS}.{name}"]
        parameters = inspect.signature(getattr(linear, name)).parameters.values()
        keyword = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        assert keyword == published["keyword"]
        assert [each.name for each in parameters if each.name not in keyword] == published["positional"]
    for name in list(sys.modules):
        if name.partition(".")[0] == "mindspeed":
            del sys.modules[name]


def test_the_published_repatch_takes_one_mapping() -> None:
    assert PUBLISHED["signatures"]["mindspeed.megatron_adaptor.repatch"]["positional"] == ["args"]


def test_the_list_of_names_is_that_of_the_branch() -> None:
    known = mindspeed.expected()
    assert len(known) > 300
    assert "megatron.core.transformer.transformer_config.TransformerConfig.__post_init__" in known
    assert PUBLISHED["commit"] in (mindspeed.__doc__ or "")


# -------------------------------------------------------------------------
# Its modules
# -------------------------------------------------------------------------


def test_a_linear_of_any_class_name_is_loaded_divided_and_exported_alike(report: dict[str, Any]) -> None:
    step = report["step"]
    assert step["class"] == "TEColumnParallelLinear"
    assert step["extra state"]
    assert step["equal"]
    assert step["marks"] == {
        "self_attention.linear_qkv.weight": [True, 0],
        "self_attention.linear_proj.weight": [True, 1],
        "mlp.linear_fc1.weight": [True, 0],
        "mlp.linear_fc2.weight": [True, 1],
    }


def test_a_provider_may_bring_some_parts_alone(context: Any, caplog: pytest.LogCaptureFixture) -> None:
    from anygauge.engines.megatron.layers.provider import SpecProvider, complete

    default = SpecProvider(kernels="table", unit_angles=True)  # type: ignore[arg-type]
    assert complete(None, default) is default

    class Linears:
        def column_parallel_linear(self) -> str:
            return "column"

    with caplog.at_level("INFO"):
        whole = complete(Linears(), default)
    assert "layers take column_parallel_linear from" in caplog.text
    assert whole.column_parallel_linear() == "column"
    assert whole.row_parallel_linear() is default.row_parallel_linear()
    assert whole.norm().params["kernels"] == "table"


def test_a_provider_of_something_else_breaks_the_contract(context: Any) -> None:
    from anygauge.engines.megatron.layers.provider import SpecProvider, complete

    class Misspelled:
        def column_paralel_linear(self) -> None: ...

    with pytest.raises(PluginError, match=r"column_paralel_linear, which no layer uses"):
        complete(Misspelled(), SpecProvider(kernels=None, unit_angles=True))  # type: ignore[arg-type]
