"""Poolers for models from outside the tree: from the hidden states of complete prompts to one result for each.

Every one is called as `pooler(hidden_states, pooling_metadata)`: [tokens, hidden] of prompts that lie one behind the
other. What comes back is a `PoolerOutput`, a list with one tensor for each prompt. Families pool without these
(`worker/pool.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.config.pooler import POOLING_TYPES, PoolerConfig
from vllm.model_executor.pooling_metadata import PoolingMetadata, PoolingTensors
from vllm.pooling_params import PoolingParams
from vllm.sequence import PoolerOutput

__all__ = [
    "AllPool", "CLSPool", "ClassifierPooler", "CrossEncodingPooler", "DispatchPooler", "IdentityPooler",
    "LambdaPoolerActivation", "LastPool", "MeanPool", "Pooler", "PoolerActivation", "PoolerClassify", "PoolerHead",
    "PoolerIdentity", "PoolerMultiLabelClassify", "PoolerNormalize", "PoolerOutput", "PoolingMethod", "PoolingMetadata",
    "PoolingParamsUpdate", "PoolingTensors", "PoolingType", "SimplePooler", "StepPool", "get_pooling_params",
    "get_prompt_lens", "get_prompt_token_ids", "get_tasks",
]  # fmt: skip

States = Tensor | Sequence[Tensor]


class PoolingType(Enum):
    """Which hidden states count: see `PoolerConfig`."""

    LAST = "LAST"
    ALL = "ALL"
    CLS = "CLS"
    STEP = "STEP"
    MEAN = "MEAN"

    @classmethod
    def of(cls, kind: PoolingType | str) -> PoolingType:
        """By itself or by name, in either case. Raises ValueError for another one."""
        if isinstance(kind, cls):
            return kind
        try:
            return cls[str(kind).upper()]
        except KeyError:
            raise ValueError(f"pooling_type must be one of {', '.join(POOLING_TYPES)}, got {kind!r}.") from None


class PoolingParamsUpdate:
    """What a pooler wants to know beyond hidden states. Token ids are always there."""

    def __init__(self, requires_token_ids: bool = False) -> None:
        self.requires_token_ids = requires_token_ids

    def apply(self, params: PoolingParams) -> None:
        """Nothing to change: every pooler gets the prompts' token ids."""


def get_prompt_lens(hidden_states: States, pooling_metadata: PoolingMetadata) -> Tensor:
    """[prompts] int64, on the device of the states."""
    device = hidden_states.device if isinstance(hidden_states, Tensor) else hidden_states[0].device
    return pooling_metadata.prompt_lens.to(device)


def get_prompt_token_ids(pooling_metadata: PoolingMetadata) -> list[Tensor]:
    return pooling_metadata.get_prompt_token_ids()


def get_pooling_params(pooling_metadata: PoolingMetadata) -> list[PoolingParams]:
    return pooling_metadata.get_pooling_params()


def get_tasks(pooling_metadata: PoolingMetadata) -> list[str]:
    """What each request asks for, "encode" where it does not say."""
    return [params.task or "encode" for params in pooling_metadata.pooling_params]


# ---- which states ----------------------------------------------------------------------------------------------------


class PoolingMethod(nn.Module):
    """From the states of all tokens to those that count: [tokens, hidden] -> one tensor for each prompt."""

    def forward(self, hidden_states: States, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        return [self.forward_one(states) for states in _split(hidden_states, pooling_metadata)]

    def forward_one(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] of one prompt."""
        raise NotImplementedError(f"{type(self).__name__} has neither forward() nor forward_one().")

    @staticmethod
    def from_pooling_type(pooling_type: PoolingType | str, **options: Any) -> PoolingMethod:
        """options: those of `StepPool`."""
        kinds: dict[PoolingType, Callable[..., PoolingMethod]] = {
            PoolingType.LAST: LastPool, PoolingType.ALL: AllPool, PoolingType.CLS: CLSPool,
            PoolingType.MEAN: MeanPool, PoolingType.STEP: StepPool,
        }  # fmt: skip
        return kinds[PoolingType.of(pooling_type)](**options)


class LastPool(PoolingMethod):
    """The last token's state: [hidden]."""

    def forward_one(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[-1]


class CLSPool(PoolingMethod):
    """The first token's state: [hidden]."""

    def forward_one(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[0]


class MeanPool(PoolingMethod):
    """The mean of all states, in fp32: [hidden]."""

    def forward_one(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.mean(0, dtype=torch.float32)


class AllPool(PoolingMethod):
    """Every token's state: [tokens, hidden]."""

    def forward_one(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class StepPool(PoolingMethod):
    """The states of the tokens `step_tag_id`: [steps, hidden]; None: every token's. Of these the columns
    `returned_token_ids`, None for all.
    """

    def __init__(self, step_tag_id: int | None = None, returned_token_ids: list[int] | None = None) -> None:
        super().__init__()
        self.step_tag_id, self.returned_token_ids = step_tag_id, returned_token_ids

    def forward(self, hidden_states: States, pooling_metadata: PoolingMetadata) -> list[Tensor]:
        found = []
        split = _split(hidden_states, pooling_metadata)
        for states, ids in zip(split, pooling_metadata.get_prompt_token_ids(), strict=True):
            chosen = states if not self.returned_token_ids else states[:, self.returned_token_ids]
            found.append(chosen if self.step_tag_id is None else chosen[(ids == self.step_tag_id).to(states.device)])
        return found


def _split(hidden_states: States, pooling_metadata: PoolingMetadata) -> Sequence[Tensor]:
    """The states of each prompt, [its tokens, hidden]."""
    if not isinstance(hidden_states, Tensor):
        return hidden_states
    lengths = pooling_metadata.prompt_lens.tolist()
    if len(hidden_states) != sum(lengths):
        raise ValueError(
            f"A pooler got the states of {len(hidden_states)} tokens for prompts of {sum(lengths)} in all. "
            "A model's forward() must return a row for every token."
        )
    split: Sequence[Tensor] = hidden_states.split(lengths)
    return split


# ---- what becomes of them --------------------------------------------------------------------------------------------


class PoolerActivation(nn.Module):
    """The last thing done to each result: `forward_chunk` of a tensor, or of each of a list."""

    def forward(self, pooled_data: States) -> Any:
        if isinstance(pooled_data, Tensor):
            return self.forward_chunk(pooled_data)
        return [self.forward_chunk(data) for data in pooled_data]

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no forward_chunk().")


class PoolerIdentity(PoolerActivation):
    """Results as they are."""

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        return pooled_data


class PoolerNormalize(PoolerActivation):
    """To length 1, in fp32."""

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        return F.normalize(pooled_data.float(), dim=-1)


class PoolerMultiLabelClassify(PoolerActivation):
    """A probability for each class by itself."""

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        return pooled_data.float().sigmoid()


class PoolerClassify(PoolerActivation):
    """A probability: of one class by itself, or of each among several."""

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        scores = pooled_data.float()
        return scores.sigmoid() if scores.shape[-1] == 1 else scores.softmax(-1)


class LambdaPoolerActivation(PoolerActivation):
    """Any function of a tensor."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward_chunk(self, pooled_data: Tensor) -> Tensor:
        return self.fn(pooled_data)


def _finished(
    pooled: Iterable[Tensor], pooling_metadata: PoolingMetadata, activation: nn.Module | None
) -> PoolerOutput:
    """What requests get: cut to the dimensions that each asks for, and then through `activation` unless it declines."""
    found = []
    for data, params in zip(pooled, pooling_metadata.pooling_params, strict=True):
        cut = data if params.dimensions is None else data[..., : params.dimensions]
        found.append(cut if activation is None or params.use_activation is False else activation(cut))
    return PoolerOutput(found)


class PoolerHead(nn.Module):
    """Softmax, normalisation, or neither, over what was pooled."""

    def __init__(self, activation: PoolerActivation | None = None, *, normalize: bool = False, softmax: bool = False):
        super().__init__()
        chosen = PoolerNormalize() if normalize else PoolerClassify() if softmax else None
        self.activation = activation if activation is not None else chosen

    def forward(self, pooled_data: States, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        return _finished(pooled_data, pooling_metadata, self.activation)


# ---- poolers ---------------------------------------------------------------------------------------------------------


class Pooler(nn.Module):
    """Hidden states of complete prompts -> one result for each. By itself: those that `pooling_type` names, normalised
    or through a softmax. What derives from it may replace `forward` and `get_supported_tasks`.
    """

    def __init__(
        self,
        pooling_type: PoolingType | str | None = None,
        normalize: bool = False,
        softmax: bool = False,
        step_tag_id: int | None = None,
        returned_token_ids: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.pooling_type = None if pooling_type is None else PoolingType.of(pooling_type)
        if self.pooling_type is not None:
            options = {"step_tag_id": step_tag_id, "returned_token_ids": returned_token_ids}
            given = options if self.pooling_type is PoolingType.STEP else {}
            self.pooling = PoolingMethod.from_pooling_type(self.pooling_type, **given)
            self.head = PoolerHead(normalize=normalize, softmax=softmax)

    def forward(self, hidden_states: States, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        """[tokens, hidden] -> a tensor for each prompt."""
        if self.pooling_type is None:
            raise NotImplementedError(f"{type(self).__name__} has no forward() and was given no pooling_type.")
        found: PoolerOutput = self.head(self.pooling(hidden_states, pooling_metadata), pooling_metadata)
        return found

    def get_supported_tasks(self) -> set[str]:
        """What requests may ask it for."""
        return {"encode", "embed", "classify", "score", "reward"}

    def get_pooling_updates(self, task: str) -> PoolingParamsUpdate:
        return PoolingParamsUpdate()

    @staticmethod
    def from_config_with_defaults(
        pooler_config: PoolerConfig | None,
        pooling_type: PoolingType | str,
        normalize: bool = False,
        softmax: bool = False,
        step_tag_id: int | None = None,
        returned_token_ids: list[int] | None = None,
    ) -> Pooler:
        """What the settings say, and where they say nothing what is given here."""
        config = PoolerConfig() if pooler_config is None else pooler_config
        ids = config.returned_token_ids
        return Pooler(
            pooling_type if config.pooling_type is None else config.pooling_type,
            normalize=normalize if config.normalize is None else config.normalize,
            softmax=softmax if config.softmax is None else config.softmax,
            step_tag_id=step_tag_id if config.step_tag_id is None else config.step_tag_id,
            returned_token_ids=returned_token_ids if ids is None else ids,
        )

    @classmethod
    def from_pooling_type(cls, pooling_type: PoolingType | str, **options: Any) -> Pooler:
        """options: those of the constructor."""
        return cls(pooling_type, **options)

    @staticmethod
    def for_embed(
        pooler_config: PoolerConfig | None, default_pooling_type: PoolingType | str = PoolingType.LAST, **defaults: Any
    ) -> Pooler:
        """One vector for each prompt, normalised."""
        return Pooler.from_config_with_defaults(
            pooler_config, default_pooling_type, **{"normalize": True, "softmax": False, **defaults}
        )

    @staticmethod
    def for_encode(
        pooler_config: PoolerConfig | None, default_pooling_type: PoolingType | str = PoolingType.ALL, **defaults: Any
    ) -> Pooler:
        """States as they are, of every token unless the settings say otherwise."""
        return Pooler.from_config_with_defaults(pooler_config, default_pooling_type, **defaults)

    @staticmethod
    def for_classify(
        pooler_config: PoolerConfig | None,
        classifier: Callable[[Tensor], Tensor] | None = None,
        default_pooling_type: PoolingType | str = PoolingType.LAST,
        act_fn: Callable[[Tensor], Tensor] | str | None = None,
    ) -> Pooler:
        """Probabilities of classes."""
        kind = None if pooler_config is None else pooler_config.pooling_type
        pooling = PoolingMethod.from_pooling_type(default_pooling_type if kind is None else kind)
        return ClassifierPooler(pooling, classifier, act_fn)


class SimplePooler(Pooler):
    """`Pooler` by the name that it had for a while."""


class IdentityPooler(Pooler):
    """What the model returns, in one piece: for models that pool inside."""

    def forward(self, hidden_states: States, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        return PoolerOutput(hidden_states)


class ClassifierPooler(Pooler):
    """States that count, a layer over them, and probabilities.

    pooling: a `PoolingMethod` or any function of (hidden states, metadata) -> [prompts, hidden] or a list.
    classifier: [..., hidden] -> [..., classes]; None where the model has applied it.
    act_fn: in place of `PoolerClassify`; "none" or "identity" for scores as they are.
    """

    def __init__(
        self,
        pooling: Callable[[States, PoolingMetadata], States],
        classifier: Callable[[Tensor], Tensor] | None = None,
        act_fn: Callable[[Tensor], Tensor] | str | None = None,
    ) -> None:
        super().__init__()
        self.pooling, self.classifier = pooling, classifier  # type: ignore[assignment]
        self.act_fn = _activation(act_fn)

    def forward(self, hidden_states: States, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        pooled = self.pooling(hidden_states, pooling_metadata)
        classify = self.classifier
        return _finished(pooled if classify is None else map(classify, pooled), pooling_metadata, self.act_fn)

    def get_supported_tasks(self) -> set[str]:
        return {"encode", "classify", "score"}

    @staticmethod
    def act_fn_for_seq_cls(config: Any) -> PoolerActivation:
        """Of transformers' config: what `problem_type` says, else a probability."""
        kind = getattr(config, "problem_type", None)
        if kind == "regression":
            return PoolerIdentity()
        return PoolerMultiLabelClassify() if kind == "multi_label_classification" else PoolerClassify()

    act_fn_for_cross_encoder = act_fn_for_seq_cls


class CrossEncodingPooler(ClassifierPooler):
    """A pair's first state, through `pooler` if there is one, through `classifier`, and a probability."""

    def __init__(self, config: Any, classifier: Callable[[Tensor], Tensor], pooler: nn.Module | None = None) -> None:
        super().__init__(CLSPool() if pooler is None else pooler, classifier, self.act_fn_for_seq_cls(config))


def _activation(given: Callable[[Tensor], Tensor] | str | None) -> nn.Module:
    if given is None or given == "classify":
        return PoolerClassify()
    if isinstance(given, nn.Module):
        return given
    if isinstance(given, str):
        if given not in ("none", "identity"):
            raise ValueError(f"act_fn must be 'classify', 'none' or a function, got {given!r}.")
        return PoolerIdentity()
    return LambdaPoolerActivation(given)


_ALIKE = {"score": "classify"}


class DispatchPooler(Pooler):
    """A pooler for each task. For "score" that of "classify" will do; a request that only asks to "encode" gets what
    the first one gives.
    """

    def __init__(self, poolers_by_task: Mapping[str, Pooler]) -> None:
        super().__init__()
        if not poolers_by_task:
            raise ValueError("DispatchPooler needs a pooler for one task at least.")
        self.poolers_by_task = nn.ModuleDict(poolers_by_task)

    @classmethod
    def for_embedding(cls, pooler_config: PoolerConfig | None) -> DispatchPooler:
        return cls({"embed": Pooler.for_embed(pooler_config), "token_embed": Pooler.for_encode(None)})

    @classmethod
    def for_seq_cls(
        cls,
        pooler_config: PoolerConfig | None,
        *,
        pooling: Callable[[States, PoolingMetadata], States] | None = None,
        classifier: Callable[[Tensor], Tensor] | None = None,
    ) -> DispatchPooler:
        if pooling is None:
            return cls({"classify": Pooler.for_classify(pooler_config, classifier)})
        return cls({"classify": ClassifierPooler(pooling, classifier)})

    def _pooler(self, task: str) -> Pooler:
        known = self.poolers_by_task
        name: str = task if task in known else _ALIKE.get(task, "")
        found: Pooler = known[name] if name in known else next(iter(known.values()))  # type: ignore[assignment]
        return found

    def forward(self, hidden_states: States, pooling_metadata: PoolingMetadata) -> PoolerOutput:
        split, results, done = _split(hidden_states, pooling_metadata), PoolerOutput(), 0
        tasks = get_tasks(pooling_metadata)
        while done < len(tasks):
            end = done + 1
            while end < len(tasks) and tasks[end] == tasks[done]:
                end += 1
            states = torch.cat(list(split[done:end]))
            results += self._pooler(tasks[done])(states, pooling_metadata[done:end])
            done = end
        return results

    def get_supported_tasks(self) -> set[str]:
        return {"encode", *self.poolers_by_task}
