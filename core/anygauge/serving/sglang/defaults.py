"""Arguments of SGLang's servers that a run fills in, because SGLang's own suit a service.

A service does not know how many requests will come. A run does: its servers hold at most the samples of a
step, and of the steps that its schedule generates ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from operator import add
from typing import TYPE_CHECKING

from anygauge.config.modalities import modalities
from anygauge.config.rules.weight_sync import HOST
from anygauge.config.schema import POLICY
from anygauge.data.evaluation import eval_datasets
from anygauge.serving.server_plan import plan_servers
from anygauge.serving.sglang.installed import Installed, installed_sglang
from anygauge.serving.sglang.kinds import plan_copies, plan_devices, plan_ranks
from anygauge_hooks.types import ConfigChange

if TYPE_CHECKING:
    from anygauge.config import Config
    from anygauge_hooks.types import BackendSpec

__all__ = ["server_defaults"]

ENGINE = "sglang"
DECODE_GRAPHS = ("cuda_graph_max_bs_decode", "cuda_graph_max_bs")
"""Names of the largest batch for which decoding is recorded as a device graph; versions have one of them."""
PREFILL_GRAPHS = "disable_prefill_cuda_graph"
MULTIPLE = 8
"""Batch sizes that SGLang records are multiples of this."""
LARGEST_BATCHES = ((8 << 30, 1024), (64 << 30, 512))
"""Bytes of a model on one device, and the largest batch to record for it. A batch costs memory that grows
with the model, and large models are bound by the device at half of it."""
SPARE_CACHE = 1.25
"""Cache beyond what the samples in flight need: prefixes are kept while other samples take their place."""


def server_defaults(config: Config, backend: BackendSpec) -> Iterator[ConfigChange]:
    """Yield arguments of the servers on accelerators; the user's own take precedence.

    * Decoding is recorded as graphs for batches of all samples in flight, where SGLang records at most 256 or
      512. A small model decodes larger batches slowly without: each launch takes longer than its kernel.
    * Prefill is not recorded. The prompts of a step are read in few large batches, and recording takes
      seconds of the start (docs/performance.md).
    * On devices shared with trainers, the cache has as many tokens as the samples in flight can have, since
      trainers and servers both stay awake if both have room.
    """
    installed = installed_sglang()
    if config.rollout.engine != ENGINE or config.rollout.external or backend.device_type == HOST:
        return
    samples = _samples_in_flight(config)
    has_own_graphs = any("cuda_graph" in name for name in _names(config))
    if installed is not None and not (has_own_graphs or _serves_other_models(config)):
        yield from _graphs(config, installed, samples)
    if config.placement.colocated and (longest := _longest(config)) is not None:
        tokens = ceil(samples * longest * SPARE_CACHE)
        reason = f"a server has {samples} samples of at most {longest} tokens at once"
        yield ConfigChange(path="rollout.max_batch_tokens", value=tokens, reason=reason)


def _graphs(config: Config, installed: Installed, samples: int) -> Iterator[ConfigChange]:
    largest = next((size for limit, size in LARGEST_BATCHES if _weight_bytes(config) <= limit), None)
    name = next((name for name in DECODE_GRAPHS if name in installed.arguments), None)
    if largest is not None and name is not None:
        batch = min(largest, ceil(samples / MULTIPLE) * MULTIPLE)
        reason = f"a server has {samples} samples at once"
        yield ConfigChange(path=f"rollout.sglang.{name}", value=batch, reason=reason)
    if PREFILL_GRAPHS in installed.arguments:
        reason = "prompts of a step are read in few large batches"
        yield ConfigChange(path=f"rollout.sglang.{PREFILL_GRAPHS}", value=True, reason=reason)


def _samples_in_flight(config: Config) -> int:
    """Return the most samples that a data-parallel rank of the policy's servers has at once."""
    rollout = config.rollout
    ahead = {"sync": 0, "one_step_off": 1}.get(rollout.schedule, rollout.max_staleness)
    prompts = rollout.prompts_per_step * (1 + ahead) + rollout.over_sampling
    plans = [plan for plan in plan_servers(config) if plan.is_synced and plan.kind != "prefill"]
    ranks = sum(plan_ranks(config, plan) for plan in plans)
    return ceil(prompts * rollout.samples_per_prompt / max(1, ranks))


def _longest(config: Config) -> int | None:
    """Return the tokens of the longest prompt and response; ``None`` if the config does not bound them."""
    rollout, evaluated = config.rollout, eval_datasets(config).values()
    if rollout.function != "single_turn" or modalities(config) or _serves_other_models(config):
        return None
    prompts = config.data.max_prompt_tokens, *(dataset.max_prompt_tokens for dataset in evaluated)
    responses = rollout.max_new_tokens, *(dataset.max_new_tokens or 0 for dataset in evaluated)
    known = [each for each in prompts if each is not None]
    return max(map(add, known, responses)) if len(known) == len(prompts) else None


def _serves_other_models(config: Config) -> bool:
    """Return whether servers of models that are not trained would get the same arguments."""
    return any(plan.model != POLICY for plan in plan_servers(config))


def _weight_bytes(config: Config) -> float:
    """Return the bytes of the model's weights on one device of a server, infinite if they are not known."""
    files = [path.stat().st_size for path in config.model.path.glob("*.safetensors")]
    plans = [plan for plan in plan_servers(config) if plan.is_synced]
    devices = min(plan_devices(config, plan) // plan_copies(config, plan) for plan in plans)
    return sum(files) / devices if files else float("inf")


def _names(config: Config) -> Iterator[str]:
    """Yield the names of all arguments that the user wrote."""
    for table in (config.rollout.sglang, *(group.sglang for group in config.rollout.groups)):
        yield from (name.replace("-", "_") for name in table)
