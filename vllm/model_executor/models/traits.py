"""What a built model is to the worker: its forward pass, its logits, and `Traits`, all that is asked about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from vllm.model_executor.models.kv_groups import KVPlace
    from vllm.model_executor.models.spec import Decoder
    from vllm.ops.attention import AttentionParams
    from vllm.pooling_params import PoolingParams
    from vllm.step.inputs import RowView, StepInputs
    from vllm.step.kv_need import KVNeed


@dataclass(frozen=True, slots=True)
class Traits:
    """One rank's model in figures. Frozen: nothing about a model changes after it is built.

    hidden_size: width of what `forward` returns.   dtype: of weights and hidden states.   vocab_size: of the logits.
    kv: per layer what it keeps for a request, None for a layer that keeps nothing; () for a model without a cache.
    layers: the model's layers that this rank has.
    heads: what can be computed from hidden states, by name; "logits" for a model that generates, "pooled" for one that
        has a head for pooled states, "pooler" for one whose class pools by itself.
    takes: step features, by name, that `forward` reads beyond tokens and positions.
    handles: step features, by name, that `forward` and `logits` honour where they are there.
    query_heads: per layer this rank's, 0 without attention; () if not known, and then prefixes are not read together.
    chunkable: a prompt may be computed in pieces.
    prefix: a cached prefix may end at every so many tokens; 1: at any block, 0: nowhere.
    taps: layers whose output, the sum of the stream behind them, `forward` hands out for every token where a step has
        `StepFeatures.taps`.
    replayable: steps of equal sizes launch equal kernels, so that a padded mixed step may be captured and replayed.
    capturable: a decode step of so many requests launches the same kernels every time, so that it may be captured.
    decoder: what the model computes, if it is built from that, block by block, in a `DecoderModel`'s modules: other
        programs may then compute the same from its weights. None for any other model.
    splits: the model can be a stage of a pipeline: it takes a stream, and returns one if it lacks the last layer.
    known_prompt: longer prompts read other rows of rotary tables: `rotary_rows` further for each `prompt_stage`.
        None: all prompts read the same.
    """

    hidden_size: int
    dtype: torch.dtype
    vocab_size: int
    kv: tuple[KVNeed | None, ...]
    layers: range
    heads: tuple[str, ...] = ("logits",)
    takes: frozenset[str] = frozenset()
    handles: frozenset[str] = frozenset()
    query_heads: tuple[int, ...] = ()
    chunkable: bool = True
    prefix: int = 1
    taps: tuple[int, ...] = ()
    replayable: bool = False
    capturable: bool = True
    decoder: Decoder | None = None
    splits: bool = False
    known_prompt: int | None = None
    rotary_rows: int = 0


class PagedAttention(Protocol):
    """An attention layer with a place in the cache. Its `params` may be replaced before the first step."""

    params: AttentionParams
    place: KVPlace | None


class Model(Protocol):
    """A model on one rank, its weights loaded."""

    @property
    def traits(self) -> Traits: ...

    def __call__(self, step: StepInputs, kv_caches: Sequence[Tensor], stream: Tensor | None = None) -> Tensor:
        """Hidden states of the tokens in `step.logits_rows`, [rows, hidden]; all keys and values are written.

        stream: given to a model whose traits say that it `splits`, by the stage before it: [tokens, hidden].
        """

    def logits(self, hidden: Tensor, view: RowView | None = None) -> Tensor:
        """[rows, hidden] -> [rows, vocabulary] fp32, on every rank. view: of the rows, where adapters are used."""

    @property
    def cache_scales(self) -> Mapping[int, tuple[float, float]]:
        """Of a cache of 8 bits, as the checkpoint says: of keys and values, by layer."""

    def paged_attention(self) -> Mapping[int, PagedAttention]:
        """This rank's attention layers that keep keys and values in the cache, by the layer's number."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def modules(self) -> Iterator[nn.Module]: ...


class AdaptableModel(Model, Protocol):
    """A model whose traits' `handles` have "adapters": it says which of its modules adapters may change."""

    def adaptable(self) -> Mapping[str, nn.Module]:
        """This rank's modules that take adapters, by canonical name: linear layers, the embedding, the head, experts.
        Where one has a `lora`, it adds what that says to its output.
        """

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Query heads and key/value heads of a whole layer, for checkpoints that store their weights in one matrix."""

    def is_elsewhere(self, name: str) -> bool:
        """Whether a module belongs to other stages of the pipeline only."""

    def stretch(self, factors: Sequence[float]) -> Sequence[int]:
        """Where the rows begin that its rotary tables have now for positions divided by each factor. Raises ValueError
        if it cannot have such.
        """


class PoolingModel(Model, Protocol):
    """A model whose heads have "pooled"."""

    def pooled(self, states: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, outputs], both fp32: what the head makes of pooled states."""


class OwnPoolingModel(Model, Protocol):
    """A model whose heads have "pooler"."""

    def pool(self, hidden: Tensor, token_ids: Sequence[Tensor], params: Sequence[PoolingParams]) -> Sequence[Tensor]:
        """hidden: [tokens, hidden] of complete prompts one behind the other -> a result for each."""


def check_traits(
    traits: Traits,
    *,
    name: str,
    chunked: bool,
    prefix_caching: bool,
    features: frozenset[str],
    stages: int = 1,
    pools: bool = False,
    known_prompt: int | None = None,
) -> None:
    """Raise ValueError if the engine, as it is set up, cannot run a model of these traits.

    name: of the model's architecture.   features: step features that the engine provides.   stages: of the pipeline.
    pools: the model is to pool.   known_prompt: by which the engine tells prompts that are rotated unlike.
    """
    if stages > 1 and not traits.splits:
        raise ValueError(
            f"{name} cannot be divided into pipeline stages: it is a class of your own, which computes all its layers. "
            "Use pipeline_parallel_size=1, and tensor_parallel_size to spread it over devices."
        )
    if not pools and "logits" not in traits.heads:
        raise ValueError(
            f"{name} computes no logits, so it cannot generate text. Its heads: {', '.join(traits.heads)}. Models that "
            "pool need task='embed' (or classify, reward), where that cannot be found out."
        )
    if traits.takes - features:
        raise ValueError(f"{name} needs {', '.join(sorted(traits.takes - features))}, which is not supported.")
    if traits.known_prompt not in (None, known_prompt):
        raise ValueError(
            f"{name} rotates prompts of more than {traits.known_prompt} tokens otherwise than shorter ones, but its "
            f"family says {known_prompt}, so that they would share cached prefixes. Its `Facts` must have the same "
            "`known_prompt`."
        )
    if chunked and not traits.chunkable:
        raise ValueError(
            f"The prompts of {name} must be computed in one piece. Set enable_chunked_prefill=False "
            "(--no-enable-chunked-prefill)."
        )
    if prefix_caching and traits.prefix != 1:
        raise ValueError(
            f"{name} cannot start behind a cached prefix. Set enable_prefix_caching=False (--no-enable-prefix-caching)."
        )
