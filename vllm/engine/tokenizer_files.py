"""A model's tokenizer files: reads them, and chooses what tokenizes by them."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.tokenizer import MISTRAL_CLASS, FastTokenizer, Tokenizer, TransformersTokenizer
from vllm.logger import init_logger
from vllm.utils.allocator import give_back_freed_memory

if TYPE_CHECKING:
    import tokenizers

logger = init_logger(__name__)

TOKENIZER_MODES = ("auto", "slow", "mistral")
# Classes whose behaviour is tokenizer.json plus the settings read below ("Fast" at the end is dropped first). Whether
# bos and eos are added is its post-processor's word; add_bos_token in the settings repeats it, or is stale.
# Any other class may do something of its own in Python and is loaded through transformers.
PLAIN_CLASSES = frozenset(
    {
        "BertTokenizer",
        "BloomTokenizer",
        "CodeLlamaTokenizer",
        "CohereTokenizer",
        "DistilBertTokenizer",
        "GPT2Tokenizer",
        "GPTNeoXTokenizer",
        "GemmaTokenizer",
        "LlamaTokenizer",
        "PreTrainedTokenizer",
        "Qwen2Tokenizer",
        "RobertaTokenizer",
        "TokenizersBackend",
        "XLMRobertaTokenizer",
    }
)
# Of them, those that set their normaliser by tokenizer_config.json, whatever tokenizer.json has.
_BERT_CLASSES = frozenset({"BertTokenizer", "DistilBertTokenizer"})
_PAIRS = "token_type_ids"  # what models are given, by model_input_names, beside the tokens
NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A folder without any of these has no tokenizer; transformers' own message about that is long and names no file.
VOCABULARY_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "tekken.json")
MISTRAL_FILES = ("tekken*.json", "tokenizer.model*", "*.model.v*")
# A file of settings larger than this is not one.
MAX_SETTINGS_BYTES = 64 << 20


def load_tokenizer(path: Path, mode: str = "auto", trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer in folder `path`.

    `mode`: "auto" prefers the fast tokenizer, "slow" takes the one written in Python, "mistral" needs `mistral_common`.
    """
    if mode == "custom":
        raise NotImplementedError("tokenizer_mode='custom' is not available in this version; set one on LLM instead.")
    if mode not in TOKENIZER_MODES:
        raise ValueError(f"Unknown tokenizer_mode {mode!r}: expected one of {', '.join(TOKENIZER_MODES)}.")
    if mode == "auto":
        light = _load_light(path, trust_remote_code)
        if light is not None:
            return light
    return from_transformers(load_transformers_tokenizer(path, mode, trust_remote_code))


def from_transformers(hf_tokenizer: Any) -> Tokenizer:
    """Wrap a transformers tokenizer, for example one that a user sets; a fast one runs without its Python layer."""
    if not getattr(hf_tokenizer, "is_fast", False):
        return TransformersTokenizer(hf_tokenizer)
    import tokenizers

    copy = tokenizers.Tokenizer.from_str(hf_tokenizer.backend_tokenizer.to_str())
    named = {name: str(token) for name, token in hf_tokenizer.special_tokens_map.items() if isinstance(token, str)}
    tells = _PAIRS in hf_tokenizer.model_input_names
    return FastTokenizer(copy, named, hf_tokenizer.chat_template, load_hf=lambda: hf_tokenizer, tells_pairs=tells)


def load_transformers_tokenizer(path: Path, mode: str, trust_remote_code: bool) -> Any:
    """transformers' own object. Code that comes with the model runs only if `trust_remote_code` is set."""
    if mode == "mistral":
        return _load_mistral(path)
    has_vocabulary = any(next(path.glob(pattern), None) for pattern in VOCABULARY_FILES)
    # Some tokenizers have no vocabulary, ByT5's for example: their settings name a class that needs none.
    if not has_vocabulary and not (path / "tokenizer_config.json").is_file():
        raise _no_tokenizer(path)
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(
            str(path), use_fast=mode != "slow", trust_remote_code=trust_remote_code, local_files_only=True
        )
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"The tokenizer in {path} comes with code of its own. If you have read that code and trust it, "
                "pass trust_remote_code=True (--trust-remote-code)."
            ) from error
        if not has_vocabulary:
            raise _no_tokenizer(path) from error
        raise
    except (TypeError, AttributeError, KeyError, IndexError) as error:  # settings of a kind that nobody expected
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"The tokenizer in {path} cannot be read; its files may be damaged: {problem}") from error
    if mode == "slow" and getattr(found, "is_fast", False):
        logger.warning("tokenizer_mode='slow' changes nothing: %s has a fast tokenizer only.", path)
    if not has_vocabulary and not found.encode("a", add_special_tokens=False):
        raise _no_tokenizer(path)  # other classes make an empty one
    return found


def _load_mistral(path: Path) -> Any:
    if importlib.util.find_spec("mistral_common") is None:
        raise ValueError("tokenizer_mode='mistral' needs the package mistral-common: pip install vllm[mistral]")
    if not any(next(path.glob(pattern), None) for pattern in MISTRAL_FILES):
        raise ValueError(
            f"tokenizer_mode='mistral': no tokenizer of Mistral's own format in {path}: expected tekken.json or "
            "tokenizer.model.v3 (or another version). Use tokenizer_mode='auto' for a tokenizer.json."
        )
    backend = getattr(importlib.import_module("transformers.tokenization_mistral_common"), MISTRAL_CLASS)
    try:
        return backend.from_pretrained(str(path), local_files_only=True)
    except ImportError as error:  # sentencepiece, for files other than tekken.json
        raise ValueError(f"tokenizer_mode='mistral': {error} (or vllm[mistral])") from None
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"The tokenizer in {path} cannot be read; its files may be damaged: {problem}") from error


def _no_tokenizer(path: Path) -> ValueError:
    return ValueError(
        f"No tokenizer found in {path}: expected tokenizer.json, or the vocabulary files of its tokenizer class. "
        "Name another folder with tokenizer=..., or pass skip_tokenizer_init=True and token ids as prompts."
    )


def _load_light(path: Path, trust_remote_code: bool) -> Tokenizer | None:
    """The tokenizer without transformers, or None if its files ask for more than tokenizer.json can say."""
    if not (path / "tokenizer.json").is_file():
        return None
    # The older file holds the special tokens only; what both say, the newer one decides.
    settings = {**_read_json(path / "special_tokens_map.json"), **_read_json(path / "tokenizer_config.json")}
    name = settings.get("tokenizer_class")
    if name is not None and str(name).removesuffix("Fast") not in PLAIN_CLASSES:
        return None
    if "auto_map" in settings and trust_remote_code:
        return None
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path / 'tokenizer.json'} is not a tokenizer that can be read: {error}") from error
    give_back_freed_memory()  # reading a large vocabulary takes several times its size
    if str(name).removesuffix("Fast") in _BERT_CLASSES:
        _set_normalizer(backend, settings)
    named = _named_special_tokens(settings)
    _add_tokens(backend, settings, named)
    return FastTokenizer(
        backend,
        named,
        _read_chat_template(path, settings),
        load_hf=lambda: load_transformers_tokenizer(path, "auto", trust_remote_code),
        tells_pairs=_PAIRS in (settings.get("model_input_names") or [_PAIRS]),
    )


def _set_normalizer(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    from tokenizers.normalizers import BertNormalizer

    normalizer = backend.normalizer
    if isinstance(normalizer, BertNormalizer):
        normalizer.lowercase = settings.get("do_lower_case", True)
        normalizer.strip_accents = settings.get("strip_accents")
        normalizer.handle_chinese_chars = settings.get("tokenize_chinese_chars", True)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_SETTINGS_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes; a settings file has at most {MAX_SETTINGS_BYTES}.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a JSON object.")
    return content


def _token_content(token: object) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _named_special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    contents = {name: _token_content(settings.get(name)) for name in NAMED_SPECIAL_TOKENS}
    return {name: content for name, content in contents.items() if content is not None}


def _add_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any], named: dict[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows, and the special flag of the named ones."""
    import tokenizers

    known = backend.get_added_tokens_decoder()
    described = settings.get("added_tokens_decoder") or {}
    missing = []
    for token_id, entry in sorted(described.items(), key=lambda item: int(item[0])):
        flags = {name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
        normalized = bool(entry.get("normalized", not flags["special"]))
        token = tokenizers.AddedToken(entry["content"], normalized=normalized, **flags)
        if known.get(int(token_id)) != token:
            missing.append(token)
    if missing:
        backend.add_tokens(missing)
    special = [t.content for t in backend.get_added_tokens_decoder().values() if t.special]
    extra = settings.get("additional_special_tokens") or settings.get("extra_special_tokens") or []
    contents = [_token_content(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
    unmarked = [c for c in dict.fromkeys([*named.values(), *contents]) if c is not None and c not in special]
    if unmarked:
        backend.add_special_tokens([tokenizers.AddedToken(c, special=True, normalized=False) for c in unmarked])


def _read_chat_template(path: Path, settings: dict[str, Any]) -> str | dict[str, str] | None:
    """The template file beats the setting; a list of named templates becomes a dictionary."""
    file = path / "chat_template.jinja"
    named: dict[str, str] = {}
    default = file.read_text(encoding="utf-8") if file.is_file() else None
    folder = path / "additional_chat_templates"
    if folder.is_dir():
        named = {f.stem: f.read_text(encoding="utf-8") for f in sorted(folder.glob("*.jinja"))}
    if default is None and not named:
        template = settings.get("chat_template")
        if isinstance(template, list):
            try:
                return {str(entry["name"]): str(entry["template"]) for entry in template}
            except (TypeError, KeyError):
                raise _wrong_template(path) from None
        if not isinstance(template, str | None):
            raise _wrong_template(path)
        return template
    if not named:
        return default
    return named if default is None else {"default": default, **named}


def _wrong_template(path: Path) -> ValueError:
    return ValueError(
        f"{path / 'tokenizer_config.json'}: chat_template must be a text, or a list of objects with `name` and "
        "`template`."
    )
