"""Take two DistributedOptimizer steps of Megatron on a backend, and print what happened as JSON.

python two_steps.py {cpu,npu}
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from anygauge.device import seed_everything
from anygauge.engines.megatron.prepare import prepare_megatron
from anygauge.engines.megatron.scope import make_scope
from anygauge.plugins import load_plugins, select_backend
from anygauge_hooks.types import BackendSpec

STEPS = 2
WIDTH = 16


def main(name: str) -> None:
    """Select the backend, train inside its scope, and report."""
    plugins = load_plugins()
    backend, _ = select_backend(plugins, name)
    plugins.prepare_worker(backend, "actor", "before_vendor_import")
    device = plugins.make_device(backend, 0)
    prepare_megatron(plugins, backend)
    seed_everything(device, 1)
    dist.init_process_group(backend.dist_backend, store=dist.HashStore(), rank=0, world_size=1)
    with make_scope(device):
        report = train(backend)
    report["device"] = str(device.torch_device)
    report["dist_backend"] = dist.get_backend()
    report["memory"] = dict(device.memory())
    sys.stdout.write(json.dumps(report) + "\n")
    dist.destroy_process_group()


def train(backend: BackendSpec) -> dict[str, Any]:
    """Train a two-layer perceptron with recompute, and return losses, norms and where everything was."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model, optimizer = build()
    inputs = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH).cuda().requires_grad_()
    losses, norms = [], []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        output = tensor_parallel.checkpoint(model, False, inputs)
        loss = (output - torch.ones(4, WIDTH, device="cuda")).square().mean()
        loss.backward()
        model.finish_grad_sync()
        success, norm, _ = optimizer.step()
        assert success
        losses.append(loss.item())
        norms.append(float(norm))
    state = optimizer.optimizer.state.values()
    tensors = [
        *model.parameters(),
        *(value for entry in state for key, value in entry.items() if key != "step"),
    ]
    return {
        "backend": backend.name,
        "losses": losses,
        "norms": norms,
        "weights": [parameter.detach().cpu().double().sum().item() for parameter in model.parameters()],
        "devices": sorted(
            {str(tensor.device) for tensor in tensors} | {str(b.grad_data.device) for b in model.buffers}
        ),
    }


def build() -> tuple[Any, Any]:
    """Return the model in Megatron's DDP and its DistributedOptimizer."""
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=2)

    @torch.no_grad()
    def initial(weight: torch.Tensor) -> torch.Tensor:
        return weight.copy_(torch.linspace(-0.5, 0.5, weight.numel()).reshape(weight.shape))

    class Perceptron(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options: dict[str, Any] = {"config": config, "init_method": initial, "bias": False}
            self.up = tensor_parallel.ColumnParallelLinear(WIDTH, WIDTH, gather_output=False, **options)
            self.down = tensor_parallel.RowParallelLinear(
                WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=False, **options
            )

        def forward(self, x: torch.Tensor) -> Any:
            return self.down(torch.tanh(self.up(x)[0]))[0]

    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, ddp_config, Perceptron().cuda())
    settings = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(settings, [model])
    return model, optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer


if __name__ == "__main__":
    main(sys.argv[1])
