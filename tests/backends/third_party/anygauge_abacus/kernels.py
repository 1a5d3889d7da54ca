import torch

from anygauge_hooks.kernels import KernelImpl


def kernels():
    return [
        KernelImpl(op="rms_norm", fn=rms_norm, source="torch.nn.functional.rms_norm"),
        KernelImpl(op="swiglu", fn=swiglu, source="anygauge_abacus.kernels.swiglu", dtypes=("float32",)),
    ]


def rms_norm(x, weight, eps):
    wide = torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return wide.to(x.dtype)


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
