"""Simulated Ascend NPUs: the real torch-npu on stand-ins for CANN. They show plumbing, and no numerics."""
