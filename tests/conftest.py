"""MEMO_HF_TEST_DEVICE=cuda pytest tests/test_gradients_*.py: what takes torch's default device runs on that one."""

import os

import torch

if device := os.environ.get("MEMO_HF_TEST_DEVICE"):
    torch.set_default_device(device)
    torch.backends.cudnn.allow_tf32 = False  # of convolutions
