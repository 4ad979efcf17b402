"""Chooses Triton's interpreter before anything imports Triton, which some versions read at import only."""

import importlib.util
import os
from dataclasses import replace
from typing import Any

import torch


def make_the_interpreter_faster() -> None:
    """Leave out two fifths of the interpreter's work, of which nobody sees anything.

    It patches Triton's language for a launch, and again for each call of a function in it: once is enough, for
    functions that see the same modules. And it computes whether integers overflow, but drops the answer.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # other versions may work otherwise
        return
    language = interpreter.tl
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[tuple[bool, ...]] = set()

    def patch_lang(fn: Any) -> Any:
        modules = tuple(any(value is m for value in fn.__globals__.values()) for m in (language, language.core))
        if modules in patched:
            return interpreter._LangPatchScope()
        patched.add(modules)
        return patch(fn)

    def launch_with(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, launch_with
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


# With a GPU, tests/gpu runs the kernels for real, which the interpreter, once chosen for a process, would take from it.
if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    make_the_interpreter_faster()
