"""Which architectures can be run: the built-in families and the classes that users register."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.plugins import load_general_plugins

if TYPE_CHECKING:
    from torch import nn

    from vllm.model_executor.models.family import Family

# architecture -> (module in `families/`, name of the Family in it)
_FAMILIES: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "LLAMA"),
    "LLaMAForCausalLM": ("llama", "LLAMA"),
    "MistralForCausalLM": ("llama", "MISTRAL"),
    "MixtralForCausalLM": ("llama", "MIXTRAL"),
    "Qwen2ForCausalLM": ("llama", "QWEN2"),
    "Qwen3ForCausalLM": ("llama", "QWEN3"),
    "GemmaForCausalLM": ("llama", "GEMMA"),
    "Gemma2ForCausalLM": ("llama", "GEMMA2"),
    "Phi3ForCausalLM": ("llama", "PHI3"),
    "PhiForCausalLM": ("gpt", "PHI"),
    "GPT2LMHeadModel": ("gpt", "GPT2"),
    "GPTNeoXForCausalLM": ("gpt", "GPT_NEOX"),
    "OPTForCausalLM": ("gpt", "OPT"),
    "GPTBigCodeForCausalLM": ("gpt", "GPT_BIGCODE"),
    "GPTJForCausalLM": ("gpt", "GPTJ"),
    "Starcoder2ForCausalLM": ("gpt", "STARCODER2"),
    "PersimmonForCausalLM": ("gpt", "PERSIMMON"),
    "NemotronForCausalLM": ("gpt", "NEMOTRON"),
    "StableLmForCausalLM": ("kin", "STABLELM"),
    "StableLMEpochForCausalLM": ("kin", "STABLELM"),
    "CohereForCausalLM": ("kin", "COHERE"),
    "Cohere2ForCausalLM": ("kin", "COHERE2"),
    "OlmoForCausalLM": ("kin", "OLMO"),
    "Olmo2ForCausalLM": ("kin", "OLMO2"),
    "GraniteForCausalLM": ("kin", "GRANITE"),
    "GlmForCausalLM": ("kin", "GLM"),
    "Glm4ForCausalLM": ("kin", "GLM4"),
    "Gemma3ForCausalLM": ("kin", "GEMMA3"),
    "Qwen2MoeForCausalLM": ("moe", "QWEN2_MOE"),
    "Qwen3MoeForCausalLM": ("moe", "QWEN3_MOE"),
    "OlmoeForCausalLM": ("moe", "OLMOE"),
    "PhimoeForCausalLM": ("moe", "PHIMOE"),
    "PhiMoEForCausalLM": ("moe", "PHIMOE"),
    "DbrxForCausalLM": ("moe", "DBRX"),
    "GraniteMoeForCausalLM": ("moe", "GRANITE_MOE"),
    "AquilaModel": ("remote", "PLAIN"),
    "AquilaForCausalLM": ("remote", "PLAIN"),
    "XverseForCausalLM": ("remote", "PLAIN"),
    "InternLMForCausalLM": ("remote", "INTERNLM"),
    "InternLM2ForCausalLM": ("remote", "INTERNLM2"),
    "InternLM3ForCausalLM": ("remote", "INTERNLM3"),
    "OrionForCausalLM": ("remote", "ORION"),
    "ExaoneForCausalLM": ("remote", "EXAONE"),
    "BaiChuanForCausalLM": ("remote", "BAICHUAN_ROTARY"),
    "BaichuanForCausalLM": ("remote", "BAICHUAN"),
    "MiniCPMForCausalLM": ("remote", "MINICPM"),
    "QWenLMHeadModel": ("remote", "QWEN"),
    "ChatGLMModel": ("remote", "CHATGLM"),
    "ChatGLMForConditionalGeneration": ("remote", "CHATGLM"),
    "JAISLMHeadModel": ("remote", "JAIS"),
    "ArcticForCausalLM": ("arctic", "ARCTIC"),
    "BloomForCausalLM": ("alibi", "BLOOM"),
    "FalconForCausalLM": ("alibi", "FALCON"),
    "RWForCausalLM": ("alibi", "FALCON"),
    "MptForCausalLM": ("alibi", "MPT"),
    "MPTForCausalLM": ("alibi", "MPT"),
}


_FAMILY_MARK = "family "  # before the place of a registered family, where classes and families travel together


@functools.cache
def _built_in(architecture: str) -> Family:
    module, name = _FAMILIES[architecture]
    family: Family = getattr(importlib.import_module(f"vllm.model_executor.models.families.{module}"), name)
    return family


def family_of(architecture: str) -> Family | None:
    """The family of an architecture, registered or built in; also where a class is registered for it. Without torch."""
    where = ModelRegistry._families.get(architecture)
    if where is not None:
        return _import_family(architecture, where)
    return _built_in(architecture) if architecture in _FAMILIES else None


@dataclass
class Registry:
    """Architecture -> family, or the class a user registered for it (which wins)."""

    _registered: dict[str, type[nn.Module] | str] = field(default_factory=dict)
    _families: dict[str, str] = field(default_factory=dict)

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        """Run models of architecture `model_arch` with `model_cls`: a class, or "module:Class", imported on first use.

        A string keeps this process free of whatever the module imports, and lets other processes import it themselves.
        """
        if not isinstance(model_arch, str) or not model_arch:
            raise TypeError(f"model_arch must be a string, got {type(model_arch).__name__}.")
        if isinstance(model_cls, str):
            module, separator, name = model_cls.partition(":")
            if not separator or not module or not name or ":" in name:
                raise ValueError(f"Expected a string in the format `<module>:<class>`, got {model_cls!r}.")
        elif not isinstance(model_cls, type) or not _is_module_class(model_cls):
            raise TypeError(f"model_cls must be a subclass of torch.nn.Module or a string, got {model_cls!r}.")
        self._registered[model_arch] = model_cls

    def register_family(self, model_arch: str, family: str) -> None:
        """Run models of architecture `model_arch` as those of `family`: "module:FAMILY", a `Family` in a module that
        every process can import, and that imports no torch.
        """
        if not isinstance(model_arch, str) or not model_arch:
            raise TypeError(f"model_arch must be a string, got {type(model_arch).__name__}.")
        if not isinstance(family, str) or family.count(":") != 1:
            raise ValueError(f"Expected a string in the format `<module>:<FAMILY>`, got {family!r}.")
        self._families[model_arch] = family

    def get_supported_archs(self) -> set[str]:
        """Every architecture that can be run."""
        return {*_FAMILIES, *self._registered, *self._families}

    def registered(self) -> dict[str, str]:
        """What users registered, as strings that another process can `restore`."""
        classes = {
            arch: entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
            for arch, entry in self._registered.items()
        }
        return {arch: _FAMILY_MARK + where for arch, where in self._families.items()} | classes

    def restore(self, models: dict[str, str]) -> None:
        """Register what another process `registered`, after what this process' plugins register."""
        load_general_plugins()
        for arch, entry in models.items():
            if entry.startswith(_FAMILY_MARK):
                self.register_family(arch, entry.removeprefix(_FAMILY_MARK))
            else:
                self.register_model(arch, entry)

    def resolve(self, architectures: str | Iterable[str]) -> Family | type[nn.Module]:
        """The family or class of the first of `architectures` that is known. Raises ValueError if none is."""
        return self._load(self._find(architectures))

    def resolve_model_cls(self, architectures: str | Iterable[str]) -> tuple[type[nn.Module], str]:
        """(class, architecture) of the first known one of `architectures`; every family's class is `DecoderModel`."""
        arch = self._find(architectures)
        found = self._load(arch)
        if isinstance(found, type):
            return found, arch
        from vllm.model_executor.models.decoder import DecoderModel

        return DecoderModel, arch

    def is_text_generation_model(self, architectures: str | Iterable[str]) -> bool:
        """Whether the model computes logits of a next token."""
        found = self.resolve(architectures)
        return not isinstance(found, type) or _has(found, "compute_logits")

    def is_pooling_model(self, architectures: str | Iterable[str]) -> bool:
        """Whether the model turns a whole input into one answer."""
        found = self.resolve(architectures)
        return isinstance(found, type) and _has(found, "pooler")

    is_embedding_model = is_pooling_model

    def is_multimodal_model(self, architectures: str | Iterable[str]) -> bool:
        """Whether the model takes images, audio or video."""
        return self._flag(architectures, "supports_multimodal")

    def is_pp_supported_model(self, architectures: str | Iterable[str]) -> bool:
        """Whether the model's layers can be dealt to pipeline stages."""
        return self._flag(architectures, "supports_pp")

    def is_attention_free_model(self, architectures: str | Iterable[str]) -> bool:
        """Whether the model has no attention and so no KV cache."""
        return self._flag(architectures, "is_attention_free")

    def _flag(self, architectures: str | Iterable[str], name: str) -> bool:
        found = self.resolve(architectures)
        return isinstance(found, type) and _has(found, name) and bool(vars_of(found)[name])

    def _find(self, architectures: str | Iterable[str]) -> str:
        names = [architectures] if isinstance(architectures, str) else list(architectures)
        for name in names:
            if name in self._registered or name in self._families or name in _FAMILIES:
                return name
        supported = sorted(self.get_supported_archs())
        near = [match for name in names for match in difflib.get_close_matches(name, supported, n=3, cutoff=0.6)]
        hint = f" Near: {', '.join(dict.fromkeys(near))}." if near else ""
        raise ValueError(
            f"Model architectures {names} are not supported for now.{hint} "
            f"Supported architectures: {', '.join(supported)}. "
            "Register your own with vllm.ModelRegistry.register_model."
        )

    def _load(self, arch: str) -> Family | type[nn.Module]:
        entry = self._registered.get(arch)
        if entry is None:
            where = self._families.get(arch)
            return _built_in(arch) if where is None else _import_family(arch, where)
        if isinstance(entry, str):
            entry = self._registered[arch] = _import_class(arch, entry)
        return entry


def _import(arch: str, where: str, what: str) -> Any:
    module, _, name = where.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The {what} {where!r} registered for {arch} cannot be imported: {error}. "
            "It must stand in a module that every process of the engine can import, not in the script itself."
        ) from error
    return found


def _import_family(arch: str, where: str) -> Family:
    from vllm.model_executor.models.family import Family

    found = _import(arch, where, "family")
    if not isinstance(found, Family):
        raise ValueError(f"{where!r}, registered for {arch}, is not a Family.")
    return found


def _import_class(arch: str, where: str) -> type[nn.Module]:
    found = _import(arch, where, "class")
    if not isinstance(found, type) or not _is_module_class(found):
        raise ValueError(f"{where!r}, registered for {arch}, is not a subclass of torch.nn.Module.")
    return found


def _is_module_class(cls: type) -> bool:
    """Whether `cls` derives from torch.nn.Module, found out without importing torch."""
    return any(f"{base.__module__}.{base.__qualname__}" == "torch.nn.modules.module.Module" for base in cls.__mro__)


def vars_of(cls: type) -> dict[str, Any]:
    """A class's attributes, inherited ones included."""
    return {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}


def _has(cls: type, name: str) -> bool:
    return name in vars_of(cls)


ModelRegistry = Registry()
