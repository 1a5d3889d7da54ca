"""Plugin discovery, backend selection, and typed wrappers around every hook.

A plugin is checked when it loads; one that is broken does not take the others with it. Its error is kept, and
raised when that plugin, or a name that nobody else provides, is asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, requires
from types import ModuleType
from typing import Any, cast

import pluggy

from anygauge.hook_answers import Owned, RecordedPlugin, call_collecting
from anygauge.version import __version__
from anygauge_hooks import CONTRACT_VERSION, PROJECT, specs
from anygauge_hooks.errors import (
    BackendUnavailableError,
    ConfigConflictError,
    DuplicateNameError,
    PluginError,
    UnknownBackendError,
    UnknownNameError,
)
from anygauge_hooks.types import (
    Availability,
    BackendSpec,
    Device,
    NamedFunction,
    Phase,
    PluginInfo,
    TrackerSpec,
)

__all__ = [
    "BACKENDS_GROUP",
    "DEFAULT_PLUGINS",
    "PLUGINS_GROUP",
    "PluginDistribution",
    "Plugins",
    "find_backend",
    "imported",
    "install_hint",
    "is_import_path",
    "load_plugins",
    "plugin_distributions",
    "probe_backend",
    "published_backends",
    "require_plugins",
    "select_backend",
    "source_location",
]

BACKENDS_GROUP = "anygauge.backends"
PLUGINS_GROUP = "anygauge.plugins"
DEFAULT_PLUGINS = (
    "anygauge.algorithms.plugin",
    "anygauge.data.plugin",
    "anygauge.engines.fsdp.plugin",
    "anygauge.engines.megatron.plugin",
    "anygauge.observability.plugin",
    "anygauge.observability.report.plugin",
    "anygauge.rollout.plugin",
    "anygauge.serving.plugin",
    "anygauge.weight_sync.plugin",
)
"""The core's own plugins. They use the same hooks as anybody's; listed so that they work uninstalled."""


_HOOKS_HINT = "docs/hooks.md has every hook with its exact signature."


def _make_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    return manager


IMPORTABLE: Mapping[str, str] = {
    "register_advantage_estimators": "Advantage estimator",
    "register_corrections": "Correction",
    "register_data_sources": "Data source",
    "register_metric_functions": "Metric function",
    "register_policy_losses": "Policy loss",
    "register_reward_functions": "Reward function",
    "register_rollout_functions": "Rollout function",
    "register_sample_filters": "Filter",
    "register_trackers": "Tracker",
}
"""Hooks whose items a config may name as ``package.module:function`` too, with their kind for messages."""

PluginDistribution = Callable[[str], tuple[str | None, str | None]]
"""Returns name and version of the distribution that a plugin came with."""


@dataclass(slots=True)
class Plugins:
    """The plugins of a process, and the errors of those that failed to load."""

    manager: pluggy.PluginManager = field(default_factory=_make_manager)
    """Holds a :class:`RecordedPlugin` for each plugin: register plugins here, not there."""
    load_errors: dict[str, Exception] = field(default_factory=dict)
    """Load errors by name of the entry point or plugin."""
    installed: list[str] = field(default_factory=list)
    """Entry points that were loaded."""
    namespaces: list[tuple[str, ModuleType | type]] = field(default_factory=lambda: [(PROJECT, specs)])
    """Owners of hook specifications, and the modules or classes that hold them."""
    _infos: dict[str, PluginInfo] = field(default_factory=dict)
    _backends: dict[str, set[str]] | None = None
    """Names of the backends that a plugin belongs to, by plugin; those that belong to none are absent."""

    def register(self, plugin: object, name: str) -> None:
        """Register a plugin object and check it against the specifications.

        :raises PluginError: A hook is unknown, or takes an argument that its specification has not.
        """
        for error in self.register_all({name: plugin}).values():
            raise error

    def register_all(self, plugins: Mapping[str, object]) -> dict[str, Exception]:
        """Register plugins and return the errors of those that break the contract.

        Every hook specification is added before an implementation is checked, so their order does not matter.
        Specifications of plugins that failed are removed, and plugins that conflicted are tried again.
        """
        errors: dict[str, Exception] = {}
        described: dict[str, RecordedPlugin] = {}
        for name, plugin in plugins.items():
            with _kept_error(errors, name):
                described[name] = self._describe(name, plugin)
        for name, recorded in described.items():
            with _kept_error(errors, name):
                self._implement(name, recorded)
        self._backends = None
        conflicts = {name for name, error in errors.items() if isinstance(error, DuplicateNameError)}
        if self._remove_hookspecs(errors) and conflicts != {*plugins}:
            retried = self.register_all({name: plugins[name] for name in plugins if name in conflicts})
            errors = {name: error for name, error in errors.items() if name not in conflicts} | retried
        return errors

    def _describe(self, name: str, plugin: object) -> RecordedPlugin:
        """Read what a plugin says about itself, and add its hook specifications."""
        recorded = RecordedPlugin(self.manager, plugin, name)
        info = _plugin_info(recorded)
        if info.contract_version != CONTRACT_VERSION:
            raise PluginError(
                f"it is written for version {info.contract_version} of the contract, and this is version "
                f"{CONTRACT_VERSION}"
            )
        if isinstance(info.backends, str):  # would be a list of its letters, none of which is a backend
            raise PluginError(
                f"backends of its PluginInfo is the string {info.backends!r}; write a tuple of names: "
                f"backends=({info.backends!r},)"
            )
        for namespace in info.hookspecs:
            self._add_hookspecs(name, namespace)
        self._infos[name] = info
        return recorded

    def _add_hookspecs(self, owner: str, namespace: ModuleType | type) -> None:
        if any(namespace is other for _, other in self.namespaces):
            return  # two plugins for one engine may add the hooks of that engine
        for other_owner, other in self.namespaces:
            if shared := set(_hook_names(self.manager, namespace)) & set(_hook_names(self.manager, other)):
                raise DuplicateNameError(
                    f"Hook {min(shared)!r} is specified by {other_owner} and by {owner}.",
                    hint="Uninstall one of the two plugins, or rename its hook.",
                )
        self.manager.add_hookspecs(namespace)
        self.namespaces.append((owner, namespace))

    def _remove_hookspecs(self, failed: Collection[str]) -> bool:
        """Remove the hook specifications of plugins that failed, and return whether there were any."""
        for name in failed:
            self._infos.pop(name, None)
        removed = [each for each in self.namespaces if each[0] in failed and each[1] is not specs]
        for owner, namespace in removed:
            self.namespaces.remove((owner, namespace))
            others = [name for name, info in self._infos.items() if namespace in info.hookspecs]
            if others:
                self.namespaces.append((others[0], namespace))
                continue
            for hook in _hook_names(self.manager, namespace):
                getattr(self.manager.hook, hook).spec = None
        return bool(removed)

    def _implement(self, name: str, plugin: RecordedPlugin) -> None:
        """Register the implementations of a plugin."""
        try:
            self.manager.register(plugin, name=name)
            _check_hook_names(self.manager, plugin, self.hooks)
        except (PluginError, pluggy.PluginValidationError):
            if self.manager.is_registered(plugin):
                self.manager.unregister(plugin)
            raise

    def hooks(self) -> list[str]:
        """Return the names of all hooks: the contract's, then those that plugins specify."""
        return [name for _, namespace in self.namespaces for name in _hook_names(self.manager, namespace)]

    def implementations(self, hook: str, backend: BackendSpec) -> list[pluggy.HookImpl]:
        """Return the implementations of a hook that are called in a run on a backend.

        Wrappers are among them, but not alone: without an implementation they have nothing to wrap.
        """
        called = self._caller(hook, {"backend": backend}).get_hookimpls()
        return called if any(not (one.wrapper or one.hookwrapper) for one in called) else []

    def unknown_backends(self) -> dict[str, list[str]]:
        """Return the declared backends that no loaded plugin registers, by plugin."""
        known = self.named("register_backends")
        unknown = {
            name: [each for each in info.backends if each not in known] for name, info in self._infos.items()
        }
        return {name: backends for name, backends in unknown.items() if backends}

    def named(self, hook: str) -> dict[str, Any]:
        """Return the items that plugins registered through a ``register_*`` hook, by name.

        :raises DuplicateNameError: Two plugins use one name.
        """
        owners: dict[str, str] = {}
        items: dict[str, Any] = {}
        for owner, item in self.registered(hook):
            if item.name in items:
                raise DuplicateNameError(
                    f"{hook}: {item.name!r} is registered by {owners[item.name]} and by {owner}.",
                    hint="Uninstall or rename one of the two; `anygauge hooks` lists every owner.",
                )
            items[item.name], owners[item.name] = item, owner
        return items

    def get(self, hook: str, name: str) -> Any:
        """Return one item that was registered through a ``register_*`` hook.

        A function or a tracker may be one of the user's own, named as ``package.module:function``.

        :raises UnknownNameError: No plugin provides the name, or it cannot be imported.
        """
        if is_import_path(hook, name):
            return _imported_item(hook, name)
        items = self.named(hook)
        if name in items:
            return items[name]
        kind = hook.removeprefix("register_").replace("_", " ")
        raise UnknownNameError(
            f"Unknown name {name!r} for {kind}; available: {', '.join(sorted(items)) or 'none'}.",
            hint=self._failed_hint() or "Choose one of these, or install the plugin that provides it.",
        ) from self.load_errors.get(name)

    def find(self, hook: str, name: str) -> Any | None:
        """Return the item of :meth:`get`, or ``None`` if there is none."""
        try:
            return self.get(hook, name)
        except UnknownNameError:
            return None

    def model(self, architectures: Sequence[str]) -> Any:
        """Return the family that registered one of the architectures of a Hugging Face config.

        :raises UnknownNameError: No plugin knows them, or they are no list of names.
        :raises DuplicateNameError: Two families claim one architecture.
        """
        is_list = isinstance(architectures, list | tuple)
        if not is_list or not all(isinstance(name, str) for name in architectures):
            raise UnknownNameError(
                f"architectures = {architectures!r} of config.json is not a list of names.",
                hint='Write a list of one name, such as ["Qwen3ForCausalLM"].',
            )
        families = self._families()
        for architecture in architectures:
            if architecture in families:
                return families[architecture]
        raise UnknownNameError(
            f"No model plugin registers the architecture {', '.join(architectures) or '(none given)'}; "
            f"known: {', '.join(sorted(families)) or 'none'}.",
            hint=self._failed_hint() or "docs/hooks.md, register_models, shows how to add a family.",
        )

    def _families(self) -> dict[str, Any]:
        owners: dict[str, str] = {}
        families: dict[str, Any] = {}
        for owner, family in self.registered("register_models", "architectures"):
            for name in family.architectures:
                if name in owners:
                    raise DuplicateNameError(
                        f"Architecture {name!r} is claimed by {owners[name]} and by {owner}.",
                        hint="Uninstall one of the two plugins; `anygauge hooks` lists every owner.",
                    )
                owners[name], families[name] = owner, family
        return families

    def _failed_hint(self) -> str:
        failed = [f"{plugin} ({error!r})" for plugin, error in sorted(self.load_errors.items())]
        return f"These plugins failed to load: {', '.join(failed)}." if failed else ""

    def merged(self, hook: str, **arguments: Any) -> dict[str, Any]:
        """Return the union of the mappings that plugins return.

        :raises ConfigConflictError: Two plugins want different values for one key.
        """
        return _union(hook, self.answers(hook, **arguments))

    def worker_env(
        self,
        backend: BackendSpec,
        *,
        role: str,
        deterministic: bool,
        interface: str | None,
        ip_version: str,
        timeout_s: float,
        train_engine: str | None = None,
    ) -> dict[str, str]:
        """Return the environment of a worker process, in which devices of other backends are hidden.

        The arguments are those of the hook ``worker_env``.

        :raises ConfigConflictError: Two plugins want different values for one variable.
        """
        others = [owned for owned in self.registered("register_backends") if owned.item.name != backend.name]
        hidden = [Owned(owner, entry) for owner, spec in others for entry in spec.hidden_env.items()]
        backend_env = self.answers(
            "worker_env",
            backend=backend,
            role=role,
            deterministic=deterministic,
            interface=interface,
            ip_version=ip_version,
            timeout_s=timeout_s,
            train_engine=train_engine,
        )
        return _union("worker_env", [*hidden, *backend_env])

    def environment(self) -> dict[str, str]:
        """Return the facts that plugins report about the host; the first value of a name is kept."""
        facts: dict[str, str] = {}
        for _, (name, value) in self.answers("report_environment"):
            facts.setdefault(name, value)
        return facts

    def first(self, hook: str, **arguments: Any) -> Any:
        """Return the first answer of a hook that is not ``None``, or ``None``."""
        return self._caller(hook, arguments)(**arguments)

    def collect(self, hook: str, **arguments: Any) -> list[Any]:
        """Return the items of every plugin's answer, in registration order."""
        return [owned.item for owned in self.answers(hook, **arguments)]

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call an observer hook of every plugin."""
        self._caller(hook, arguments)(**arguments)

    def make_device(self, backend: BackendSpec, index: int) -> Device:
        """Return the device object of this process.

        :raises PluginError: No plugin knows the backend.
        """
        device = self.first("make_device", backend=backend, index=index)
        if device is None:
            raise PluginError(
                f"No plugin makes a device for backend {backend.name!r}.",
                hint="The plugin that registers a backend implements make_device for it.",
            )
        return cast(Device, device)

    def prepare_worker(
        self,
        backend: BackendSpec,
        role: str,
        phase: Phase,
        *,
        config: Any | None = None,
        log: str | None = None,
    ) -> None:
        """Prepare this process for its vendor libraries.

        :param config: The run's config, if the process belongs to one.
        :param log: File of the process's output.
        """
        self.notify("prepare_worker", backend=backend, role=role, phase=phase, config=config, log=log)

    def answers(self, hook: str, **arguments: Any) -> list[Owned]:
        """Return the items of every plugin's answer with the plugin, in registration order."""
        return call_collecting(self._caller(hook, arguments), arguments)

    def registered(self, hook: str, attribute: str = "name") -> list[Owned]:
        """Return the items of a ``register_*`` hook, each of which has an attribute.

        :raises PluginError: A plugin registered something else, such as a name alone.
        """
        items = self.answers(hook)
        for owner, item in items:
            if isinstance(item, type) or not hasattr(item, attribute):
                raise PluginError(
                    f"Plugin {owner!r} returned {item!r:.80} ({type(item).__name__}) from {hook}, which is "
                    f"no specification: it has no {attribute}.",
                    hint=f"docs/hooks.md, {hook}, shows the objects that the hook returns.",
                )
        return items

    def _caller(self, hook: str, arguments: Mapping[str, Any]) -> pluggy.HookCaller:
        """Return pluggy's caller of a hook, without the plugins of other backends where a call names one.

        It is made anew for each call, since pluggy's would also call plugins that are registered later.
        """
        caller: pluggy.HookCaller = getattr(self.manager.hook, hook)
        backend: BackendSpec | None = arguments.get("backend")
        if backend is None or caller.spec is None or "backend" not in caller.spec.argnames:
            return caller
        others = [name for name, backends in self._backends_of().items() if backend.name not in backends]
        return self.manager.subset_hook_caller(hook, filter(None, map(self.manager.get_plugin, others)))

    def _backends_of(self) -> dict[str, set[str]]:
        """Return the backends that plugins registered or declared; a plugin without any is for all."""
        if self._backends is None:
            backends = {name: {*info.backends} for name, info in self._infos.items() if info.backends}
            for owner, spec in self.registered("register_backends"):
                backends.setdefault(owner, set()).add(spec.name)
            self._backends = backends
        return self._backends


def is_import_path(hook: str, name: str) -> bool:
    """Return whether a name is ``package.module:function``, for a hook whose items a user may name so."""
    return ":" in name and hook in IMPORTABLE


def _imported_item(hook: str, name: str) -> NamedFunction | TrackerSpec:
    """Return the user's own item; an object of the contract at that path says more than its name."""
    item = imported(name, IMPORTABLE[hook])
    if isinstance(item, NamedFunction | TrackerSpec):
        return replace(item, name=name)
    if not callable(item):
        raise UnknownNameError(
            f"{IMPORTABLE[hook]} {name!r} is {type(item).__name__}, not a function.",
            hint="Name a function.",
        )
    if hook == "register_trackers":
        return TrackerSpec(name=name, make=item)
    return NamedFunction(name=name, fn=item)


def imported(path: str, kind: str = "") -> Any:
    """Import ``package.module:function``.

    :param kind: Kind of function, to begin the error with; without it the error leaves the path out too.
    :raises UnknownNameError: The module cannot be imported, or has no such function.
    """
    whose = f"{kind} {path!r}: " if kind else ""
    module, _, attribute = path.partition(":")
    try:
        target: Any = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # foreign code: the user's module is imported
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            hint = "Install it, run from the directory that holds it, or put that on PYTHONPATH."
            raise UnknownNameError(f"{whose}no module {module!r}.", hint=hint) from error
        hint = "Correct the module, or install what it imports."
        raise UnknownNameError(f"{whose}importing {module!r} raised {error!r}.", hint=hint) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            functions = [known for known in dir(target) if callable(getattr(target, known, None))]
            close = difflib.get_close_matches(part, functions)
            raise UnknownNameError(
                f"{whose}module {module!r}{_file_of(module)} has no {attribute!r}.",
                hint=f"Did you mean {' or '.join(close)}?" if close else "Define it there.",
            )
        target = getattr(target, part)
    return target


def _file_of(module: str) -> str:
    """Return the file of an imported module, in parentheses: another one of that name may have been meant."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return f" ({file})" if file else ""


def _hook_names(manager: pluggy.PluginManager, namespace: ModuleType | type) -> Iterator[str]:
    """Yield the hooks that a module or class specifies, in their order."""
    yield from (name for name in vars(namespace) if manager.parse_hookspec_opts(namespace, name) is not None)


class _Description:
    describe_plugin = staticmethod(specs.describe_plugin)


def _plugin_info(plugin: RecordedPlugin) -> PluginInfo:
    """Return a plugin's description of itself, before anything else of it is checked."""
    manager = pluggy.PluginManager(PROJECT)
    options = filter(None, (manager.parse_hookimpl_opts(plugin, name) for name in dir(plugin)))
    if "describe_plugin" not in {*dir(plugin), *(each.get("specname") for each in options)}:
        return PluginInfo(contract_version=1)  # most have none, and a manager takes as long as all else
    manager.add_hookspecs(_Description)
    manager.register(plugin)
    return manager.hook.describe_plugin() or PluginInfo(contract_version=1)


def _check_hook_names(
    manager: pluggy.PluginManager, plugin: RecordedPlugin, known: Callable[[], Sequence[str]]
) -> None:
    for caller in manager.get_hookcallers(plugin) or ():
        (own,) = [one for one in caller.get_hookimpls() if one.plugin is plugin]
        if not caller.has_spec() and not own.optionalhook:
            stem = caller.name.removesuffix("s")
            longer = [name for name in known() if name.startswith(stem)]  # register_rewards, say
            # one, since many names differ in one word alone
            close = longer or difflib.get_close_matches(caller.name, known(), n=1)
            suggestion = f" (did you mean {close[0]}?)" if close else ""
            raise PluginError(f"unknown hook {caller.name!r}{suggestion}")


@contextmanager
def _kept_error(errors: dict[str, Exception], name: str) -> Iterator[None]:
    """Keep the error of one plugin, so that the others load."""
    try:
        yield
    except (PluginError, pluggy.PluginValidationError) as error:
        errors[name] = PluginError(f"Plugin {name!r} breaks the contract: {error.args[0]}.", hint=_HOOKS_HINT)
        errors[name].__cause__ = error
    except Exception as error:  # noqa: BLE001 - foreign code: a plugin is imported and describes itself
        errors[name] = error


def _union(hook: str, entries: Iterable[Owned]) -> dict[str, Any]:
    union: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for owner, (key, value) in entries:
        if union.get(key, value) != value:
            raise ConfigConflictError(
                f"{hook}: {owners[key]} sets {key}={union[key]} and {owner} sets {key}={value}.",
                hint="Disable one of the two plugins, or set the key yourself.",
            )
        union[key], owners[key] = value, owner
    return union


def load_plugins(*, only: Sequence[str] | None = None) -> Plugins:
    """Return the core's plugins and the installed ones.

    Each is loaded alone, so that a broken one does not take the others with it: its error is kept in
    :attr:`Plugins.load_errors`.

    :param only: Entry-point names to load. Default: all that are installed.
    """
    plugins = Plugins()
    if os.environ.get("ANYGAUGE_TRACE_HOOKS"):
        _trace(plugins.manager)
    loaded: dict[str, object] = {name: importlib.import_module(name) for name in DEFAULT_PLUGINS}
    entries = entry_points()  # once: it reads the metadata of every distribution
    for group in (BACKENDS_GROUP, PLUGINS_GROUP):
        for entry in sorted(entries.select(group=group)):
            if only is None or entry.name in only:
                name = entry.name if entry.name not in loaded else f"{entry.name} ({entry.value})"
                with _kept_error(plugins.load_errors, name):
                    loaded[name] = entry.load()
    errors = plugins.register_all(loaded)
    for error in (errors[name] for name in DEFAULT_PLUGINS if name in errors):
        raise error
    plugins.load_errors |= errors
    plugins.installed += [name for name in loaded if name not in {*DEFAULT_PLUGINS, *errors}]
    return plugins


def require_plugins(plugins: Plugins, names: Sequence[str]) -> None:
    """Check that this process has the plugins that another one has.

    :raises PluginError: One is missing or failed to load here.
    """
    for name in names:
        if name not in plugins.installed:
            error = plugins.load_errors.get(name)
            why = f"failed to load here: {error!r}" if error else "is not installed here"
            raise PluginError(
                f"Plugin {name!r}, which the driver has, {why}.",
                hint="Install the same packages on every node.",
            ) from error


def _trace(manager: pluggy.PluginManager) -> None:
    manager.trace.root.setwriter(lambda text: os.write(2, text.encode()))
    manager.enable_tracing()


@cache
def published_backends() -> tuple[str, ...]:
    """Return the backends that an extra of this distribution installs; used in hints only."""
    try:
        requirements = requires("anygauge") or []
    except PackageNotFoundError:
        return ()
    pattern = re.compile(r"anygauge-(\w+)\b.*;\s*extra == ['\"]\1['\"]")
    return tuple(sorted(match[1] for text in requirements if (match := pattern.match(text))))


def install_hint(backend: str) -> str:
    """Return the command that installs one of :func:`published_backends`, which are on no index yet."""
    return f"In a clone of anygauge: pip install ./backends/{backend} (docs/{backend}.md)"


def _close_backend(name: str, backends: Mapping[str, BackendSpec]) -> str | None:
    """Return a backend that was probably meant, as a hint."""
    names = [alias for spec in backends.values() for alias in (spec.name, *spec.aliases)]
    close = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]}?" if close else None


def plugin_distributions() -> PluginDistribution:
    """Return a function that returns name and version of the distribution that a plugin came with.

    It takes the plugin's name, that of its entry point or a module of the core, and returns ``None`` twice
    for a plugin that was not installed.
    """
    entries = entry_points()  # once: it reads the metadata of every distribution
    installed = {PROJECT: (PROJECT, __version__)}
    for entry in (
        entry for group in (PLUGINS_GROUP, BACKENDS_GROUP) for entry in entries.select(group=group)
    ):
        if entry.dist is not None:
            metadata = entry.dist.metadata  # parses it
            installed[entry.name] = metadata["Name"], metadata["Version"]

    def distribution(owner: str) -> tuple[str | None, str | None]:
        return installed.get(PROJECT if owner.partition(".")[0] == PROJECT else owner, (None, None))

    return distribution


def source_location(function: Callable[..., Any]) -> str:
    """Return ``file:line`` of a function, or an empty string where it is not Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def probe_backend(spec: BackendSpec) -> Availability:
    """Return whether a backend can run here; a probe that raises counts as no."""
    try:
        return spec.probe()
    except Exception as error:  # noqa: BLE001 - foreign code: a probe of a vendor's library
        return Availability(
            ok=False,
            reason=f"its probe raised {error!r}",
            hint="Report this to the maintainers of the backend.",
        )


def select_backend(plugins: Plugins, requested: str | None = None) -> tuple[BackendSpec, str]:
    """Return the backend to run on, and why.

    :param requested: A backend name; ``None`` takes the only usable accelerator, else ``"cpu"``. A name that
        was asked for never falls back to another.
    :raises UnknownBackendError: No such backend is installed.
    :raises BackendUnavailableError: It cannot run on this host, or the choice is not unique.
    """
    backends: dict[str, BackendSpec] = plugins.named("register_backends")
    if requested is not None:
        return _requested(plugins, backends, requested)
    states = {name: probe_backend(spec) for name, spec in backends.items() if name != "cpu"}
    usable = sorted(name for name, state in states.items() if state.ok)
    if len(usable) > 1:
        raise BackendUnavailableError(
            f"More than one accelerator backend is usable here: {', '.join(usable)}.",
            hint=f"Name one: --backend {usable[0]}.",
        )
    if usable:
        return backends[usable[0]], "the only accelerator whose probe passes"
    known = {name: state.reason for name, state in states.items()}
    known |= {name: f"failed to load: {error!r}" for name, error in plugins.load_errors.items()}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(known.items()))
    return backends["cpu"], f"no accelerator backend is usable ({reasons or 'none is installed'})"


def _requested(plugins: Plugins, backends: Mapping[str, BackendSpec], name: str) -> tuple[BackendSpec, str]:
    spec = find_backend(plugins, backends, name)
    state = probe_backend(spec)
    if not state.ok:
        raise BackendUnavailableError(
            f"Backend {name!r} cannot run on this host: {state.reason}.", hint=state.hint
        )
    return spec, "asked for"


def find_backend(plugins: Plugins, backends: Mapping[str, BackendSpec], name: str) -> BackendSpec:
    """Return an installed backend, whether or not it can run here.

    :raises UnknownBackendError: It is not installed.
    :raises BackendUnavailableError: It is, but its plugin failed to load.
    """
    named = (spec for spec in backends.values() if name in spec.aliases)
    if (spec := backends.get(name) or next(named, None)) is not None:
        return spec
    if name in plugins.load_errors:
        error = plugins.load_errors[name]
        raise BackendUnavailableError(
            f"Backend {name!r} is installed but its plugin failed to load.", hint=f"{error!r}"
        ) from error
    failed = "".join(f"; failed to load: {other}" for other in sorted(plugins.load_errors))
    raise UnknownBackendError(
        f"Unknown backend {name!r}; installed: {', '.join(sorted(backends))}{failed}.",
        hint=install_hint(name) if name in published_backends() else _close_backend(name, backends),
    )
