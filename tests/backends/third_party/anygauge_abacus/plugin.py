from anygauge_abacus import env
from anygauge_abacus.probe import probe
from anygauge_hooks import hookimpl
from anygauge_hooks.types import BackendSpec, ConfigChange

ABACUS = BackendSpec(
    name="abacus",
    device_type="cpu",  # the torch.device type; "privateuseone", or what your vendor renames it to
    dist_backend="gloo",  # the torch.distributed backend
    probe=probe,
    scheduler_resource="ABACUS",
    local_device=env.local_device,
)


@hookimpl
def register_backends():
    return [ABACUS]


@hookimpl
def worker_env():
    return env.WORKER


@hookimpl
def prepare_worker(phase):
    if phase == "before_vendor_import":
        import torch  # noqa: F401 - yours: import torch_abacus, which registers the device with torch


@hookimpl
def make_device(index):
    from anygauge_abacus.device import AbacusDevice

    return AbacusDevice(index)


@hookimpl
def adjust_config():
    return [ConfigChange(path="train.dtype", value="float32", reason="beads hold no bfloat16")]


@hookimpl
def register_kernels():
    from anygauge_abacus.kernels import kernels

    return kernels()
