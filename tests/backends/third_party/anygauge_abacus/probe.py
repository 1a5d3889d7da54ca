import importlib.util

from anygauge_hooks.types import Availability


def probe():
    if importlib.util.find_spec("torch") is None:
        return Availability(ok=False, reason="torch is not installed", hint="pip install torch")
    # yours: is the vendor's library installed, does the driver answer, is there a device that is free
    return Availability(ok=True, reason="a frame with ten rods")
