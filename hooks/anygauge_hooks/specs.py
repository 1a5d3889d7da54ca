"""Hook specifications.

Sections follow the life of a run. A hook that may return nothing has ``| None`` in its return type; ``None``
always means "not mine, ask the next plugin". An implementation may leave out arguments that it does not
need, so an argument can be added here without breaking a plugin; a change that breaks one raises
``CONTRACT_VERSION``.

A hook with an argument ``backend`` is called for one backend. Plugins that registered other backends, or said
in :func:`describe_plugin` that they are for others, are left out of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from anygauge_hooks import hookspec

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from anygauge_hooks.engines import RolloutEngineSpec, TrainEngineSpec
    from anygauge_hooks.kernels import KernelImpl
    from anygauge_hooks.models import ModelSpec
    from anygauge_hooks.rl import Group
    from anygauge_hooks.settings import RunConfig
    from anygauge_hooks.types import (
        BackendSpec,
        ConfigChange,
        ConfigProblem,
        Device,
        NamedFunction,
        Phase,
        PluginInfo,
        RunInfo,
        TrackerSpec,
    )
    from anygauge_hooks.weights import WeightTransportSpec


# -------------------------------------------------------------------------
# Plugins
# -------------------------------------------------------------------------


@hookspec(firstresult=True)
def describe_plugin() -> PluginInfo | None:
    """Return the plugin's contract version, its backends, and the hooks that it adds.

    Called on each plugin alone when it is loaded, before its other hooks are checked.

    :returns: The facts, or ``None`` for a plugin of contract version 1 that is for every backend.

    First result: no answer means ``PluginInfo(contract_version=1)``.

    .. versionadded:: 0.1
    """


# -------------------------------------------------------------------------
# Device
# -------------------------------------------------------------------------


@hookspec
def register_backends() -> Iterable[BackendSpec] | None:
    """Return the backends that this plugin provides.

    Called once, at start-up, in every process. Importing the plugin and calling this hook must not
    import a vendor library, nor torch; :attr:`BackendSpec.probe` may.

    :returns: The backends, or ``None``.

    Collecting: all results are used. Two backends of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def make_device(backend: BackendSpec, index: int) -> Device | None:
    """Return the device object of this process.

    Called once per worker, after ``prepare_worker`` with ``before_vendor_import``.

    :param backend: The backend of the run.
    :param index: The device's index inside this process.
    :returns: The device, or ``None``.

    First result: exactly one plugin knows a backend; if none does the worker stops (AG104).

    .. versionadded:: 0.1
    """


@hookspec
def worker_env(
    backend: BackendSpec,
    role: str,
    deterministic: bool,
    interface: str | None,
    ip_version: str,
    timeout_s: float,
    train_engine: str | None,
) -> Mapping[str, str] | None:
    """Return environment variables for a worker process.

    Called on the driver, before the process starts.

    :param backend: The backend of the run.
    :param role: ``"actor"`` for the processes that train; an engine launched by a worker has its own role.
    :param deterministic: Whether two runs must give the same bits (``run.deterministic``).
    :param interface: Network interface of collectives (``cluster.interface``); ``None`` leaves the choice.
    :param ip_version: Which addresses collectives use: ``"any"``, ``"4"`` or ``"6"``.
    :param timeout_s: Longest wait for a collective (``run.timeout_s``), in seconds.
    :param train_engine: Train engine of the run (``train.engine``); ``None`` outside of a run.
    :returns: The variables, or ``None``.

    Collecting: the union. Two values for one variable are an error that names both plugins (AG202).

    .. versionadded:: 0.1
    """


@hookspec
def prepare_worker(
    backend: BackendSpec, role: str, phase: Phase, config: RunConfig | None, log: str | None
) -> None:
    """Prepare a process for its vendor libraries.

    Called in every worker and every spawned engine process, once for each phase.

    :param backend: The backend of the run.
    :param role: ``"actor"`` for the processes that train; an engine launched by a worker has its own role.
    :param phase: ``"before_vendor_import"`` comes before torch is used and before the first megatron import,
        ``"after_config"`` once the config is known and before the first process group.
    :param config: The run's config, read-only; ``None`` in a process of no run or of a server.
    :param log: File of the process's output; what a plugin has to write down it writes beside that, under
        the same name with another suffix. ``None`` where there is none.

    Observer: results are ignored; an error stops the worker.

    .. versionadded:: 0.1
    """


# -------------------------------------------------------------------------
# Communication
# -------------------------------------------------------------------------


@hookspec(firstresult=True)
def make_process_group_options(backend: BackendSpec, group_name: str, timeout_s: float) -> Any | None:
    """Return the ``pg_options`` of a process group.

    Called in every worker, when the group is made.

    :param backend: The backend of the run.
    :param group_name: Purpose of the group: ``"default"``.
    :param timeout_s: Seconds until a collective of the group fails.
    :returns: An options object of the backend's own class, or ``None`` for torch's defaults.

    First result: the backend's plugin answers; no answer means torch's defaults.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def make_communicator(backend: BackendSpec, options: Any, group_options: Any | None) -> Any | None:
    """Return the ``torch.distributed`` object that a process group is made of.

    Called in every worker each time that a reloadable group is loaded: groups release their device memory
    while a rollout engine uses the device.

    :param backend: The backend of the run.
    :param options: Torch's options for any backend: ``store``, ``group_rank``, ``group_size``, ``timeout``,
        ``group_id``, ``global_ranks_in_group``.
    :param group_options: Result of ``make_process_group_options``, or ``None``.
    :returns: The object, such as a ``ProcessGroupGloo``, or ``None``.

    First result: no answer means groups that keep their device memory.

    .. versionadded:: 0.1
    """


@hookspec
def register_weight_transports() -> Iterable[WeightTransportSpec] | None:
    """Return the ways for weights to servers that this plugin provides.

    Called when the config is checked and when a training rank makes its sender. Must not import torch;
    ``make`` may.

    :returns: The transports, or ``None``.

    Collecting: two transports of one name are an error (AG103).

    .. versionadded:: 0.1
    """


# -------------------------------------------------------------------------
# Fused kernels
# -------------------------------------------------------------------------


@hookspec
def register_kernels(backend: BackendSpec) -> Iterable[KernelImpl] | None:
    """Return the kernels that this plugin implements for a backend.

    Called once per process, when the engine is built. No hook is called during a step.

    :param backend: The backend of the run.
    :returns: The kernels, or ``None``.

    Collecting: per op the highest priority that accepts a module's static facts, else the reference.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def make_optimizer(
    backend: BackendSpec,
    param_groups: Sequence[Mapping[str, Any]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Any | None:
    """Return the AdamW that updates a rank's shard of the master weights.

    Called once for each role with an optimizer.

    :param backend: The backend of the run.
    :param param_groups: As ``torch.optim`` takes them; float32 tensors on the device.
    :param lr: Learning rate of the first step.
    :param betas: Decay rates of the two moments.
    :param eps: Added to the denominator.
    :param weight_decay: Decoupled decay.
    :returns: A ``torch.optim.Optimizer`` with ``exp_avg``, ``exp_avg_sq`` and ``step`` as state, or ``None``.
        One that is a :class:`anygauge_hooks.optimizers.FusedOptimizer` too takes gradients and the model's
        copies of the weights with its step.

    First result: no answer means ``torch.optim.AdamW`` with its defaults.

    .. versionadded:: 0.1
    """


# -------------------------------------------------------------------------
# Models
# -------------------------------------------------------------------------


@hookspec
def register_models() -> Iterable[ModelSpec] | None:
    """Return the model families that this plugin provides.

    Called when the config is checked and when the engine is built. Must not import torch.

    :returns: The families, or ``None``.

    Collecting: two plugins that claim one architecture are an error (AG103).

    .. versionadded:: 0.1
    """


# -------------------------------------------------------------------------
# Engines
# -------------------------------------------------------------------------


@hookspec
def register_train_engines() -> Iterable[TrainEngineSpec] | None:
    """Return the train engines that this plugin provides.

    Called when the config is checked and when a worker builds its roles. Must not import the engine's
    libraries; ``make`` does.

    :returns: The engines, or ``None``.

    Collecting: two engines of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec
def register_rollout_engines() -> Iterable[RolloutEngineSpec] | None:
    """Return the rollout engines that this plugin provides.

    Called when the config is checked and when a worker builds its engine. Must not import the engine's
    libraries; ``make`` does.

    :returns: The engines, or ``None``.

    Collecting: two engines of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec
def rollout_engine_args(config: RunConfig, backend: BackendSpec, engine: str) -> Mapping[str, Any] | None:
    """Return arguments that the servers of a rollout engine need on a backend.

    Called in the process that starts a server, for each server. What the user wrote counts more.

    :param config: The run's config, read-only.
    :param backend: The backend of the run.
    :param engine: Registered name of the engine, such as ``"sglang"``.
    :returns: The arguments by the names that the engine gives them, or ``None``.

    Collecting: the union. Two values for one argument are an error that names both plugins (AG202).

    .. versionadded:: 0.1
    """


# -------------------------------------------------------------------------
# Algorithms
# -------------------------------------------------------------------------


@hookspec
def register_advantage_estimators() -> Iterable[NamedFunction] | None:
    """Return advantage estimators: ``fn(rewards_G, **options) -> advantages_G``.

    One of kind ``token`` is ``fn(inputs, **options)``, from
    :class:`anygauge_hooks.algorithms.AdvantageInputs` to :class:`anygauge_hooks.algorithms.TokenAdvantages`.

    Called when the config is checked and when the run is built.

    :returns: The functions by name, or ``None``.

    Collecting: two functions of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec
def register_policy_losses() -> Iterable[NamedFunction] | None:
    """Return policy losses: ``fn(inputs, **options) -> (loss, metrics)``.

    Called when the config is checked and when the run is built.

    :returns: The functions by name, or ``None``.

    Collecting: two functions of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec
def register_corrections() -> Iterable[NamedFunction] | None:
    """Return corrections for tokens that another policy sampled: ``fn(inputs, **options) -> Correction``.

    From :class:`anygauge_hooks.engines.LossInputs`, whose samples are whole, to
    :class:`anygauge_hooks.algorithms.Correction`. Its weights are multiplied into those of the policy loss,
    whichever that is. It is called without gradients.

    Called when the config is checked and when the run is built.

    :returns: The functions by name, or ``None``.

    Collecting: two functions of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec
def register_reward_functions() -> Iterable[NamedFunction] | None:
    """Return reward functions: ``fn(response, label, metadata, **options) -> float``.

    A function may be ``async``, may leave out ``label`` and ``metadata``, may take ``prompt`` too, and may
    return a dict of which ``reward.key`` names the number. With ``reward.scope = "group"`` each argument is a
    list, and so is the result. It runs in a process of its own unless it is registered as ``inline``; there
    it is found by its import path, or, where it has none, by its name among the installed plugins.

    Called when the config is checked and when the run is built.

    :returns: The functions by name, or ``None``.

    Collecting: two functions of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec
def register_rollout_functions() -> Iterable[NamedFunction] | None:
    """Return rollout functions: ``async def fn(rollout, prompt, seed, **options)``.

    It returns a :class:`~anygauge_hooks.rl.Sample`, or several that share the reward and the weight of one
    rollout. ``rollout`` is a :class:`~anygauge_hooks.rollout.Rollout`, ``prompt`` a
    :class:`~anygauge_hooks.rl.Prompt`. The function runs in the driver's event loop and must not block it.

    Called when the config is checked and when the run is built.

    :returns: The functions by name, or ``None``.

    Collecting: two functions of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec
def register_sample_filters() -> Iterable[NamedFunction] | None:
    """Return filters ``fn(group, **options) -> bool``, which accept or reject a scored group.

    A filter may be ``async``. It runs in the driver's event loop and must not block it.

    Called when the config is checked and when the run is built.

    :returns: The functions by name, or ``None``.

    Collecting: two functions of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec
def register_data_sources() -> Iterable[NamedFunction] | None:
    """Return data sources: ``fn(data, tokenizer, seed, max_tokens, stop_tokens) -> DataSource``.

    ``max_tokens`` is what the model can take of a prompt, or ``None``. ``stop_tokens`` is ``None``, or for
    SFT the texts of the tokens that end a response. Both are given by name.

    Called when the config is checked and when the run is built.

    :returns: The functions by name, or ``None``.

    Collecting: two functions of one name are an error (AG103).

    .. versionadded:: 0.1
    """


# -------------------------------------------------------------------------
# Config
# -------------------------------------------------------------------------


@hookspec
def adjust_config(config: RunConfig, backend: BackendSpec) -> Iterable[ConfigChange] | None:
    """Fill in keys that the user left out.

    A backend fills in what depends on its device: keys of ``train``, ``rollout``, ``weight_sync``,
    ``placement`` and ``cluster``.

    Called once, after the overlays are applied and before ``check_config``.

    :param config: The run's config, read-only.
    :param backend: The backend of the run.
    :returns: The changes, or ``None``.

    Collecting: a change to a key that the user wrote is dropped; two values for one key are an error (AG202).

    .. versionadded:: 0.1
    """


@hookspec
def check_config(config: RunConfig, backend: BackendSpec) -> Iterable[ConfigProblem] | None:
    """Return the problems of a config.

    Called once, after ``adjust_config``; also for a backend that is not present on this host.

    :param config: The run's config, read-only.
    :param backend: The backend of the run.
    :returns: The problems, or ``None``.

    Collecting: all problems of all plugins are reported in one error (AG201).

    .. versionadded:: 0.1
    """


# -------------------------------------------------------------------------
# Lifecycle (on the driver, at most once a step)
# -------------------------------------------------------------------------


@hookspec
def before_train(run: RunInfo) -> None:
    """Observe the start of a run.

    Called once, when every worker is ready.

    :param run: The run, with the number of finished steps.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


@hookspec
def before_train_step(run: RunInfo) -> None:
    """Observe the start of a step.

    Called before the samples of the step are waited for, and before its profile begins.

    :param run: The run, with the number of finished steps: the step that begins is the next one.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


@hookspec
def after_rollout(run: RunInfo, groups: Sequence[Group]) -> None:
    """Observe the samples of a step.

    Called after generation and reward, while the workers train on them.

    :param run: The run, with the number of finished steps.
    :param groups: The scored groups.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


@hookspec
def after_train_step(run: RunInfo, metrics: Mapping[str, float]) -> None:
    """Observe a finished step.

    Called after the weights were synced.

    :param run: The run, with the number of finished steps.
    :param metrics: Every metric of the step, named ``<group>/<name>``.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


@hookspec
def after_weight_sync(run: RunInfo, version: int) -> None:
    """Observe new weights in the rollout engines.

    Called after all engines serve a version.

    :param run: The run, with the number of finished steps.
    :param version: The version that they serve now.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


@hookspec
def after_evaluate(run: RunInfo, metrics: Mapping[str, float]) -> None:
    """Observe an evaluation.

    Called after every evaluation.

    :param run: The run, with the number of finished steps.
    :param metrics: ``eval/<name>`` values.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


@hookspec
def on_wait(run: RunInfo, message: str) -> None:
    """Observe that a run waits, and for what.

    Called before ``before_train`` for the processes that are started, and every few seconds while a run that
    would go on, or end, waits for a checkpoint or an export to be written; during an export, from another
    thread than that of the other hooks.

    :param run: The run, with the number of finished steps.
    :param message: One line for the terminal: what is waited for, and how far it is.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


@hookspec
def after_save_checkpoint(run: RunInfo, path: str) -> None:
    """Observe a checkpoint.

    Called once a checkpoint is complete on disk, which may be some steps after the one that it holds.

    :param run: The run, with the number of finished steps.
    :param path: Directory of the checkpoint.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


@hookspec
def on_error(run: RunInfo, error: BaseException) -> None:
    """Observe the error that ends a run.

    Called once with the error that ends a run once its directory exists, before the workers are shut down. An
    error before that, in the config or because the directory is taken, is raised and not observed.

    :param run: The run, with the number of finished steps.
    :param error: The error that will be raised.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


@hookspec
def after_train(run: RunInfo) -> None:
    """Observe the end of a run.

    Called once, after success and after an error that ``on_error`` saw.

    :param run: The run, with the number of finished steps.

    Observer: results are ignored.

    .. versionadded:: 0.1
    """


# -------------------------------------------------------------------------
# Observability
# -------------------------------------------------------------------------


@hookspec
def register_trackers() -> Iterable[TrackerSpec] | None:
    """Return the metric trackers that this plugin provides.

    Called when the config is checked and when the run is built.

    :returns: The trackers, or ``None``.

    Collecting: two trackers of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def make_profiler(backend: BackendSpec, kind: str, path: str) -> AbstractContextManager[object] | None:
    """Return a profiler of this process: it records while it is entered, and writes when it is left.

    Called in each worker that trains or has an embedded rollout engine, before a step of ``profile.steps``.
    An exception of it is a warning.

    :param backend: The backend of the run.
    :param kind: One of ``torch`` and :attr:`BackendSpec.profile_kinds`.
    :param path: Directory of the step, which is there, and a name of the worker in it: files begin with both.
    :returns: The profiler, or ``None`` for a kind of another plugin.

    First result: no answer is a warning; the core answers for ``torch``, and for ``memory`` with torch's
    history of allocations.

    .. versionadded:: 0.1
    """


@hookspec
def register_metric_functions() -> Iterable[NamedFunction] | None:
    """Return functions that add metrics to each step.

    ``fn(groups, metrics, step)`` takes by name what it needs of these: the scored groups of the step, its
    other metrics by name, and its number. It returns a dict of names and numbers, which are recorded as
    ``custom/<name>``, or ``None``.

    Called when the config is checked and when the run is built; the functions are called in the driver at
    the end of each step.

    :returns: The functions, or ``None``.

    Collecting: ``run.metrics`` chooses by name; two functions of one name are an error (AG103).

    .. versionadded:: 0.1
    """


@hookspec
def report_environment() -> Mapping[str, str] | None:
    """Return facts about the host, for ``anygauge doctor`` and the run's log.

    Called by ``anygauge doctor`` and when a run starts. Must not import torch.

    :returns: Facts by name, or ``None``. One with the name of a backend is about its devices: a run on that
        backend has it in its first line, the first line of its log and the header of its report.

    Collecting: the union; the first value of a name is kept.

    .. versionadded:: 0.1
    """
