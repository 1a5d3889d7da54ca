import contextlib

import psutil
import torch

from anygauge_hooks.megatron import ScopeMap
from anygauge_hooks.types import Device


class AbacusDevice(Device):  # yours: override peak_memory, capture_graph, meters, ... if the device has them
    type = "cpu"

    def __init__(self, index):
        self.index = index
        self.torch_device = torch.device("cpu")  # yours: torch.device("abacus", index), made current
        self.scope_map = scope_map()

    def seed(self, seed):
        torch.manual_seed(seed)  # the host's generator; yours: and the device's

    def get_rng_state(self):
        return torch.get_rng_state()

    def set_rng_state(self, state):
        torch.set_rng_state(state)

    def synchronize(self):
        pass  # nothing is queued

    def memory(self):
        return {"allocated": psutil.Process().memory_info().rss}


def nothing(*args, **kwargs):
    pass


class Queue:
    """Stands for a stream and for an event: all work is done by the time it is queued."""

    __init__ = synchronize = wait = wait_stream = wait_event = record = nothing

    def query(self):
        return True

    def record_event(self, event=None):
        return event or Queue()


def scope_map():
    functions = {
        "Event": Queue,
        "Stream": Queue,
        "current_device": lambda: "cpu",  # used as ``device=``; yours: the index
        "current_stream": lambda device=None: Queue(),
        "default_stream": lambda device=None: Queue(),
        "device_count": lambda: 1,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "is_available": lambda: False,  # yours: True
        "manual_seed": torch.default_generator.manual_seed,  # torch.manual_seed calls it: not itself
        "manual_seed_all": torch.default_generator.manual_seed,
        "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
        "stream": contextlib.nullcontext,
        **dict.fromkeys(("empty_cache", "set_device", "set_stream", "synchronize"), nothing),
    }
    types = {  # yours: also "torch.abacus.FloatTensor" and so on
        "fp32": ("torch.FloatTensor",),
        "fp16": ("torch.HalfTensor",),
        "bf16": ("torch.BFloat16Tensor",),
    }
    # yours: leave these three out
    capable = dict.fromkeys(("has_index", "has_pinned_memory", "is_accelerator"), False)
    return ScopeMap(device_type="cpu", functions=functions, tensor_types=types, **capable)
