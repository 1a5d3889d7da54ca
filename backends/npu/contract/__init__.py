"""What the NPU backend takes for granted of torch-npu, per version, and a stand-in that holds calls to it."""
