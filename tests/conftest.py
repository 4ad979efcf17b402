"""Chooses Triton's interpreter before anything imports Triton, which some versions read at import only."""

import importlib.util
import os

import torch

# With a GPU, tests/gpu runs the kernels for real, which the interpreter, once chosen for a process, would take from it.
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
