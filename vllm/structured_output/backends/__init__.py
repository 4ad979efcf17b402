"""The back ends by name; a library is imported when the first request needs it, or is chosen for the engine."""

from __future__ import annotations

import importlib

from vllm.structured_output.grammar import Backend
from vllm.structured_output.support import GUIDANCE, LMFE, OUTLINES, XGRAMMAR
from vllm.structured_output.vocabulary import Vocabulary

_MODULES = {GUIDANCE: "guidance", XGRAMMAR: "xgrammar", OUTLINES: "outlines", LMFE: "lm_format_enforcer"}


def make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """The back end `name` for a vocabulary."""
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    backend: Backend = module.make(vocabulary)
    return backend
