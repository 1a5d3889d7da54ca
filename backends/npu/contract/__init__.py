"""Parts of torch-npu that the NPU backend relies on, per version, and a checked stand-in."""
