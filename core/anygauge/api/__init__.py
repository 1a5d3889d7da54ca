"""Python API: train, evaluate and generate from a script or a notebook. The command line calls it too."""
