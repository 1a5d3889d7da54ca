"""Plugin discovery, backend selection, and typed wrappers around every hook.

A plugin is checked when it loads; one that is broken does not take the others with it. Its error is kept, and
raised when that plugin, or a name that nobody else provides, is asked for.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires, version
from typing import Any, cast

import pluggy

from anygauge_hooks import PROJECT, specs
from anygauge_hooks.errors import (
    BackendUnavailableError,
    ConfigConflictError,
    DuplicateNameError,
    PluginError,
    UnknownBackendError,
    UnknownNameError,
)
from anygauge_hooks.types import Availability, BackendSpec, Device, Phase

__all__ = [
    "BACKENDS_GROUP",
    "DEFAULT_PLUGINS",
    "PLUGINS_GROUP",
    "Plugins",
    "find_backend",
    "load_plugins",
    "plugin_distribution",
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
    "anygauge.engines.megatron.plugin",
    "anygauge.observability.plugin",
    "anygauge.observability.report.plugin",
    "anygauge.rollout.plugin",
    "anygauge.serving.plugin",
    "anygauge.weight_sync.plugin",
)
"""The core's own plugins. They use the same hooks as anybody's; listed so that they work uninstalled."""


@dataclass(slots=True)
class Plugins:
    """The plugins of a process, and what could not be loaded into it."""

    manager: pluggy.PluginManager
    load_errors: dict[str, Exception] = field(default_factory=dict)
    """Load errors by name of the entry point or plugin."""
    installed: list[str] = field(default_factory=list)
    """Entry points that were loaded."""

    def register(self, plugin: object, name: str) -> None:
        """Register a plugin object and check it against the specifications.

        :raises PluginError: A hook is unknown, or takes an argument that its specification has not.
        """
        try:
            self.manager.register(plugin, name=name)
            _check_hook_names(self.manager, plugin, name)
        except (pluggy.PluginValidationError, PluginError) as error:
            if self.manager.is_registered(plugin):
                self.manager.unregister(plugin)
            text = error.args[0] if isinstance(error, PluginError) else str(error)
            raise PluginError(f"Plugin {name!r} breaks the contract: {text}", hint=_HOOKS_HINT) from error

    def named(self, hook: str) -> dict[str, Any]:
        """Return what plugins registered through a ``register_*`` hook, by name.

        :raises DuplicateNameError: Two plugins use one name.
        """
        owners: dict[str, str] = {}
        items: dict[str, Any] = {}
        for owner, result in self.answers(hook):
            for item in result:
                if item.name in items:
                    raise DuplicateNameError(
                        f"{hook}: {item.name!r} is registered by {owners[item.name]} and by {owner}.",
                        hint="Uninstall or rename one of the two; `anygauge hooks` lists every owner.",
                    )
                items[item.name], owners[item.name] = item, owner
        return items

    def get(self, hook: str, name: str) -> Any:
        """Return one item that was registered through a ``register_*`` hook.

        :raises UnknownNameError: No plugin provides the name.
        """
        items = self.named(hook)
        if name in items:
            return items[name]
        kind = hook.removeprefix("register_").replace("_", " ")
        raise UnknownNameError(
            f"Unknown name {name!r} for {kind}; available: {', '.join(sorted(items)) or 'none'}.",
            hint=self._failed_hint() or "Choose one of these, or install the plugin that provides it.",
        ) from self.load_errors.get(name)

    def model(self, architectures: Sequence[str]) -> Any:
        """Return the family that registered one of the architectures of a Hugging Face config.

        :raises UnknownNameError: No plugin knows them, or they are no list of names.
        :raises DuplicateNameError: Two families claim one architecture.
        """
        is_list = isinstance(architectures, list | tuple)
        if not is_list or not all(isinstance(name, str) for name in architectures):
            raise UnknownNameError(
                f"architectures = {architectures!r} of config.json is no list of names.",
                hint='Write a list of one name, such as ["Qwen3ForCausalLM"].',
            )
        families = self._families()
        for architecture in architectures:
            if architecture in families:
                return families[architecture]
        raise UnknownNameError(
            f"No model plugin knows the architecture {', '.join(architectures) or '(none given)'}; "
            f"known: {', '.join(sorted(families)) or 'none'}.",
            hint=self._failed_hint() or "docs/hooks.md, register_models, shows how to add a family.",
        )

    def _families(self) -> dict[str, Any]:
        owners: dict[str, str] = {}
        families: dict[str, Any] = {}
        for owner, registered in self.answers("register_models"):
            for name, family in ((name, spec) for spec in registered for name in spec.architectures):
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
        union: dict[str, Any] = {}
        owners: dict[str, str] = {}
        for owner, result in self.answers(hook, **arguments):
            for key, value in result.items():
                if union.get(key, value) != value:
                    raise ConfigConflictError(
                        f"{hook}: {owners[key]} sets {key}={union[key]} and {owner} sets {key}={value}.",
                        hint="Disable one of the two plugins, or set the key yourself.",
                    )
                union[key], owners[key] = value, owner
        return union

    def environment(self) -> dict[str, str]:
        """Return what plugins report about the host; the first value of a name is kept."""
        facts: dict[str, str] = {}
        for _, answer in self.answers("report_environment"):
            facts = {**answer, **facts}
        return facts

    def first(self, hook: str, **arguments: Any) -> Any:
        """Return the first answer of a hook that is not ``None``, or ``None``."""
        return getattr(self.manager.hook, hook)(**arguments)

    def collect(self, hook: str, **arguments: Any) -> list[Any]:
        """Return the items of every plugin's answer, in registration order."""
        return [item for _, result in self.answers(hook, **arguments) for item in result]

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call an observer hook of every plugin."""
        getattr(self.manager.hook, hook)(**arguments)

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

        :param config: Of the run, if the process belongs to one.
        :param log: File of the process's output.
        """
        self.notify("prepare_worker", backend=backend, role=role, phase=phase, config=config, log=log)

    def answers(self, hook: str, **arguments: Any) -> Iterable[tuple[str, Any]]:
        """Yield plugin name and answer of every implementation that answers, in registration order."""
        caller = getattr(self.manager.hook, hook)
        for implementation in caller.get_hookimpls():
            accepted = {name: arguments[name] for name in implementation.argnames if name in arguments}
            result = implementation.function(**accepted)
            if result is not None:
                yield implementation.plugin_name, result


_HOOKS_HINT = "docs/hooks.md has every hook with its exact signature."


def _check_hook_names(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    for attribute in dir(plugin):
        if manager.parse_hookimpl_opts(plugin, attribute) is not None and not hasattr(specs, attribute):
            raise PluginError(f"unknown hook {attribute!r}")


def load_plugins(*, only: Sequence[str] | None = None) -> Plugins:
    """Return the core's plugins and the installed ones.

    Each is loaded alone, so that a broken one does not take the others with it: its error is kept in
    :attr:`Plugins.load_errors`.

    :param only: Entry-point names to load. Default: all that are installed.
    """
    plugins = Plugins(pluggy.PluginManager(PROJECT))
    plugins.manager.add_hookspecs(specs)
    if os.environ.get("ANYGAUGE_TRACE_HOOKS"):
        _trace(plugins.manager)
    for name in DEFAULT_PLUGINS:
        plugins.register(importlib.import_module(name), name)
    for group in (BACKENDS_GROUP, PLUGINS_GROUP):
        for entry in sorted(entry_points(group=group)):
            if only is None or entry.name in only:
                _load_entry(plugins, entry)
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


def _load_entry(plugins: Plugins, entry: EntryPoint) -> None:
    name = entry.name if plugins.manager.get_plugin(entry.name) is None else f"{entry.name} ({entry.value})"
    try:
        plugins.register(entry.load(), name)
        plugins.installed.append(name)
    except Exception as error:  # noqa: BLE001 - importing a plugin runs anybody's code
        plugins.load_errors[name] = error


def _trace(manager: pluggy.PluginManager) -> None:
    manager.trace.root.setwriter(lambda text: os.write(2, text.encode()))
    manager.enable_tracing()


def published_backends() -> tuple[str, ...]:
    """Return the backends that an extra of this distribution installs; used in hints only."""
    try:
        requirements = requires("anygauge") or []
    except PackageNotFoundError:
        return ()
    pattern = re.compile(r"anygauge-(\w+)\b.*;\s*extra == ['\"]\1['\"]")
    return tuple(sorted(match[1] for text in requirements if (match := pattern.match(text))))


def plugin_distribution(owner: str) -> tuple[str | None, str | None]:
    """Return name and version of the distribution that a plugin came with, if it was installed from one.

    :param owner: The plugin's name: that of its entry point, or a module of the core.
    """
    if owner.partition(".")[0] == PROJECT:
        return PROJECT, version(PROJECT)
    for group in (BACKENDS_GROUP, PLUGINS_GROUP):
        for entry in entry_points(group=group, name=owner):
            if entry.dist is not None:
                return entry.dist.name, entry.dist.version
    return None, None


def source_location(function: Callable[..., Any]) -> str:
    """Return ``file:line`` of a function, or an empty string where it is not Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def probe_backend(spec: BackendSpec) -> Availability:
    """Return whether a backend can run here; a probe that raises counts as no."""
    try:
        return spec.probe()
    except Exception as error:  # noqa: BLE001 - a probe runs vendor code
        return Availability(
            ok=False, reason=f"its probe raised {error!r}", hint="Report this to the backend."
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
    if name in backends:
        return backends[name]
    if name in plugins.load_errors:
        error = plugins.load_errors[name]
        raise BackendUnavailableError(
            f"Backend {name!r} is installed but its plugin failed to load.", hint=f"{error!r}"
        ) from error
    failed = "".join(f"; failed to load: {other}" for other in sorted(plugins.load_errors))
    raise UnknownBackendError(
        f"Unknown backend {name!r}; installed: {', '.join(sorted(backends))}{failed}.",
        hint=f"pip install 'anygauge[{name}]'" if name in published_backends() else None,
    )
