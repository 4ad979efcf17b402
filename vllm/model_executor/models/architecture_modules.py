"""`vllm.model_executor.models.llama` and its like, which have no file: modules made when they are imported.

Each holds the classes of its architectures (`architecture_classes.py`), for plug-ins that derive from them. The module
of an architecture is called as other programs call it: `_NAMED`, or else its name in lower case without its ending.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from vllm.model_executor.models.registry import ModelRegistry

PACKAGE = "vllm.model_executor.models"

# module -> architectures whose names do not say it
_NAMED: dict[str, tuple[str, ...]] = {
    "llama": (
        "LlamaForCausalLM", "LLaMAForCausalLM", "MistralForCausalLM", "AquilaModel", "AquilaForCausalLM",
        "InternLMForCausalLM", "InternLM3ForCausalLM", "XverseForCausalLM",
    ),
    "commandr": ("CohereForCausalLM", "Cohere2ForCausalLM"),
    "gpt_j": ("GPTJForCausalLM",),
    "gpt_bigcode": ("GPTBigCodeForCausalLM",),
    "qwen": ("QWenLMHeadModel",),
    "baichuan": ("BaiChuanForCausalLM", "BaichuanForCausalLM"),
    "chatglm": ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    "stablelm": ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    "phimoe": ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    "falcon": ("FalconForCausalLM", "RWForCausalLM"),
    "mpt": ("MptForCausalLM", "MPTForCausalLM"),
    "internlm2": ("InternLM2ForCausalLM",),
    "granitemoe": ("GraniteMoeForCausalLM",),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
}  # fmt: skip
_ENDING = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration|ForSequenceClassification|Model)$")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z]{2,})")


def module_of(architecture: str) -> str:
    """The name of the module that holds an architecture's class."""
    for module, architectures in _NAMED.items():
        if architecture in architectures:
            return module
    return _WORD.sub("_", _ENDING.sub("", architecture)).lower()


def _architectures(module: str) -> list[str]:
    return [name for name in ModelRegistry.built_in() if module_of(name) == module]


class _Finder(MetaPathFinder, Loader):
    """Finds the modules that architectures need and no file provides."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, module = fullname.rpartition(".")
        if package != PACKAGE or not _architectures(module):
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        known = _architectures(module.__name__.rpartition(".")[2])
        module.__doc__ = f"The classes of {', '.join(known)}, made of their families."
        module.__dict__["__all__"] = known

        def lookup(name: str) -> Any:
            if name not in known:
                raise AttributeError(
                    f"module {module.__name__!r} has no {name!r}: models are made of families here, and each has one "
                    f"class, {' or '.join(known)}."
                )
            from vllm.model_executor.models.architecture_classes import class_of

            found = class_of(name)
            setattr(module, name, found)
            return found

        module.__dict__["__getattr__"] = lookup


def install() -> None:
    """Make the modules importable. They come behind files, of which there is none of these names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
