# What a library reads when it is loaded; prepare_worker would be too late for it.
WORKER = {"ABACUS_BEADS": "10"}


def ray_options(count):
    return {"num_cpus": 0, "resources": {"ABACUS": count}}


def cluster_resources(count):
    return {"ABACUS": count}


def local_device(ids, environ):
    return 0  # yours: where ids[0] is among the devices that this process sees
