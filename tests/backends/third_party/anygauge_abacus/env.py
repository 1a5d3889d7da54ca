# What a library reads when it is loaded; prepare_worker would be too late for it.
WORKER = {"ABACUS_BEADS": "10"}


def local_device(ids, environ):
    return 0  # yours: where ids[0] is among the devices that this process sees
