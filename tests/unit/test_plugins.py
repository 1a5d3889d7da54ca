"""Loading, the checks at load time, how answers combine, and backend selection."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anygauge import plugins as plugins_module
from anygauge.plugins import (
    DEFAULT_PLUGINS,
    Plugins,
    find_backend,
    load_plugins,
    probe_backend,
    published_backends,
    require_plugins,
    select_backend,
)
from anygauge_hooks import CONTRACT_VERSION, hookimpl, hookspec
from anygauge_hooks.errors import (
    BackendUnavailableError,
    ConfigConflictError,
    DuplicateNameError,
    PluginError,
    UnknownBackendError,
    UnknownNameError,
)
from anygauge_hooks.models import ModelSpec
from anygauge_hooks.types import Availability, BackendSpec, NamedFunction, PluginInfo

Install = Callable[[Mapping[str, str]], None]
ENV: dict[str, Any] = {"deterministic": False, "interface": None, "ip_version": "any", "timeout_s": 9.0}
"""Arguments of ``worker_env``."""


def backend(name: str, *, ok: bool = True, probe: Callable[[], Availability] | None = None) -> BackendSpec:
    found = Availability(ok=ok, reason="" if ok else "no device", hint=None if ok else "Plug it in.")
    return BackendSpec(
        name=name,
        device_type=name,
        dist_backend="gloo",
        probe=probe or (lambda: found),
        scheduler_resource="GPU",
        local_device=lambda ids, env: 0,
    )


class Provides:
    """A plugin that registers backends."""

    def __init__(self, *specs: BackendSpec) -> None:
        self.specs = specs

    @hookimpl
    def register_backends(self) -> tuple[BackendSpec, ...]:
        return self.specs


def plugin(**functions: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(**{name: hookimpl(function) for name, function in functions.items()})


@pytest.fixture
def plugins() -> Plugins:
    plugins = Plugins()
    plugins.register(Provides(backend("cpu")), "cpu")
    return plugins


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that makes modules and declares an entry point for each, instead of the real ones."""

    def install(sources: Mapping[str, str]) -> None:
        monkeypatch.syspath_prepend(str(tmp_path))
        entries = []
        for name, source in sources.items():
            module = f"installed_{name}"
            (tmp_path / f"{module}.py").write_text(source)
            monkeypatch.delitem(sys.modules, module, raising=False)
            entries.append(EntryPoint(name, module, plugins_module.PLUGINS_GROUP))
        found = EntryPoints(entries)
        monkeypatch.setattr(plugins_module, "entry_points", found.select)

    return install


# -------------------------------------------------------------------------
# Loading
# -------------------------------------------------------------------------


def test_the_cores_own_plugins_and_the_installed_ones_load() -> None:
    plugins = load_plugins()
    assert plugins.load_errors == {}
    names = {name for name, _ in plugins.manager.list_name_plugin()}
    assert {*DEFAULT_PLUGINS, "cpu", "models"} <= names


def test_only_the_named_entry_points_load() -> None:
    names = {name for name, _ in load_plugins(only=["cpu"]).manager.list_name_plugin()}
    assert "cpu" in names
    assert "models" not in names


GOOD = """
from anygauge_hooks import CONTRACT_VERSION, hookimpl, hookspec

@hookimpl
def report_environment():
    return {"good": "yes"}
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_library", "No module named 'no_such_library'"),
        ("raise SyntaxError('bad')", "bad"),
        (GOOD.replace("report_environment", "report_environmant"), "unknown hook 'report_environmant'"),
        (GOOD.replace("report_environment()", "report_environment(color)"), "color"),
    ],
)
def test_a_broken_plugin_is_kept_with_its_reason_and_the_others_load(
    install: Install, source: str, reason: str
) -> None:
    install({"broken": source, "good": GOOD})
    plugins = load_plugins()
    assert list(plugins.load_errors) == ["broken"]
    assert reason in str(plugins.load_errors["broken"])
    assert plugins.environment()["good"] == "yes"
    assert plugins.manager.get_plugin("broken") is None


def test_the_reason_is_raised_when_the_plugin_is_asked_for(install: Install) -> None:
    install({"broken": "import no_such_library"})
    plugins = load_plugins()
    plugins.register(Provides(backend("cpu")), "cpu")
    with pytest.raises(BackendUnavailableError, match="no_such_library"):
        select_backend(plugins, "broken")
    with pytest.raises(UnknownNameError, match=r"failed to load: broken \(ModuleNotFoundError"):
        plugins.get("register_reward_functions", "broken")


def test_registering_a_broken_plugin_leaves_nothing_of_it(plugins: Plugins) -> None:
    broken = plugin(report_environment=lambda: {"half": "yes"}, report_weather=lambda: None)
    with pytest.raises(PluginError, match="'broken' breaks the contract: unknown hook 'report_weather'"):
        plugins.register(broken, "broken")
    assert plugins.collect("report_environment") == []


def test_a_misspelled_hook_is_answered_with_the_closest_one(plugins: Plugins) -> None:
    with pytest.raises(
        PluginError, match=r"'register_polcy_losses' \(did you mean register_policy_losses\?\)"
    ):
        plugins.register(plugin(register_polcy_losses=lambda: []), "misspelled")
    with pytest.raises(PluginError, match=r"\(did you mean register_reward_functions\?\)"):
        plugins.register(plugin(register_rewards=lambda: []), "short")


def test_a_wrong_argument_names_the_plugin_and_the_argument(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match=r"'odd' breaks the contract(.|\n)*color"):
        plugins.register(plugin(after_train=lambda run, color: None), "odd")


# -------------------------------------------------------------------------
# How answers combine
# -------------------------------------------------------------------------


def rewards(*names: str) -> Callable[[], list[NamedFunction]]:
    return lambda: [NamedFunction(name=name, fn=len) for name in names]


def test_named_items_are_found_by_name(plugins: Plugins) -> None:
    plugins.register(plugin(register_reward_functions=rewards("a", "b")), "one")
    plugins.register(plugin(register_reward_functions=lambda: None), "none")
    plugins.register(plugin(register_reward_functions=rewards("c")), "two")
    assert set(plugins.named("register_reward_functions")) == {"a", "b", "c"}
    assert plugins.get("register_reward_functions", "c").fn is len


@pytest.mark.parametrize("answer", [["ppo2"], {"ppo2": len}, [NamedFunction]])
def test_an_item_that_is_no_specification_is_named_with_its_plugin(plugins: Plugins, answer: Any) -> None:
    plugins.register(plugin(register_policy_losses=lambda: answer), "odd")
    with pytest.raises(PluginError, match=r"'odd' returned .* from register_policy_losses, .* has no name\."):
        plugins.get("register_policy_losses", "ppo2")


@pytest.mark.parametrize(
    ("hook", "attribute", "ask"),
    [
        ("register_models", "architectures", lambda plugins: plugins.model(["Qwen3ForCausalLM"])),
        (
            "register_backends",
            "name",
            lambda plugins: plugins.prepare_worker(backend("cpu"), "a", "after_config"),
        ),
        ("register_backends", "name", lambda plugins: plugins.worker_env(backend("cpu"), role="a", **ENV)),
    ],
)
def test_a_name_in_place_of_a_model_or_backend_is_named_with_its_plugin(
    plugins: Plugins, hook: str, attribute: str, ask: Callable[[Plugins], object]
) -> None:
    plugins.register(plugin(**{hook: lambda: ["mine"]}), "odd")
    with pytest.raises(PluginError, match=rf"'odd' returned 'mine' \(str\) from {hook}, .* no {attribute}\."):
        ask(plugins)


def test_two_owners_of_a_name_are_both_named(plugins: Plugins) -> None:
    plugins.register(plugin(register_reward_functions=rewards("a")), "one")
    plugins.register(plugin(register_reward_functions=rewards("a")), "two")
    with pytest.raises(DuplicateNameError, match="'a' is registered by one and by two"):
        plugins.named("register_reward_functions")


def test_an_unknown_name_lists_what_there_is(plugins: Plugins) -> None:
    plugins.register(plugin(register_reward_functions=rewards("b", "a")), "one")
    with pytest.raises(UnknownNameError, match="'x' for reward functions; available: a, b"):
        plugins.get("register_reward_functions", "x")


def test_mappings_are_merged_and_a_conflict_names_both(plugins: Plugins) -> None:
    cpu = backend("cpu")
    plugins.register(plugin(worker_env=lambda: {"A": "1"}), "one")
    plugins.register(plugin(worker_env=lambda role: {"A": "1", "B": role}), "two")
    assert plugins.worker_env(cpu, role="actor", **ENV) == {"A": "1", "B": "actor"}
    plugins.register(plugin(worker_env=lambda: {"A": "2"}), "three")
    with pytest.raises(ConfigConflictError, match=r"sets A=1 and three sets A=2"):
        plugins.worker_env(cpu, role="actor", **ENV)


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        ("make_process_group_options", {"group_name": "default", "timeout_s": 9.0}),
        ("make_device", {"index": 0}),
        (
            "make_optimizer",
            {"param_groups": [], "lr": 1.0, "betas": (0.9, 0.9), "eps": 1.0, "weight_decay": 0.0},
        ),
    ],
)
def test_the_first_answer_that_is_not_none_is_taken(
    plugins: Plugins, hook: str, arguments: dict[str, Any]
) -> None:
    def answer(backend: BackendSpec) -> str | None:
        return f"for {backend.name}" if backend.name == "fast" else None

    assert plugins.first(hook, backend=backend("fast"), **arguments) is None
    plugins.register(plugin(**{hook: answer}), "fast")
    plugins.register(plugin(**{hook: lambda: None}), "other")
    assert plugins.first(hook, backend=backend("fast"), **arguments) == "for fast"
    assert plugins.first(hook, backend=backend("cpu"), **arguments) is None


@pytest.mark.parametrize(
    ("hook", "arguments"),
    [
        ("before_train", {}),
        ("before_train_step", {}),
        ("after_rollout", {"groups": ()}),
        ("after_train_step", {"metrics": {}}),
        ("after_weight_sync", {"version": 3}),
        ("after_evaluate", {"metrics": {}}),
        ("on_error", {"error": ValueError()}),
        ("after_train", {}),
    ],
)
def test_every_observer_is_called_and_its_error_is_not_lost(
    plugins: Plugins, hook: str, arguments: dict[str, Any]
) -> None:
    seen: list[object] = []

    def fail(run: object) -> None:
        raise ZeroDivisionError

    def watch(run: object) -> None:
        seen.append(run)

    plugins.register(plugin(**{hook: watch}), "one")
    plugins.notify(hook, run="run", **arguments)
    assert seen == ["run"]
    plugins.register(plugin(**{hook: fail}), "three")
    with pytest.raises(ZeroDivisionError) as caught:
        plugins.notify(hook, run="run", **arguments)
    assert caught.value.__notes__ == [f"raised by plugin 'three' in the hook {hook}"]


def test_a_backend_without_a_device_is_a_contract_error(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match="No plugin makes a device for backend 'cpu'"):
        plugins.make_device(backend("cpu"), 0)
    plugins.register(plugin(make_device=lambda backend, index: (backend.name, index)), "devices")
    assert plugins.make_device(backend("cpu"), 1) == ("cpu", 1)


def test_workers_are_prepared_by_every_plugin(plugins: Plugins) -> None:
    seen: list[str] = []

    def prepare_worker(phase: str) -> None:
        seen.append(phase)

    plugins.register(plugin(prepare_worker=prepare_worker), "one")
    plugins.prepare_worker(backend("cpu"), "actor", "before_vendor_import")
    assert seen == ["before_vendor_import"]


def adding(*answers: object) -> Callable[[], Iterator[None]]:
    """Return a wrapper that adds answers to those of the plugins."""

    @hookimpl(wrapper=True)
    def wrapper() -> Generator[None, list[object], list[object]]:
        return [*(yield), *answers]

    return wrapper


def test_a_wrapper_adds_to_what_plugins_register(plugins: Plugins) -> None:
    plugins.register(plugin(register_reward_functions=rewards("a")), "one")
    plugins.register(SimpleNamespace(register_reward_functions=adding(rewards("b")())), "wraps")
    assert list(plugins.named("register_reward_functions")) == ["a", "b"]


def test_a_wrapper_that_adds_a_name_twice_is_named(plugins: Plugins) -> None:
    plugins.register(SimpleNamespace(register_reward_functions=adding(rewards("a")())), "wraps")
    plugins.register(plugin(register_reward_functions=rewards("a")), "one")
    with pytest.raises(DuplicateNameError, match="'a' is registered by one and by wraps"):
        plugins.named("register_reward_functions")


def test_a_wrapper_that_replaces_an_item_owns_it(plugins: Plugins) -> None:
    @hookimpl(wrapper=True)
    def rename() -> Generator[None, list[Any], list[Any]]:
        return [[replace(item, name="same") for item in answer] for answer in (yield)]

    plugins.register(plugin(register_reward_functions=rewards("a")), "one")
    plugins.register(SimpleNamespace(register_reward_functions=rename), "wraps")
    assert [owner for owner, _ in plugins.answers("register_reward_functions")] == ["wraps"]


def test_a_wrapper_that_changes_a_variable_is_named(plugins: Plugins) -> None:
    plugins.register(plugin(worker_env=lambda: {"A": "1", "B": "1"}), "one")
    plugins.register(SimpleNamespace(worker_env=adding({"B": "2"})), "wraps")
    with pytest.raises(ConfigConflictError, match=r"one sets B=1 and wraps sets B=2"):
        plugins.worker_env(backend("cpu"), role="actor", **ENV)


def test_a_wrapper_that_returns_nothing_is_named(plugins: Plugins) -> None:
    @hookimpl(wrapper=True)
    def forgets() -> Iterator[None]:
        yield

    plugins.register(SimpleNamespace(register_reward_functions=forgets), "wraps")
    with pytest.raises(PluginError, match="'wraps' returned None from register_reward_functions"):
        plugins.named("register_reward_functions")


def test_one_object_of_two_plugins_has_two_owners(plugins: Plugins) -> None:
    shared = rewards("a")()
    plugins.register(plugin(register_reward_functions=lambda: shared), "one")
    plugins.register(plugin(register_reward_functions=lambda: iter(shared)), "two")
    with pytest.raises(DuplicateNameError, match="'a' is registered by one and by two"):
        plugins.named("register_reward_functions")


def test_items_come_in_registration_order_unless_a_plugin_is_tried_first_or_last(plugins: Plugins) -> None:
    for name, order in {"last": "trylast", "one": None, "two": None, "first": "tryfirst"}.items():
        marker = hookimpl(**{order: True}) if order else hookimpl
        plugins.register(SimpleNamespace(register_reward_functions=marker(rewards(name))), name)
    assert list(plugins.named("register_reward_functions")) == ["first", "one", "two", "last"]


def test_the_first_report_of_a_fact_is_kept(plugins: Plugins) -> None:
    plugins.register(plugin(report_environment=lambda: {"a": "1"}), "one")
    plugins.register(plugin(report_environment=lambda: {"a": "2", "b": "2"}), "two")
    assert plugins.environment() == {"a": "1", "b": "2"}


def test_a_hook_that_calls_another_keeps_its_owners(plugins: Plugins) -> None:
    inner = rewards("inner")
    plugins.register(plugin(register_reward_functions=inner), "inner")
    plugins.register(plugin(register_trackers=lambda: plugins.collect("register_reward_functions")), "outer")
    assert [owner for owner, _ in plugins.answers("register_trackers")] == ["outer"]


@pytest.mark.parametrize("hook", ["register_reward_functions", "register_backends"])
def test_tracing_shows_collecting_hooks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], hook: str
) -> None:
    monkeypatch.setenv("ANYGAUGE_TRACE_HOOKS", "1")
    load_plugins(only=["cpu"]).collect(hook)
    assert f"finish {hook} -->" in capfd.readouterr().err


# -------------------------------------------------------------------------
# The backend that a call names
# -------------------------------------------------------------------------


def environment_of(name: str) -> Callable[..., dict[str, str]]:
    return lambda backend: {name: backend.name}


def test_plugins_of_other_backends_are_not_called(plugins: Plugins) -> None:
    for name in ("fast", "slow"):
        own = plugin(
            register_backends=lambda name=name: [backend(name)],
            worker_env=environment_of(name),
            make_device=lambda backend, name=name: (name, backend.name),
        )
        plugins.register(own, name)  # a namespace, which cannot be hashed
    assert plugins.worker_env(backend("fast"), role="actor", **ENV) == {"fast": "fast"}
    assert plugins.first("make_device", backend=backend("fast"), index=0) == ("fast", "fast")
    assert plugins.first("make_device", backend=backend("other"), index=0) is None


def test_a_plugin_of_two_backends_is_told_which(plugins: Plugins) -> None:
    two = plugin(
        register_backends=lambda: [backend("fast"), backend("slow")], worker_env=environment_of("seen")
    )
    plugins.register(two, "two")
    assert plugins.worker_env(backend("fast"), role="actor", **ENV) == {"seen": "fast"}
    assert plugins.worker_env(backend("slow"), role="actor", **ENV) == {"seen": "slow"}
    assert plugins.worker_env(backend("cpu"), role="actor", **ENV) == {}


def test_an_add_on_is_called_for_the_backends_that_it_declares(plugins: Plugins) -> None:
    info = PluginInfo(contract_version=CONTRACT_VERSION, backends=("fast",))
    plugins.register(plugin(describe_plugin=lambda: info, worker_env=environment_of("add_on")), "add-on")
    plugins.register(plugin(worker_env=environment_of("all")), "all")
    assert plugins.worker_env(backend("fast"), role="actor", **ENV) == {"add_on": "fast", "all": "fast"}
    assert plugins.worker_env(backend("cpu"), role="actor", **ENV) == {"all": "cpu"}
    assert [one.plugin_name for one in plugins.implementations("worker_env", backend("cpu"))] == ["all"]


def test_a_wrapper_alone_implements_nothing(plugins: Plugins) -> None:
    @hookimpl(wrapper=True)
    def worker_env() -> Generator[None, Any, Any]:
        return (yield)

    plugins.register(SimpleNamespace(worker_env=worker_env), "wrapper")
    assert not plugins.implementations("worker_env", backend("cpu"))
    plugins.register(plugin(worker_env=environment_of("all")), "all")
    assert len(plugins.implementations("worker_env", backend("cpu"))) == 2


def test_a_wrapper_of_another_backend_is_not_entered(plugins: Plugins) -> None:
    entered: list[str] = []

    @hookimpl(wrapper=True)
    def prepare_worker(backend: BackendSpec) -> Generator[None, object, object]:
        entered.append(backend.name)
        return (yield)

    info = PluginInfo(contract_version=CONTRACT_VERSION, backends=("fast",))
    own = SimpleNamespace(describe_plugin=hookimpl(lambda: info), prepare_worker=prepare_worker)
    plugins.register(own, "add-on")
    for name in ("cpu", "fast"):
        plugins.prepare_worker(backend(name), "actor", "before_vendor_import")
    assert entered == ["fast"]


def test_a_plugin_of_another_backend_that_is_registered_later_is_not_called(plugins: Plugins) -> None:
    assert plugins.worker_env(backend("cpu"), role="actor", **ENV) == {}
    late = plugin(register_backends=lambda: [backend("late")], worker_env=environment_of("late"))
    plugins.register(late, "late")
    assert plugins.worker_env(backend("cpu"), role="actor", **ENV) == {}


def test_the_devices_of_other_backends_are_hidden(plugins: Plugins) -> None:
    plugins.register(Provides(replace(backend("fast"), hidden_env={"FAST_VISIBLE": ""})), "fast")
    assert plugins.worker_env(backend("cpu"), role="actor", **ENV) == {"FAST_VISIBLE": ""}
    assert plugins.worker_env(backend("fast"), role="actor", **ENV) == {}
    plugins.register(plugin(worker_env=lambda: {"FAST_VISIBLE": "0"}), "shows")
    with pytest.raises(ConfigConflictError, match="fast sets FAST_VISIBLE= and shows sets FAST_VISIBLE=0"):
        plugins.worker_env(backend("cpu"), role="actor", **ENV)


# -------------------------------------------------------------------------
# The contract's version, and hooks that plugins add
# -------------------------------------------------------------------------


class Shop:
    """Hooks of a third party."""

    @hookspec
    def register_goods(self, kind: str) -> list[str] | None:
        """Return goods."""


def described(**facts: Any) -> Callable[[], PluginInfo]:
    return hookimpl(lambda: PluginInfo(**{"contract_version": CONTRACT_VERSION, **facts}))


def test_a_plugin_of_another_contract_is_refused_for_that_reason(plugins: Plugins) -> None:
    newer = plugin(report_weather=lambda: None)
    info = PluginInfo(contract_version=CONTRACT_VERSION + 1)
    newer.about = hookimpl(lambda: info, specname="describe_plugin")
    with pytest.raises(PluginError, match=rf"for version {CONTRACT_VERSION + 1} of the contract") as caught:
        plugins.register(newer, "newer")
    assert "weather" not in str(caught.value)
    assert plugins.manager.get_plugin("newer") is None


def test_backends_as_a_bare_string_are_refused(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match=r"'add-on' .* is the string 'cpu'; .* backends=\('cpu',\)\."):
        plugins.register(SimpleNamespace(describe_plugin=described(backends="cpu")), "add-on")
    assert plugins.manager.get_plugin("add-on") is None


def test_declared_backends_that_nobody_registers_are_known(plugins: Plugins) -> None:
    plugins.register(SimpleNamespace(describe_plugin=described(backends=("cpuu", "cpu"))), "misspelled")
    plugins.register(SimpleNamespace(describe_plugin=described(backends=("cpu",))), "add-on")
    assert plugins.unknown_backends() == {"misspelled": ["cpuu"]}


def test_a_third_party_adds_hooks_whatever_the_order(plugins: Plugins) -> None:
    seller = plugin(register_goods=lambda kind: [kind])
    shop = SimpleNamespace(describe_plugin=described(hookspecs=[Shop]))
    assert plugins.register_all({"seller": seller, "shop": shop}) == {}
    assert plugins.collect("register_goods", kind="rods") == ["rods"]
    assert plugins.hooks()[-1] == "register_goods"


def test_an_argument_that_an_added_hook_has_not_is_refused_whatever_the_order(plugins: Plugins) -> None:
    wrong = plugin(register_goods=lambda color: [])
    shop = SimpleNamespace(describe_plugin=described(hookspecs=[Shop]))
    errors = plugins.register_all({"wrong": wrong, "shop": shop})
    assert list(errors) == ["wrong"]
    assert "color" in str(errors["wrong"])


def test_two_plugins_may_add_the_same_hooks_but_not_others_of_that_name(plugins: Plugins) -> None:
    class Another:
        register_goods = Shop.register_goods

    for name in ("one", "two"):
        plugins.register(SimpleNamespace(describe_plugin=described(hookspecs=[Shop])), name)
    with pytest.raises(DuplicateNameError, match="'register_goods' is specified by one and by three"):
        plugins.register(SimpleNamespace(describe_plugin=described(hookspecs=[Another])), "three")


def test_hooks_of_a_plugin_that_failed_are_removed(plugins: Plugins) -> None:
    class Another:
        register_goods = Shop.register_goods

    known = plugins.hooks()
    broken = plugin(report_weather=lambda: None)
    broken.describe_plugin = described(hookspecs=[Shop])
    assert list(plugins.register_all({"broken": broken})) == ["broken"]
    assert plugins.hooks() == known

    shop = plugin(register_goods=lambda kind: [kind])
    shop.describe_plugin = described(hookspecs=[Another])
    assert list(plugins.register_all({"broken": broken, "shop": shop})) == ["broken"]
    assert plugins.collect("register_goods", kind="rods") == ["rods"]
    assert plugins.namespaces[-1] == ("shop", Another)


def test_hooks_of_a_plugin_that_failed_stay_where_another_adds_them_too(plugins: Plugins) -> None:
    broken = plugin(report_weather=lambda: None)
    broken.describe_plugin = described(hookspecs=[Shop])
    shop = SimpleNamespace(describe_plugin=described(hookspecs=[Shop]))
    assert list(plugins.register_all({"broken": broken, "shop": shop})) == ["broken"]
    assert plugins.namespaces[-1] == ("shop", Shop)
    assert plugins.collect("register_goods", kind="rods") == []


def test_an_optional_hook_may_be_unknown(plugins: Plugins) -> None:
    optional = SimpleNamespace(register_goods=hookimpl(lambda: ["rods"], optionalhook=True))
    plugins.register(optional, "optional")


def test_an_old_style_wrapper_is_refused(plugins: Plugins) -> None:
    old = SimpleNamespace(report_environment=hookimpl(lambda: iter([None]), hookwrapper=True))
    with pytest.raises(PluginError, match=r"'report_environment' is a hookwrapper; write a wrapper"):
        plugins.register(old, "old")


def test_a_wrapper_must_be_a_generator(plugins: Plugins) -> None:
    wrong = SimpleNamespace(report_environment=hookimpl(lambda: None, wrapper=True))
    with pytest.raises(PluginError, match="function is not a generator function"):
        plugins.register(wrong, "wrong")


# -------------------------------------------------------------------------
# Backend selection
# -------------------------------------------------------------------------


def test_without_a_usable_accelerator_the_host_is_taken_and_the_reason_kept(plugins: Plugins) -> None:
    plugins.register(Provides(backend("fast", ok=False)), "fast")
    spec, reason = select_backend(plugins)
    assert spec.name == "cpu"
    assert reason == "no accelerator backend is usable (fast: no device)"


def test_the_only_usable_accelerator_is_taken(plugins: Plugins) -> None:
    plugins.register(Provides(backend("fast"), backend("slow", ok=False)), "two")
    assert select_backend(plugins)[0].name == "fast"


def test_two_usable_accelerators_need_a_choice(plugins: Plugins) -> None:
    plugins.register(Provides(backend("fast"), backend("slow")), "two")
    with pytest.raises(BackendUnavailableError, match=r"usable here: fast, slow(.|\n)*--backend fast"):
        select_backend(plugins)
    assert select_backend(plugins, "slow") == (plugins.named("register_backends")["slow"], "asked for")


def test_a_backend_that_was_asked_for_is_never_replaced(plugins: Plugins) -> None:
    plugins.register(Provides(backend("fast", ok=False)), "fast")
    with pytest.raises(BackendUnavailableError, match=r"cannot run on this host: no device(.|\n)*Plug it in"):
        select_backend(plugins, "fast")


def test_a_probe_that_raises_is_a_no(plugins: Plugins) -> None:
    def probe() -> Availability:
        raise OSError("libvendor.so")

    state = probe_backend(backend("fast", probe=probe))
    assert not state.ok
    assert "libvendor.so" in state.reason


def test_a_backend_is_found_whether_or_not_it_can_run(plugins: Plugins) -> None:
    plugins.register(Provides(backend("fast", ok=False)), "fast")
    found = plugins.named("register_backends")
    assert find_backend(plugins, found, "fast").name == "fast"
    with pytest.raises(UnknownBackendError, match="Unknown backend 'nope'; installed: cpu, fast"):
        find_backend(plugins, found, "nope")
    with pytest.raises(UnknownBackendError, match=r"(?s)Unknown backend 'fats';.*Did you mean fast\?"):
        find_backend(plugins, found, "fats")


def test_an_alias_names_a_backend_unless_it_is_the_name_of_another(plugins: Plugins) -> None:
    plugins.register(Provides(replace(backend("fast"), aliases=("quick", "other"))), "fast")
    plugins.register(Provides(backend("other")), "other")
    known = plugins.named("register_backends")
    assert find_backend(plugins, known, "quick").name == "fast"
    assert find_backend(plugins, known, "other").name == "other"


def test_a_published_backend_comes_with_its_command(plugins: Plugins) -> None:
    names = published_backends()
    assert len(names) == 2
    for name in names:
        with pytest.raises(UnknownBackendError, match=re.escape(f"pip install ./backends/{name} ")):
            find_backend(plugins, plugins.named("register_backends"), name)


def family(name: str, *architectures: str) -> ModelSpec:
    nothing: Any = None
    return ModelSpec(
        name=name,
        architectures=architectures,
        model_options=nothing,
        flops_per_token=nothing,
        tiny=nothing,
    )


def test_a_model_is_found_by_its_exact_architecture(plugins: Plugins) -> None:
    plugins.register(plugin(register_models=lambda: [family("toy", "ToyForCausalLM")]), "toys")
    assert plugins.model(["ToyForCausalLM"]).name == "toy"
    with pytest.raises(UnknownNameError, match=r"ToyForCausalLM2; known: .*ToyForCausalLM"):
        plugins.model(["ToyForCausalLM2"])


def test_two_owners_of_an_architecture_are_both_named(plugins: Plugins) -> None:
    plugins.register(plugin(register_models=lambda: [family("a", "ToyForCausalLM")]), "one")
    plugins.register(plugin(register_models=lambda: [family("b", "ToyForCausalLM")]), "two")
    with pytest.raises(DuplicateNameError, match="'ToyForCausalLM' is claimed by one and by two"):
        plugins.model(["ToyForCausalLM"])


def test_the_reason_of_a_broken_accelerator_is_part_of_the_choice(plugins: Plugins) -> None:
    plugins.load_errors["xpu"] = ImportError("libvendor.so is missing")
    backend, reason = select_backend(plugins)
    assert backend.name == "cpu"
    assert "xpu: failed to load: ImportError('libvendor.so is missing')" in reason


def test_the_cause_of_a_missing_name_is_kept(plugins: Plugins) -> None:
    plugins.load_errors["mine"] = ImportError("broken")
    with pytest.raises(UnknownNameError) as caught:
        plugins.get("register_reward_functions", "mine")
    assert caught.value.__cause__ is plugins.load_errors["mine"]


def test_a_plugin_that_only_the_driver_has_is_named(plugins: Plugins) -> None:
    require_plugins(plugins, plugins.installed)
    plugins.load_errors["mine"] = ImportError("broken")
    with pytest.raises(PluginError, match=r"'mine', which the driver has, failed to load here: ImportError"):
        require_plugins(plugins, ["mine"])
    with pytest.raises(PluginError, match="'other', which the driver has, is not installed here"):
        require_plugins(plugins, ["other"])
