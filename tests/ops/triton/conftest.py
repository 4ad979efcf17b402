"""Tests of the Triton kernels in Triton's interpreter: nothing to collect where tests/conftest.py has not chosen it."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def seeded():
    """Each test draws the same numbers, whatever runs before it."""
    torch.manual_seed(0)
