"""Load the stand-in for MindSpeed as a worker does, and print what was seen, as JSON. Simulated.

python chosen_provider.py LOG OPTIONS [step]
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anygauge.config import Config
from anygauge.engines.megatron.plugin import register_train_engines
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.plugins import load_plugins
from anygauge_hooks import hookimpl
from anygauge_hooks.engines import WorkerContext
from anygauge_hooks.errors import ProviderError
from anygauge_npu import mindspeed
from anygauge_tests.engine_config import engine_config


def main(log: str, options: str, step: str = "") -> None:
    """Go through the phases of a worker."""
    plugins = load_plugins(only=["cpu", "models"])
    backend = plugins.get("register_backends", "cpu")
    model = Path(log).parent / "model"
    config = engine_config(
        str(model), train={"provider": "mindspeed", "provider_options": json.loads(options)}
    )
    (spec,) = register_train_engines()
    report: dict[str, Any] = {}
    try:
        assert spec.prepare is not None
        spec.prepare(plugins, backend)
        mindspeed.load(config, log)
        report["after import"] = json.loads(Path(log).with_suffix(".mindspeed.json").read_text())
        mindspeed.reapply(config, log)
        prepare_megatron(plugins, backend)  # as the engine does: nothing was imported behind its back
        if step:
            report["step"] = exported(config, plugins, backend)
    except ProviderError as error:
        report["error"] = str(error)
    adaptor = sys.modules["mindspeed.megatron_adaptor"]
    report |= {"first": adaptor.FIRST, "arguments": adaptor.SEEN}
    report["fuser"] = sys.modules["megatron.core.jit"].prepared_for  # type: ignore[attr-defined]
    report["argv"] = sys.argv[1:]
    sys.stdout.write(json.dumps(report, default=repr) + "\n")


def exported(config: Config, plugins: Any, backend: Any) -> dict[str, Any]:
    """Build the engine with the library's linears, and compare what it exports with what it read."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from anygauge.testing.tiny import tiny_qwen3

    tiny_qwen3(config.model.path, vocab_size=64, head_dim=32)
    plugins.register(SimpleNamespace(get_spec_provider=get_spec_provider), "mindspeed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = plugins.make_device(backend, 0)
    context = WorkerContext(rank=0, world_size=1, backend=backend, device=device, plugins=plugins)
    engine = plugins.get("register_train_engines", "megatron").make(config, context)
    path = Path(config.model.path).with_name("exported")
    engine.save_hf(str(path))
    before, after = (
        {
            name: tensor
            for file in Path(each).glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }
        for each in (config.model.path, path)
    )
    layer = engine.policy.chunks[0].decoder.layers[0]
    marks = {
        name: [parameter.tensor_model_parallel, parameter.partition_dim]
        for name, parameter in layer.named_parameters()
        if "linear" in name and parameter.dim() == 2
    }
    report = {
        "class": type(layer.mlp.linear_fc1).__name__,
        "equal": before.keys() == after.keys() and all(bool((before[k] == after[k]).all()) for k in before),
        "marks": marks,
    }
    with contextlib.suppress(AttributeError):
        report["extra state"] = any("_extra_state" in name for name in layer.state_dict())
    dist.destroy_process_group()
    return report


@hookimpl
def get_spec_provider() -> mindspeed.Modules:
    """Answer for the backend of the host, which has no provider."""
    return mindspeed.Modules()


if __name__ == "__main__":
    main(*sys.argv[1:])
