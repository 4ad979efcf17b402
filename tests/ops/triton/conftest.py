"""Tests of the Triton kernels in Triton's interpreter: nothing to collect where tests/conftest.py has not chosen it."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
