"""Exceptions raised by the core and by plugins.

Every class has a stable ``code``. The message ends with it, and ``docs/errors.md``
has one section per code, so that a log line is enough to find the explanation.
"""

from __future__ import annotations

import copy
from typing import ClassVar

__all__ = [
    "AnygaugeError",
    "AsleepError",
    "BackendUnavailableError",
    "CheckpointError",
    "CollectiveError",
    "ConfigConflictError",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "DoesNotFitError",
    "DuplicateNameError",
    "HealthError",
    "HubError",
    "KernelInputError",
    "MediaError",
    "MediaMismatchError",
    "MetricError",
    "MissedRedirectionError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PlacementError",
    "PluginError",
    "ProviderError",
    "RankMismatchError",
    "ReplicaError",
    "RewardError",
    "RolloutError",
    "RouterReplayError",
    "ScopeError",
    "TorchImportError",
    "UnknownBackendError",
    "UnknownNameError",
    "WeightMappingError",
    "WorkerDiedError",
    "WorkerFailedError",
]


class AnygaugeError(Exception):
    """Base class of every error that this project raises on purpose."""

    code: ClassVar[str] = "AG000"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        # ``args`` holds the message alone and the rest is in ``__dict__``, so that the
        # error survives pickling on its way out of a worker process or a Ray actor.
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.args[0], self.hint, f"[{self.code}]"]
        return "\n  ".join(line for line in lines if line)


class UnknownBackendError(AnygaugeError, ValueError):
    """The requested backend is not installed."""

    code = "AG101"


class BackendUnavailableError(AnygaugeError, RuntimeError):
    """The requested backend is installed but cannot run on this host."""

    code = "AG102"


class DuplicateNameError(AnygaugeError, ValueError):
    """Two plugins claim the same name."""

    code = "AG103"


class PluginError(AnygaugeError, RuntimeError):
    """A plugin breaks the contract, or failed to load and was asked for."""

    code = "AG104"


class UnknownNameError(AnygaugeError, ValueError):
    """No plugin provides the engine, loss, reward or model that the config names."""

    code = "AG105"


class TorchImportError(AnygaugeError, RuntimeError):
    """Torch cannot be imported because an extension that it autoloads fails."""

    code = "AG106"


class ProviderError(AnygaugeError, RuntimeError):
    """The library of ``train.provider`` cannot be used, or patches more than the config allows."""

    code = "AG107"


class ConfigError(AnygaugeError, ValueError):
    """The config is wrong; every problem found is listed."""

    code = "AG201"


class ConfigConflictError(AnygaugeError, ValueError):
    """Two plugins want different values for one key."""

    code = "AG202"


class DoesNotFitError(AnygaugeError, ValueError):
    """The plan of a run needs more memory than its devices have."""

    code = "AG203"


class DataError(AnygaugeError, ValueError):
    """A data file or a row of it cannot be used; names file, line and field."""

    code = "AG301"


class RewardError(AnygaugeError, RuntimeError):
    """A reward function failed or returned something that is no number."""

    code = "AG302"


class MediaError(DataError):
    """An image, a video or a recording cannot be used; names row, number and file."""

    code = "AG303"


class MetricError(AnygaugeError, RuntimeError):
    """A metric function of ``run.metrics`` failed or returned something that is no number."""

    code = "AG304"


class RolloutError(AnygaugeError, RuntimeError):
    """The rollout engine cannot serve a request."""

    code = "AG401"


class CheckpointError(AnygaugeError, ValueError):
    """A checkpoint directory cannot be read or must not be overwritten."""

    code = "AG501"


class WeightMappingError(AnygaugeError, ValueError):
    """A tensor is missing, unexpected or of the wrong shape."""

    code = "AG502"


class HubError(AnygaugeError, RuntimeError):
    """A name of a model or of data cannot be had from its hub."""

    code = "AG503"


class ScopeError(AnygaugeError, RuntimeError):
    """The device scope was used in a way that it cannot honor."""

    code = "AG601"


class MissedRedirectionError(AnygaugeError, RuntimeError):
    """Vendor code reached for a device that the scope does not redirect."""

    code = "AG602"


class NonFiniteError(AnygaugeError, ArithmeticError):
    """A loss or gradient is not finite."""

    code = "AG603"


class RankMismatchError(AnygaugeError, RuntimeError):
    """Ranks hold different weights, or read different configs, where they must be the same."""

    code = "AG604"


class OutOfMemoryError(AnygaugeError, MemoryError):
    """An allocation failed in a worker; tells the phase, the peaks so far, and what to lower."""

    code = "AG605"

    def __init__(self, message: str, *, hint: str | None = None, phase: str = "") -> None:
        super().__init__(message, hint=hint)
        self.phase = phase


class RouterReplayError(AnygaugeError, RuntimeError):
    """No pass captured the expert routes to replay."""

    code = "AG606"


class AsleepError(AnygaugeError, RuntimeError):
    """A train engine was called while its state is offloaded for the rollout engines."""

    code = "AG607"


class KernelInputError(AnygaugeError, ValueError):
    """A fused kernel was called with unsupported inputs."""

    code = "AG608"


class MediaMismatchError(AnygaugeError, ValueError):
    """The media of a sample and the placeholders in its tokens differ, or a content is not there."""

    code = "AG609"


class ReplicaError(AnygaugeError, RuntimeError):
    """Ranks that hold the same weights or gradients no longer have the same bits."""

    code = "AG610"


class CollectiveError(AnygaugeError, RuntimeError):
    """A collective of a process group gives a wrong result."""

    code = "AG611"


class WorkerDiedError(AnygaugeError, RuntimeError):
    """A worker process ended before its run did."""

    code = "AG701"


class WorkerFailedError(AnygaugeError, RuntimeError):
    """A worker raised; its rank and its own traceback come first."""

    code = "AG702"

    def original(self) -> AnygaugeError | None:
        """Return the error of this project that the worker raised, its rank first; ``None`` for any other."""
        if not isinstance(self.__cause__, AnygaugeError):
            return None
        error = copy.copy(self.__cause__)
        who = str(self.args[0]).partition(" raised:\n")[0]
        error.args = (f"{who}: {error.args[0]}",)
        return error


class DeadlineError(AnygaugeError, TimeoutError):
    """An operation timed out; the message names it."""

    code = "AG703"


class PlacementError(AnygaugeError, RuntimeError):
    """The cluster cannot host the requested workers."""

    code = "AG704"


class HealthError(AnygaugeError, RuntimeError):
    """A health rule has ended the run."""

    code = "AG801"
