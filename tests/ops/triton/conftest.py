"""The Triton kernels run in Triton's interpreter, on the CPU. Where tests/conftest.py has not chosen it, nothing does."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
