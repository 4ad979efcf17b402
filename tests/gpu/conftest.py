"""Tests that need a CUDA device; on machines without one there is nothing here to collect."""

import pytest
import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
elif torch.cuda.device_count() < 2:
    collect_ignore = [
        "test_one_shot.py",
        "test_pipeline_parallel.py",
        "test_tensor_parallel.py",
        "test_trainer_group.py",
    ]


@pytest.fixture(autouse=True)
def fast_kernels():
    """Our kernels on "cuda" tensors, whatever backend the test before has used, and true fp32 in torch's products."""
    from vllm.ops import triton as kernels

    kernels.register()
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, whatever runs before it."""
    torch.manual_seed(0)
