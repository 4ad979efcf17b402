"""What a pooling model pools and how: what the user sets, what its files say, and what comes of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from vllm.config.facts import Pooling
from vllm.config.hf import HEAD_TOKENS, HFConfig, read_json_object
from vllm.exceptions import VLLMValidationError

POOLING_TYPES = ("LAST", "ALL", "CLS", "STEP", "MEAN")
EMBED, CLASSIFY, SCORE, REWARD = "embed", "classify", "score", "reward"
_MODULES_FILE = "modules.json"
_SETTINGS_FILE = "config_sentence_transformers.json"
_SENTENCE_FILES = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "xlm-roberta", "camembert")
)
_MODES = {  # fields of a pooling module's config, as its versions write them
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_lasttoken": "LAST",
}
_NEWER_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_MAX_DENSE = 8
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")  # in which modules are followed
_ACTIVATIONS = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.activation.Softmax": "softmax",
    "torch.nn.modules.linear.Identity": "none",
}


@dataclass
class PoolerConfig:
    """How to pool, in place of what the model's files say; None leaves it to them.

    pooling_type: "LAST" (token), "ALL" (tokens), "CLS" (the first), "STEP" (tokens that end a step) or "MEAN".
    normalize: to length 1.   softmax: over what the head gives; False: as it comes.
    step_tag_id: for STEP, the token that ends a step.
    returned_token_ids: of a reward model that is a language model: the tokens whose logits count.
    seq_pooling_type, tok_pooling_type: newer names of pooling_type, for one vector and for one per token.
    use_activation: the newer name of normalize and softmax together.
    """

    pooling_type: str | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None

    @classmethod
    def of(cls, given: Any, name: str) -> PoolerConfig:
        """A setting's value, an object or a dictionary, checked. Raises VLLMValidationError."""
        if isinstance(given, Mapping):
            known = {field.name for field in fields(cls)}
            unknown = sorted(map(str, given.keys() - known))
            if unknown:
                raise VLLMValidationError(
                    f"{name} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}.", parameter=name
                )
            given = cls(**given)
        made = cls(**{field.name: getattr(given, field.name, None) for field in fields(cls)})
        made._check(name)
        return made

    def _check(self, name: str) -> None:
        def wrong(field: str, expected: str) -> VLLMValidationError:
            value = getattr(self, field)
            return VLLMValidationError(f"{name}: {field} must be {expected}, got {value!r}.", parameter=name)

        for newer, olders in _NEWER.items():
            for older in olders if getattr(self, newer) is not None else ():
                if getattr(self, older) not in (None, getattr(self, newer)):
                    raise wrong(newer, f"that of {older}, {getattr(self, older)!r}")
                setattr(self, older, getattr(self, newer))
            setattr(self, newer, None)
        if self.pooling_type is not None:
            if not isinstance(self.pooling_type, str) or self.pooling_type.upper() not in POOLING_TYPES:
                raise wrong("pooling_type", f"one of {', '.join(POOLING_TYPES)}")
            self.pooling_type = self.pooling_type.upper()
        for field in ("normalize", "softmax"):
            if not isinstance(getattr(self, field), bool | None):
                raise wrong(field, "True, False or None")
        if self.step_tag_id is not None and not _is_id(self.step_tag_id):
            raise wrong("step_tag_id", "a token id")
        ids = self.returned_token_ids
        if ids is not None and (not isinstance(ids, list | tuple) or not all(map(_is_id, ids))):
            raise wrong("returned_token_ids", "a list of token ids")


_NEWER = {  # name -> what it sets
    "seq_pooling_type": ("pooling_type",), "tok_pooling_type": ("pooling_type",),
    "use_activation": ("normalize", "softmax"),
}  # fmt: skip


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


@dataclass(frozen=True)
class PoolingSettings:
    """How this model pools, everything decided.

    task: what the model is for: "embed", "classify", "score" (a classifier of pairs) or "reward".
    type: one of POOLING_TYPES.   normalize: to length 1.
    activation: of what the head gives: "softmax", "sigmoid" or "none".
    step_tag: for STEP, the token that ends a step.   labels: outputs of a classifier, 0 for what is none.
    dense: folders, in the model's, of sentence-transformers' dense layers behind the pooling.
    lower_case: texts are turned to lower case before they are tokenized.
    width: numbers of an embedding; None for other tasks, and for models of the user's own.
    """

    task: str
    type: str
    normalize: bool = False
    activation: str = "none"
    step_tag: int | None = None
    labels: int = 0
    dense: tuple[str, ...] = ()
    lower_case: bool = False
    width: int | None = None

    def as_config(self) -> PoolerConfig:
        """The same, as a model's class reads it to build a pooler of its own."""
        return PoolerConfig(self.type, self.normalize, self.activation == "softmax", self.step_tag)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What requests may ask for: "encode" and what is special to the model."""
        if self.task == EMBED:
            return ("encode", EMBED, SCORE)
        if self.task in (CLASSIFY, SCORE):
            return ("encode", CLASSIFY, SCORE) if self.labels == 1 else ("encode", CLASSIFY)
        return ("encode", REWARD)

    @property
    def gives_many(self) -> bool:
        """Whether an answer has a row for each of several tokens."""
        return self.type in ("ALL", "STEP")

    @property
    def scores_pairs(self) -> bool:
        """Whether two texts are scored by one prompt of both, not by the similarity of two vectors."""
        return self.task in (CLASSIFY, SCORE)


@dataclass(frozen=True)
class SentenceFiles:
    """What sentence-transformers' files in a model folder say.

    type: of pooling, None where no module pools.   max_length: in tokens.   activation: of a cross-encoder's scores.
    width: of what the last dense layer gives, None without one.
    """

    type: str | None = None
    normalize: bool = False
    dense: tuple[str, ...] = ()
    max_length: int | None = None
    lower_case: bool = False
    activation: str | None = None
    width: int | None = None


def read_sentence_files(folder: Path) -> SentenceFiles | None:
    """None for a model that is not of sentence-transformers. Raises ValueError for a module that is not supported."""
    file = folder / _MODULES_FILE
    if not file.is_file():
        return None
    pooling: str | None = None
    normalize = False
    dense: list[str] = []
    width: int | None = None
    done = _ORDER[0]
    for module in _modules(file):
        kind = str(module.get("type", "")).rpartition(".")[2]
        name = module.get("path", "")
        if not isinstance(name, str) or (name and (Path(name).name != name or name in (".", ".."))):
            raise ValueError(f"{file}: the path {name!r} of a module is not the name of a folder beside it.")
        if kind == "Pooling":
            pooling = _pooling_type(folder / name / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            dense.append(name)
            width = HFConfig(read_json_object(folder / name / "config.json"), folder / name).get_int("out_features")
        elif kind not in ("Transformer", "Dropout"):
            raise ValueError(f"{file}: modules of type {kind!r} are not supported.")
        if kind in _ORDER:
            if _ORDER.index(kind) < _ORDER.index(done) or kind == done == "Pooling":
                raise ValueError(
                    f"{file}: a module {kind} behind a module {done} is not supported, expected "
                    f"{', '.join(_ORDER)} in this order, with one {_ORDER[1]}."
                )
            done = kind
    if len(dense) > _MAX_DENSE:
        raise ValueError(f"{file} has {len(dense)} dense modules, expected at most {_MAX_DENSE}.")
    settings = next((folder / name for name in _SENTENCE_FILES if (folder / name).is_file()), None)
    config = HFConfig({} if settings is None else read_json_object(settings), folder)
    length = config.get_int("max_seq_length", default=None)
    length = _tokenizers_length(folder) if length is None else length  # as sentence-transformers does
    lower_case = config.get_bool("do_lower_case", default=False)
    return SentenceFiles(pooling, normalize, tuple(dense), length, lower_case, _named_activation(folder), width)


def _named_activation(folder: Path) -> str | None:
    """What becomes of a cross-encoder's scores, None if the files do not say so."""
    file = folder / _SETTINGS_FILE
    named = read_json_object(file).get("activation_fn") if file.is_file() else None
    return None if named is None else _known_activation(named, file)


def _known_activation(named: Any, file: Path) -> str:
    if not isinstance(named, str) or named not in _ACTIVATIONS:
        raise ValueError(f"{file}: the activation {named!r} is not one of {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[named]


def _tokenizers_length(folder: Path) -> int | None:
    """The tokens that a folder's tokenizer cuts texts to, None if it does not say so or names a number without end."""
    file = folder / "tokenizer_config.json"
    length = read_json_object(file).get("model_max_length") if file.is_file() else None
    return length if type(length) is int and 0 < length < 2**31 else None


def _modules(file: Path) -> list[dict[str, Any]]:
    import json

    if file.stat().st_size > 1 << 20:
        raise ValueError(f"{file} is larger than a megabyte. Is it the right file?")
    try:
        modules = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}.") from None
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{file} must hold a list of modules.")
    return modules


def _pooling_type(file: Path) -> str:
    """The one way in which a pooling module pools."""
    config = read_json_object(file)
    newer = config.get("pooling_mode")
    if newer is not None:
        chosen = [newer] if isinstance(newer, str) else list(newer) if isinstance(newer, list | tuple) else [newer]
        found = [_NEWER_MODES.get(mode, "") if isinstance(mode, str) else "" for mode in chosen]
    else:
        chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
        found = [_MODES.get(name, "") for name in chosen]
    if len(found) != 1 or not found[0]:
        raise ValueError(f"{file}: pooling by {chosen} is not supported, expected one of cls, mean and last token.")
    if config.get("include_prompt") is False:
        raise ValueError(f"{file}: pooling without the prompt (include_prompt=false) is not supported.")
    return found[0]


# ---- resolving -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolingChoice:
    """What `resolve_pooling` has decided. settings: None for a model that generates.   convert: what is made of the
    architecture: "none", "embed", "classify" or "reward".   max_length: of sentence-transformers' files.
    """

    hf: HFConfig
    settings: PoolingSettings | None = None
    convert: str = "none"
    max_length: int | None = None


def resolve_pooling(args: Mapping[str, Any], hf: HFConfig, folder: Path, tokenizer_folder: Path) -> PoolingChoice:
    """Whether and how a model pools. Raises ValueError where the wishes and the model do not go together."""
    wanted = _wanted_task(args)
    own = _pools_by_itself(hf)
    native = None if own else hf.facts.pooling
    name = "pooler_config" if args["pooler_config"] is not None else "override_pooler_config"
    override = PoolerConfig() if args[name] is None else PoolerConfig.of(args[name], name)
    files = read_sentence_files(folder) if native is not None or wanted in (None, EMBED) else None
    pools = files is not None and files.type is not None
    if wanted is None:
        wanted = native.task if native is not None else EMBED if pools or own else "generate"
    if wanted == "generate":
        if native is not None:
            raise VLLMValidationError(
                f"{_named(hf)} has no head that makes logits, so it cannot generate text; it is for the task "
                f"{native.task!r}. Leave task at 'auto'.",
                parameter="task",
            )
        if args[name] is not None:
            raise VLLMValidationError(f"{name} is for pooling models. Set task, too, e.g. 'embed'.", parameter=name)
        return PoolingChoice(hf)
    base, convert = _base(wanted, native, hf)
    if base.task != EMBED or files is None:
        files = files or SentenceFiles()
        files = SentenceFiles(max_length=files.max_length, activation=files.activation)
    tokens = _head_tokens(base, override, native, hf, tokenizer_folder)
    if tokens:
        hf = HFConfig.from_dict({**hf.raw, HEAD_TOKENS: list(tokens)}, hf.path)
    settings = _settings(wanted, base, override, files, hf)
    if base.task == EMBED and not _is_registered(hf):
        settings = replace(settings, width=files.width or hf.hidden_size)
    return PoolingChoice(hf, settings, convert, files.max_length)


def _pools_by_itself(hf: HFConfig) -> bool:
    """Whether a class has been registered for the architecture that pools and makes no logits."""
    from vllm.model_executor.models.registry import ModelRegistry

    return ModelRegistry.is_own_pooler(hf.architectures)


def _is_registered(hf: HFConfig) -> bool:
    """Whether the architecture's class or family is the user's own."""
    from vllm.model_executor.models.registry import ModelRegistry

    return not ModelRegistry.registered().keys().isdisjoint(hf.architectures)


def _named(hf: HFConfig) -> str:
    return " or ".join(hf.architectures) or "The model"


def _wanted_task(args: Mapping[str, Any]) -> str | None:
    """What the user asks for, in any of the spellings; None for nothing."""
    task: str | None = {"embedding": EMBED, "auto": None}.get(args["task"], args["task"])
    runner, convert = args["runner"], args["convert"]
    if convert in (EMBED, CLASSIFY, REWARD):
        if runner == "generate" or task not in (None, convert, SCORE if convert == CLASSIFY else convert):
            raise VLLMValidationError(f"convert={convert!r} contradicts task and runner.", parameter="convert")
        return task or convert
    if runner == "generate" and task not in (None, "generate"):
        raise VLLMValidationError(f"runner='generate' contradicts task={task!r}.", parameter="runner")
    if runner == "pooling":
        if task == "generate":
            raise VLLMValidationError("runner='pooling' contradicts task='generate'.", parameter="runner")
        return task or "pooling"
    return "generate" if runner == "generate" else task


def _base(wanted: str, native: Pooling | None, hf: HFConfig) -> tuple[Pooling, str]:
    """How the task is pooled if nothing else is said, and what is made of the architecture for it."""
    from vllm.model_executor.models import pooling

    if native is None:
        kind = {"pooling": EMBED, SCORE: CLASSIFY}.get(wanted, wanted)
        return {EMBED: pooling.EMBED, CLASSIFY: pooling.CLASSIFY, REWARD: pooling.REWARD}[kind], kind
    able = {native.task, "pooling"} | ({SCORE} if native.task in (EMBED, CLASSIFY) else set())
    if wanted not in able:
        raise VLLMValidationError(
            f"This model does not support the '{wanted}' task. {_named(hf)} supports: {', '.join(sorted(able))}.",
            parameter="task",
        )
    return native, "none"


def _head_tokens(
    base: Pooling, override: PoolerConfig, native: Pooling | None, hf: HFConfig, folder: Path
) -> tuple[int, ...]:
    """Tokens whose logits score a prompt, empty where a head of its own does."""
    if override.returned_token_ids:
        if native is not None or base.task != REWARD:
            raise VLLMValidationError(
                "returned_token_ids are for language models that are used as reward models (task='reward').",
                parameter="override_pooler_config",
            )
        return tuple(override.returned_token_ids)
    texts = hf.get("classifier_from_token", default=None)
    if base.task != CLASSIFY or not texts:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{hf.file}: classifier_from_token must be a list of tokens, got {texts!r}.")
    known = _vocabulary(folder / "tokenizer.json")
    missing = [text for text in texts if text not in known]
    if missing:
        raise ValueError(f"{hf.file}: classifier_from_token names {missing[0]!r}, which the tokenizer does not have.")
    return tuple(known[text] for text in texts)


def _vocabulary(file: Path) -> dict[str, int]:
    """Token -> id, of a tokenizer.json."""
    content = read_json_object(file, max_bytes=64 << 20)
    model = content.get("model")
    known = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(known, list):  # of pieces with scores
        known = {piece[0]: i for i, piece in enumerate(known)}
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    return {**known, **added}


def _settings(
    wanted: str, base: Pooling, override: PoolerConfig, files: SentenceFiles, hf: HFConfig
) -> PoolingSettings:
    kind = override.pooling_type or files.type or _type_of(base, hf)
    normalize = files.normalize if files.type is not None else base.normalize
    if override.normalize is not None:
        if override.normalize is False and hf.is_matryoshka:
            raise VLLMValidationError(
                "`normalize` must be enabled (set to True) for models that are compatible with Matryoshka "
                "Representation.",
                parameter="override_pooler_config",
            )
        normalize = override.normalize
    labels = 0
    if base.task == CLASSIFY:
        labels = 1 if len(hf.head_tokens) == 2 and _compared(hf) else len(hf.head_tokens) or hf.num_labels
    step_tag = base.step_tag if override.step_tag_id is None else override.step_tag_id
    if kind == "STEP" and step_tag is None:
        raise VLLMValidationError(
            "Pooling of type STEP needs step_tag_id, the token that ends a step.", parameter="override_pooler_config"
        )
    if step_tag is not None and step_tag >= hf.vocab_size:
        raise VLLMValidationError(
            f"step_tag_id must be a token of the vocabulary, below {hf.vocab_size}, got {step_tag}.",
            parameter="override_pooler_config",
        )
    softmax = base.softmax if override.softmax is None else override.softmax
    if softmax is None and base.task == REWARD:
        softmax = bool(hf.head_tokens)
    task = base.task
    if base.task == CLASSIFY and (wanted == SCORE or labels == 1):
        task = SCORE
    return PoolingSettings(
        task=task,
        type=kind,
        normalize=normalize,
        activation=_activation(base.task, softmax, labels, files.activation, hf),
        step_tag=step_tag,
        labels=labels,
        dense=files.dense,
        lower_case=files.lower_case,
    )


def _type_of(base: Pooling, hf: HFConfig) -> str:
    said: str | None = hf.get_str(base.type_field, default=None) if base.type_field else None
    if said is None:
        return base.type
    if said not in _NEWER_MODES:
        raise ValueError(f"{hf.file}: {base.type_field} is {said!r}, expected one of {', '.join(_NEWER_MODES)}.")
    return _NEWER_MODES[said]


def _compared(hf: HFConfig) -> bool:
    return bool(
        hf.get_bool("is_original_qwen3_reranker", default=False)
        or hf.get_str("method", default="") == "from_2_way_softmax"
    )


def _activation(task: str, softmax: bool | None, labels: int, said: str | None, hf: HFConfig) -> str:
    """What the user says; else what sentence-transformers' files have `said`, or the config names; else a probability:
    of one class by itself, or among several.
    """
    if softmax is not None:
        return "softmax" if softmax else "none"
    if task != CLASSIFY:
        return "none"
    if said is not None:
        return said
    named = hf.nested("sentence_transformers").get_str("activation_fn", default=None) or hf.get_str(
        "sbert_ce_default_activation_function", default=None
    )
    if named is not None:
        return _known_activation(named, hf.file)
    if hf.get_str("problem_type", default=None) == "regression":
        return "none"
    several = labels > 1 and hf.get_str("problem_type", default=None) != "multi_label_classification"
    return "softmax" if several else "sigmoid"
