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

# architecture -> (module in `families/`, name of the Family in it, public checkpoints for docs/supported_models.md)
_FAMILIES: dict[str, tuple[str, str, str]] = {
    "LlamaForCausalLM": ("llama", "LLAMA", "meta-llama/Llama-3.1-8B-Instruct, meta-llama/Llama-3.2-1B, 01-ai/Yi-6B"),
    "LLaMAForCausalLM": ("llama", "LLAMA", "huggyllama/llama-7b"),
    "MistralForCausalLM": ("llama", "MISTRAL", "mistralai/Mistral-7B-Instruct-v0.3"),
    "MixtralForCausalLM": ("llama", "MIXTRAL", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "Qwen2ForCausalLM": ("llama", "QWEN2", "Qwen/Qwen2.5-7B-Instruct"),
    "Qwen3ForCausalLM": ("llama", "QWEN3", "Qwen/Qwen3-8B"),
    "GemmaForCausalLM": ("llama", "GEMMA", "google/gemma-7b-it"),
    "Gemma2ForCausalLM": ("llama", "GEMMA2", "google/gemma-2-9b-it"),
    "Phi3ForCausalLM": ("llama", "PHI3", "microsoft/Phi-3-mini-4k-instruct, microsoft/phi-4"),
    "PhiForCausalLM": ("gpt", "PHI", "microsoft/phi-2"),
    "GPT2LMHeadModel": ("gpt", "GPT2", "openai-community/gpt2"),
    "GPTNeoXForCausalLM": ("gpt", "GPT_NEOX", "EleutherAI/pythia-6.9b, EleutherAI/gpt-neox-20b"),
    "OPTForCausalLM": ("gpt", "OPT", "facebook/opt-125m"),
    "GPTBigCodeForCausalLM": ("gpt", "GPT_BIGCODE", "bigcode/starcoder, bigcode/gpt_bigcode-santacoder"),
    "GPTJForCausalLM": ("gpt", "GPTJ", "EleutherAI/gpt-j-6b"),
    "Starcoder2ForCausalLM": ("gpt", "STARCODER2", "bigcode/starcoder2-7b"),
    "PersimmonForCausalLM": ("gpt", "PERSIMMON", "adept/persimmon-8b-chat"),
    "NemotronForCausalLM": ("gpt", "NEMOTRON", "nvidia/Minitron-8B-Base"),
    "StableLmForCausalLM": ("kin", "STABLELM", "stabilityai/stablelm-2-1_6b, stabilityai/stablelm-2-12b"),
    "StableLMEpochForCausalLM": ("kin", "STABLELM", "stabilityai/stablelm-3b-4e1t (older config)"),
    "CohereForCausalLM": ("kin", "COHERE", "CohereLabs/c4ai-command-r-v01, CohereLabs/c4ai-command-r-plus"),
    "Cohere2ForCausalLM": ("kin", "COHERE2", "CohereLabs/c4ai-command-r7b-12-2024"),
    "OlmoForCausalLM": ("kin", "OLMO", "allenai/OLMo-7B-hf"),
    "OLMoForCausalLM": ("kin", "OLMO", "allenai/OLMo-1B-hf (older name)"),
    "Olmo2ForCausalLM": ("kin", "OLMO2", "allenai/OLMo-2-1124-7B"),
    "GraniteForCausalLM": ("kin", "GRANITE", "ibm-granite/granite-3.1-8b-instruct"),
    "GlmForCausalLM": ("kin", "GLM", "zai-org/glm-4-9b-chat-hf"),
    "Glm4ForCausalLM": ("kin", "GLM4", "zai-org/GLM-4-9B-0414"),
    "Gemma3ForCausalLM": ("kin", "GEMMA3", "google/gemma-3-1b-it"),
    "Qwen2MoeForCausalLM": ("moe", "QWEN2_MOE", "Qwen/Qwen1.5-MoE-A2.7B-Chat"),
    "Qwen3MoeForCausalLM": ("moe", "QWEN3_MOE", "Qwen/Qwen3-30B-A3B"),
    "OlmoeForCausalLM": ("moe", "OLMOE", "allenai/OLMoE-1B-7B-0924"),
    "PhimoeForCausalLM": ("moe", "PHIMOE", "microsoft/Phi-3.5-MoE-instruct"),
    "PhiMoEForCausalLM": ("moe", "PHIMOE", "microsoft/Phi-3.5-MoE-instruct"),
    "DbrxForCausalLM": ("moe", "DBRX", "databricks/dbrx-instruct"),
    "GraniteMoeForCausalLM": ("moe", "GRANITE_MOE", "ibm-granite/granite-3.1-3b-a800m-instruct"),
    "DeepseekForCausalLM": ("deepseek", "DEEPSEEK", "deepseek-ai/deepseek-moe-16b-chat"),
    "DeepseekV2ForCausalLM": (
        "deepseek",
        "DEEPSEEK_V2",
        "deepseek-ai/DeepSeek-V2-Lite-Chat, deepseek-ai/DeepSeek-V2.5",
    ),
    "DeepseekV3ForCausalLM": (
        "deepseek",
        "DEEPSEEK_V3",
        "deepseek-ai/DeepSeek-V3, deepseek-ai/DeepSeek-R1, moonshotai/Moonlight-16B-A3B-Instruct",
    ),
    "MiniCPM3ForCausalLM": ("deepseek", "MINICPM3", "openbmb/MiniCPM3-4B"),
    "GptOssForCausalLM": ("gpt_oss", "GPT_OSS", "openai/gpt-oss-20b, openai/gpt-oss-120b"),
    "Llama4ForCausalLM": ("later", "LLAMA4", "the text model of meta-llama/Llama-4-Scout-17B-16E-Instruct"),
    "Llama4ForConditionalGeneration": (
        "later",
        "LLAMA4_INSIDE",
        "meta-llama/Llama-4-Scout-17B-16E-Instruct, meta-llama/Llama-4-Maverick-17B-128E-Instruct (text only)",
    ),
    "SmolLM3ForCausalLM": ("later", "SMOLLM3", "HuggingFaceTB/SmolLM3-3B"),
    "SeedOssForCausalLM": ("later", "SEED_OSS", "ByteDance-Seed/Seed-OSS-36B-Instruct"),
    "Exaone4ForCausalLM": ("later", "EXAONE4", "LGAI-EXAONE/EXAONE-4.0-32B, LGAI-EXAONE/EXAONE-4.0-1.2B"),
    "Glm4MoeForCausalLM": ("later", "GLM4_MOE", "zai-org/GLM-4.5-Air, zai-org/GLM-4.5"),
    "Dots1ForCausalLM": ("later", "DOTS1", "rednote-hilab/dots.llm1.inst"),
    "Ernie4_5ForCausalLM": ("later", "ERNIE4_5", "baidu/ERNIE-4.5-0.3B-PT"),
    "Ernie4_5_MoeForCausalLM": ("later", "ERNIE4_5_MOE", "baidu/ERNIE-4.5-21B-A3B-PT"),
    "HunYuanDenseV1ForCausalLM": ("later", "HUNYUAN_DENSE", "tencent/Hunyuan-7B-Instruct"),
    "HunYuanMoEV1ForCausalLM": ("later", "HUNYUAN_MOE", "tencent/Hunyuan-A13B-Instruct"),
    "DeciLMForCausalLM": ("deci", "DECI", "Deci/DeciLM-7B, nvidia/Llama-3_3-Nemotron-Super-49B-v1"),
    "Phi3SmallForCausalLM": ("phi3_small", "PHI3_SMALL", "microsoft/Phi-3-small-8k-instruct"),
    "AquilaModel": ("remote", "PLAIN", "BAAI/Aquila-7B"),
    "AquilaForCausalLM": ("remote", "PLAIN", "BAAI/AquilaChat2-7B"),
    "XverseForCausalLM": ("remote", "PLAIN", "xverse/XVERSE-7B-Chat"),
    "InternLMForCausalLM": ("remote", "INTERNLM", "internlm/internlm-7b"),
    "InternLM2ForCausalLM": ("remote", "INTERNLM2", "internlm/internlm2_5-7b-chat"),
    "InternLM3ForCausalLM": ("remote", "INTERNLM3", "internlm/internlm3-8b-instruct"),
    "OrionForCausalLM": ("remote", "ORION", "OrionStarAI/Orion-14B-Chat"),
    "ExaoneForCausalLM": ("remote", "EXAONE", "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct"),
    "BaiChuanForCausalLM": ("remote", "BAICHUAN_ROTARY", "baichuan-inc/Baichuan-7B"),
    "BaichuanForCausalLM": ("remote", "BAICHUAN", "baichuan-inc/Baichuan2-13B-Chat, baichuan-inc/Baichuan2-7B-Chat"),
    "MiniCPMForCausalLM": (
        "remote",
        "MINICPM",
        "openbmb/MiniCPM-2B-sft-bf16, openbmb/MiniCPM-MoE-8x2B, openbmb/MiniCPM-S-1B-sft",
    ),
    "QWenLMHeadModel": ("remote", "QWEN", "Qwen/Qwen-7B-Chat"),
    "ChatGLMModel": ("remote", "CHATGLM", "zai-org/chatglm3-6b"),
    "ChatGLMForConditionalGeneration": ("remote", "CHATGLM", "zai-org/glm-4-9b-chat"),
    "JAISLMHeadModel": ("remote", "JAIS", "inceptionai/jais-13b-chat"),
    "ArcticForCausalLM": ("arctic", "ARCTIC", "Snowflake/snowflake-arctic-instruct"),
    "MambaForCausalLM": ("mamba", "MAMBA", "state-spaces/mamba-130m-hf, state-spaces/mamba-2.8b-hf"),
    "FalconMambaForCausalLM": ("mamba", "FALCON_MAMBA", "tiiuae/falcon-mamba-7b, tiiuae/falcon-mamba-7b-instruct"),
    "Mamba2ForCausalLM": ("mamba", "MAMBA2", "state-spaces/mamba2-2.7b (converted), mistralai/Mamba-Codestral-7B-v0.1"),
    "JambaForCausalLM": ("mamba", "JAMBA", "ai21labs/Jamba-v0.1, ai21labs/AI21-Jamba-Mini-1.6"),
    "BloomForCausalLM": ("alibi", "BLOOM", "bigscience/bloom-7b1"),
    "FalconForCausalLM": ("alibi", "FALCON", "tiiuae/falcon-7b, tiiuae/falcon-40b, tiiuae/falcon-11B"),
    "RWForCausalLM": ("alibi", "FALCON", "tiiuae/falcon-rw-1b (older config)"),
    "MptForCausalLM": ("alibi", "MPT", "mosaicml/mpt-7b"),
    "MPTForCausalLM": ("alibi", "MPT", "mosaicml/mpt-7b-chat, mosaicml/mpt-30b"),
}


_ENCODERS: dict[str, tuple[str, str, str]] = {
    "BertModel": ("encoders", "BERT", "BAAI/bge-base-en-v1.5, sentence-transformers/all-MiniLM-L6-v2"),
    "BertForMaskedLM": ("encoders", "BERT", "google-bert/bert-base-uncased"),
    "BertForSequenceClassification": ("encoders", "BERT_CLASSIFIER", "cross-encoder/ms-marco-MiniLM-L6-v2"),
    "RobertaModel": ("encoders", "ROBERTA", "sentence-transformers/all-roberta-large-v1"),
    "RobertaForMaskedLM": ("encoders", "ROBERTA", "sentence-transformers/all-roberta-large-v1"),
    "RobertaForSequenceClassification": ("encoders", "ROBERTA_CLASSIFIER", "cross-encoder/quora-roberta-base"),
    "XLMRobertaModel": ("encoders", "ROBERTA", "BAAI/bge-m3, intfloat/multilingual-e5-large"),
    "XLMRobertaForMaskedLM": ("encoders", "ROBERTA", "FacebookAI/xlm-roberta-base"),
    "XLMRobertaForSequenceClassification": ("encoders", "ROBERTA_CLASSIFIER", "BAAI/bge-reranker-v2-m3"),
    "CamembertModel": ("encoders", "ROBERTA", "dangvantuan/sentence-camembert-large"),
    "CamembertForSequenceClassification": ("encoders", "ROBERTA_CLASSIFIER", ""),
    "DistilBertModel": ("encoders", "DISTILBERT", "sentence-transformers/msmarco-distilbert-base-v4"),
    "DistilBertForMaskedLM": ("encoders", "DISTILBERT", "distilbert/distilbert-base-uncased"),
    "DistilBertForSequenceClassification": (
        "encoders", "DISTILBERT_CLASSIFIER", "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
    ),
    "MPNetModel": ("encoders", "MPNET", "sentence-transformers/all-mpnet-base-v2"),
    "MPNetForMaskedLM": ("encoders", "MPNET", "microsoft/mpnet-base"),
    "MPNetForSequenceClassification": ("encoders", "MPNET_CLASSIFIER", ""),
    "ModernBertModel": ("encoders", "MODERNBERT", "nomic-ai/modernbert-embed-base, Alibaba-NLP/gte-modernbert-base"),
    "ModernBertForMaskedLM": ("encoders", "MODERNBERT", "answerdotai/ModernBERT-base"),
    "ModernBertForSequenceClassification": (
        "encoders", "MODERNBERT_CLASSIFIER", "Alibaba-NLP/gte-reranker-modernbert-base"
    ),
    "NomicBertModel": ("encoders", "NOMIC_BERT", "nomic-ai/nomic-embed-text-v1.5, nomic-ai/nomic-embed-text-v2-moe"),
    "GteModel": ("encoders", "GTE", "Snowflake/snowflake-arctic-embed-m-v2.0"),
    "GteNewModel": ("encoders", "GTE", "Alibaba-NLP/gte-multilingual-base"),
    "NewModel": ("encoders", "GTE", "Alibaba-NLP/gte-base-en-v1.5, Alibaba-NLP/gte-multilingual-base"),
    "GteForSequenceClassification": ("encoders", "GTE_CLASSIFIER", ""),
    "NewForSequenceClassification": ("encoders", "GTE_CLASSIFIER", "Alibaba-NLP/gte-multilingual-reranker-base"),
    "InternLM2ForRewardModel": ("rewards", "INTERNLM2_REWARD", "internlm/internlm2-7b-reward"),
    "Qwen2ForRewardModel": ("rewards", "QWEN2_REWARD", "Qwen/Qwen2.5-Math-RM-72B"),
    "Qwen2ForProcessRewardModel": ("rewards", "QWEN2_PROCESS_REWARD", "Qwen/Qwen2.5-Math-PRM-7B"),
}  # fmt: skip
_FAMILIES |= _ENCODERS
# What a decoder is called without its head, or with one for classes: the end of its name -> (that of the decoder which
# generates, what is made of it, public checkpoints of the best known).
_CONVERTED = {
    "Model": ("embed", {
        "MistralModel": "intfloat/e5-mistral-7b-instruct", "Qwen2Model": "Alibaba-NLP/gte-Qwen2-7B-instruct",
        "Gemma2Model": "BAAI/bge-multilingual-gemma2", "Gemma3TextModel": "google/embeddinggemma-300m",
        "LlamaModel": "samaya-ai/promptriever-llama3.1-8b-instruct-v1",
    }),
    "ForSequenceClassification": ("classify", {
        "Qwen2ForSequenceClassification": "jason9693/Qwen2.5-1.5B-apeach",
        "LlamaForSequenceClassification": "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2",
        "Gemma2ForSequenceClassification": "Skywork/Skywork-Reward-Gemma-2-27B-v0.2",
        "Qwen3ForSequenceClassification": "tomaarsen/Qwen3-Reranker-0.6B-seq-cls",
    }),
}  # fmt: skip


def _decoder_of(architecture: str) -> tuple[str, str] | None:
    """(The architecture that generates, what is made of it) of one that is the same decoder without a head, or with
    one for classes; None for all others.
    """
    for end, (convert, _) in _CONVERTED.items():
        base = architecture.removesuffix(end)
        for decoder in (f"{base}ForCausalLM", f"{base.removesuffix('Text')}ForCausalLM", f"{base}LMHeadModel"):
            if base != architecture and decoder in _FAMILIES:
                return decoder, convert
    return None


_FAMILY_MARK = "family "  # before the place of a registered family, where classes and families travel together


@functools.cache
def _built_in(architecture: str) -> Family:
    made_of = None if architecture in _FAMILIES else _decoder_of(architecture)
    if made_of is not None:
        from vllm.model_executor.models.pooling import converted

        return converted(_built_in(made_of[0]), made_of[1])
    module, name, _ = _FAMILIES[architecture]
    family: Family = getattr(importlib.import_module(f"vllm.model_executor.models.families.{module}"), name)
    return family


def built_in_family(architecture: str) -> Family:
    """The family that is built in for an architecture, whatever has been registered for it."""
    return _built_in(architecture)


def family_of(architecture: str) -> Family | None:
    """The family of an architecture, registered or built in; also where a class is registered for it. Without torch."""
    where = ModelRegistry._families.get(architecture)
    if where is not None:
        return _import_family(architecture, where)
    return _built_in(architecture) if _is_built_in(architecture) else None


def _is_built_in(architecture: str) -> bool:
    return architecture in _FAMILIES or _decoder_of(architecture) is not None


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
        named = {name for _, examples in _CONVERTED.values() for name in examples}
        return {*_FAMILIES, *named, *self._registered, *self._families}

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

    def built_in(self) -> list[str]:
        """The architectures that families list."""
        return list(_FAMILIES)

    def knows(self, architectures: Iterable[str]) -> bool:
        """Whether one of `architectures` is built in or registered."""
        return any(self._knows(name) for name in architectures)

    def _knows(self, name: str) -> bool:
        return name in self._registered or name in self._families or _is_built_in(name)

    def check(self, architectures: str | Iterable[str]) -> None:
        """Raise ValueError if none of `architectures` is known."""
        self._find(architectures)

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
        return _has(found, "compute_logits") if isinstance(found, type) else found.pool is None

    def is_pooling_model(self, architectures: str | Iterable[str]) -> bool:
        """Whether the model turns a whole input into one answer."""
        found = self.resolve(architectures)
        if isinstance(found, type):
            return _has(found, "pooler") or bool(vars_of(found).get("is_pooling_model"))
        return found.pool is not None

    is_embedding_model = is_pooling_model

    def is_own_pooler(self, architectures: Iterable[str]) -> bool:
        """Whether a class registered for one of `architectures` pools and makes no logits. Nothing is imported for it:
        False for a class that is only known by name.
        """
        entry = next((self._registered[name] for name in architectures if name in self._registered), None)
        if not isinstance(entry, type):
            return False
        return bool(vars_of(entry).get("is_pooling_model")) or (
            _has(entry, "pooler") and not _has(entry, "compute_logits")
        )

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
            if self._knows(name):
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
