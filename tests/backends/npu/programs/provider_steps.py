"""Take the steps of two_steps.py where a run has chosen MindSpeed, for which a stand-in is there, as JSON.

Torch-npu's ``transfer_to_npu``, which it imports, is the real one.

python provider_steps.py LOG
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from two_steps import train

from anygauge.device import seed_everything
from anygauge.engines.megatron.scope import make_scope
from anygauge.plugins import load_plugins, select_backend
from anygauge_hooks.megatron import scope_map_of
from anygauge_tests.engine_config import engine_config

STAND_IN = Path(__file__).parents[1] / "provider"


def main(log: str) -> None:
    """Go through the phases of a worker, train, and report."""
    sys.path.append(str(STAND_IN))
    plugins = load_plugins()
    backend, _ = select_backend(plugins, "npu")
    config = engine_config(".", train={"provider": "mindspeed", "provider_options": {"strict": True}})
    plugins.get("register_train_engines", "megatron").prepare(plugins, backend)
    plugins.prepare_worker(backend, "actor", "before_vendor_import", config=config, log=log)
    device = plugins.make_device(backend, 0)
    plugins.prepare_worker(backend, "actor", "after_config", config=config, log=log)
    seed_everything(device, 1)
    dist.init_process_group(backend.dist_backend, store=dist.HashStore(), rank=0, world_size=1)
    with make_scope(device):
        report = train(backend)
    report["has_scope"] = scope_map_of(device) is not None
    report["replaced"] = json.loads(Path(log).with_suffix(".mindspeed.json").read_text())["replaced"]
    sys.stdout.write(json.dumps(report) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
