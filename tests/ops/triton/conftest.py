"""Run the Triton kernels in Triton's interpreter, on the CPU.

Without triton there is nothing here to collect; nor with a GPU, where tests/gpu runs the same kernels for real, which
the interpreter, once chosen for a process, would take from it.
"""

import importlib.util
import os

import torch

if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["TRITON_INTERPRET"] = "1"
